// Variable lengths: which sequence has a block of rows, found by a whole warp. The binary search of common/sequence.h
// loads one value of cu_seqlens after the other, and waits for each.
#pragma once

#include "common/sequence.h"

namespace flash::sm90 {

// find_block() of common/sequence.h, called by all lanes of a warp with the same arguments. Each lane loads a
// value of cu_seqlens: once for up to 32 sequences, twice for up to 1024. Then all load that of the sequence found.
__device__ __forceinline__ SequenceBlock find_block_by_warp(const int *cu_seqlens, int b, int64_t total, int kBlock,
                                                            int64_t index) {
    const int lane = threadIdx.x % 32;
    int low = 0;  // the last sequence that begins at or before `index` is one of `count` from here on
    for (int count = b; count > 1;) {
        const int stride = (count + 31) / 32, bidb = low + lane * stride;
        const bool begins_before =
            lane * stride < count &&
            (lane == 0 || first_block(load_cu_seqlen(cu_seqlens, bidb, total), bidb, kBlock) <= index);
        const int last = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, begins_before)));
        low += last * stride;
        count = min(stride, count - last * stride);
    }
    const int block = static_cast<int>(index - first_block(load_cu_seqlen(cu_seqlens, low, total), low, kBlock));
    return {low, max(block, 0)};
}

}  // namespace flash::sm90
