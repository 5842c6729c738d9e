// s_dmask (s_dmask.h), with the generator of common/philox.h in int64 arithmetic of ATen.
#include "s_dmask.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>
#include <vector>

#include "checks.h"
#include "common/philox.h"
#include "message.h"

namespace flash {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 34;  // of S_dmask: the float32 steps to it then fill 64 GiB each

using at::indexing::None;
using at::indexing::Slice;

int64_t round_up(int64_t x) {
    constexpr int64_t kRounded = Flash_bwd_params::kRowsRounded;
    return (x + kRounded - 1) / kRounded * kRounded;
}

// [rows of all sequences, ...]: merges the first two dimensions of [batch, seqlen, ...] and [pages, page_size, ...].
at::Tensor flat_rows(const at::Tensor &x) {
    return x.dim() == 4 ? x.flatten(0, 1) : x;
}

// flat[index] as [batch, rows, ...] in `dtype`. An index past the end of a sequence gives any row; it is masked later.
at::Tensor rows_at(const at::Tensor &flat, const at::Tensor &index, at::ScalarType dtype) {
    const at::Tensor in_range = index.clamp(0, flat.size(0) - 1).flatten();
    return flat.index_select(0, in_range).unflatten(0, index.sizes()).to(dtype);
}

// The lower and upper 32 bits of an int64.
at::Tensor low32(const at::Tensor &x) {
    return x.bitwise_and(int64_t{0xffffffff});
}
at::Tensor high32(const at::Tensor &x) {
    return low32(x.bitwise_right_shift(32));
}

// philox4x32 of common/philox.h. x: 4 words, broadcast against each other.
std::vector<at::Tensor> philox4x32(std::vector<at::Tensor> x, at::Tensor key0, at::Tensor key1) {
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const at::Tensor product0 = x[0] * int64_t{0xD2511F53}, product1 = x[2] * int64_t{0xCD9E8D57};
        x = {high32(product1).bitwise_xor(x[1]).bitwise_xor(key0), low32(product1),
             high32(product0).bitwise_xor(x[3]).bitwise_xor(key1), low32(product0)};
        key0 = low32(key0 + int64_t{0x9E3779B9});
        key1 = low32(key1 + int64_t{0xBB67AE85});
    }
    return x;
}

// The 16 random bits of every (query, key), [batch, heads, rows, keys]; rows and keys are multiples of 16.
at::Tensor random_bits16(const at::Tensor &rng_state, int64_t batch, int64_t heads, int64_t rows, int64_t keys) {
    const at::TensorOptions options = rng_state.options();
    const auto along = [&](int64_t size, int dim) {  // 0, 1, 2, ... along dimension dim of [bh, rows / 2, keys / 4]
        std::vector<int64_t> shape{1, 1, 1};
        shape[dim] = size;
        return at::arange(size, options).view(shape);
    };
    const at::Tensor seed = rng_state[0], offset = rng_state[1];
    const at::Tensor head = along(batch * heads, 0);
    const at::Tensor row = along(rows / 2, 1);  // the first 8 of every 16 rows
    const at::Tensor column = along(keys / 4, 2);
    const auto quotient = [](const at::Tensor &x, int64_t divisor) { return x.div(divisor, "floor"); };
    const at::Tensor counter = quotient(row, 8) * 32 + row.remainder(8) * 4 + column.remainder(4);
    const std::vector<at::Tensor> x = philox4x32({counter, quotient(column, 4), low32(head), low32(offset)},
                                                 low32(seed), high32(seed).bitwise_xor(high32(offset)));

    // Words 2 * (key & 1) + (key / 8 & 1), then their halves: query / 8 & 1.
    const at::Tensor words = at::stack(x, -1);  // [bh, rows / 2, keys / 4, 4]
    const at::Tensor halves = at::stack({words.bitwise_and(0xffff), words.bitwise_right_shift(16)}, -1);
    return halves.view({batch, heads, rows / 16, 8, keys / 16, 4, 2, 2, 2})
        .permute({0, 1, 2, 8, 3, 4, 7, 5, 6})  // b, h, query: 16s, 8, 1s; key: 16s, 8, pairs, 1s
        .reshape({batch, heads, rows, keys});
}

// Positions, lengths and row indices of the sequences.
struct SequenceIndices {
    at::Tensor query, key;          // int64 [rows, 1], [1, keys]: within the sequence
    at::Tensor seqlen_q, seqlen_k;  // int64 [batch, 1, 1, 1]
    at::Tensor index_q, index_k;    // int64 [batch, rows], [batch, keys]: rows of the flat tensors

    // rows, keys: of S_dmask.
    SequenceIndices(const FwdArgs &args, int64_t rows, int64_t keys) {
        const Sizes sizes(args);
        const VarlenArgs *varlen = args.varlen;
        const at::TensorOptions options = args.q.options().dtype(at::kLong);
        const at::Tensor row = at::arange(rows, options), column = at::arange(keys, options);
        query = row.unsqueeze(1);
        key = column.unsqueeze(0);

        const at::Tensor bidb = at::arange(sizes.batch + 1, options);
        const at::Tensor begin_q = varlen == nullptr ? bidb * sizes.rows_q : varlen->cu_seqlens_q.to(at::kLong);
        const at::Tensor begin_k = varlen == nullptr ? bidb * sizes.rows_k : varlen->cu_seqlens_k.to(at::kLong);
        seqlen_q = begin_q.diff().view({-1, 1, 1, 1});
        seqlen_k = begin_k.diff().view({-1, 1, 1, 1});
        index_q = begin_q.index({Slice(None, -1), None}) + row;
        index_k = begin_k.index({Slice(None, -1), None}) + column;
        if (args.is_paged()) {
            const int64_t page_size = args.k.size(1);
            const at::Tensor page = varlen->block_table->index_select(
                1, column.div(page_size, "floor").clamp_max(varlen->block_table->size(1) - 1));
            index_k = page.to(at::kLong) * page_size + column.remainder(page_size);
        }
    }

    // [batch, 1, rows, keys]: true where a query sees a key.
    at::Tensor is_visible(const Options &options) const {
        const at::Tensor ahead = key - query - (seqlen_k - seqlen_q);  // keys to the right of the diagonal
        at::Tensor visible = query.lt(seqlen_q).logical_and(key.lt(seqlen_k));
        const int64_t right = options.is_causal ? 0 : options.window_size_right;
        if (right >= 0) {
            visible = visible.logical_and(ahead.le(right));
        }
        if (options.window_size_left >= 0) {
            visible = visible.logical_and(ahead.ge(-options.window_size_left));
        }
        return visible;
    }
};

}  // namespace

at::Tensor s_dmask(const FwdArgs &args, const at::Tensor &rng_state) {
    const Sizes sizes(args);
    const Options &options = args.options;
    const VarlenArgs *varlen = args.varlen;
    const int64_t batch = sizes.batch, heads = sizes.nheads,
                  rows = round_up(varlen == nullptr ? sizes.seqlen_q : varlen->max_seqlen_q),
                  keys = round_up(varlen == nullptr ? sizes.seqlen_k : varlen->max_seqlen_k);
    if (batch == 0) {  // strides of 0, as contiguous ones could overflow
        return at::empty_strided({batch, heads, rows, keys}, {0, 0, 0, 0}, args.q.options());
    }
    FLASH_CHECK_VALUE(double(batch) * double(heads) * double(rows) * double(keys) <= double(kMostElements),
                      "S_dmask has the shape [", batch, ", ", heads, ", ", rows, ", ", keys,
                      "] (max_seqlen_q and max_seqlen_k, rounded up); allowed: at most 2^34 elements");
    if (args.q.numel() == 0 || !sizes.has_keys || rows == 0 || keys == 0) {
        return at::zeros({batch, heads, rows, keys}, args.q.options());
    }
    const SequenceIndices sequences(args, rows, keys);
    const at::ScalarType wide = lse_dtype(args.q);
    const at::Tensor q = rows_at(flat_rows(args.q), sequences.index_q, wide).transpose(1, 2);  // (b, h, rows, d)
    const at::Tensor k =
        rows_at(flat_rows(args.k), sequences.index_k, wide).permute({0, 2, 3, 1});  // (b, h_k, d, keys)
    const at::Tensor of_groups = q.reshape({batch, sizes.nheads_k, -1, sizes.headdim}).matmul(k);
    at::Tensor logits = of_groups.view({batch, heads, rows, keys}) * options.softmax_scale;
    if (options.softcap > 0.0) {
        logits = (logits / options.softcap).tanh() * options.softcap;
    }
    if (options.alibi_slopes.has_value()) {
        const at::Tensor distance =
            (sequences.query + sequences.seqlen_k - sequences.seqlen_q - sequences.key).abs().to(wide);
        logits = logits - options.alibi_slopes->to(wide).view({-1, heads, 1, 1}) * distance;
    }
    const at::Tensor hidden = sequences.is_visible(options).logical_not();
    const at::Tensor largest =
        logits.masked_fill(hidden, -std::numeric_limits<double>::infinity()).amax(-1, /*keepdim=*/true);
    at::Tensor probability = (logits - largest).exp();
    if (options.p_dropout > 0.0) {
        const at::Tensor bits = random_bits16(rng_state, batch, heads, rows, keys);
        const auto threshold = static_cast<int64_t>(dropout_threshold(options.p_dropout));
        probability = at::where(bits.lt(threshold), -probability, probability);
    }
    return probability.masked_fill(hidden, 0.0).to(args.q.scalar_type());
}

}  // namespace flash
