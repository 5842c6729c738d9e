// Backward epilogue: dK and dV of a consumer warpgroup go from registers to global memory, scaled and rounded.
#pragma once

#include "../kind.h"
#include "layout.h"
#include "steps_bwd.h"
#include "store_rows.h"

namespace flash::sm90 {

// Stores acc (MMA, MMA_M, MMA_N), 64 keys from key_offset on, times `factor`. A null pointer: the gradient is not
// wanted.
template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dkv(const Flash_bwd_params &params, const ColumnBlock<Traits, kKind> &block,
                                          const TensorRef &target, const TensorKV &acc, float factor, int key_offset) {
    using Element = typename Traits::Element;
    if (target.ptr == nullptr) {
        return;
    }
    Tensor rows = make_tensor(acc.data(), rowcol_layout(acc.layout()));  // (row, col)
    const int bidh_dkv = block.bidh / block.heads, first_key = block.first_key() + key_offset;
    Element *base = static_cast<Element *>(target.ptr) + block.bidb * target.batch_stride +
                    bidh_dkv * target.head_stride + int64_t(block.k_begin + first_key) * target.row_stride;
    CUTE_UNROLL
    for (int i = 0; i < size<0>(rows); ++i) {
        const int row = first_row_of_thread() + i * 8;
        store_row<Element, uint4>(rows, i, factor, [&](int col, const uint4 &vector) {
            if (first_key + row < block.seqlen_k && col < params.d) {
                *reinterpret_cast<uint4 *>(base + row * target.row_stride + col) = vector;
            }
        });
    }
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dk(const Flash_bwd_params &params, const ColumnBlock<Traits, kKind> &block,
                                         const TensorKV &acc, int key_offset) {
    store_dkv(params, block, params.dk, acc, params.qk_scale, key_offset);
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dv(const Flash_bwd_params &params, const ColumnBlock<Traits, kKind> &block,
                                         const TensorKV &acc, int key_offset) {
    store_dkv(params, block, params.dv, acc, is_general(kKind) ? params.rp_dropout : 1.0f, key_offset);
}

}  // namespace flash::sm90
