// Where one sequence of the batch lies, whether its length is that of all or its own.
#pragma once

#include "../flash.h"

#ifdef __CUDACC__
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_HOST_DEVICE inline
#endif

namespace flash {

struct Sequence {
    int q_begin;   // rows of q, o and the statistics before it, beyond the batch stride; 0 unless varlen
    int k_begin;   // rows of k and v likewise
    int seqlen_q;  // queries
    int seqlen_k;  // keys
};

// May_be_varlen: false where the caller knows that lengths are equal, and code for others would cost.
template <bool May_be_varlen = true>
FLASH_HOST_DEVICE Sequence sequence(const Flash_fwd_params &params, int bidb) {
    if (!May_be_varlen || params.cu_seqlens_q == nullptr) {
        return {0, 0, params.seqlen_q, params.seqlen_k};
    }
    const int q_begin = params.cu_seqlens_q[bidb], k_begin = params.cu_seqlens_k[bidb];
    return {q_begin, k_begin, params.cu_seqlens_q[bidb + 1] - q_begin, params.cu_seqlens_k[bidb + 1] - k_begin};
}

// Blocks of kBlock rows cut from a run of sequences: a sequence that follows `rows` others' rows in `bidb` sequences
// has its first block at this index. Each may leave a block unused, but nobody has to add lengths up to know where it
// is.
FLASH_HOST_DEVICE int64_t first_block(int64_t rows, int64_t bidb, int kBlock) {
    return rows / kBlock + bidb;
}

// Which sequence the block with this index belongs to, and which of its blocks it is: past the sequence's end where
// unused.
struct Sequence_block {
    int bidb;
    int block;
};

FLASH_HOST_DEVICE Sequence_block find_block(const int *cu_seqlens, int b, int kBlock, int64_t index) {
    int low = 0, high = b;  // first_block(low) <= index < first_block(high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_block(cu_seqlens[middle], middle, kBlock) <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return {low, static_cast<int>(index - first_block(cu_seqlens[low], low, kBlock))};
}

// The thread blocks that cut the rows (queries or keys) of all sequences and heads into blocks: head after head, and of
// a head sequence after sequence; of equal lengths, sequence after sequence and of a sequence head after head.
struct Row_blocks {
    const int *cu_seqlens;  // null: equal lengths
    int b, heads, kBlock;
    int per_head;  // blocks

    FLASH_HOST_DEVICE Row_blocks(const int *cu_seqlens, int64_t total, int seqlen, int b, int heads, int kBlock)
        : cu_seqlens(cu_seqlens),
          b(b),
          heads(heads),
          kBlock(kBlock),
          per_head(cu_seqlens == nullptr ? (seqlen + kBlock - 1) / kBlock : int(first_block(total, b, kBlock))) {}

    FLASH_HOST_DEVICE int64_t count() const { return int64_t(per_head) * heads * (cu_seqlens == nullptr ? b : 1); }

    struct Place {
        int bidb, bidh, block;  // the block may lie past the end of its sequence: unused
    };
    // is_reversed: the last blocks of a head come first.
    FLASH_HOST_DEVICE Place place(int index, bool is_reversed) const {
        const int head = index / per_head;  // of equal lengths: of all b * heads
        int block = index - head * per_head;
        block = is_reversed ? per_head - 1 - block : block;
        if (cu_seqlens == nullptr) {
            return {head / heads, head % heads, block};
        }
        const Sequence_block found = find_block(cu_seqlens, b, kBlock, block);
        return {found.bidb, head, found.block};
    }
};

template <bool May_be_varlen = true>
FLASH_HOST_DEVICE Row_blocks row_blocks(const Flash_fwd_params &params, int kBlockM) {
    return {
        May_be_varlen ? params.cu_seqlens_q : nullptr, params.total_q, params.seqlen_q, params.b, params.h, kBlockM};
}

// heads: of dK and dV.
template <bool May_be_varlen = true>
FLASH_HOST_DEVICE Row_blocks key_blocks(const Flash_fwd_params &params, int heads, int kBlockN) {
    return {May_be_varlen ? params.cu_seqlens_k : nullptr, params.total_k, params.seqlen_k, params.b, heads, kBlockN};
}

// The first padded row of a sequence within its head (see Flash_bwd_params).
template <bool May_be_varlen = true>
FLASH_HOST_DEVICE int64_t padded_begin(const Flash_bwd_params &params, int bidb) {
    if (!May_be_varlen || params.cu_seqlens_q == nullptr) {
        return 0;
    }
    constexpr int kRows = Flash_bwd_params::kRowsRounded;
    return first_block(params.cu_seqlens_q[bidb], bidb, kRows) * kRows;
}

// Padded rows of all heads and sequences.
FLASH_HOST_DEVICE int64_t padded_rows(const Flash_bwd_params &params) {
    return params.padded_head_stride * params.h * (params.cu_seqlens_q == nullptr ? params.b : 1);
}

}  // namespace flash
