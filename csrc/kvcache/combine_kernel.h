// Combines the partial results of a head whose keys several CTAs have worked on, always in the order of the keys.
#pragma once

#include "splitkv_results.h"
#include "splitkv_schedule.h"

namespace flash::kvcache {

// Group g of n groups of threads reads the slots g, g + n, g + 2 n, ... Several groups hide the latency of the loads.
constexpr int kCombineGroups = 4;       // one where a head has few slots
constexpr int kManyCombineGroups = 16;  // rows of more than 256 columns, where a head has many slots

// The rows and columns of a CTA. A thread of a group has four columns of one row.
template <int kHeadDim, int kGroups>
struct CombineTile {
    static constexpr int kGroupThreads = kGroups <= 4 ? 128 : 512 / kGroups;
    static constexpr int kColumns = kHeadDim < kGroupThreads * 4 ? kHeadDim : kGroupThreads * 4;
    static constexpr int kRows = kGroupThreads * 4 / kColumns, kPartsOfRow = kHeadDim / kColumns;
    static_assert(kHeadDim % kColumns == 0);
};

// The slots of one head: `first`, then `count - 1` slots from `second` on, `stride` apart.
struct Slots {
    int64_t first, second;
    int stride, count;
};

// blockIdx.x: a CombineTile of a row tile. blockIdx.y: the head; if combines_by_cta the CTA in which it begins.
template <typename Element, int kHeadDim, int kGroups>
__global__ void __launch_bounds__(kGroups *CombineTile<kHeadDim, kGroups>::kGroupThreads)
    flash_fwd_splitkv_combine_kernel(const __grid_constant__ Flash_fwd_params params,
                                     const __grid_constant__ SplitkvPlan plan) {
    using Tile = CombineTile<kHeadDim, kGroups>;
    constexpr int kRows = Tile::kRows, kGroupThreads = Tile::kGroupThreads, kVectors = Tile::kColumns / 4;
    const int chunks = gridDim.x / plan.row_tiles;
    const int row_tile = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
    const int row_begin = chunk / Tile::kPartsOfRow * kRows, column_begin = chunk % Tile::kPartsOfRow * Tile::kColumns;
    const int rows = min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio - row_tile * plan.tile_rows);
    if (row_begin >= rows) {
        return;
    }
    wait_for_previous_kernel();  // also where nothing is combined: this grid must not end before that kernel
    launch_dependents();
    int bidb = blockIdx.y / params.h_k, bidh_k = blockIdx.y % params.h_k;
    Slots slots{};
    if (plan.max_splits > 0) {
        const int64_t first = int64_t(blockIdx.y) * plan.max_splits;
        slots = {first, first + 1, 1, Units(params, plan, cache_sequence(params, bidb)).count};
    } else {
        const int4 words = __ldcg(reinterpret_cast<const int4 *>(params.cache.scratch) + blockIdx.y);
        const SharedHead head{words.x, words.y, words.z, words.w};
        bidb = head.bidb;
        bidh_k = head.bidh_k;
        const int heads = plan.heads_of_piece(params), in_piece = plan.by_sequence ? bidh_k : 0;
        slots = {int64_t{2 * head.piece + 1} * heads + in_piece, int64_t{2 * head.piece + 2} * heads + in_piece,
                 2 * heads, head.pieces};
    }
    if (slots.count <= 1) {  // stored by the kernel before
        return;
    }

    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
    const int row = row_begin + thread / kVectors, column = column_begin + thread % kVectors * 4;
    const bool is_in_range = row < min(row_begin + kRows, rows);
    const Slot first(params, plan, kHeadDim, slots.first, row_tile),
        second(params, plan, kHeadDim, slots.second, row_tile),
        third(params, plan, kHeadDim, slots.second + slots.stride, row_tile);
    const int64_t o_stride = third.o - second.o, statistics_stride = third.statistics - second.statistics;
    const auto statistics_of = [&](int i) {
        const float *of_slot = i == 0 ? first.statistics : second.statistics + (i - 1) * statistics_stride;
        return *reinterpret_cast<const float2 *>(of_slot + row * 2);
    };
    RowResult result;
    if (is_in_range) {
        constexpr int kAtOnce = 4;  // slots whose loads are in flight together
#pragma unroll 1
        for (int begin = group; begin < slots.count; begin += kAtOnce * kGroups) {
            float2 statistics[kAtOnce];
            float4 o[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int i = begin + j * kGroups;
                if (i < slots.count) {
                    statistics[j] = statistics_of(i);
                    o[j] = load_now((i == 0 ? first.o : second.o + (i - 1) * o_stride) + row * kHeadDim + column);
                } else {
                    statistics[j] = {-INFINITY, 0.0f};  // like a row without keys
                }
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                result.add(statistics[j].x, statistics[j].y, o[j], params.scale_softmax_log2);
            }
        }
    }
    if constexpr (kGroups > 1) {
        __shared__ RowResult of_groups[kGroups - 1][kGroupThreads];
        if (group > 0) {
            of_groups[group - 1][thread] = result;
        }
        __syncthreads();  // the results of the groups are there
        if (group > 0) {
            return;
        }
#pragma unroll
        for (int i = 0; i < kGroups - 1; ++i) {
            const RowResult &other = of_groups[i][thread];
            result.add(other.row_max, other.row_sum, other.o, params.scale_softmax_log2);
        }
    }
    if (!is_in_range) {
        return;
    }
    int query, head;
    plan.by_ratio(query, head, row_tile * plan.tile_rows + row);
    result.store<Element>(params, bidb, bidh_k * params.h_h_k_ratio + head, query, column, plan.sum_factor);
}

}  // namespace flash::kvcache
