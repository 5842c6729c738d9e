// key_ranges in the CUDA kernels. run_prepare_key_ranges (key_ranges.cu) writes the keys that each row sees, and
// summaries of blocks of rows and of keys, before the attention kernel reads them. The mask and the lengths are part of
// them.
#pragma once

#include <cuda_runtime.h>
#include <cute/config.hpp>

#include "block_info.h"

namespace flash {

constexpr int kNoKey = INT32_MAX;  // the begin of an empty range, where the smallest begin is searched

// The keys that a row sees: [begin0, end0) and [begin1, end1), where begin0 < end0 < begin1 < end1. A missing range is
// [0, 0).
struct VisibleKeys {
    int begin0, end0, begin1, end1;

    __device__ __forceinline__ bool is_empty() const { return end0 == 0; }
    __device__ __forceinline__ bool contains(int key) const {
        return (key >= begin0 && key < end0) || (key >= begin1 && key < end1);
    }
};

// The same for a block of rows. Hulls: every key that some row sees is in [begin0, end0) or in [begin1, end1). Full:
// every row sees all keys of [full_begin0, full_end0) and of [full_begin1, full_end1). A range is empty unless its
// begin is below its end.
struct VisibleBlock {
    int begin0 = kNoKey, end0 = 0, begin1 = kNoKey, end1 = 0;
    int full_begin0 = 0, full_end0 = kNoKey, full_begin1 = 0, full_end1 = kNoKey;

    __device__ __forceinline__ void join(const int4 &hulls, const int4 &full) {
        begin0 = min(begin0, hulls.x);
        end0 = max(end0, hulls.y);
        begin1 = min(begin1, hulls.z);
        end1 = max(end1, hulls.w);
        full_begin0 = max(full_begin0, full.x);
        full_end0 = min(full_end0, full.y);
        full_begin1 = max(full_begin1, full.z);
        full_end1 = min(full_end1, full.w);
    }

    __device__ __forceinline__ bool has_row_without_key() const { return full_end0 == 0; }
    // True if every row sees all of the keys [begin, end).
    __device__ __forceinline__ bool sees_all(int begin, int end) const {
        return (begin >= full_begin0 && end <= full_end0) || (begin >= full_begin1 && end <= full_end1);
    }
};

// The ranges of one head of one sequence.
class RangesOfHead {
    const int4 *rows_;    // of the sequence's row 0
    const int4 *blocks_;  // hulls, then full

public:
    RangesOfHead() = default;  // of no head
    __device__ __forceinline__ RangesOfHead(const Flash_fwd_params &params, int bidb, int bidh) {
        const KeyRanges &ranges = params.key_ranges;
        const int64_t first =
            bidb * ranges.rows_batch_stride + bidh * ranges.rows_head_stride + padded_begin(params, bidb);
        rows_ = reinterpret_cast<const int4 *>(ranges.rows) + first;
        blocks_ = reinterpret_cast<const int4 *>(ranges.blocks) + first / KeyRanges::kRowsPerBlock * 2;
    }

    // row: below the sequence's length, rounded up to a multiple of kRowsRounded.
    __device__ __forceinline__ VisibleKeys row(int row) const {
        const int4 keys = __ldg(rows_ + row);
        return {keys.x, keys.y, keys.z, keys.w};
    }

    // Prefetches the ranges of `rows` rows, at most 256, into L1. Called by a whole warp. first_row: a multiple of 8,
    // the rows of a cache line.
    __device__ __forceinline__ void prefetch(int first_row, int rows, int seqlen_q) const {
        constexpr int kRowsOfLine = 128 / sizeof(int4);
        const int row = first_row + static_cast<int>(threadIdx.x) % 32 * kRowsOfLine;
        if (row < min(first_row + rows, seqlen_q)) {
            asm volatile("prefetch.global.L1 [%0];" ::"l"(rows_ + row));
        }
    }

    // first_row: a multiple of kRowsPerBlock. Rows past the end of the sequence do not count.
    template <int kRows>
    __device__ __forceinline__ VisibleBlock block(int first_row, int seqlen_q) const {
        constexpr int kPerBlock = KeyRanges::kRowsPerBlock;
        static_assert(kRows % kPerBlock == 0);
        VisibleBlock result;
        CUTE_UNROLL
        for (int row = 0; row < kRows; row += kPerBlock) {
            if (first_row + row < seqlen_q) {
                const int4 *block = blocks_ + (first_row + row) / kPerBlock * 2;
                result.join(__ldg(block), __ldg(block + 1));
            }
        }
        return result;
    }
};

// Like BlockInfo: the key blocks that the rows [m_block * kBlockM, (m_block + 1) * kBlockM) visit, from the last to the
// first.
template <int kBlockM, int kBlockN>
struct RangedBlockInfo : Sequence {
    RangesOfHead ranges;
    VisibleBlock keys;
    int n_block_min, n_block_max;
    int gap_begin, gap_end;  // no row sees the key blocks in between

    __device__ RangedBlockInfo(const Flash_fwd_params &params, const Sequence &sequence, int bidb, int bidh,
                               int m_block)
        : Sequence(sequence),
          ranges(params, bidb, bidh),
          keys(ranges.block<kBlockM>(m_block * kBlockM, sequence.seqlen_q)) {
        // With a wrong cu_seqlens_q another sequence, with more keys, may have written the rows.
        const auto end_block = [&](int end) { return (min(end, seqlen_k) + kBlockN - 1) / kBlockN; };
        const bool has_second = keys.begin1 < keys.end1;
        gap_begin = end_block(keys.end0);
        n_block_min = keys.end0 == 0 ? 0 : min(keys.begin0 / kBlockN, gap_begin);
        n_block_max = has_second ? max(end_block(keys.end1), gap_begin) : gap_begin;
        gap_end = has_second ? clamp_to(keys.begin1 / kBlockN, gap_begin, n_block_max) : gap_begin;
    }

    __device__ __forceinline__ bool needs_mask(int n_block) const {
        return !keys.sees_all(n_block * kBlockN, (n_block + 1) * kBlockN);
    }
    // The block to visit after n_block.
    __device__ __forceinline__ int before(int n_block) const { return (n_block == gap_end ? gap_begin : n_block) - 1; }
};

// Like ColumnBlockInfo: the row blocks that a block of keys visits, of every head that shares it.
template <int kBlockM, int kBlockN>
struct RangedColumnBlockInfo : Sequence {
    int n_block;
    int m_block_min, m_block_max;

    // heads: query heads from bidh on.
    __device__ RangedColumnBlockInfo(const Flash_fwd_params &params, const Sequence &sequence, int bidb, int bidh,
                                     int heads, int n_block)
        : Sequence(sequence), n_block(n_block) {
        constexpr int kKeys = KeyRanges::kKeysPerColumn, kColumns = kBlockN > kKeys ? kBlockN / kKeys : 1;
        const KeyRanges &ranges = params.key_ranges;
        const int64_t begin = params.cu_seqlens_k == nullptr
                                  ? 0
                                  : first_block(load_cu_seqlen(params.cu_seqlens_k, bidb, params.total_k), bidb, kKeys);
        const int first_column = n_block * kBlockN / kKeys;
        int before_first = 0, end_row = 0;  // before_first: kNoKey minus the first row
        for (int head = 0; head < (ranges.head_stride == 0 ? 1 : heads); ++head) {
            const int2 *columns = reinterpret_cast<const int2 *>(ranges.columns) + bidb * ranges.columns_batch_stride +
                                  (bidh + head) * ranges.columns_head_stride + begin + first_column;
            CUTE_UNROLL
            for (int i = 0; i < kColumns; ++i) {
                if ((first_column + i) * kKeys < seqlen_k) {
                    const int2 rows = __ldg(columns + i);
                    before_first = max(before_first, rows.x);
                    end_row = max(end_row, rows.y);
                }
            }
        }
        // With a wrong cu_seqlens_k another sequence may have written the columns.
        end_row = min(end_row, seqlen_q);
        m_block_min = end_row == 0 ? 0 : (kNoKey - before_first) / kBlockM;
        m_block_max = (end_row + kBlockM - 1) / kBlockM;
    }

    __device__ __forceinline__ int num_m_blocks() const { return max(m_block_max - m_block_min, 0); }

    // Deterministic dQ: how many key blocks add to the rows of `first_row`, of one head, before this one. The last key
    // blocks add first, as in ColumnBlockInfo::order_in. kDoesNotAdd: no row of the group sees this key block; it adds
    // zeros, so its order does not matter. A group has kRowsRounded rows (KeyRanges::has_wide_columns).
    static constexpr int kDoesNotAdd = -1;
    __device__ __forceinline__ int order_in(const Flash_fwd_params &params, int bidb, int bidh, int first_row) const {
        constexpr int kRows = Flash_bwd_params::kRowsRounded;
        const VisibleBlock keys = RangesOfHead(params, bidb, bidh).block<kRows>(first_row / kRows * kRows, seqlen_q);
        const int begin = keys.begin0 / kBlockN, end = (max(keys.end0, keys.end1) + kBlockN - 1) / kBlockN;
        return n_block >= begin && n_block < end ? end - 1 - n_block : kDoesNotAdd;
    }
};

// The rows of a tile that see a key.
struct RowsWithKeys {
    RangesOfHead ranges;
    int first_row, seqlen_q;

    // row: of the tile.
    __device__ __forceinline__ bool contains(int row) const {
        return first_row + row < seqlen_q && !ranges.row(first_row + row).is_empty();
    }
};

}  // namespace flash
