// The preprocess of a backward: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded to whole tiles, and a flag for
// large log-sum-exps.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include <cmath>

#include "sequence.h"
#include "softmax.h"

namespace flash {

// The padded rows that share a flag: of one head and one sequence.
struct FlagRows {
    int64_t out, dout, lse;  // of the first row: elements from the pointers in the params
    int count;               // rows of the sequence among them

    __device__ FlagRows() = default;
    __device__ FlagRows(const Flash_bwd_params &params, int64_t padded_row) {
        constexpr int kRounded = Flash_bwd_params::kRowsRounded;
        const auto [bidb, bidh, block] =
            row_blocks(params, kRounded).place(static_cast<int>(padded_row / kRounded), /*is_reversed=*/false);
        const Sequence seq = sequence(params, bidb);
        const int first_row = block * kRounded + static_cast<int>(padded_row % kRounded);
        const int64_t row = int64_t{seq.q_begin} + first_row;
        const auto offset = [&](const TensorRef &x) {
            return bidb * x.batch_stride + row * x.row_stride + bidh * x.head_stride;
        };
        out = offset(params.o);
        dout = offset(params.dout);
        lse = bidb * params.lse_batch_stride + bidh * params.lse_head_stride + row;
        count = clamp_to(seq.seqlen_q - first_row, 0, Flash_bwd_params::kRowsPerFlag);
    }
};

// A CTA of kThreads does `rows` padded rows from padded_row on, at most kRows; both are multiples of kRowsPerFlag.
// kLanes lanes share a row. Each lane reads 16 bytes of it. places: in shared memory, for every kRowsPerFlag rows.
template <typename Element, int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void preprocess_rows(const Flash_bwd_params &params, int64_t padded_row, int rows,
                                                FlagRows *places) {
    constexpr int kVector = 16 / sizeof(Element);
    constexpr int kVectors = kHeadDim / kVector;
    constexpr int kLanes = kVectors <= 4 ? 4 : kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;
    constexpr int kFlagRows = Flash_bwd_params::kRowsPerFlag;
    constexpr int kStride = kThreads / kLanes;  // rows at a time
    constexpr int kInFlight = cute::min((kRows + kStride - 1) / kStride, 11);  // rows of a lane, loaded together
    if (threadIdx.x < rows / kFlagRows) {
        places[threadIdx.x] = FlagRows(params, padded_row + threadIdx.x * kFlagRows);
        params.large_rows[padded_row / kFlagRows + threadIdx.x] = 0;
    }
    __syncthreads();

    const int lane = threadIdx.x % kLanes;
    const auto *all_lse = static_cast<const float *>(params.softmax_lse);
    const auto *all_dlse = static_cast<const float *>(params.dsoftmax_lse);
    CUTE_NO_UNROLL
    for (int first = threadIdx.x / kLanes; first < rows; first += kStride * kInFlight) {
        uint4 out[kInFlight], dout[kInFlight];
        float lse[kInFlight], dlse[kInFlight];
        CUTE_UNROLL
        for (int i = 0; i < kInFlight; ++i) {
            const int row = first + i * kStride;
            out[i] = dout[i] = {};
            lse[i] = dlse[i] = 0.0f;
            if (row < rows) {
                const FlagRows &place = places[row / kFlagRows];
                const int of_place = row % kFlagRows;
                if (of_place < place.count) {
                    if (lane * kVector < params.d) {
                        const auto vector_of = [&](const TensorRef &x, int64_t begin) {
                            return *reinterpret_cast<const uint4 *>(static_cast<const Element *>(x.ptr) + begin +
                                                                    of_place * x.row_stride + lane * kVector);
                        };
                        out[i] = vector_of(params.o, place.out);
                        dout[i] = vector_of(params.dout, place.dout);
                    }
                    if (lane == 0) {
                        lse[i] = all_lse[place.lse + of_place];
                        dlse[i] = all_dlse == nullptr ? 0.0f : all_dlse[place.lse + of_place];
                    }
                } else {
                    lse[i] = -INFINITY;
                }
            }
        }
        CUTE_UNROLL
        for (int i = 0; i < kInFlight; ++i) {
            const int row = first + i * kStride;
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
            if (lane == 0 && row < rows) {
                // A row without a key has no gradient, whatever dO holds. P = exp(s - inf) = 0 there and past the end.
                const bool has_keys = lse[i] != -INFINITY;
                static_cast<float *>(params.dsoftmax_sum)[padded_row + row] = has_keys ? dot - dlse[i] : 0.0f;
                params.lse_padded[padded_row + row] = has_keys ? lse[i] : INFINITY;
                if (has_keys && fabsf(lse[i]) > kLargeExponent) {
                    params.large_rows[(padded_row + row) / kFlagRows] = 1;
                }
            }
        }
    }
}

}  // namespace flash
