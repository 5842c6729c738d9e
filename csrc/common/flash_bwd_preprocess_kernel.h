// The kernel before the backward kernel of any architecture: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded to
// whole tiles, a flag for large log-sum-exps, and zeros in the accumulator of dQ.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cmath>

#include "sequence.h"
#include "softmax.h"

namespace flash {

constexpr int kPreprocessRows = Flash_bwd_params::kRowsPerFlag;  // query rows of a CTA
constexpr int kPreprocessThreads = 256;

// kLanes lanes share a row. Each lane reads 16 bytes of it.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPreprocessThreads)
    flash_bwd_dot_do_o(const __grid_constant__ Flash_bwd_params params) {
    constexpr int kVector = 16 / sizeof(Element);
    constexpr int kVectors = kHeadDim / kVector;
    constexpr int kLanes = kVectors <= 4 ? 4 : kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;
    constexpr int kRounded = Flash_bwd_params::kRowsRounded;
    const int64_t padded_row = int64_t(blockIdx.x) * kPreprocessRows;  // the first one
    const RowBlocks::Place place =
        row_blocks(params, kRounded).place(static_cast<int>(padded_row / kRounded), /*is_reversed=*/false);
    const int bidb = place.bidb, bidh = place.bidh;
    const Sequence seq = sequence(params, bidb);
    const int first_row = place.block * kRounded + static_cast<int>(padded_row % kRounded);
    const int lane = threadIdx.x % kLanes;

    bool is_large = false;
    CUTE_UNROLL
    for (int row = threadIdx.x / kLanes; row < kPreprocessRows; row += kPreprocessThreads / kLanes) {
        const int query = first_row + row;
        float dot = 0.0f;
        if (query < seq.seqlen_q && lane * kVector < params.d) {
            const auto vector_of = [&](const TensorRef &x) {
                const Element *source = static_cast<const Element *>(x.ptr) + bidb * x.batch_stride +
                                        int64_t(seq.q_begin + query) * x.row_stride + bidh * x.head_stride +
                                        lane * kVector;
                cutlass::Array<Element, kVector> bits;
                *reinterpret_cast<uint4 *>(&bits) = *reinterpret_cast<const uint4 *>(source);
                return cutlass::NumericArrayConverter<float, Element, kVector>::convert(bits);
            };
            const auto out = vector_of(params.o), dout = vector_of(params.dout);
            CUTE_UNROLL
            for (int i = 0; i < kVector; ++i) {
                dot += out[i] * dout[i];
            }
        }
        CUTE_UNROLL
        for (int offset = kLanes / 2; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        }
        if (lane == 0) {
            float lse = INFINITY;  // rows without a key and rows past the end: P = exp(s - inf) = 0
            if (query < seq.seqlen_q) {
                const int64_t index =
                    bidb * params.lse_batch_stride + bidh * params.lse_head_stride + seq.q_begin + query;
                lse = static_cast<const float *>(params.softmax_lse)[index];
                if (lse == -INFINITY) {  // a row without a key has no gradient, whatever dO holds
                    lse = INFINITY;
                    dot = 0.0f;
                } else if (params.dsoftmax_lse != nullptr) {
                    dot -= static_cast<const float *>(params.dsoftmax_lse)[index];
                }
                is_large |= fabsf(lse) > kLargeExponent && lse != INFINITY;
            }
            static_cast<float *>(params.dsoftmax_sum)[padded_row + row] = dot;
            params.lse_padded[padded_row + row] = lse;
        }
    }

    is_large = __syncthreads_or(is_large);
    if (threadIdx.x == 0) {
        params.large_rows[blockIdx.x] = is_large;
    }

    if (params.dq_accum != nullptr) {
        auto *accum = reinterpret_cast<float4 *>(params.dq_accum + padded_row * kHeadDim);
        CUTE_UNROLL
        for (int i = threadIdx.x; i < kPreprocessRows * kHeadDim / 4; i += kPreprocessThreads) {
            accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

}  // namespace flash
