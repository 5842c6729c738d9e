// The last phase of the backward: the float32 accumulator, in the layout of dq_tile.h, becomes dQ.
#pragma once

#include "dq_rows.h"
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

// dQ = softmax_scale * acc, for the rows of the tile from first_row on. Rows without a key get 0: the accumulator of
// such a row holds NaN if one of its tiles has an infinite key.
template <typename Traits, typename TensorDq>
__device__ __forceinline__ void store_dq(const Flash_bwd_params &params, const DqRows &place, int first_row,
                                         const TensorDq &acc) {
    using Element = typename Traits::Element;
    Element *base = static_cast<Element *>(params.dq.ptr) + place.target;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int row = first_row + threadIdx.x % 32 / 4 + i * 8;
        const bool has_keys = row >= place.has_begin && row < place.has_end;
        store_row<Element, uint4>(acc, i, params.qk_scale, [&](int col, const uint4 &vector) {
            if (row < place.count && col < params.d) {
                *reinterpret_cast<uint4 *>(base + row * params.dq.row_stride + col) = has_keys ? vector : uint4{};
            }
        });
    }
}

}  // namespace flash::sm90
