// The preprocess of a backward: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded to whole tiles, and a flag for
// large log-sum-exps.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include <cmath>

#include "sequence.h"
#include "softmax.h"

namespace flash {

// A padded query row of one head.
struct PaddedRow {
    int64_t padded_row;  // in the padded row statistics
    int bidb, bidh;
    Sequence seq;
    int row;  // in the sequence; may lie past its end
};

// The part of a row's dot product that 16 bytes of each operand hold.
template <typename Element>
__device__ __forceinline__ float dot(const uint4 &x, const uint4 &y) {
    constexpr int kVector = 16 / sizeof(Element);
    using Converter = cutlass::NumericArrayConverter<float, Element, kVector>;
    using Vector = cutlass::Array<Element, kVector>;
    const auto floats_x = Converter::convert(reinterpret_cast<const Vector &>(x));
    const auto floats_y = Converter::convert(reinterpret_cast<const Vector &>(y));
    float sum = 0.0f;
    CUTE_UNROLL
    for (int j = 0; j < kVector; ++j) {
        sum += floats_x[j] * floats_y[j];
    }
    return sum;
}

// Stores delta and the log-sum-exp of a padded row. is_row: it lies within its sequence. Returns whether the
// log-sum-exp is large. A row without a key has no gradient, whatever dO holds. P = exp(s - inf) = 0 there and past the
// end.
__device__ __forceinline__ bool store_statistics(const Flash_bwd_params &params, int64_t padded_row, bool is_row,
                                                 float dot_do_o, float lse, float dlse) {
    const bool has_keys = is_row && lse != -INFINITY;
    static_cast<float *>(params.dsoftmax_sum)[padded_row] = has_keys ? dot_do_o - dlse : 0.0f;
    params.lse_padded[padded_row] = has_keys ? lse : INFINITY;
    return has_keys && fabsf(lse) > kLargeExponent;
}

// A warp does kRows padded rows from `first` on, of one head and one sequence. kLanes lanes share a row. Each lane
// reads 16 bytes of it. Returns, in every lane, whether a row has a large log-sum-exp.
template <typename Element, int kHeadDim, int kRows>
__device__ __forceinline__ bool preprocess_rows(const Flash_bwd_params &params, const PaddedRow &first) {
    constexpr int kVector = 16 / sizeof(Element);
    constexpr int kVectors = kHeadDim / kVector;
    constexpr int kLanes = kVectors <= 4 ? 4 : kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;
    constexpr int kStride = 32 / kLanes;                                  // rows at a time
    constexpr int kTogether = kRows / kStride < 8 ? kRows / kStride : 8;  // rows of a lane that are loaded together
    static_assert(kRows % (kStride * kTogether) == 0);
    const int lane = threadIdx.x % kLanes, row_of_lane = threadIdx.x % 32 / kLanes;
    const int rows = first.seq.seqlen_q - first.row;  // of the sequence
    const auto base_of = [&](const TensorRef &x) {
        return static_cast<const Element *>(x.ptr) + first.bidb * x.batch_stride + first.bidh * x.head_stride +
               int64_t(first.seq.q_begin + first.row) * x.row_stride;
    };
    const Element *out_base = base_of(params.o), *dout_base = base_of(params.dout);
    const bool has_columns = lane * kVector < params.d;
    const int column = has_columns ? lane * kVector : 0;
    const int64_t lse_begin =
        first.bidb * params.lse_batch_stride + first.bidh * params.lse_head_stride + first.seq.q_begin + first.row;
    const auto *all_lse = static_cast<const float *>(params.softmax_lse) + lse_begin;
    const auto *all_dlse = static_cast<const float *>(params.dsoftmax_lse);
    bool is_large = false;
    CUTE_UNROLL
    for (int begin = 0; begin < kRows; begin += kStride * kTogether) {
        uint4 out[kTogether] = {}, dout[kTogether] = {};
        float lse[kTogether], dlse[kTogether] = {};
        CUTE_UNROLL
        for (int i = 0; i < kTogether; ++i) {
            lse[i] = -INFINITY;
        }
        if (rows > 0) {
            // Without branches between them, so that all loads wait together: rows past the end load the last one.
            CUTE_UNROLL
            for (int i = 0; i < kTogether; ++i) {
                const int row = begin + i * kStride + row_of_lane, loaded = row < rows ? row : rows - 1;
                out[i] = *reinterpret_cast<const uint4 *>(out_base + loaded * params.o.row_stride + column);
                dout[i] = *reinterpret_cast<const uint4 *>(dout_base + loaded * params.dout.row_stride + column);
                lse[i] = all_lse[loaded];
            }
            if (all_dlse != nullptr) {
                CUTE_UNROLL
                for (int i = 0; i < kTogether; ++i) {
                    const int row = begin + i * kStride + row_of_lane, loaded = row < rows ? row : rows - 1;
                    dlse[i] = all_dlse[lse_begin + loaded];
                }
            }
        }
        CUTE_UNROLL
        for (int i = 0; i < kTogether; ++i) {
            float sum = has_columns ? dot<Element>(out[i], dout[i]) : 0.0f;
            CUTE_UNROLL
            for (int offset = kLanes / 2; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            }
            if (lane == 0) {
                const int row = begin + i * kStride + row_of_lane;
                is_large |= store_statistics(params, first.padded_row + row, row < rows, sum, lse[i], dlse[i]);
            }
        }
    }
    return __any_sync(0xffffffffu, is_large);
}

}  // namespace flash
