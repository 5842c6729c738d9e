// An m16n8 accumulator: views of it as rows and columns for the softmax and as the A operand of the next product, its
// conversion, and the mask.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include "common/key_ranges.h"

namespace flash {

using namespace cute;

// (MMA=4, MMA_M, MMA_N) -> (row=(2, MMA_M), col=(2, MMA_N))
template <typename Layout0>
__device__ auto rowcol_layout(Layout0 acc_layout) {
    static_assert(decltype(size<0>(acc_layout))::value == 4 && decltype(rank(acc_layout))::value == 3,
                  "an m16n8 accumulator holds 4 values in each thread");
    auto split = logical_divide(acc_layout, Shape<_2>{});  // ((2, 2), MMA_M, MMA_N)
    return make_layout(make_layout(get<0, 1>(split), get<1>(split)), make_layout(get<0, 0>(split), get<2>(split)));
}

// (MMA=4, MMA_M, MMA_N) -> (MMA=(4, 2), MMA_M, MMA_N / 2): two neighbouring n8 accumulators are one k16 operand.
template <typename Layout0>
__device__ auto operand_A_layout(Layout0 acc_layout) {
    auto split = logical_divide(acc_layout, Shape<Underscore, Underscore, _2>{});  // (4, MMA_M, (2, MMA_N / 2))
    return make_layout(make_layout(get<0>(split), get<2, 0>(split)), get<1>(split), get<2, 1>(split));
}

// float32 registers rounded to Element, in the same layout.
template <typename Element, typename Engine, typename Layout0>
__device__ auto convert_type(const Tensor<Engine, Layout0> &source) {
    constexpr int kCount = decltype(size(source))::value;
    cutlass::NumericArrayConverter<Element, float, kCount> convert;
    auto converted = convert(*reinterpret_cast<const cutlass::Array<float, kCount> *>(source.data()));
    Tensor result = make_tensor<Element>(source.layout());
    copy(make_tensor(make_rmem_ptr<Element>(&converted), source.layout()), result);
    return result;
}

// ---- the mask: scores of keys that a row does not see become -inf; only steps at the ends of the key ranges need it

// scores: (row, col) of the tile (m_block, n_block). coords: the same layout, holding (row, col) in the tile.
template <int kBlockM, int kBlockN, typename Info, typename TensorS, typename TensorC>
__device__ __forceinline__ void apply_mask(TensorS &scores, const TensorC &coords, const Info &info, int m_block,
                                           int n_block) {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
        const int query = m_block * kBlockM + get<0>(coords(row, 0));
        const int begin = info.begin_key(query) - n_block * kBlockN, end = info.end_key(query) - n_block * kBlockN;
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            const int key = get<1>(coords(row, col));
            if (key >= end || (Info::Is_local && key < begin)) {
                scores(row, col) = -INFINITY;
            }
        }
    }
}

// The same with key_ranges.
template <int kBlockM, typename TensorS, typename TensorC>
__device__ __forceinline__ void apply_mask(TensorS &scores, const TensorC &coords, const RangesOfHead &ranges,
                                           int seqlen_q, int m_block, int first_key) {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
        const int query = m_block * kBlockM + get<0>(coords(row, 0));
        const VisibleKeys keys = ranges.row(min(query, seqlen_q - 1));
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            if (!keys.contains(first_key + get<1>(coords(row, col)))) {
                scores(row, col) = -INFINITY;
            }
        }
    }
}

template <int kBlockM, int kBlockN, typename TensorS, typename TensorC>
__device__ __forceinline__ void apply_mask(TensorS &scores, const TensorC &coords,
                                           const RangedBlockInfo<kBlockM, kBlockN> &info, int m_block, int n_block) {
    apply_mask<kBlockM>(scores, coords, info.ranges, info.seqlen_q, m_block, n_block * kBlockN);
}

}  // namespace flash
