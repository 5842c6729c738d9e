// Combines the partial results of a head whose keys several CTAs have worked on, always in the order of the keys.
#pragma once

#include "splitkv_kernel.h"

namespace flash::kvcache {

constexpr int kCombineThreads = 128;
constexpr int kCombineRows = 16;  // of a CTA

// The slots of one head: `first`, then `count - 1` slots from `second` on, kStride apart.
struct Slots {
    int64_t first, second;
    int stride;
    int count;

    __device__ int64_t index(int i) const { return i == 0 ? first : second + int64_t(i - 1) * stride; }
};

template <typename Traits>
__device__ __forceinline__ void combine_rows(const Flash_fwd_params &params, const SplitkvPlan &plan,
                                             const Slots &slots, int bidb, int bidh_k, int row_tile, int row_begin,
                                             int row_end) {
    using Element = typename Traits::Element;
    constexpr int kHeadDim = Traits::kHeadDim, kVectors = kHeadDim / 4, kStep = 64;  // slots
    constexpr int kItems = (kCombineRows * kVectors + kCombineThreads - 1) / kCombineThreads;
    __shared__ float2 statistics[kStep][kCombineRows];  // maximum and sum
    __shared__ float maximum[kCombineRows];             // of this step and those before it

    float o[kItems][4] = {}, row_sum[kItems] = {}, row_max[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        row_max[item] = -INFINITY;
    }
    const int rows = row_end - row_begin;
    for (int begin = 0; begin < slots.count; begin += kStep) {
        const int count = min(kStep, slots.count - begin);
        __syncthreads();  // the step before is done
        for (int i = threadIdx.x; i < count * rows; i += kCombineThreads) {
            const int slot = i / rows, row = i % rows;
            const Slot source(params, plan, kHeadDim, slots.index(begin + slot), row_tile);
            statistics[slot][row] = *reinterpret_cast<const float2 *>(source.statistics + (row_begin + row) * 2);
        }
        __syncthreads();  // the statistics are complete
        if (threadIdx.x < rows) {
            float largest = begin == 0 ? -INFINITY : maximum[threadIdx.x];
            for (int slot = 0; slot < count; ++slot) {
                largest = fmaxf(largest, statistics[slot][threadIdx.x].x);
            }
            maximum[threadIdx.x] = largest;
        }
        __syncthreads();  // the maxima are complete
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
            const int index = item * kCombineThreads + threadIdx.x;
            const int row = index / kVectors, column = index % kVectors * 4;
            if (row < rows) {
                const float old_weight = weight_of(row_max[item], maximum[row], params.scale_softmax_log2);
                row_max[item] = maximum[row];
                row_sum[item] *= old_weight;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    o[item][i] *= old_weight;
                }
#pragma unroll 8
                for (int slot = 0; slot < count; ++slot) {
                    const Slot source(params, plan, kHeadDim, slots.index(begin + slot), row_tile);
                    const float4 x =
                        *reinterpret_cast<const float4 *>(source.o + (row_begin + row) * kHeadDim + column);
                    const float2 of_slot = statistics[slot][row];
                    const float weight = weight_of(of_slot.x, row_max[item], params.scale_softmax_log2);
                    row_sum[item] += weight * of_slot.y;
                    o[item][0] += weight * x.x;
                    o[item][1] += weight * x.y;
                    o[item][2] += weight * x.z;
                    o[item][3] += weight * x.w;
                }
            }
        }
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        const int index = item * kCombineThreads + threadIdx.x;
        const int row = index / kVectors, column = index % kVectors * 4;
        if (row < rows) {
            const int packed = row_tile * plan.tile_rows + row_begin + row, query = packed / params.h_h_k_ratio;
            const int bidh = bidh_k * params.h_h_k_ratio + packed % params.h_h_k_ratio;
            const float inverse = row_sum[item] == 0.0f ? 0.0f : 1.0f / row_sum[item];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                o[item][i] = row_sum[item] == 0.0f ? 0.0f : o[item][i] * inverse;
            }
            store_out<Element>(params, bidb, bidh, query, column, o[item]);
            if (column == 0) {
                store_lse(params, bidb, bidh, query, row_max[item], row_sum[item]);
            }
        }
    }
}

// blockIdx.x: kCombineRows rows of a row tile. blockIdx.y: with chosen splits the piece in which the head begins; with
// fixed splits the head.
template <typename Traits>
__global__ void __launch_bounds__(kCombineThreads)
    flash_fwd_splitkv_combine_kernel(const __grid_constant__ Flash_fwd_params params,
                                     const __grid_constant__ SplitkvPlan plan) {
    wait_for_previous_kernel();
    const int chunks = (plan.tile_rows + kCombineRows - 1) / kCombineRows;
    const int row_tile = blockIdx.x / chunks, row_begin = blockIdx.x % chunks * kCombineRows;
    const int rows_left = params.seqlen_q * params.h_h_k_ratio - row_tile * plan.tile_rows;
    const int row_end = min(min(row_begin + kCombineRows, plan.tile_rows), rows_left);
    if (row_begin >= row_end) {
        return;
    }
    if (plan.max_splits > 0) {
        const int bidb = blockIdx.y / params.h_k, bidh_k = blockIdx.y % params.h_k;
        const int count = Units(params, sequence(params, bidb), Traits::kUnit).count;
        const int64_t first = int64_t(blockIdx.y) * plan.max_splits;
        if (count > 1) {
            combine_rows<Traits>(params, plan, {first, first + 1, 1, count}, bidb, bidh_k, row_tile, row_begin,
                                 row_end);
        }
        return;
    }
    using Schedule = Schedule<kCombineThreads, Traits::kUnit>;
    __shared__ typename Schedule::Shared shared;
    Schedule schedule(params, shared);
    const int64_t piece = blockIdx.y, pieces = schedule.used_pieces(plan);
    const int64_t begin = schedule.begin_of(piece, pieces), end = schedule.begin_of(piece + 1, pieces);
    if (begin >= end) {
        return;
    }
    const auto [place, head_begin] = schedule.find(end - 1);
    const int64_t head_end = head_begin + Units(params, sequence(params, place.bidb), Traits::kUnit).count;
    if (head_begin >= begin && head_end > end) {  // the head begins in this piece and does not end in it
        const int count = static_cast<int>(schedule.piece_of(head_end - 1, pieces) - piece) + 1;
        combine_rows<Traits>(params, plan, {2 * piece + 1, 2 * (piece + 1), 2, count}, place.bidb, place.bidh_k,
                             row_tile, row_begin, row_end);
    }
}

}  // namespace flash::kvcache
