// Which key blocks a block of query rows visits (forward) or which blocks of query rows a key block visits (backward),
// and which pairs need a mask: the causal diagonal and a ragged end of the keys are one matter, the end of the range of
// keys that a row sees.
#pragma once

#include "../flash.h"

namespace flash {

// For the query rows [m_block * kBlockM, (m_block + 1) * kBlockM) of one sequence: the key blocks [0, n_block_max), of
// which those below n_full_end are seen whole by every row.
template <int kBlockM, int kBlockN, bool Is_causal>
struct BlockInfo {
    int seqlen_q, seqlen_k;
    int n_block_max, n_full_end;

    __device__ BlockInfo(const Flash_fwd_params &params, int m_block)
        : seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k) {
        const int first_row = m_block * kBlockM;
        n_block_max = (max(end_key(first_row + kBlockM - 1), 0) + kBlockN - 1) / kBlockN;
        n_full_end = max(end_key(first_row), 0) / kBlockN;
    }

    // Row i sees the keys [0, end_key(i)); causal is aligned to the bottom right.
    __device__ __forceinline__ int end_key(int row) const {
        return Is_causal ? min(seqlen_k, row + seqlen_k - seqlen_q + 1) : seqlen_k;
    }
};

// For the keys [n_block * kBlockN, (n_block + 1) * kBlockN) of one sequence: the blocks [m_block_min, m_block_max) of
// query rows, of which at least one row sees at least one of the keys.
template <int kBlockM, int kBlockN, bool Is_causal>
struct ColumnBlockInfo {
    int seqlen_q, seqlen_k;
    int n_block, num_n_blocks;
    int m_block_min, m_block_max;

    __device__ ColumnBlockInfo(const Flash_bwd_params &params, int n_block, int num_n_blocks)
        : seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k), n_block(n_block), num_n_blocks(num_n_blocks) {
        m_block_min = Is_causal ? max(n_block * kBlockN + seqlen_q - seqlen_k, 0) / kBlockM : 0;
        m_block_max = (seqlen_q + kBlockM - 1) / kBlockM;
    }

    __device__ __forceinline__ int num_m_blocks() const { return m_block_max - m_block_min; }

    // How many key blocks add to the row block before this one does, when they do it in order. Row blocks are walked
    // upwards; causal: the later keys first, as they begin at later rows and never wait for those that come from
    // earlier ones.
    __device__ __forceinline__ int turn(int m_block) const {
        if (!Is_causal) {
            return n_block;
        }
        const int last_n_block = ((m_block + 1) * kBlockM - 1 + seqlen_k - seqlen_q) / kBlockN;
        return min(last_n_block, num_n_blocks - 1) - n_block;
    }

    // The key block that has the n-th turn.
    __device__ static __forceinline__ int n_block_in_order(int n, int num_n_blocks) {
        return Is_causal ? num_n_blocks - 1 - n : n;
    }

    // Row i sees the keys [0, end_key(i)); causal is aligned to the bottom right.
    __device__ __forceinline__ int end_key(int row) const {
        return Is_causal ? min(seqlen_k, row + seqlen_k - seqlen_q + 1) : seqlen_k;
    }

    // Whether some row of the block does not see some of the keys.
    __device__ __forceinline__ bool needs_mask(int m_block) const {
        return end_key(m_block * kBlockM) < (n_block + 1) * kBlockN;
    }
};

}  // namespace flash
