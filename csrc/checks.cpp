// The checks of checks.h: tensors, sequences, options, and what a backend does not implement.
#include "checks.h"

#include <ATen/MemoryOverlap.h>

#include <cmath>
#include <limits>
#include <vector>

#include "environment.h"
#include "flash.h"
#include "message.h"

namespace flash {
namespace {

struct Named {
    const char *name;
    const at::Tensor &tensor;
};

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxRows = kMaxInt / 4;  // rows of a tensor: keeps distances below kFar of common/block_info.h

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

void check_heads(const FwdArgs &args) {
    const Named q{"q", args.q}, k{"k", args.k}, v{"v", args.v};
    const int64_t headdim = args.q.size(-1), nheads = args.q.size(-2), nheads_k = args.k.size(-2);
    FLASH_CHECK_VALUE(headdim >= 1 && headdim <= kMaxHeadDim, "q has headdim ", headdim, " (shape ", args.q.sizes(),
                      "); allowed: 1 to ", kMaxHeadDim);
    check_same_size(k, q, -1, "headdim");
    check_same_size(v, q, -1, "headdim");
    FLASH_CHECK_VALUE(args.v.size(-2) == nheads_k, "v has ", args.v.size(-2), " heads (shape ", args.v.sizes(),
                      "); allowed: the heads of k, ", nheads_k);
    FLASH_CHECK_VALUE(nheads >= 1, "q has 0 heads (shape ", args.q.sizes(), "); allowed: at least 1");
    FLASH_CHECK_VALUE(nheads_k >= 1, "k has 0 heads (shape ", args.k.sizes(), "); allowed: at least 1");
    FLASH_CHECK_VALUE(nheads % nheads_k == 0, "q has ", nheads, " heads and k has ", nheads_k,
                      "; allowed: nheads of q a multiple of nheads of k");
    check_at_most(q, -2, kMaxInt, "heads");
}

void check_shapes(const FwdArgs &args) {
    const Named q{"q", args.q}, k{"k", args.k}, v{"v", args.v};
    const bool is_dense = args.varlen == nullptr, is_paged = args.is_paged();
    check_rank(q, is_dense ? 4 : 3, is_dense ? "[batch, seqlen_q, nheads, headdim]" : "[total_q, nheads, headdim]");
    for (const Named &x : {k, v}) {
        check_rank(x, is_dense || is_paged ? 4 : 3,
                   is_dense   ? "[batch, seqlen_k, nheads_k, headdim]"
                   : is_paged ? "[num_pages, page_size, nheads_k, headdim]"
                              : "[total_k, nheads_k, headdim]");
    }
    const char *rows_of_k = is_dense ? "seqlen" : is_paged ? "page_size" : "total_k";
    if (is_dense) {
        check_same_size(k, q, 0, "batch");
        check_same_size(v, q, 0, "batch");
        check_at_most(q, 0, kMaxInt, "batch");
    } else if (is_paged) {
        check_same_size(v, k, 0, "num_pages");
    }
    check_same_size(v, k, -3, rows_of_k);
    check_at_most(q, -3, kMaxRows, is_dense ? "seqlen" : "total_q");
    check_at_most(k, -3, kMaxRows, rows_of_k);
    check_heads(args);
}

void check_same_shape(const Named &x, const Named &like) {
    FLASH_CHECK_VALUE(x.tensor.sizes() == like.tensor.sizes(), x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: the shape of ", like.name, ", ", like.tensor.sizes());
}

// A tensor that a kernel writes: the shape of `like`, the dtype and the device of q.
void check_written(const Named &x, const Named &like, const at::Tensor &q) {
    check_same_kind(x, q);
    check_same_shape(x, like);
    check_last_dim_contiguous(x);
    FLASH_CHECK_VALUE(at::has_internal_overlap(x.tensor) != at::MemOverlap::Yes, x.name, " has strides ",
                      x.tensor.strides(), " (shape ", x.tensor.sizes(),
                      "); allowed: every element in memory of its own");
}

void check_no_overlap(const Named &written, const Named &other) {
    const auto overlap = at::get_overlap_status(written.tensor, other.tensor);
    FLASH_CHECK_VALUE(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial, written.name,
                      " shares memory with ", other.name, "; allowed: memory of its own");
}

// softmax_lse or its gradient.
void check_lse(const Named &x, const FwdArgs &args) {
    const at::Tensor &q = args.q;
    FLASH_CHECK_TYPE(x.tensor.scalar_type() == lse_dtype(q), x.name, " has dtype ", x.tensor.scalar_type(),
                     "; allowed: ", lse_dtype(q), " for inputs of ", q.scalar_type());
    check_same_device(x, q);
    const bool is_varlen = args.varlen != nullptr;
    const std::vector<int64_t> shape =
        is_varlen ? std::vector<int64_t>{q.size(1), q.size(0)} : std::vector<int64_t>{q.size(0), q.size(2), q.size(1)};
    FLASH_CHECK_VALUE(x.tensor.sizes() == shape, x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: ", is_varlen ? "[nheads, total_q]" : "[batch, nheads, seqlen_q]", " = ",
                      list_of(shape));
}

void check_alibi_slopes(const at::Tensor &slopes, const FwdArgs &args) {
    const Sizes sizes(args);
    FLASH_CHECK_TYPE(slopes.scalar_type() == at::kFloat, "alibi_slopes has dtype ", slopes.scalar_type(),
                     "; allowed: float32");
    check_same_device({"alibi_slopes", slopes}, args.q);
    const std::vector<int64_t> per_head{sizes.nheads}, per_batch{sizes.batch, sizes.nheads};
    FLASH_CHECK_VALUE(slopes.sizes() == per_head || slopes.sizes() == per_batch, "alibi_slopes has shape ",
                      slopes.sizes(), "; allowed: [nheads] = ", list_of(per_head),
                      " or [batch, nheads] = ", list_of(per_batch));
    FLASH_CHECK_VALUE(slopes.stride(-1) == 1 || slopes.size(-1) == 1, "alibi_slopes has strides ", slopes.strides(),
                      "; allowed: a contiguous last dimension (stride 1)");
}

// These ranges keep every factor that a kernel derives from the two, and its products with q.k of float16 inputs,
// inside float32. float64 without a softcap multiplies by softmax_scale alone.
void check_scale_and_softcap(const Options &options, at::ScalarType dtype) {
    constexpr double kLeast = 1e-20, kLargest = 1e20;
    const auto is_within = [](double x, double least, double largest) {
        return x == 0.0 || (std::abs(x) >= least && std::abs(x) <= largest);  // false for NaN
    };
    const double scale = options.softmax_scale, softcap = options.softcap;
    const bool is_wide = dtype == at::kDouble && softcap == 0.0;
    const double least = is_wide ? 1e-300 : kLeast, largest = is_wide ? 1e300 : kLargest;
    FLASH_CHECK_VALUE(is_within(scale, least, largest), "softmax_scale is ", scale,
                      "; allowed: 0, a finite number of magnitude ", least, " to ", largest,
                      ", or None for 1/sqrt(headdim)");
    FLASH_CHECK_VALUE(softcap >= 0.0 && is_within(softcap, kLeast, kLargest), "softcap is ", softcap,
                      "; allowed: 0 (off) or a positive number from ", kLeast, " to ", kLargest);
    FLASH_CHECK_VALUE(softcap == 0.0 || is_within(scale / softcap, kLeast, kLargest), "softmax_scale is ", scale,
                      " and softcap is ", softcap,
                      "; allowed: a quotient softmax_scale / softcap of 0 or of magnitude ", kLeast, " to ", kLargest);
}

void check_scalars(const FwdArgs &args) {
    const Options &options = args.options;
    constexpr double kNearly1 = 1.0 - 1.0 / (1 << 17);  // from here on dropout_threshold says to drop all
    FLASH_CHECK_VALUE(options.p_dropout >= 0.0 && options.p_dropout < kNearly1, "dropout_p is ", options.p_dropout,
                      "; allowed: at least 0 and below 1 - 2^-17");
    for (const auto &[side, size] :
         {std::pair{"left", options.window_size_left}, std::pair{"right", options.window_size_right}}) {
        FLASH_CHECK_VALUE(size >= -1, "window_size has ", side, " ", size,
                          "; allowed: -1 (unbounded) or at least 0 keys");
    }
    check_scale_and_softcap(options, args.q.scalar_type());
    FLASH_CHECK_VALUE(options.softcap == 0.0 || options.p_dropout == 0.0, "softcap is ", options.softcap,
                      " and dropout_p is ", options.p_dropout, "; allowed: one of the two, not both");
}

// NotImplementedError, with the backends that have the feature, if `backend` does not.
void check_implemented(const FwdArgs &args, const std::string &backend) {
    const auto lacks = [&](const char *one, bool is_used, const std::string &feature, const char *have_it) {
        FLASH_CHECK_NOT_IMPLEMENTED(backend != one || !is_used, "backend '", backend, "' does not implement ", feature,
                                    " in this version; backends that have it: ", have_it);
    };
    constexpr int64_t kPageMultiple = 16;
    lacks("cuda", args.is_paged() && args.k.size(1) % kPageMultiple != 0,
          message("pages of ", args.is_paged() ? args.k.size(1) : 0, " keys (block_table with a page size that is no ",
                  "multiple of ", kPageMultiple, ")"),
          "cpu, triton");
}

// cu_seqlens or block_table.
void check_index(const Named &x, const at::Tensor &q) {
    FLASH_CHECK_TYPE(x.tensor.scalar_type() == at::kInt, x.name, " has dtype ", x.tensor.scalar_type(),
                     "; allowed: int32");
    check_same_device(x, q);
}

void check_cu_seqlens_shape(const Named &x, const at::Tensor &q) {
    check_index(x, q);
    FLASH_CHECK_VALUE(x.tensor.dim() == 1 && x.tensor.size(0) >= 1, x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: [batch + 1], one dimension of at least 1");
    FLASH_CHECK_VALUE(x.tensor.is_contiguous(), x.name, " has strides ", x.tensor.strides(), "; allowed: contiguous");
}

// True if values of x may be read on the host: CPU tensors, or FLASH_ATTN_MINI_CHECK=1 (synchronises).
bool may_read(const at::Tensor &x) {
    return x.is_cpu() || is_switched_on("FLASH_ATTN_MINI_CHECK");
}

// cu_seqlens of `side` (q or k) starts at 0, never falls, ends at `rows` (-1: anywhere), and no sequence is longer than
// max_seqlen.
void check_cu_seqlens_values(const char *side, const at::Tensor &cu_seqlens, int64_t rows, int64_t max_seqlen) {
    const at::Tensor on_cpu = cu_seqlens.cpu();
    const int *values = on_cpu.data_ptr<int>();
    const int64_t batch = on_cpu.size(0) - 1;
    FLASH_CHECK_VALUE(values[0] == 0, "cu_seqlens_", side, " starts at ", values[0], "; allowed: 0");
    for (int64_t i = 0; i < batch; ++i) {
        FLASH_CHECK_VALUE(values[i + 1] >= values[i], "cu_seqlens_", side, " falls from ", values[i], " to ",
                          values[i + 1], " at index ", i + 1, "; allowed: values that never fall");
        FLASH_CHECK_VALUE(values[i + 1] - values[i] <= max_seqlen, "max_seqlen_", side, " is ", max_seqlen,
                          "; allowed: at least the length of every sequence; sequence ", i, " has length ",
                          values[i + 1] - values[i]);
    }
    FLASH_CHECK_VALUE(rows < 0 || values[batch] == rows, "cu_seqlens_", side, " ends at ", values[batch],
                      "; allowed: the rows of ", side, ", ", rows);
}

// Every page that holds a key of a sequence is in the pool.
void check_block_table_values(const FwdArgs &args) {
    const at::Tensor on_cpu = args.varlen->block_table->cpu(), lengths = args.varlen->cu_seqlens_k.diff().cpu();
    const int64_t num_pages = args.k.size(0), page_size = args.k.size(1), columns = on_cpu.size(1);
    const auto table = on_cpu.accessor<int, 2>();
    const auto length = lengths.accessor<int, 1>();
    for (int64_t bidb = 0; bidb < on_cpu.size(0); ++bidb) {
        FLASH_CHECK_VALUE(length[bidb] <= columns * page_size, "block_table has ", columns, " pages of ", page_size,
                          " keys for each sequence; allowed: enough for every sequence, sequence ", bidb, " has ",
                          length[bidb], " keys");
        for (int64_t page = 0; page * page_size < length[bidb]; ++page) {
            const int index = table[bidb][page];
            FLASH_CHECK_VALUE(index >= 0 && index < num_pages, "block_table has page ", index, " at [", bidb, ", ",
                              page, "]; allowed: 0 to ", num_pages - 1);
        }
    }
}

void check_block_table(const FwdArgs &args) {
    const Named table{"block_table", *args.varlen->block_table};
    check_index(table, args.q);
    const int64_t batch = args.varlen->cu_seqlens_q.size(0) - 1, page_size = args.k.size(1);
    FLASH_CHECK_VALUE(table.tensor.dim() == 2 && table.tensor.size(0) == batch, "block_table has shape ",
                      table.tensor.sizes(), "; allowed: [batch, max_blocks] with batch ", batch);
    FLASH_CHECK_VALUE(table.tensor.stride(1) == 1 || table.tensor.size(1) <= 1, "block_table has strides ",
                      table.tensor.strides(), "; allowed: a contiguous last dimension (stride 1)");
    FLASH_CHECK_VALUE(page_size >= 1, "k has pages of 0 keys (shape ", args.k.sizes(), "); allowed: at least 1");
    FLASH_CHECK_VALUE(table.tensor.size(1) <= kMaxRows / page_size, "block_table has shape ", table.tensor.sizes(),
                      "; allowed: up to ", kMaxRows / page_size, " pages of ", page_size, " keys for each sequence");
}

void check_varlen(const FwdArgs &args) {
    const VarlenArgs &varlen = *args.varlen;
    const Named cu_q{"cu_seqlens_q", varlen.cu_seqlens_q}, cu_k{"cu_seqlens_k", varlen.cu_seqlens_k};
    check_cu_seqlens_shape(cu_q, args.q);
    check_cu_seqlens_shape(cu_k, args.q);
    check_same_shape(cu_k, cu_q);
    const auto check_max_seqlen = [](const char *name, int64_t value) {
        FLASH_CHECK_VALUE(value >= 0 && value <= kMaxInt, name, " is ", value, "; allowed: 0 to ", kMaxInt);
    };
    check_max_seqlen("max_seqlen_q", varlen.max_seqlen_q);
    check_max_seqlen("max_seqlen_k", varlen.max_seqlen_k);
    if (args.is_paged()) {
        check_block_table(args);
    }
    if (may_read(args.q)) {
        check_cu_seqlens_values("q", varlen.cu_seqlens_q, args.q.size(0), varlen.max_seqlen_q);
        check_cu_seqlens_values("k", varlen.cu_seqlens_k, args.is_paged() ? -1 : args.k.size(0), varlen.max_seqlen_k);
        if (args.is_paged()) {
            check_block_table_values(args);
        }
    }
}

// q, k, v and the sequences.
void check_inputs(const FwdArgs &args, const std::string &backend) {
    check_dtype({"q", args.q}, backend);
    check_same_kind({"k", args.k}, args.q);
    check_same_kind({"v", args.v}, args.q);
    check_shapes(args);
    for (const Named &x : {Named{"q", args.q}, Named{"k", args.k}, Named{"v", args.v}}) {
        check_last_dim_contiguous(x);
    }
    if (args.varlen != nullptr) {
        check_varlen(args);
    }
}

void check_options(const FwdArgs &args, const std::string &backend) {
    if (args.options.alibi_slopes.has_value()) {
        check_alibi_slopes(*args.options.alibi_slopes, args);
    }
    check_scalars(args);
    check_implemented(args, backend);
}

}  // namespace

at::ScalarType lse_dtype(const at::Tensor &q) {
    return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_fwd(const FwdArgs &args, const std::string &backend) {
    const Named inputs[] = {{"q", args.q}, {"k", args.k}, {"v", args.v}};
    check_inputs(args, backend);
    if (args.out.has_value()) {
        check_written({"out", *args.out}, {"q", args.q}, args.q);
        for (const Named &x : inputs) {
            check_no_overlap({"out", *args.out}, x);
        }
    }
    check_options(args, backend);
}

void check_bwd(const BwdArgs &args, const std::string &backend) {
    const FwdArgs &forward = args.forward;
    const at::Tensor &q = forward.q, &out = *forward.out;
    check_inputs(forward, backend);
    for (const Named &x : {Named{"dout", args.dout}, Named{"out", out}}) {
        check_same_kind(x, q);
        check_same_shape(x, {"q", q});
    }
    check_lse({"softmax_lse", args.softmax_lse}, forward);
    if (args.dsoftmax_lse.has_value()) {
        check_lse({"dsoftmax_lse", *args.dsoftmax_lse}, forward);
    }
    std::vector<Named> read{{"q", q}, {"k", forward.k}, {"v", forward.v}, {"out", out}, {"dout", args.dout}};
    const auto check_gradient = [&](const char *name, const std::optional<at::Tensor> &given, const Named &like) {
        if (!given.has_value()) {
            return;
        }
        const Named x{name, *given};
        check_written(x, like, q);
        for (const Named &other : read) {
            check_no_overlap(x, other);
        }
        read.push_back(x);  // gradients share no memory with each other
    };
    check_gradient("dq", args.dq, {"q", q});
    check_gradient("dk", args.dk, {"k", forward.k});
    check_gradient("dv", args.dv, {"v", forward.v});
    check_options(forward, backend);
}

void check_rng_state(const std::optional<at::Tensor> &rng_state, double p_dropout, const at::Tensor &q) {
    if (p_dropout == 0.0) {
        return;
    }
    FLASH_CHECK_VALUE(rng_state.has_value(), "rng_state is None and dropout_p ", p_dropout,
                      "; allowed with dropout: the rng_state that the forward returned");
    FLASH_CHECK_TYPE(rng_state->scalar_type() == at::kLong, "rng_state has dtype ", rng_state->scalar_type(),
                     "; allowed: int64");
    FLASH_CHECK_VALUE(rng_state->dim() == 1 && rng_state->size(0) == 2, "rng_state has shape ", rng_state->sizes(),
                      "; allowed with dropout: [2], as the forward returned it");
    check_same_device({"rng_state", *rng_state}, q);
}

void check_s_dmask(const FwdArgs &args, const std::optional<at::Tensor> &rng_state) {
    check_fwd(args, args.q.is_cpu() ? "cpu" : "triton");  // on a GPU, triton accepts whatever cuda accepts
    check_rng_state(rng_state, args.options.p_dropout, args.q);
}

}  // namespace flash
