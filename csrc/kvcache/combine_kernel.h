// Combines the partial results of a head whose keys several CTAs have worked on, always in the order of the keys.
#pragma once

#include "splitkv_results.h"
#include "splitkv_schedule.h"

namespace flash::kvcache {

// Group g of n groups of threads reads the slots g, g + n, g + 2 n, ... Several groups hide the latency of the loads.
constexpr int kCombineGroups = 4;  // one, of kFewSlotsThreads threads, where a head has few slots
constexpr int kFewSlotsThreads = 256;
constexpr int kManyCombineGroups = 16;  // rows of more than 256 columns, where a head has many slots

// The rows and columns of a CTA. A thread of a group has four columns of one row.
template <int kHeadDim, int kGroups>
struct CombineTile {
    static constexpr int kGroupThreads = kGroups == 1 ? kFewSlotsThreads : kGroups <= 4 ? 128 : 512 / kGroups;
    static constexpr int kColumns = kHeadDim < kGroupThreads * 4 ? kHeadDim : kGroupThreads * 4;
    static constexpr int kRows = kGroupThreads * 4 / kColumns, kPartsOfRow = kHeadDim / kColumns;
    static_assert(kHeadDim % kColumns == 0);
    static constexpr int kThreads = kGroups * kGroupThreads;
    static constexpr int kCtasOfSM = kGroups <= kCombineGroups ? 1024 / kThreads : 1;  // leaves 64 registers a thread
};

// The slots of one head: `first`, then `count - 1` slots from `second` on, `stride` apart.
struct Slots {
    int64_t first, second;
    int stride, count;
};

// Where CombineTile `index` of the `tiles` of a head lies.
template <typename Tile>
struct CombinePlace {
    int row_tile, rows;           // rows: of the row tile
    int row_begin, column_begin;  // in it

    __device__ CombinePlace(const Flash_fwd_params &params, const SplitkvPlan &plan, int index, int tiles) {
        const int chunks = tiles / plan.row_tiles, chunk = index % chunks;
        row_tile = index / chunks;
        row_begin = chunk / Tile::kPartsOfRow * Tile::kRows;
        column_begin = chunk % Tile::kPartsOfRow * Tile::kColumns;
        rows = min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio - row_tile * plan.tile_rows);
    }
    __device__ bool is_empty() const { return row_begin >= rows; }
};

// Combines the slots of the rows of one CombineTile. Called by all threads of a CTA.
template <typename Element, int kHeadDim, int kGroups>
__device__ __forceinline__ void combine_tile(const Flash_fwd_params &params, const SplitkvPlan &plan,
                                             const CombinePlace<CombineTile<kHeadDim, kGroups>> &place, int bidb,
                                             int bidh_k, const Slots &slots) {
    using Tile = CombineTile<kHeadDim, kGroups>;
    constexpr int kRows = Tile::kRows, kGroupThreads = Tile::kGroupThreads, kVectors = Tile::kColumns / 4;
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
    const int row = place.row_begin + thread / kVectors, column = place.column_begin + thread % kVectors * 4;
    const bool is_in_range = row < min(place.row_begin + kRows, place.rows);
    const Slot first(params, plan, kHeadDim, slots.first, place.row_tile),
        second(params, plan, kHeadDim, slots.second, place.row_tile),
        third(params, plan, kHeadDim, slots.second + slots.stride, place.row_tile);
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
    plan.by_ratio(query, head, place.row_tile * plan.tile_rows + row);
    result.store<Element>(params, bidb, bidh_k * params.h_h_k_ratio + head, query, column, plan.sum_factor);
}

// blockIdx.x: one of the `tiles` CombineTiles of a head; with one group also every gridDim.x-th after it.
// blockIdx.y: the head; if combines_by_cta the CTA in which it begins.
template <typename Element, int kHeadDim, int kGroups>
__global__ void __launch_bounds__(CombineTile<kHeadDim, kGroups>::kThreads, CombineTile<kHeadDim, kGroups>::kCtasOfSM)
    flash_fwd_splitkv_combine_kernel(const __grid_constant__ Flash_fwd_params params,
                                     const __grid_constant__ SplitkvPlan plan, int tiles) {
    using Place = CombinePlace<CombineTile<kHeadDim, kGroups>>;
    Place place(params, plan, blockIdx.x, tiles);
    if (kGroups > 1 && place.is_empty()) {
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

    if constexpr (kGroups > 1) {
        combine_tile<Element, kHeadDim, kGroups>(params, plan, place, bidb, bidh_k, slots);
    } else {
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            place = Place(params, plan, tile, tiles);
            if (!place.is_empty()) {
                combine_tile<Element, kHeadDim, kGroups>(params, plan, place, bidb, bidh_k, slots);
            }
        }
    }
}

}  // namespace flash::kvcache
