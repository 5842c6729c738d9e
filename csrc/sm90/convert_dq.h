// The last phase of the backward: the float32 accumulator, in the layout of dq_tile.h, becomes dQ.
#pragma once

#include "dq_rows.h"
#include "dq_tile.h"
#include "store_rows.h"

namespace flash::sm90 {

// dQ = softmax_scale * accumulator, for 16 padded rows of a tile, from padded_row on. Called by a warp. Rows without a
// key get 0: the accumulator of such a row holds NaN if one of its tiles has an infinite key.
template <typename Traits>
__device__ __forceinline__ void convert_dq(const Flash_bwd_params &params, const DqRows &place, int64_t padded_row) {
    using Element = typename Traits::Element;
    using Tile = DqTile<Traits>;
    constexpr int kHeadDim = Traits::kHeadDim, kVectors = kHeadDim / 8;
    const int first_row = static_cast<int>(padded_row % 64);  // in the tile
    if (first_row >= place.count) {
        return;
    }
    const auto *accum = reinterpret_cast<const float4 *>(params.dq_accum + (padded_row - first_row) * kHeadDim);
    const int thread = first_row / 16 * 32 + threadIdx.x % 32;
    Tensor acc = make_tensor<float>(Shape<_2, Int<kVectors * 2>>{});  // (row, col)
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
        const float4 x = accum[i / Tile::kVectors * (Traits::kTileOfDq / 4) + Tile::place(i % Tile::kVectors, thread)];
        acc(0, 2 * i) = x.x;
        acc(0, 2 * i + 1) = x.y;
        acc(1, 2 * i) = x.z;
        acc(1, 2 * i + 1) = x.w;
    }
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
