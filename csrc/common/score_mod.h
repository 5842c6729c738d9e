// Score modification, softcap and ALiBi: applied to the scores between Q K^T and the softmax.
// kvcache/splitkv_kernel.h (modify_and_mask) and sm90/backward/scores_bwd.h (round_p) have their own forms of `apply`:
// a modifier changes all three.
#pragma once

#include <cfloat>
#include <cute/tensor.hpp>

#include "../flash.h"

namespace flash {

using namespace cute;

// Relative error at most 2^-11, as much as rounding a score to 16 bits.
__device__ __forceinline__ float tanh_approx(float x) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

struct ScoreMod {
    float cap_scale;  // tanh(cap_scale * q.k) is the capped score; 0 = no softcap
    float slope;      // ALiBi slope of this head / params.scale_softmax; 0 = off
    int offset;       // seqlen_k - seqlen_q

    __device__ ScoreMod(const Flash_fwd_params &params, int bidb, int bidh, int offset)
        : cap_scale(params.cap_scale), slope(0.0f), offset(offset) {
        if (params.alibi_slopes != nullptr) {
            slope = slope_of(params, params.alibi_slopes[bidb * params.alibi_slopes_batch_stride + bidh]);
        }
    }

    // Finite, so that slope * 0 is 0.
    __device__ static float slope_of(const Flash_fwd_params &params, float alibi_slope) {
        return fminf(fmaxf(alibi_slope / params.scale_softmax, -FLT_MAX), FLT_MAX);
    }

    __device__ static bool is_on(const Flash_fwd_params &params) {
        return params.cap_scale != 0.0f || params.alibi_slopes != nullptr;
    }

    // scores (row, col) holds q.k on entry and logits / params.scale_softmax on return, for the tile that begins at
    // first_query and first_key. coords: the same layout, holding (row, col) in the tile. offsets: coords of thread 0;
    // they are compile-time constants, so only one integer per tile is converted to float32. kTransposed: rows are
    // keys. after_cap(row, col, t) receives t = tanh(scaled score / softcap).
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
            // Row minus column of this thread's first element. float32 holds these small integers exactly.
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
