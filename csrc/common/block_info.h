// The range of key blocks that a block of query rows visits (forward), or of row blocks that a key block visits
// (backward), and which of these need a mask. Causal masks, windows and the ragged end of the keys are one rule: row i
// sees the keys [begin_key(i), end_key(i)).
#pragma once

#include "sequence.h"

namespace flash {

// Moves a number that is the same in every lane of the warp into a uniform register. The compiler then knows that
// branches on it do not diverge.
__device__ __forceinline__ int uniform(int x) {
    return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(x)));
}

// Is_local: the range depends on the row (causal or windowed), aligned to the bottom right.
template <bool Is_local>
struct KeyRange {
    int seqlen_q, seqlen_k;
    int begin_shift, end_shift;  // begin_key(i) = max(i + begin_shift, 0), end_key(i) = min(i + end_shift, seqlen_k)

    __device__ KeyRange(const Flash_fwd_params &params, int seqlen_q, int seqlen_k)
        : seqlen_q(seqlen_q), seqlen_k(seqlen_k) {
        constexpr int64_t kFar = 1 << 29;  // larger than any row or key; a sum with one of them fits into 32 bits
        const int64_t offset = int64_t(seqlen_k) - seqlen_q;
        const int left = params.window_size_left, right = params.window_size_right;
        begin_shift = left < 0 ? -kFar : max(offset - left, -kFar);
        end_shift = right < 0 ? kFar : min(max(offset + right + 1, -kFar), kFar);
    }

    __device__ __forceinline__ int begin_key(int row) const { return Is_local ? max(row + begin_shift, 0) : 0; }
    __device__ __forceinline__ int end_key(int row) const {
        return Is_local ? min(row + end_shift, seqlen_k) : seqlen_k;
    }

    // The rows [begin_row(), end_row()) see at least one key. Rows outside of it get output 0 and no gradient, and NaN
    // or infinity in them must not reach other rows: kernels load zeros in their place.
    __device__ __forceinline__ int begin_row() const { return Is_local ? min(max(1 - end_shift, 0), seqlen_q) : 0; }
    __device__ __forceinline__ int end_row() const {
        return seqlen_k == 0 ? 0 : Is_local ? min(max(seqlen_k - begin_shift, 0), seqlen_q) : seqlen_q;
    }
};

// For the query rows [m_block * kBlockM, (m_block + 1) * kBlockM) of one sequence: the key blocks to visit,
// [n_block_min, n_block_max). Every row sees all keys of the blocks [n_full_begin, n_full_end).
template <int kBlockM, int kBlockN, bool Is_local_>
struct BlockInfo : Sequence, KeyRange<Is_local_> {
    static constexpr bool Is_local = Is_local_;
    int n_block_min, n_block_max, n_full_begin, n_full_end;

    using Sequence::seqlen_k, Sequence::seqlen_q;

    __device__ BlockInfo(const Flash_fwd_params &params, const Sequence &sequence, int m_block)
        : BlockInfo(params, sequence, m_block * kBlockM, m_block * kBlockM + kBlockM - 1) {}

    // For the query rows [first_row, last_row].
    __device__ BlockInfo(const Flash_fwd_params &params, const Sequence &sequence, int first_row, int last_row)
        : Sequence(sequence), KeyRange<Is_local>(params, sequence.seqlen_q, sequence.seqlen_k) {
        n_block_min = this->begin_key(first_row) / kBlockN;
        n_block_max = (max(this->end_key(last_row), 0) + kBlockN - 1) / kBlockN;
        n_full_begin = (this->begin_key(last_row) + kBlockN - 1) / kBlockN;
        n_full_end = max(this->end_key(first_row), 0) / kBlockN;
    }

    // True if some row of the block does not see some of the keys.
    __device__ __forceinline__ bool needs_mask(int n_block) const {
        return n_block >= n_full_end || (Is_local && n_block < n_full_begin);
    }
    // The block to visit after n_block.
    __device__ __forceinline__ int before(int n_block) const { return n_block - 1; }
};

// For the keys [n_block * kBlockN, (n_block + 1) * kBlockN) of one sequence: the row blocks to visit, [m_block_min,
// m_block_max). In each, at least one row sees at least one of the keys.
template <int kBlockM, int kBlockN, bool Is_local_>
struct ColumnBlockInfo : Sequence, KeyRange<Is_local_> {
    static constexpr bool Is_local = Is_local_;
    int n_block;
    int m_block_min, m_block_max;

    using Sequence::seqlen_k, Sequence::seqlen_q;

    __device__ ColumnBlockInfo(const Flash_fwd_params &params, const Sequence &sequence, int n_block)
        : Sequence(sequence), KeyRange<Is_local>(params, sequence.seqlen_q, sequence.seqlen_k), n_block(n_block) {
        m_block_min = 0;
        m_block_max = (seqlen_q + kBlockM - 1) / kBlockM;
        if (Is_local) {
            const int first_key = n_block * kBlockN, last_key = first_key + kBlockN - 1;
            m_block_min = max(first_key - this->end_shift + 1, 0) / kBlockM;
            m_block_max = min(m_block_max, max(last_key - this->begin_shift + kBlockM, 0) / kBlockM);
        }
    }

    __device__ __forceinline__ int num_m_blocks() const { return max(m_block_max - m_block_min, 0); }

    // Deterministic dQ: how many key blocks add to the row block before this one. Every key block walks its row blocks
    // upwards. Local: the last key blocks add first, because they start at later rows and so wait for nobody.
    __device__ __forceinline__ int order_in(int m_block) const {
        if (!Is_local) {
            return n_block;
        }
        const int last_key = this->end_key((m_block + 1) * kBlockM - 1) - 1;
        return last_key / kBlockN - n_block;
    }

    // True if some row of the block does not see some of the keys.
    __device__ __forceinline__ bool needs_mask(int m_block) const {
        const int first_row = m_block * kBlockM;
        return this->end_key(first_row) < (n_block + 1) * kBlockN ||
               (Is_local && this->begin_key(first_row + kBlockM - 1) > n_block * kBlockN);
    }
};

}  // namespace flash
