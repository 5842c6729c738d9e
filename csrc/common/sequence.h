// Sequences of a batch and their blocks of rows. Equal lengths and variable lengths (varlen) share this code.
//
// cu_seqlens lies in GPU memory, so the host does not check its values. Every value is clamped where it is loaded: a
// sequence is a range inside [0, total], whatever cu_seqlens holds, and its length is at least 0.
#pragma once

#include "../flash.h"

#ifdef __CUDACC__
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_HOST_DEVICE inline
#endif

namespace flash {

FLASH_HOST_DEVICE int clamp_to(int x, int low, int high) {
    return x < low ? low : x > high ? high : x;
}

// The first row of sequence `bidb`; for bidb = b the end of the last one. total: rows of the tensor.
FLASH_HOST_DEVICE int load_cu_seqlen(const int *cu_seqlens, int bidb, int64_t total) {
    return clamp_to(cu_seqlens[bidb], 0, static_cast<int>(total));
}

struct Sequence {
    int q_begin;   // first row in q, o and the row statistics; 0 for equal lengths (the batch stride counts instead)
    int k_begin;   // first row in k and v; 0 for equal lengths; with a cache the left padding
    int seqlen_q;  // queries
    int seqlen_k;  // keys
    int k_bidb;    // batch index in k and v; 0 for variable lengths
};

// With a cache: keys of sequence `bidb` before the call, left padding included.
FLASH_HOST_DEVICE int cache_seqlen(const KvCache &cache, int bidb) {
    return clamp_to(cache.seqlens == nullptr ? cache.seqlen : cache.seqlens[bidb], 0, cache.capacity);
}

// The sequence of a call with a cache, new keys included. Keys past the capacity do not exist.
FLASH_HOST_DEVICE Sequence cache_sequence(const Flash_fwd_params &params, int bidb) {
    const KvCache &cache = params.cache;
    const int64_t end_of_new = int64_t{cache_seqlen(cache, bidb)} + cache.seqlen_new;
    const int end = end_of_new < cache.capacity ? static_cast<int>(end_of_new) : cache.capacity;
    const int begin = cache.leftpad == nullptr ? 0 : clamp_to(cache.leftpad[bidb], 0, end);
    const int k_bidb = cache.batch_idx == nullptr ? bidb : clamp_to(cache.batch_idx[bidb], 0, cache.batch_cache - 1);
    return {0, begin, params.seqlen_q, end - begin, k_bidb};
}

// kMayBeVarlen: false where the caller knows that the lengths are equal.
template <bool kMayBeVarlen = true>
FLASH_HOST_DEVICE Sequence sequence(const Flash_fwd_params &params, int bidb) {
    if (kMayBeVarlen && params.cache.is_used()) {
        return cache_sequence(params, bidb);
    }
    if (!kMayBeVarlen || params.cu_seqlens_q == nullptr) {
        return {0, 0, params.seqlen_q, params.seqlen_k, bidb};
    }
    const int total_q = static_cast<int>(params.total_q), total_k = static_cast<int>(params.total_k);
    const int q_begin = load_cu_seqlen(params.cu_seqlens_q, bidb, total_q);
    const int q_end = clamp_to(params.cu_seqlens_q[bidb + 1], q_begin, total_q);
    if (params.block_table != nullptr) {  // cu_seqlens_k only says how many keys each sequence has
        const int64_t keys = int64_t{params.cu_seqlens_k[bidb + 1]} - params.cu_seqlens_k[bidb];
        return {q_begin, 0, q_end - q_begin, keys < 0 ? 0 : keys > total_k ? total_k : static_cast<int>(keys), 0};
    }
    const int k_begin = load_cu_seqlen(params.cu_seqlens_k, bidb, total_k);
    const int k_end = clamp_to(params.cu_seqlens_k[bidb + 1], k_begin, total_k);
    return {q_begin, k_begin, q_end - q_begin, k_end - k_begin, 0};
}

// Blocks of kBlock rows over concatenated sequences. Sequence `bidb`, preceded by `rows` rows, gets the block indices
// from rows / kBlock + bidb on. This leaves at most one unused index per sequence, and needs no sum over lengths.
// Example: kBlock = 64, lengths 100 and 30: blocks 0, 1 and 2 (100 / 64 + 1).
FLASH_HOST_DEVICE int64_t first_block(int64_t rows, int64_t bidb, int kBlock) {
    return rows / kBlock + bidb;
}

struct SequenceBlock {
    int bidb;
    int block;  // number of the block within its sequence; past the sequence's end if the index is unused
};

// The sequence and the block with this block index. Never negative, whatever cu_seqlens holds.
FLASH_HOST_DEVICE SequenceBlock find_block(const int *cu_seqlens, int b, int64_t total, int kBlock, int64_t index) {
    int low = 0, high = b;  // first_block(low) <= index < first_block(high) for rising cu_seqlens
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_block(load_cu_seqlen(cu_seqlens, middle, total), middle, kBlock) <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const int block = static_cast<int>(index - first_block(load_cu_seqlen(cu_seqlens, low, total), low, kBlock));
    return {low, block < 0 ? 0 : block};
}

// The blocks of rows (queries or keys) of all sequences and heads, in the order in which CTAs take them. Varlen: head
// by head, the sequences of a head one after the other. Equal lengths: sequence by sequence, then head by head.
struct RowBlocks {
    const int *cu_seqlens;  // null: equal lengths
    int64_t total;          // varlen: rows of the tensor
    int b, heads, kBlock;
    int per_head;  // blocks

    FLASH_HOST_DEVICE RowBlocks(const int *cu_seqlens, int64_t total, int seqlen, int b, int heads, int kBlock)
        : cu_seqlens(cu_seqlens),
          total(total),
          b(b),
          heads(heads),
          kBlock(kBlock),
          per_head(cu_seqlens == nullptr ? (seqlen + kBlock - 1) / kBlock : int(first_block(total, b, kBlock))) {}

    FLASH_HOST_DEVICE int64_t count() const { return int64_t(per_head) * heads * (cu_seqlens == nullptr ? b : 1); }

    // Equal lengths: of all sequences.
    FLASH_HOST_DEVICE int all_heads() const { return cu_seqlens == nullptr ? b * heads : heads; }

    // Blocks of one sequence and one head; varlen: on average.
    FLASH_HOST_DEVICE int per_sequence() const { return cu_seqlens == nullptr ? per_head : (per_head + b - 1) / b; }

    // The index at this position when the blocks of `group` heads are interleaved: the first block of each head, then
    // the second of each, and so on.
    FLASH_HOST_DEVICE int interleaved(int position, int group) const {
        const int first_head = position / (per_head * group) * group;
        const int in_group = position - first_head * per_head;
        group = clamp_to(all_heads() - first_head, 1, group);
        return (first_head + in_group % group) * per_head + in_group / group;
    }

    struct Place {
        int bidb, bidh, block;  // the block may lie past the end of its sequence (unused)
    };
    // is_reversed: the last blocks of a head come first.
    FLASH_HOST_DEVICE Place place(int index, bool is_reversed) const {
        const int head = index / per_head;  // equal lengths: among all b * heads
        int block = index - head * per_head;
        block = is_reversed ? per_head - 1 - block : block;
        if (cu_seqlens == nullptr) {
            return {head / heads, head % heads, block};
        }
        const SequenceBlock found = find_block(cu_seqlens, b, total, kBlock, block);
        return {found.bidb, head, found.block};
    }
};

template <bool kMayBeVarlen = true>
FLASH_HOST_DEVICE RowBlocks row_blocks(const Flash_fwd_params &params, int kBlockM) {
    return {kMayBeVarlen ? params.cu_seqlens_q : nullptr, params.total_q, params.seqlen_q, params.b, params.h, kBlockM};
}

// heads: of dK and dV.
template <bool kMayBeVarlen = true>
FLASH_HOST_DEVICE RowBlocks key_blocks(const Flash_fwd_params &params, int heads, int kBlockN) {
    return {kMayBeVarlen ? params.cu_seqlens_k : nullptr, params.total_k, params.seqlen_k, params.b, heads, kBlockN};
}

// The first padded row of a sequence within its head (Flash_bwd_params). q_begin: Sequence::q_begin.
template <bool kMayBeVarlen = true>
FLASH_HOST_DEVICE int64_t padded_begin(const Flash_fwd_params &params, int bidb, int q_begin) {
    constexpr int kRows = Flash_bwd_params::kRowsRounded;
    return kMayBeVarlen && params.cu_seqlens_q != nullptr ? first_block(q_begin, bidb, kRows) * kRows : 0;
}

// The same where q_begin is not known.
template <bool kMayBeVarlen = true>
FLASH_HOST_DEVICE int64_t padded_begin(const Flash_fwd_params &params, int bidb) {
    const bool is_varlen = kMayBeVarlen && params.cu_seqlens_q != nullptr;
    return is_varlen ? padded_begin(params, bidb, load_cu_seqlen(params.cu_seqlens_q, bidb, params.total_q)) : 0;
}

// Padded rows of all heads and sequences.
FLASH_HOST_DEVICE int64_t padded_rows(const Flash_bwd_params &params) {
    return params.padded_head_stride * params.h * (params.cu_seqlens_q == nullptr ? params.b : 1);
}

}  // namespace flash
