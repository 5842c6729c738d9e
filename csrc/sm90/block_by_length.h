// Varlen: a head's blocks of query rows from long to short, which only the GPU knows how to find.
#pragma once

#include <cute/tensor.hpp>

#include "../common/sequence.h"

namespace flash::sm90 {

// Of the blocks of up to kMax_sequences sequences, number `index` of a list in which those come first that follow most
// others of their sequence: where causal, those that take longest. Past its end: a block that its sequence has not. By
// a whole warp.
constexpr int kMax_sequences = 128;

template <int kBlock>
__device__ __forceinline__ Sequence_block find_block_by_length(const int *cu_seqlens, int b, int index) {
    constexpr unsigned kAll_lanes = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    int blocks[kMax_sequences / 32], most = 0;  // of sequences lane, lane + 32, ...
    CUTE_UNROLL
    for (int i = 0; i < kMax_sequences / 32; ++i) {
        const int bidb = i * 32 + lane;
        blocks[i] = bidb < b ? (cu_seqlens[bidb + 1] - cu_seqlens[bidb] + kBlock - 1) / kBlock : 0;
        most = max(most, blocks[i]);
    }
    most = __reduce_max_sync(kAll_lanes, most);
    const auto count_from = [&](int block) {  // blocks with this number or a higher one
        int count = 0;
        CUTE_UNROLL
        for (int i = 0; i < kMax_sequences / 32; ++i) {
            count += max(blocks[i] - block, 0);
        }
        return __reduce_add_sync(kAll_lanes, count);
    };
    int low = -1, high = most;  // count_from(high) <= index < count_from(low), or low is -1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (count_from(middle) > index ? low : high) = middle;
    }
    int before = index - count_from(high);  // blocks with the number `low`
    CUTE_UNROLL
    for (int i = 0; i < kMax_sequences / 32; ++i) {
        const unsigned have_it = __ballot_sync(kAll_lanes, low >= 0 && blocks[i] > low);
        const bool is_it = (have_it >> lane & 1) != 0 && __popc(have_it & ((1u << lane) - 1)) == before;
        const unsigned found = __ballot_sync(kAll_lanes, is_it);
        if (found != 0) {
            return {i * 32 + __ffs(static_cast<int>(found)) - 1, low};
        }
        before -= __popc(have_it);
    }
    return {0, most};
}

}  // namespace flash::sm90
