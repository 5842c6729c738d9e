// Results of rows: summed over parts of the keys, stored as output and log-sum-exp or in slots of partial results.
#pragma once

#include "../common/softmax.h"
#include "instructions.h"
#include "splitkv_schedule.h"

namespace flash::kvcache {

// Four columns of a row, not normalised, relative to a reference near the row's maximum.
struct RowResult {
    float row_max = -INFINITY;  // unscaled
    float row_sum = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

    // Adds the result of other keys. A row that sees none of them has the maximum -inf, the sum 0, and may have o =
    // NaN. No branch: loads of several results stay together.
    __device__ __forceinline__ void add(float other_max, float other_sum, const float4 &other_o, float scale_log2) {
        const bool is_seen = sees_keys(other_max, other_sum);
        const float new_max = fmaxf(row_max, other_max);
        const float weight = row_max == -INFINITY ? 0.0f : exp2_approx((row_max - new_max) * scale_log2);
        const float other_weight = is_seen ? exp2_approx((other_max - new_max) * scale_log2) : 0.0f;
        const auto sum = [&](float x, float other) { return x * weight + (is_seen ? other * other_weight : 0.0f); };
        row_max = new_max;
        row_sum = sum(row_sum, other_sum);
        o = {sum(o.x, other_o.x), sum(o.y, other_o.y), sum(o.z, other_o.z), sum(o.w, other_o.w)};
    }

    // The same where row_max is the maximum of all results. statistics: maximum and sum.
    __device__ __forceinline__ void add_weighted(const float2 &statistics, const float4 &other_o, float scale_log2) {
        const bool is_seen = sees_keys(statistics.x, statistics.y);
        const float weight = is_seen ? exp2_approx((statistics.x - row_max) * scale_log2) : 0.0f;
        const auto sum = [&](float x, float other) { return x + (is_seen ? other * weight : 0.0f); };
        row_sum = sum(row_sum, statistics.y);
        o = {sum(o.x, other_o.x), sum(o.y, other_o.y), sum(o.z, other_o.z), sum(o.w, other_o.w)};
    }

    // Scores that are all NaN leave the maximum at -inf and make the sum NaN.
    __device__ __forceinline__ static bool sees_keys(float maximum, float sum) {
        return maximum != -INFINITY || sum != 0.0f;
    }

    // The result of the lane whose number differs in the bits of `bits`. Called by all lanes.
    __device__ __forceinline__ RowResult of_lane_xor(int bits) const {
        const auto other = [bits](float x) { return __shfl_xor_sync(0xffffffffu, x, bits); };
        return {other(row_max), other(row_sum), {other(o.x), other(o.y), other(o.z), other(o.w)}};
    }

    // Stores the output and, with column 0, the log-sum-exp (natural log) of a row. sum_factor: SplitkvPlan's.
    template <typename Element>
    __device__ __forceinline__ void store(const Flash_fwd_params &params, int bidb, int bidh, int query, int column,
                                          float sum_factor = 1.0f) const {
        float reference = __fmul_rn(row_max, params.scale_softmax), sum = row_sum, weight = 1.0f;
        if (RowMod<float>::is_on(params)) {
            weight = RowMod<float>(params, bidb, bidh).join(reference, sum, 1.0f / sum_factor);
        }
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum * weight;
        const uint2 rounded = {pack<Element>(o.x * inverse, o.y * inverse),
                               pack<Element>(o.z * inverse, o.w * inverse)};
        Element *target = static_cast<Element *>(params.o.ptr) + bidb * params.o.batch_stride +
                          query * params.o.row_stride + bidh * params.o.head_stride + column;
        if (column + 4 <= params.d_v && reinterpret_cast<uintptr_t>(target) % 8 == 0) {
            *reinterpret_cast<uint2 *>(target) = rounded;
        } else {
#pragma unroll 1
            for (int i = 0; i < min(4, params.d_v - column); ++i) {
                const uint32_t pair = i < 2 ? rounded.x : rounded.y;
                reinterpret_cast<uint16_t *>(target)[i] = static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16);
            }
        }
        if (column == 0) {
            float *lse = static_cast<float *>(params.softmax_lse) + bidb * params.lse_batch_stride +
                         bidh * params.lse_head_stride + query;
            *lse = sum == 0.0f ? -INFINITY : reference + logf(sum * sum_factor);
        }
    }
};

// A load that stays where it is: the compiler would make it wait for the statistics, which say whether it is needed.
__device__ __forceinline__ float4 load_now(const float *source) {
    float4 x;
    asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(source));
    return x;
}

// Where the partial results of a row tile lie.
struct Slot {
    float *o;           // [rows, kHeadDim]
    float *statistics;  // [rows, 2]: maximum and sum

    __device__ Slot(const Flash_fwd_params &params, const SplitkvPlan &plan, int kHeadDim, int64_t slot, int row_tile) {
        const int rows = min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio);
        const int64_t index = slot * plan.row_tiles + row_tile, count = plan.slots(params) * plan.row_tiles;
        float *const slots = params.cache.scratch + plan.shared_head_floats(params);
        o = slots + index * rows * kHeadDim;
        statistics = slots + count * rows * kHeadDim + index * rows * 2;
    }

    __device__ __forceinline__ void store(int row, int column, int kHeadDim, const RowResult &result) const {
        *reinterpret_cast<float4 *>(o + row * kHeadDim + column) = result.o;
        if (column == 0) {
            *reinterpret_cast<float2 *>(statistics + row * 2) = {result.row_max, result.row_sum};
        }
    }
};

}  // namespace flash::kvcache
