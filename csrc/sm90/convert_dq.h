// The last phase of the backward: the float32 accumulator, in the layout of dq_tile.h, becomes dQ.
#pragma once

#include "../common/block_info.h"
#include "../kind.h"
#include "dq_tile.h"
#include "store_rows.h"

namespace flash::sm90 {

// dQ = softmax_scale * accumulator, for the 16 padded rows from padded_row on. Called by a warp. Rows without a key get
// 0: the accumulator of such a row holds NaN if one of its tiles has an infinite key.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void convert_dq(const Flash_bwd_params &params, int64_t padded_row) {
    using Element = typename Traits::Element;
    using Tile = DqTile<Traits>;
    constexpr int kHeadDim = Traits::kHeadDim, kVectors = kHeadDim / 8;
    constexpr int kRounded = Flash_bwd_params::kRowsRounded;
    const auto [bidb, bidh, block] = row_blocks<may_be_varlen(kKind)>(params, kRounded)
                                         .place(static_cast<int>(padded_row / kRounded), /*is_reversed=*/false);
    const Sequence seq = sequence<may_be_varlen(kKind)>(params, bidb);
    const int first_row = block * kRounded + static_cast<int>(padded_row % kRounded);
    if (first_row >= seq.seqlen_q) {
        return;
    }
    // The accumulator is in tiles of 64 rows. A warp's part of them is 16 rows.
    const auto *accum = reinterpret_cast<const float4 *>(params.dq_accum + padded_row / 64 * 64 * kHeadDim);
    const int thread = static_cast<int>(padded_row % 64 / 16) * 32 + threadIdx.x % 32;
    Tensor acc = make_tensor<float>(Shape<_2, Int<kVectors * 2>>{});  // (row, col)
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
        const float4 x = accum[i / Tile::kVectors * (Traits::kTileOfDq / 4) + Tile::place(i % Tile::kVectors, thread)];
        acc(0, 2 * i) = x.x;
        acc(0, 2 * i + 1) = x.y;
        acc(1, 2 * i) = x.z;
        acc(1, 2 * i + 1) = x.w;
    }
    const KeyRange<is_local(kKind)> range(params, seq.seqlen_q, seq.seqlen_k);
    Element *base =
        static_cast<Element *>(params.dq.ptr) + bidb * params.dq.batch_stride + bidh * params.dq.head_stride;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int row = first_row + threadIdx.x % 32 / 4 + i * 8;
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
