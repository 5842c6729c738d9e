// The functions of key_ranges.h.
#include "api/key_ranges.h"

#include <ATen/ops/empty.h>

#include <string>

#include "api/check_tensors.h"
#include "common/message.h"
#include "common/trace.h"

namespace flash {
namespace {

// Dimensions before the pairs of a query: batch (equal lengths only), heads, queries.
int64_t leading_dims(const FwdArgs &args) {
    return args.is_varlen() ? 2 : 3;
}

bool has_two_ranges(const at::Tensor &key_ranges, const FwdArgs &args) {
    return key_ranges.dim() == leading_dims(args) + 2;
}

// Checks that every bound lies in [0, keys of the query's sequence].
void check_values(const at::Tensor &key_ranges, const FwdArgs &args) {
    const at::Tensor on_cpu = key_ranges.cpu();
    const auto check = [](const at::Tensor &ranges, int64_t keys, const std::string &where) {
        if (ranges.numel() == 0) {
            return;
        }
        const int low = ranges.min().item<int>(), high = ranges.max().item<int>();
        FLASH_CHECK_VALUE(low >= 0 && high <= keys, "key_ranges has ", low < 0 ? low : high, where,
                          "; allowed: 0 to the number of keys, ", keys);
    };
    if (!args.is_varlen()) {
        check(on_cpu, args.k.size(1), "");
        return;
    }
    const at::Tensor begins_q = args.sequences.cu_seqlens_q->cpu(), begins_k = args.sequences.cu_seqlens_k->cpu();
    const int *of_q = begins_q.data_ptr<int>(), *of_k = begins_k.data_ptr<int>();
    for (int64_t bidb = 0; bidb < args.batch(); ++bidb) {
        check(on_cpu.narrow(1, of_q[bidb], of_q[bidb + 1] - of_q[bidb]), of_k[bidb + 1] - of_k[bidb],
              message(" in sequence ", bidb));
    }
}

}  // namespace

void check_key_ranges(const FwdArgs &args) {
    if (!args.options.key_ranges.has_value()) {
        return;
    }
    const Named x{"key_ranges", *args.options.key_ranges};
    FLASH_CHECK_NOT_IMPLEMENTED(!args.is_paged(),
                                "flash_attn_mini: key_ranges is given together with block_table; allowed: one of the "
                                "two, not both");
    check_index(x, args.q);
    const Sizes sizes(args);
    const at::Tensor &ranges = x.tensor;
    const bool is_varlen = args.is_varlen();
    const int64_t leading = leading_dims(args), heads_dim = leading - 2;
    bool is_right = ranges.dim() == leading + 1 || (ranges.dim() == leading + 2 && ranges.size(leading) == 2);
    is_right = is_right && ranges.size(-1) == 2 && ranges.size(leading - 1) == sizes.rows_q &&
               (ranges.size(heads_dim) == 1 || ranges.size(heads_dim) == sizes.nheads) &&
               (is_varlen || ranges.size(0) == 1 || ranges.size(0) == sizes.batch);
    FLASH_CHECK_VALUE(is_right, "key_ranges has shape ", ranges.sizes(), "; allowed: ",
                      is_varlen ? "[1 or nheads, total_q, 2] or [1 or nheads, total_q, 2, 2] with "
                                : message("[1 or batch, 1 or nheads, seqlen_q, 2] or [1 or batch, 1 or nheads, "
                                          "seqlen_q, 2, 2] with batch ",
                                          sizes.batch, ", "),
                      "nheads ", sizes.nheads, is_varlen ? ", total_q " : ", seqlen_q ", sizes.rows_q);
    if (is_switched_on("FLASH_ATTN_MINI_CHECK")) {
        check_values(ranges, args);
    }
}

at::Tensor readable_key_ranges(const at::Tensor &key_ranges) {
    const int64_t dims = key_ranges.dim();
    const bool is_pair = key_ranges.stride(-1) == 1;
    const bool has_row = dims < 4 || key_ranges.size(-2) != 2 || key_ranges.stride(-2) == 2;
    return is_pair && has_row ? key_ranges : key_ranges.contiguous();
}

void set_key_ranges(Flash_fwd_params &params, const FwdArgs &args) {
    if (!args.options.key_ranges.has_value()) {
        return;
    }
    const at::Tensor &ranges = *args.options.key_ranges;
    const int64_t heads_dim = leading_dims(args) - 2;
    const auto stride = [&](int64_t dim) { return ranges.size(dim) == 1 ? 0 : ranges.stride(dim); };
    params.key_ranges.ptr = ranges.data_ptr<int>();
    params.key_ranges.batch_stride = args.is_varlen() ? 0 : stride(0);
    params.key_ranges.head_stride = stride(heads_dim);
    params.key_ranges.row_stride = ranges.stride(heads_dim + 1);
    params.key_ranges.count = has_two_ranges(ranges, args) ? 2 : 1;
}

at::Tensor key_ranges_scratch(Flash_fwd_params &params, const at::Tensor &q, bool is_backward, bool is_deterministic) {
    KeyRanges &ranges = params.key_ranges;
    if (!ranges.is_used()) {
        return {};
    }
    constexpr int64_t kRounded = Flash_bwd_params::kRowsRounded, kKeys = KeyRanges::kKeysPerColumn;
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const auto blocks = [&](int64_t total, int64_t longest, int64_t block) {  // of a head
        return is_varlen ? total / block + params.b : (longest + block - 1) / block;
    };
    const int64_t rows = blocks(params.total_q, params.seqlen_q, kRounded) * kRounded,
                  columns = blocks(params.total_k, params.seqlen_k, kKeys);
    const int64_t heads = ranges.head_stride == 0 ? 1 : params.h, batch = ranges.batch_stride == 0 ? 1 : params.b;
    const auto stride = [](int64_t of_call, int64_t elements) { return of_call == 0 ? 0 : elements; };
    ranges.rows_head_stride = stride(ranges.head_stride, rows);
    ranges.rows_batch_stride = stride(ranges.batch_stride, rows * heads);
    ranges.columns_head_stride = stride(ranges.head_stride, columns);
    ranges.columns_batch_stride = stride(ranges.batch_stride, columns * heads);
    const int64_t all_rows = rows * heads * batch, row_ints = all_rows * 4,
                  block_ints = all_rows / KeyRanges::kRowsPerBlock * 8,
                  column_ints = is_backward ? columns * heads * batch * 2 : 0;
    const at::Tensor memory = at::empty({row_ints + block_ints + column_ints}, q.options().dtype(at::kInt));
    ranges.rows = memory.data_ptr<int>();
    ranges.blocks = ranges.rows + row_ints;
    ranges.columns = is_backward ? ranges.blocks + block_ints : nullptr;
    ranges.has_wide_columns = is_deterministic;
    ranges.columns_bytes = column_ints * int64_t(sizeof(int));
    return memory;
}

}  // namespace flash
