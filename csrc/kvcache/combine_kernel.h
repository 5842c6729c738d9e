// Combines the partial results of a head whose keys several CTAs have worked on, always in the order of the keys.
#pragma once

#include "splitkv_results.h"
#include "splitkv_schedule.h"

namespace flash::kvcache {

constexpr int kCombineThreads = 128;
template <int kHeadDim>
constexpr int kCombineRows = kCombineThreads * 4 / kHeadDim;  // of a CTA: each thread has four columns of one row

// The slots of one head: `first`, then `count - 1` slots from `second` on, `stride` apart.
struct Slots {
    int64_t first, second;
    int stride, count;
};

// blockIdx.x: kCombineRows rows of a row tile. blockIdx.y: with chosen splits the piece in which the head begins; with
// fixed splits the head.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kCombineThreads)
    flash_fwd_splitkv_combine_kernel(const __grid_constant__ Flash_fwd_params params,
                                     const __grid_constant__ SplitkvPlan plan) {
    constexpr int kRows = kCombineRows<kHeadDim>;
    const int chunks = gridDim.x / plan.row_tiles;
    const int row_tile = blockIdx.x / chunks, row_begin = blockIdx.x % chunks * kRows;
    const int rows = min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio - row_tile * plan.tile_rows);
    if (row_begin >= rows) {
        return;
    }
    int bidb, bidh_k;
    Slots slots;
    if (plan.max_splits > 0) {
        bidb = blockIdx.y / params.h_k;
        bidh_k = blockIdx.y % params.h_k;
        const int64_t first = int64_t(blockIdx.y) * plan.max_splits;
        slots = {first, first + 1, 1, Units(params, plan, cache_sequence(params, bidb)).count};
        if (slots.count == 1) {  // stored by the kernel before
            return;
        }
    } else {
        const Schedule schedule(params, plan);
        const int piece = blockIdx.y, begin = schedule.begin_of(piece), end = schedule.begin_of(piece + 1);
        if (begin >= end) {
            return;
        }
        const Place place = schedule.find(end - 1);
        bidb = place.bidb;
        bidh_k = place.bidh_k;
        const int head_end = place.head_begin + Units(params, plan, cache_sequence(params, bidb)).count;
        if (place.head_begin < begin || head_end <= end) {  // the head begins before this piece, or ends in it
            return;
        }
        slots = {2 * piece + 1, 2 * (piece + 1), 2, schedule.piece_of(head_end - 1) - piece + 1};
    }
    wait_for_previous_kernel();  // it writes the partial results

    const int row = row_begin + threadIdx.x / (kHeadDim / 4), column = threadIdx.x % (kHeadDim / 4) * 4;
    if (row >= min(row_begin + kRows, rows)) {
        return;
    }
    const Slot first(params, plan, kHeadDim, slots.first, row_tile),
        second(params, plan, kHeadDim, slots.second, row_tile),
        third(params, plan, kHeadDim, slots.second + slots.stride, row_tile);
    const int64_t o_stride = third.o - second.o, statistics_stride = third.statistics - second.statistics;
    RowResult result;
    constexpr int kBatch = 16;  // slots that are loaded together
#pragma unroll 1
    for (int begin = 0; begin < slots.count; begin += kBatch) {
        float2 statistics[kBatch];
        float4 o[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int slot = min(begin + i, slots.count - 1);
            const float *of_slot = slot == 0 ? first.statistics : second.statistics + (slot - 1) * statistics_stride;
            statistics[i] = *reinterpret_cast<const float2 *>(of_slot + row * 2);
            const float *o_of_slot = slot == 0 ? first.o : second.o + (slot - 1) * o_stride;
            o[i] = *reinterpret_cast<const float4 *>(o_of_slot + row * kHeadDim + column);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const float maximum = begin + i < slots.count ? statistics[i].x : -INFINITY;
            result.add(maximum, statistics[i].y, o[i], params.scale_softmax_log2);
        }
    }
    int query, head;
    plan.by_ratio(query, head, row_tile * plan.tile_rows + row);
    result.store<Element>(params, bidb, bidh_k * params.h_h_k_ratio + head, query, column);
}

}  // namespace flash::kvcache
