// The preprocess of a backward: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded to whole tiles, and a flag for
// large log-sum-exps.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include <cmath>

#include "key_ranges.h"
#include "row_mod.h"
#include "softmax.h"

namespace flash {

// Whether the 16-bit elements of a row are zeros, of either sign. part: those of a lane; kLanes lanes share a row,
// which is row_of_lane of the warp's rows. Called by a whole warp.
template <int kLanes>
__device__ __forceinline__ bool is_row_of_zeros(const uint4 &part, int row_of_lane) {
    const unsigned nonzero = __ballot_sync(0xffffffffu, ((part.x | part.y | part.z | part.w) & 0x7fff7fffu) != 0);
    return (nonzero >> (row_of_lane * kLanes) & (0xffffffffu >> (32 - kLanes))) == 0;
}

// attn_bias: the rows of a tile that see a key, when their log-sum-exp is written.
struct RowsByLse {
    const float *lse_padded;  // of the tile

    // row: of the tile.
    __device__ __forceinline__ bool contains(int row) const { return lse_padded[row] != INFINITY; }
};

// A padded query row of one head.
struct PaddedRow {
    int64_t padded_row;  // in the padded row statistics
    int bidb, bidh;
    Sequence seq;
    int row;  // in the sequence; may lie past its end
};

// A warp does kRows padded rows from `first` on, of one head and one sequence. kLanes lanes share a row. Each lane
// reads 16 bytes of it. kHasRanges: the call has key_ranges; kHasBias: attn_bias. Returns, in every lane, whether a row
// has a large log-sum-exp.
template <typename Element, int kHeadDim, int kRows, bool kHasRanges, bool kHasBias = false>
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
    const KeyRange<true> mask(params, first.seq.seqlen_q, first.seq.seqlen_k);
    const int first_seeing = params.is_local() ? mask.begin_row() - first.row : 0,
              end_seeing = params.is_local() ? mask.end_row() - first.row : rows;
    const RangesOfHead ranges = [&] {
        if constexpr (kHasRanges) {
            return RangesOfHead(params, first.bidb, first.bidh);
        } else {
            return RangesOfHead();
        }
    }();
    const auto sees_keys = [&](int row) {
        const bool is_seeing = row >= first_seeing && row < end_seeing;
        return is_seeing && (!kHasRanges || !ranges.row(first.row + row).is_empty());
    };
    const float logit = kHasBias ? RowMod<float>(params, first.bidb, first.bidh).logit() : -INFINITY;
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
            // There are no branches between the loads, so that all wait together: rows past the end load the last one.
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
            dot = has_columns ? dot : 0.0f;
            CUTE_UNROLL
            for (int offset = kLanes / 2; offset > 0; offset /= 2) {
                dot += __shfl_xor_sync(0xffffffffu, dot, offset);
            }
            const bool is_zero = kHasBias && is_row_of_zeros<kLanes>(out[i], row_of_lane);
            if (lane == 0) {
                // A row without a key has no gradient, even if dO is NaN or its lse is the sink. Its stored lse is
                // +inf, so P = exp(s - inf) = 0.
                const int row = begin + i * kStride + row_of_lane;
                const int64_t padded_row = first.padded_row + row;
                // With attn_bias it is known by its log-sum-exp: the sink, if there is one.
                const bool has_keys =
                    lse[i] != -INFINITY && sees_keys(row) && !(kHasBias && lse[i] == logit && is_zero);
                static_cast<float *>(params.dsoftmax_sum)[padded_row] = has_keys ? dot - dlse[i] : 0.0f;
                params.lse_padded[padded_row] = has_keys ? lse[i] : INFINITY;
                is_large |= has_keys && fabsf(lse[i]) > kLargeExponent;
            }
        }
    }
    return __any_sync(0xffffffffu, is_large);
}

}  // namespace flash
