// Variable lengths: which sequence has a block of rows, found by a whole warp.
#pragma once

#include <cute/tensor.hpp>

#include "common/sequence.h"

namespace flash::sm90 {

// A block of rows that was found, with the bounds of its sequence. It may lie past the end of the sequence.
struct FoundBlock : SequenceBlock {
    Sequence sequence;
};

// find_block() of common/sequence.h together with sequence() of what it finds. Called by all lanes of a warp with the
// same arguments. The binary search there loads one value of cu_seqlens after the other, and waits for each. Here each
// lane loads the bounds of one sequence. A warp waits for one load with up to 32 sequences, for two with up to 1,024.
// kOfKeys: the block has keys, not queries.
template <bool kOfKeys>
__device__ __forceinline__ FoundBlock find_block_by_warp(const Flash_fwd_params &params, int kBlock, int64_t index) {
    constexpr int kLanes = 32;
    constexpr unsigned kAllLanes = 0xffffffffu;
    const int lane = threadIdx.x % kLanes;
    // The last sequence that begins at or before `index` is one of `count` from `low` on.
    int low = 0, count = params.b;
    const auto last_lane = [&](bool is_one, int64_t row, int bidb) {
        const bool begins_before = is_one && (lane == 0 || first_block(row, bidb, kBlock) <= index);
        return 31 - __clz(static_cast<int>(__ballot_sync(kAllLanes, begins_before)));
    };
    while (count > kLanes) {
        const int stride = (count + kLanes - 1) / kLanes, bidb = min(low + lane * stride, params.b - 1);
        const int row = kOfKeys ? load_cu_seqlen(params.cu_seqlens_k, bidb, params.total_k)
                                : load_cu_seqlen(params.cu_seqlens_q, bidb, params.total_q);
        const int last = last_lane(lane * stride < count, row, bidb);
        low += last * stride;
        count = min(stride, count - last * stride);
    }
    const int bidb = low + min(lane, count - 1);
    const Sequence own = sequence(params, bidb);
    const int last = last_lane(lane < count, kOfKeys ? own.k_begin : own.q_begin, bidb);
    const auto of_last = [&](int x) { return __shfl_sync(kAllLanes, x, last); };
    const Sequence found{of_last(own.q_begin), of_last(own.k_begin), of_last(own.seqlen_q), of_last(own.seqlen_k), 0};
    const int block =
        static_cast<int>(index - first_block(kOfKeys ? found.k_begin : found.q_begin, low + last, kBlock));
    return {{low + last, max(block, 0)}, found};
}

// ---- the blocks of rows of a head, sorted from long to short on the device, because the host does not know the
// lengths

constexpr int kMaxSortedSequences = 128;  // reading the lengths of more takes too long

// The blocks of b sequences are listed by their number within their sequence, the highest number first. Under a causal
// mask these take longest, if they are blocks of queries. Of blocks of keys the first ones take longest, so the caller
// counts them from the end. Returns entry `index` of the list; past its end, a block that its sequence does not have.
// Called by a whole warp; it reads every length several times.
template <int kBlock>
__device__ __forceinline__ SequenceBlock find_block_by_length(const int *cu_seqlens, int b, int64_t total, int index) {
    constexpr unsigned kAllLanes = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    const auto blocks_of = [&](int bidb) {
        if (bidb >= b) {
            return 0;
        }
        const int begin = load_cu_seqlen(cu_seqlens, bidb, total);
        return (clamp_to(cu_seqlens[bidb + 1], begin, static_cast<int>(total)) - begin + kBlock - 1) / kBlock;
    };
    int max_blocks = 0;
    CUTE_NO_UNROLL
    for (int bidb = lane; bidb < b; bidb += 32) {
        max_blocks = max(max_blocks, blocks_of(bidb));
    }
    max_blocks = __reduce_max_sync(kAllLanes, max_blocks);
    const auto count_from = [&](int block) {  // blocks with this number or a higher one
        int count = 0;
        CUTE_NO_UNROLL
        for (int bidb = lane; bidb < b; bidb += 32) {
            count += max(blocks_of(bidb) - block, 0);
        }
        return __reduce_add_sync(kAllLanes, count);
    };
    int low = -1, high = max_blocks;  // count_from(high) <= index < count_from(low), or low is -1
    CUTE_NO_UNROLL
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (count_from(middle) > index ? low : high) = middle;
    }
    int before = index - count_from(high);  // blocks with the number `low`
    CUTE_NO_UNROLL
    for (int first = 0; first < b && low >= 0; first += 32) {
        const unsigned have_it = __ballot_sync(kAllLanes, blocks_of(first + lane) > low);
        const bool is_it = (have_it >> lane & 1) != 0 && __popc(have_it & ((1u << lane) - 1)) == before;
        const unsigned found = __ballot_sync(kAllLanes, is_it);
        if (found != 0) {
            return {first + __ffs(static_cast<int>(found)) - 1, low};
        }
        before -= __popc(have_it);
    }
    return {0, max_blocks};
}

}  // namespace flash::sm90
