// The kernel after the backward kernel: the float32 accumulator, in the layout of dq_tile.h, becomes dQ.
#pragma once

#include "../common/block_info.h"
#include "../kind.h"
#include "dq_tile.h"
#include "store_rows.h"

namespace flash::sm90 {

constexpr int kConvertRows = 64, kConvertThreads = 128;

// dQ = softmax_scale * accumulator for 64 rows. Rows without a key get 0: the accumulator of such a row holds NaN if
// one of its tiles has an infinite key.
template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(kConvertThreads)
    flash_bwd_convert_dq(const __grid_constant__ Flash_bwd_params params) {
    const auto [bidb, bidh, m_block] = row_blocks(params, kConvertRows).place(blockIdx.x, /*is_reversed=*/false);
    const Sequence seq = sequence(params, bidb);
    const int first_row = m_block * kConvertRows;
    if (first_row >= seq.seqlen_q) {
        return;
    }
    using Element = typename Traits::Element;
    using Tile = DqTile<Traits>;
    constexpr int kHeadDim = Traits::kHeadDim, kVectors = kHeadDim / 8;
    const int64_t padded_row =
        bidb * params.padded_batch_stride + bidh * params.padded_head_stride + padded_begin(params, bidb) + first_row;
    const auto *accum = reinterpret_cast<const float4 *>(params.dq_accum + padded_row * kHeadDim);
    Tensor acc = make_tensor<float>(Shape<_2, Int<kVectors * 2>>{});  // (row, col)
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
        const float4 x = accum[i / Tile::kVectors * (Traits::kTileOfDq / 4) + Tile::place(i % Tile::kVectors)];
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
        const int row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i * 8;
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
