// The option return_max_logits: the largest score of each head that a query sees. A thread keeps the largest of its
// scores, and each warp adds one value per block of queries to Flash_fwd_params::max_logits. Hopper has
// sm90/forward/largest_logit.h for calls without other options.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"

namespace flash {

using namespace cute;

// The largest of a warp's values, compared as integers of the same order.
__device__ __forceinline__ float warp_max(float value) {
    const auto flip = [](int bits) { return bits ^ (bits < 0 ? 0x7fffffff : 0); };
    return __int_as_float(flip(__reduce_max_sync(0xffffffffu, flip(__float_as_int(value)))));
}

// max(x, the bits of a and of b). The conversions stay inside: otherwise the compiler keeps all scores as floats and as
// integers, and spills 3 KB (nvcc 13.0, head dim 64).
__device__ __forceinline__ int max_of_bits(int x, float a, float b) {
    asm("{\n.reg .b32 i, j;\nmov.b32 i, %1;\nmov.b32 j, %2;\nmax.s32 i, i, j;\nmax.s32 %0, %0, i;\n}"
        : "+r"(x)
        : "f"(a), "f"(b));
    return x;
}

class MaxLogit {
public:
    __device__ __forceinline__ static bool is_on(const Flash_fwd_params &params) {
        return params.max_logits != nullptr;
    }

    // The value of a head in global memory.
    __device__ __forceinline__ static float *of_head(const Flash_fwd_params &params, int bidb, int bidh) {
        return static_cast<float *>(params.max_logits) + bidb * params.max_logits_batch_stride + bidh;
    }

    __device__ __forceinline__ void add(float score) { largest = fmaxf(largest, score); }

    // scores: (row, col), -inf where hidden. is_query(row): false past the last query, and then for all later rows.
    // Compares floats as integers, because Hopper has a maximum of three integers (VIMNMX3, one per two scores) and
    // only of two floats. The orders agree unless all scores are negative or one is NaN.
    template <typename TensorS, typename IsQuery>
    __device__ __forceinline__ void add(const TensorS &scores, const IsQuery &is_query) {
        constexpr int kNothing = 0x80000000, kInfinity = 0x7f800000;
        int bits = kNothing;
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            int of_row = kNothing;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); col += 2) {
                of_row = max_of_bits(of_row, scores(row, col), scores(row, col + 1));
            }
            bits = max(bits, is_query(row) ? of_row : kNothing);
        }
        const bool is_wrong = bits > kInfinity || (bits < 0 && largest < 0.0f);
        if (__any_sync(0xffffffffu, is_query(0) && is_wrong)) {
            add_as_floats(scores, is_query);
        } else if (bits >= 0) {
            add(__int_as_float(bits));
        }
    }

    // Adds the scores of a block of queries to those of its head, times `scale`. Called by a whole warp.
    __device__ __forceinline__ void store(const Flash_fwd_params &params, int bidb, int bidh, float scale) {
        const float of_warp = warp_max(largest);
        largest = -INFINITY;
        if (threadIdx.x % 32 == 0 && of_warp != -INFINITY) {
            store(of_head(params, bidb, bidh), of_warp * scale);
        }
    }

    // *to becomes the larger of *to and logit.
    __device__ __forceinline__ static void store(float *to, float logit) {
        const int bits = __float_as_int(logit);
        if (bits >= 0) {
            atomicMax(reinterpret_cast<int *>(to), bits);
        } else {  // the negative floats are the largest unsigned integers, in reverse order
            atomicMin(reinterpret_cast<unsigned *>(to), static_cast<unsigned>(bits));
        }
    }

private:
    template <typename TensorS, typename IsQuery>
    __device__ __forceinline__ void add_as_floats(const TensorS &scores, const IsQuery &is_query) {
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            float of_row = -INFINITY;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                of_row = fmaxf(of_row, scores(row, col));
            }
            add(is_query(row) ? of_row : -INFINITY);
        }
    }

    float largest = -INFINITY;  // of this thread, unscaled
};

}  // namespace flash
