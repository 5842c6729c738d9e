// The option return_max_logits: the largest score of each head that a query sees. A thread keeps the largest of its
// scores, and each warp adds one value per block of queries to Flash_fwd_params::max_logits. The row maximum of the
// softmax does not serve: it may lag behind the true one, and Hopper's is often only a bound.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"

namespace flash {

using namespace cute;

class MaxLogit {
public:
    __device__ __forceinline__ static bool is_on(const Flash_fwd_params &params) {
        return params.max_logits != nullptr;
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
        const auto in_order = [](int bits) { return bits ^ (bits < 0 ? 0x7fffffff : 0); };
        const float of_warp =
            __int_as_float(in_order(__reduce_max_sync(0xffffffffu, in_order(__float_as_int(largest)))));
        largest = -INFINITY;
        if (threadIdx.x % 32 == 0 && of_warp != -INFINITY) {
            float *to = static_cast<float *>(params.max_logits) + bidb * params.max_logits_batch_stride + bidh;
            const int bits = __float_as_int(of_warp * scale);
            if (bits >= 0) {
                atomicMax(reinterpret_cast<int *>(to), bits);
            } else {  // the negative floats are the largest unsigned integers, in reverse order
                atomicMin(reinterpret_cast<unsigned *>(to), static_cast<unsigned>(bits));
            }
        }
    }

private:
    // max(x, the bits of a and of b). The conversions stay inside: otherwise the compiler keeps all scores as floats
    // and as integers, and spills 3 KB (nvcc 13.0, head dim 64).
    __device__ __forceinline__ static int max_of_bits(int x, float a, float b) {
        asm("{\n.reg .b32 i, j;\nmov.b32 i, %1;\nmov.b32 j, %2;\nmax.s32 i, i, j;\nmax.s32 %0, %0, i;\n}"
            : "+r"(x)
            : "f"(a), "f"(b));
        return x;
    }

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
