// Softcap and ALiBi: what becomes of a score before the softmax.
#pragma once

#include <cfloat>
#include <cute/tensor.hpp>

#include "../flash.h"

namespace flash {

using namespace cute;

// A relative error of 2^-11 at most, which is what rounding a score to 16 bits costs.
__device__ __forceinline__ float tanh_approx(float x) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

struct Score_mod {
    float cap_scale;  // of q.k, to what tanh is taken of; 0 = no softcap
    float slope;      // of ALiBi for this head, in units of the softmax scale; 0 = off
    int offset;       // seqlen_k - seqlen_q

    __device__ Score_mod(const Flash_fwd_params &params, int bidb, int bidh, int offset)
        : cap_scale(params.softcap > 0.0 ? float(params.softmax_scale / params.softcap) : 0.0f),
          slope(0.0f),
          offset(offset) {
        if (params.alibi_slopes != nullptr) {
            slope = params.alibi_slopes[bidb * params.alibi_slopes_batch_stride + bidh] / softmax_scale(params);
            slope = fminf(fmaxf(slope, -FLT_MAX), FLT_MAX);  // times a distance of 0 it has to be 0
        }
    }

    __device__ static bool is_on(const Flash_fwd_params &params) {
        return params.softcap > 0.0 || params.alibi_slopes != nullptr;
    }

    // What the softmax after it multiplies scores by. With a softcap, scores become tanh, which spares a product.
    __device__ static float softmax_scale(const Flash_fwd_params &params) {
        return float(params.softcap > 0.0 ? params.softcap : params.softmax_scale);
    }

    // scores (row, col): from q.k to logits / softmax_scale(params), in a tile that begins at first_query and
    // first_key. coords: the same layout holding (row, col); offsets: that of thread 0, which are constants, so that
    // only the sum of both has to be converted to float32 once. kTransposed: rows are keys. after_cap(row, col, t): t =
    // tanh(scaled score / softcap).
    template <bool kTransposed, typename TensorS, typename TensorC, typename AfterCap>
    __device__ __forceinline__ void apply(TensorS &scores, const TensorC &coords, const TensorC &offsets,
                                          int first_query, int first_key, const AfterCap &after_cap) const {
        if (cap_scale != 0.0f) {
            CUTE_UNROLL
            for (int row = 0; row < size<0>(scores); ++row) {
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) = tanh_approx(scores(row, col) * cap_scale);
                    after_cap(row, col, scores(row, col));
                }
            }
        }
        if (slope != 0.0f) {
            // Row minus column of this thread's first element; within a tile small numbers, which float32 has exactly.
            const int first_row = get<0>(coords(0, 0)), first_col = get<1>(coords(0, 0));
            const int shift = first_query + offset - first_key;
            const float first = float(kTransposed ? first_row - first_col - shift : first_row - first_col + shift);
            CUTE_UNROLL
            for (int row = 0; row < size<0>(scores); ++row) {
                const float of_row = first + float(get<0>(offsets(row, 0)));
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) -= slope * fabsf(of_row - float(get<1>(offsets(0, col))));
                }
            }
        }
    }
};

}  // namespace flash
