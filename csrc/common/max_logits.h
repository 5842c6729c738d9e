// The option return_max_logits: the largest score of each head that a query sees. A thread keeps the largest of its
// scores, and each warp adds one value per block of queries to Flash_fwd_params::max_logits. Hopper's kernels, most of
// whose steps know no maximum, have sm90/forward/largest_logit.h.
#pragma once

#include "flash.h"

namespace flash {

// The largest of a warp's values, compared as integers of the same order.
__device__ __forceinline__ float warp_max(float value) {
    const auto flip = [](int bits) { return bits ^ (bits < 0 ? 0x7fffffff : 0); };
    return __int_as_float(flip(__reduce_max_sync(0xffffffffu, flip(__float_as_int(value)))));
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
    float largest = -INFINITY;  // of this thread, unscaled
};

}  // namespace flash
