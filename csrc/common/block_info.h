// Which key blocks a block of query rows visits (forward) or which blocks of query rows a key block visits (backward),
// and which pairs need a mask: causal and local windows and a ragged end of the keys are one matter, the range of keys
// that a row sees.
#pragma once

#include "sequence.h"

namespace flash {

// The keys [begin_key(i), end_key(i)) that row i of one sequence sees. Is_local: they depend on the row; aligned to the
// bottom right.
template <bool Is_local>
struct Key_range {
    int seqlen_k;
    int begin_shift, end_shift;  // of a row's number, to where its keys begin and end

    __device__ Key_range(const Flash_fwd_params &params, int seqlen_q, int seqlen_k) : seqlen_k(seqlen_k) {
        constexpr int64_t kFar = 1 << 29;  // no row or key is as far, and no sum with one overflows
        const int64_t offset = int64_t(seqlen_k) - seqlen_q;
        const int left = params.window_size_left, right = params.window_size_right;
        begin_shift = left < 0 ? -kFar : max(offset - left, -kFar);
        end_shift = right < 0 ? kFar : min(max(offset + right + 1, -kFar), kFar);
    }

    __device__ __forceinline__ int begin_key(int row) const { return Is_local ? max(row + begin_shift, 0) : 0; }
    __device__ __forceinline__ int end_key(int row) const {
        return Is_local ? min(row + end_shift, seqlen_k) : seqlen_k;
    }
};

// For the query rows [m_block * kBlockM, (m_block + 1) * kBlockM) of one sequence: the key blocks [n_block_min,
// n_block_max), of which those in [n_full_begin, n_full_end) are seen whole by every row.
template <int kBlockM, int kBlockN, bool Is_local_>
struct BlockInfo : Sequence, Key_range<Is_local_> {
    static constexpr bool Is_local = Is_local_;
    int n_block_min, n_block_max, n_full_begin, n_full_end;

    using Sequence::seqlen_k;

    __device__ BlockInfo(const Flash_fwd_params &params, const Sequence &sequence, int m_block)
        : Sequence(sequence), Key_range<Is_local>(params, sequence.seqlen_q, sequence.seqlen_k) {
        const int first_row = m_block * kBlockM, last_row = first_row + kBlockM - 1;
        n_block_min = this->begin_key(first_row) / kBlockN;
        n_block_max = (max(this->end_key(last_row), 0) + kBlockN - 1) / kBlockN;
        n_full_begin = (this->begin_key(last_row) + kBlockN - 1) / kBlockN;
        n_full_end = max(this->end_key(first_row), 0) / kBlockN;
    }

    // Whether some row of the block does not see some of the keys.
    __device__ __forceinline__ bool needs_mask(int n_block) const {
        return n_block >= n_full_end || (Is_local && n_block < n_full_begin);
    }
};

// For the keys [n_block * kBlockN, (n_block + 1) * kBlockN) of one sequence: the blocks [m_block_min, m_block_max) of
// query rows, of which at least one row sees at least one of the keys.
template <int kBlockM, int kBlockN, bool Is_local_>
struct ColumnBlockInfo : Sequence, Key_range<Is_local_> {
    static constexpr bool Is_local = Is_local_;
    int n_block;
    int m_block_min, m_block_max;

    using Sequence::seqlen_k;

    __device__ ColumnBlockInfo(const Flash_fwd_params &params, const Sequence &sequence, int n_block)
        : Sequence(sequence), Key_range<Is_local>(params, sequence.seqlen_q, sequence.seqlen_k), n_block(n_block) {
        m_block_min = 0;
        m_block_max = (seqlen_q + kBlockM - 1) / kBlockM;
        if (Is_local) {
            const int first_key = n_block * kBlockN, last_key = first_key + kBlockN - 1;
            m_block_min = max(first_key - this->end_shift + 1, 0) / kBlockM;
            m_block_max = min(m_block_max, max(last_key - this->begin_shift + kBlockM, 0) / kBlockM);
        }
    }

    __device__ __forceinline__ int num_m_blocks() const { return max(m_block_max - m_block_min, 0); }

    // How many key blocks add to the row block before this one does, when they do it in order. Row blocks are walked
    // upwards; local: the later keys first, as they begin at later rows and never wait for those that come from
    // earlier ones.
    __device__ __forceinline__ int turn(int m_block) const {
        if (!Is_local) {
            return n_block;
        }
        const int last_key = this->end_key((m_block + 1) * kBlockM - 1) - 1;
        return last_key / kBlockN - n_block;
    }

    // Whether some row of the block does not see some of the keys.
    __device__ __forceinline__ bool needs_mask(int m_block) const {
        const int first_row = m_block * kBlockM;
        return this->end_key(first_row) < (n_block + 1) * kBlockN ||
               (Is_local && this->begin_key(first_row + kBlockM - 1) > n_block * kBlockN);
    }
};

}  // namespace flash
