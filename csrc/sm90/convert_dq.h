// The last phase of the backward: the float32 accumulator, in the layout of dq_tile.h, becomes dQ.
#pragma once

#include "../common/block_info.h"
#include "../common/preprocess_rows.h"
#include "../kind.h"
#include "dq_tile.h"
#include "store_rows.h"

namespace flash::sm90 {

// A warp's part of a tile of the accumulator: 16 padded rows from padded_row on, (row, col) of a thread.
template <typename Traits>
__device__ __forceinline__ auto load_dq(const Flash_bwd_params &params, int64_t padded_row) {
    using Tile = DqTile<Traits>;
    constexpr int kHeadDim = Traits::kHeadDim, kVectors = kHeadDim / 8;
    const int first_row = static_cast<int>(padded_row % 64);  // in the tile
    const auto *accum = reinterpret_cast<const float4 *>(params.dq_accum + (padded_row - first_row) * kHeadDim);
    const int thread = first_row / 16 * 32 + threadIdx.x % 32;
    auto acc = make_tensor<float>(Shape<_2, Int<kVectors * 2>>{});
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
        const float4 x = accum[i / Tile::kVectors * (Traits::kTileOfDq / 4) + Tile::place(i % Tile::kVectors, thread)];
        acc(0, 2 * i) = x.x;
        acc(0, 2 * i + 1) = x.y;
        acc(1, 2 * i) = x.z;
        acc(1, 2 * i + 1) = x.w;
    }
    return acc;
}

// dQ = softmax_scale * acc, for 16 rows. Rows without a key get 0: the accumulator of such a row holds NaN if one of
// its tiles has an infinite key.
template <typename Traits, Kind kKind, typename TensorDq>
__device__ __forceinline__ void store_dq(const Flash_bwd_params &params, const PaddedRow &first, const TensorDq &acc) {
    using Element = typename Traits::Element;
    const Sequence &seq = first.seq;
    const KeyRange<is_local(kKind)> range(params, seq.seqlen_q, seq.seqlen_k);
    Element *base = static_cast<Element *>(params.dq.ptr) + first.bidb * params.dq.batch_stride +
                    first.bidh * params.dq.head_stride;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int row = first.row + threadIdx.x % 32 / 4 + i * 8;
        const bool has_keys = row >= range.begin_row() && row < range.end_row();
        store_row<Element, uint4>(acc, i, params.qk_scale, [&](int col, const uint4 &vector) {
            if (row < seq.seqlen_q && col < params.d) {
                *reinterpret_cast<uint4 *>(base + int64_t(seq.q_begin + row) * params.dq.row_stride + col) =
                    has_keys ? vector : uint4{};
            }
        });
    }
}

}  // namespace flash::sm90
