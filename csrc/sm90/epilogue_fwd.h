// What leaves a consumer warpgroup: 64 rows of O, normalised and rounded, and the log-sum-exp of each. It goes straight
// from registers to global memory, so that Q of the next tile need not wait for a room.
#pragma once

#include "mainloop_fwd.h"

namespace flash::sm90 {

// The four lanes of a quad each hold a 4x4 matrix's column; afterwards each holds a row.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
    const bool is_odd = threadIdx.x & 1, is_upper = threadIdx.x & 2;
    const auto exchange = [](uint32_t &low, uint32_t &high, bool keeps_high, int mask) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, keeps_high ? low : high, mask);
        (keeps_high ? low : high) = got;
    };
    exchange(words[0], words[1], is_odd, 1);
    exchange(words[2], words[3], is_odd, 1);
    exchange(words[0], words[2], is_upper, 2);
    exchange(words[1], words[3], is_upper, 2);
}

// Where the rows of one consumer warpgroup go.
template <typename Traits>
struct Output {
    using Element = typename Traits::Element;
    using Vector = cute::uint128_t;
    static constexpr int kVector = sizeof(Vector) / sizeof(Element);

    float *lse;      // of the first row
    Element *o;      // likewise
    int64_t stride;  // elements between rows of O
    int rows_left;   // of the sequence, from the first row on
    int d;

    __device__ Output(const Flash_fwd_params &params, const Tile &tile, int warpgroup) : stride(params.o.row_stride) {
        const int bidb = tile.place.bidb, bidh = tile.place.bidh;
        const int first_row = tile.place.block * Traits::kBlockM + warpgroup * Traits::kRows;
        const int64_t row = tile.sequence.q_begin + first_row;
        lse = static_cast<float *>(params.softmax_lse) + bidb * params.lse_batch_stride +
              bidh * params.lse_head_stride + row;
        o = static_cast<Element *>(params.o.ptr) + bidb * params.o.batch_stride + bidh * params.o.head_stride +
            row * stride;
        rows_left = tile.sequence.seqlen_q - first_row;
        d = params.d;
    }

    __device__ __forceinline__ void store_lse(int row, float value) const {
        if (row < rows_left) {
            lse[row] = value;
        }
    }
    __device__ __forceinline__ void store(int row, int col, const Vector &vector) const {
        if (row < rows_left && col < d) {
            *reinterpret_cast<Vector *>(o + row * stride + col) = vector;
        }
    }
};

// acc_o: (row, col).
template <typename Traits, typename TensorO, typename SoftmaxState>
__device__ __forceinline__ void store(const Output<Traits> &output, float softmax_scale, const TensorO &acc_o,
                                      const SoftmaxState &softmax) {
    using Element = typename Traits::Element;
    using Pair = cutlass::Array<Element, 2>;
    // A thread holds columns 2 q, 2 q + 1 of every 8 columns of two rows, where q is its lane in its quad.
    constexpr int kRowsOfThread = decltype(size<0>(acc_o))::value;
    const int quad = threadIdx.x % 4, first_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float lse[kRowsOfThread], factor[kRowsOfThread];
    softmax.finalize(softmax_scale, lse, factor);
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
        const int row = first_row + i * 8;
        if (quad == 0) {
            output.store_lse(row, lse[i]);
        }
        // Of each 32 columns a lane collects 8 that lie side by side.
        CUTE_UNROLL
        for (int col = 0; col < Traits::kHeadDim; col += 32) {
            uint32_t words[4];
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
                const int at = col / 4 + 2 * j;
                const Pair pair = cutlass::NumericArrayConverter<Element, float, 2>::convert(
                    {acc_o(i, at) * factor[i], acc_o(i, at + 1) * factor[i]});
                words[j] = reinterpret_cast<const uint32_t &>(pair);
            }
            transpose_in_quad(words);
            output.store(row, col + quad * Output<Traits>::kVector,
                         reinterpret_cast<const typename Output<Traits>::Vector &>(words));
        }
    }
}

// Rows that see no key: zeros and -inf.
template <typename Traits>
__device__ __forceinline__ void store_nothing(const Output<Traits> &output) {
    constexpr int kVector = Output<Traits>::kVector, kVectors = Traits::kHeadDim / kVector;
    for (int i = threadIdx.x % 128; i < Traits::kRows * kVectors; i += 128) {
        output.store(i / kVectors, i % kVectors * kVector, {0, 0});
    }
    for (int row = threadIdx.x % 128; row < Traits::kRows; row += 128) {
        output.store_lse(row, -INFINITY);
    }
}

}  // namespace flash::sm90
