// The mask: scores of keys that a row does not see become -inf. Only steps at the ends of the key ranges need it.
#pragma once

#include <cute/tensor.hpp>

namespace flash {

using namespace cute;

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

}  // namespace flash
