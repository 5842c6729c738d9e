// The preprocess of a backward: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded to whole tiles, a flag for large
// log-sum-exps, and zeros in the accumulator of dQ.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include <cmath>

#include "sequence.h"
#include "softmax.h"

namespace flash {

// A CTA of kThreads does the padded rows [padded_row, padded_row + kRows). kLanes lanes share a row. Each lane reads 16
// bytes of it.
template <typename Element, int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void preprocess_rows(const Flash_bwd_params &params, int64_t padded_row) {
    constexpr int kVector = 16 / sizeof(Element);
    constexpr int kVectors = kHeadDim / kVector;
    constexpr int kLanes = kVectors <= 4 ? 4 : kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;
    constexpr int kRounded = Flash_bwd_params::kRowsRounded, kFlagRows = Flash_bwd_params::kRowsPerFlag;
    constexpr int kStride = kThreads / kLanes;                  // rows at a time
    constexpr int kRowsOfLane = (kRows + kStride - 1) / kStride;
    const RowBlocks::Place place =
        row_blocks(params, kRounded).place(static_cast<int>(padded_row / kRounded), /*is_reversed=*/false);
    const int bidb = place.bidb, bidh = place.bidh;
    const Sequence seq = sequence(params, bidb);
    const int first_row = place.block * kRounded + static_cast<int>(padded_row % kRounded);
    const int lane = threadIdx.x % kLanes, row_of_thread = threadIdx.x / kLanes;

    uint4 out[kRowsOfLane], dout[kRowsOfLane];  // all loads first, so that they wait for memory together
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) {
        const int row = row_of_thread + i * kStride, query = first_row + row;
        out[i] = dout[i] = {};
        if (row < kRows && query < seq.seqlen_q && lane * kVector < params.d) {
            const auto vector_of = [&](const TensorRef &x) {
                return *reinterpret_cast<const uint4 *>(
                    static_cast<const Element *>(x.ptr) + bidb * x.batch_stride +
                    int64_t(seq.q_begin + query) * x.row_stride + bidh * x.head_stride + lane * kVector);
            };
            out[i] = vector_of(params.o);
            dout[i] = vector_of(params.dout);
        }
    }
    if (params.dq_accum != nullptr) {
        auto *accum = reinterpret_cast<float4 *>(params.dq_accum + padded_row * kHeadDim);
        for (int i = threadIdx.x; i < kRows * kHeadDim / 4; i += kThreads) {
            accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    if (threadIdx.x < kRows / kFlagRows) {
        params.large_rows[padded_row / kFlagRows + threadIdx.x] = 0;
    }
    __syncthreads();  // before a row sets its flag

    CUTE_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) {
        const int row = row_of_thread + i * kStride, query = first_row + row;
        const auto floats = [](const uint4 &bits) {
            using Converter = cutlass::NumericArrayConverter<float, Element, kVector>;
            return Converter::convert(reinterpret_cast<const cutlass::Array<Element, kVector> &>(bits));
        };
        const auto out_i = floats(out[i]), dout_i = floats(dout[i]);
        float dot = 0.0f;
        CUTE_UNROLL
        for (int j = 0; j < kVector; ++j) {
            dot += out_i[j] * dout_i[j];
        }
        CUTE_UNROLL
        for (int offset = kLanes / 2; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        }
        if (lane == 0 && row < kRows) {
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
                if (fabsf(lse) > kLargeExponent && lse != INFINITY) {
                    params.large_rows[(padded_row + row) / kFlagRows] = 1;
                }
            }
            static_cast<float *>(params.dsoftmax_sum)[padded_row + row] = dot;
            params.lse_padded[padded_row + row] = lse;
        }
    }
}

}  // namespace flash
