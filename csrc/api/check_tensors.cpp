// The functions of check_tensors.h.
#include "api/check_tensors.h"

#include <string>
#include <utility>
#include <vector>

#include "api/memory_overlap.h"
#include "api/score_mod.h"
#include "common/message.h"
#include "common/trace.h"
#include "flash.h"

namespace flash {
namespace {

void check_dropout(const Options &options) {
    constexpr double kNearly1 = 1.0 - 1.0 / (1 << 17);  // from here on dropout_threshold says to drop all
    FLASH_CHECK_VALUE(options.dropout_p >= 0.0 && options.dropout_p < kNearly1, "dropout_p is ", options.dropout_p,
                      "; allowed: at least 0 and below 1 - 2^-17");
}

}  // namespace

at::ScalarType lse_dtype(const at::Tensor &q) {
    return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_rank(const Named &x, int64_t rank, const char *shape) {
    FLASH_CHECK_VALUE(x.tensor.dim() == rank, x.name, " has shape ", x.tensor.sizes(), " (", x.tensor.dim(),
                      " dimensions); allowed: ", rank, " dimensions ", shape);
}

void check_dtype(const Named &x, const std::string &backend) {
    const auto dtype = x.tensor.scalar_type();
    const bool is_16bit = dtype == at::kHalf || dtype == at::kBFloat16;
    const bool is_allowed = backend == "cpu"      ? is_16bit || dtype == at::kFloat || dtype == at::kDouble
                            : backend == "triton" ? is_16bit || dtype == at::kFloat
                                                  : is_16bit;
    const char *allowed = backend == "cpu"      ? "float16, bfloat16, float32, float64"
                          : backend == "triton" ? "float16, bfloat16, float32"
                                                : "float16, bfloat16";
    FLASH_CHECK_TYPE(is_allowed, x.name, " has dtype ", dtype, "; allowed on the ", backend, " backend: ", allowed);
}

void check_same_device(const Named &x, const at::Tensor &q) {
    FLASH_CHECK_VALUE(x.tensor.device() == q.device(), x.name, " is on ", x.tensor.device(),
                      "; allowed: the device of q, ", q.device());
}

void check_same_kind(const Named &x, const at::Tensor &q) {
    FLASH_CHECK_TYPE(x.tensor.scalar_type() == q.scalar_type(), x.name, " has dtype ", x.tensor.scalar_type(),
                     "; allowed: that of q, ", q.scalar_type());
    check_same_device(x, q);
}

void check_last_dim_contiguous(const Named &x) {
    FLASH_CHECK_VALUE(x.tensor.stride(-1) == 1 || x.tensor.size(-1) == 1 || x.tensor.numel() == 0, x.name,
                      " has strides ", x.tensor.strides(),
                      "; allowed: a contiguous last dimension (stride 1), for example ", x.name, ".contiguous()");
}

void check_same_size(const Named &x, const Named &like, int64_t dim, const char *dim_name) {
    FLASH_CHECK_VALUE(x.tensor.size(dim) == like.tensor.size(dim), x.name, " has ", dim_name, " ", x.tensor.size(dim),
                      " (shape ", x.tensor.sizes(), "); allowed: the ", dim_name, " of ", like.name, ", ",
                      like.tensor.size(dim));
}

void check_at_most(const Named &x, int64_t dim, int64_t most, const char *dim_name) {
    FLASH_CHECK_VALUE(x.tensor.size(dim) <= most, x.name, " has shape ", x.tensor.sizes(), "; allowed: ", dim_name,
                      " up to ", most);
}

void check_heads(const Named &q, const Named &k, const Named &v, const std::string &backend, int64_t most) {
    const int64_t nheads = q.tensor.size(-2), nheads_k = k.tensor.size(-2);
    for (const auto &[x, largest] : {std::pair{q, most}, std::pair{v, int64_t(kMaxHeadDim)}}) {
        const int64_t headdim = x.tensor.size(-1);
        FLASH_CHECK_VALUE(headdim >= 1 && headdim <= largest, x.name, " has headdim ", headdim, " (shape ",
                          x.tensor.sizes(), "); allowed: 1 to ", largest);
        FLASH_CHECK_NOT_IMPLEMENTED(headdim <= kMaxHeadDimCuda || backend != "cuda", x.name, " has headdim ", headdim,
                                    " (shape ", x.tensor.sizes(), "); allowed on the cuda backend: 1 to ",
                                    kMaxHeadDimCuda, "; available: the triton backend, up to ", largest);
    }
    check_same_size(k, q, -1, "headdim");
    FLASH_CHECK_VALUE(v.tensor.size(-2) == nheads_k, v.name, " has ", v.tensor.size(-2), " heads (shape ",
                      v.tensor.sizes(), "); allowed: the heads of ", k.name, ", ", nheads_k);
    FLASH_CHECK_VALUE(nheads >= 1, "q has 0 heads (shape ", q.tensor.sizes(), "); allowed: at least 1");
    FLASH_CHECK_VALUE(nheads_k >= 1, k.name, " has 0 heads (shape ", k.tensor.sizes(), "); allowed: at least 1");
    FLASH_CHECK_VALUE(nheads % nheads_k == 0, "q has ", nheads, " heads and ", k.name, " has ", nheads_k,
                      "; allowed: nheads of q a multiple of nheads of ", k.name);
    check_at_most(q, -2, kMaxInt, "heads");
}

void check_same_shape(const Named &x, const Named &like) {
    FLASH_CHECK_VALUE(x.tensor.sizes() == like.tensor.sizes(), x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: the shape of ", like.name, ", ", like.tensor.sizes());
}

void check_shape_of_out(const Named &x, const Named &q, const Named &v) {
    std::vector<int64_t> shape = q.tensor.sizes().vec();
    shape.back() = v.tensor.size(-1);
    FLASH_CHECK_VALUE(x.tensor.sizes() == shape, x.name, " has shape ", x.tensor.sizes(), "; allowed: the shape of ",
                      q.name, " with the headdim of ", v.name, ", ", list_of(shape));
}

void check_written(const Named &x, const at::Tensor &q) {
    check_same_kind(x, q);
    check_last_dim_contiguous(x);
    FLASH_CHECK_VALUE(!has_internal_overlap(x.tensor), x.name, " has strides ", x.tensor.strides(), " (shape ",
                      x.tensor.sizes(), "); allowed: every element in memory of its own");
}

void add_given(NamedList &list, const char *name, const std::optional<at::Tensor> &given) {
    if (given.has_value()) {
        list.push_back({name, *given});
    }
}

void check_no_overlap(const Named &written, const NamedList &others) {
    for (const Named &other : others) {
        FLASH_CHECK_VALUE(!have_overlap(written.tensor, other.tensor), written.name, " shares memory with ", other.name,
                          "; allowed: memory of its own");
    }
}

void check_options(const Options &options, const at::Tensor &q, int64_t batch) {
    check_score_mod(options, q, batch);
    for (const auto &[side, size] :
         {std::pair{"left", options.window_size_left}, std::pair{"right", options.window_size_right}}) {
        FLASH_CHECK_VALUE(size >= -1, "window_size has ", side, " ", size,
                          "; allowed: -1 (unbounded) or at least 0 keys");
    }
    check_dropout(options);
}

void check_index(const Named &x, const at::Tensor &q) {
    FLASH_CHECK_TYPE(x.tensor.scalar_type() == at::kInt, x.name, " has dtype ", x.tensor.scalar_type(),
                     "; allowed: int32");
    FLASH_CHECK_VALUE(!x.tensor.is_neg(), x.name, " is a lazily negated view; allowed: numbers in memory as they are");
    check_same_device(x, q);
}

void check_block_table(const Named &table, const Named &pages, const at::Tensor &q, int64_t batch) {
    check_index(table, q);
    const int64_t page_size = pages.tensor.size(1);
    FLASH_CHECK_VALUE(table.tensor.dim() == 2 && table.tensor.size(0) == batch, "block_table has shape ",
                      table.tensor.sizes(), "; allowed: [batch, max_blocks] with batch ", batch);
    check_last_dim_contiguous(table);
    FLASH_CHECK_VALUE(page_size >= 1, pages.name, " has pages of 0 keys (shape ", pages.tensor.sizes(),
                      "); allowed: at least 1");
    FLASH_CHECK_VALUE(table.tensor.size(1) <= kMaxRows / page_size, "block_table has shape ", table.tensor.sizes(),
                      "; allowed: up to ", kMaxRows / page_size, " pages of ", page_size, " keys for each sequence");
}

bool may_read(const at::Tensor &x) {
    return x.is_cpu() || is_switched_on("FLASH_ATTN_MINI_CHECK");
}

std::string pages_text(int64_t num_pages) {
    return num_pages == 0 ? "none, because the cache has no pages" : message("0 to ", num_pages - 1);
}

}  // namespace flash
