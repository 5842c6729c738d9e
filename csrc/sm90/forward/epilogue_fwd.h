// Forward epilogue: normalises and rounds the 64 rows of O of a consumer warpgroup, and stores them with their
// log-sum-exp. O goes from registers to global memory, so that no buffer in shared memory delays Q of the next work
// tile.
#pragma once

#include "common/store_rows.h"
#include "mainloop_fwd.h"
#include "sm90/common/accumulator.h"

namespace flash::sm90 {

// The rows of q's shape that one consumer warpgroup stores.
template <typename Traits>
struct Output {
    using Element = typename Traits::Element;
    // Stores of 8 bytes need fewer exchanges between lanes; stores of 16 bytes are fewer, which pays for long rows.
    using Vector = std::conditional_t<Traits::kHeadDimV <= 64, uint2, uint4>;
    static constexpr int kVector = sizeof(Vector) / sizeof(Element);

    float *lse;      // at the first row
    Element *o;      // at the first row
    int64_t stride;  // elements between rows of O
    int rows_left;   // from the first row to the end of the sequence
    int d_v;

    __device__ Output(const Flash_fwd_params &params, const WorkTile &tile, int warpgroup)
        : stride(params.o.row_stride) {
        const int bidb = tile.place.bidb, bidh = tile.place.bidh;
        const int first_row = tile.place.block * Traits::kBlockM + warpgroup * Traits::kRows;
        const int64_t row = tile.sequence.q_begin + first_row;
        lse = static_cast<float *>(params.softmax_lse) + bidb * params.lse_batch_stride +
              bidh * params.lse_head_stride + row;
        o = static_cast<Element *>(params.o.ptr) + bidb * params.o.batch_stride + bidh * params.o.head_stride +
            row * stride;
        rows_left = tile.sequence.seqlen_q - first_row;
        d_v = params.d_v;
    }

    __device__ __forceinline__ void store_lse(int row, float value) const {
        if (row < rows_left) {
            lse[row] = value;
        }
    }
    __device__ __forceinline__ void store(int row, int col, const Vector &vector) const {
        if (row < rows_left && col < d_v) {
            *reinterpret_cast<Vector *>(o + row * stride + col) = vector;
        }
    }
};

// Rows without a key (factor 0) become zeros in acc_o (row, col): P is 0 there, but P times NaN or infinity in V is
// NaN.
template <int kRows, typename TensorO>
__device__ __forceinline__ void clear_rows_without_keys(const float (&factor)[kRows], TensorO &acc_o) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
        if (factor[row] == 0.0f) {
            CUTE_UNROLL
            for (int col = 0; col < size<1>(acc_o); ++col) {
                acc_o(row, col) = 0.0f;
            }
        }
    }
}

// acc_o: (row, col).
template <typename Traits, Kind kKind, typename TensorO, typename SoftmaxState>
__device__ __forceinline__ void store(const Flash_fwd_params &params, const WorkTile &tile,
                                      const Output<Traits> &output, TensorO &acc_o, const SoftmaxState &softmax) {
    using Element = typename Traits::Element;
    constexpr int kRowsOfThread = decltype(size<0>(acc_o))::value;
    const float rp_dropout = is_general(kKind) ? params.rp_dropout : 1.0f;
    float lse[kRowsOfThread], factor[kRowsOfThread];
    const RowMod<float> row_mod(params, tile.place.bidb, tile.place.bidh);
    softmax.template finalize<has_bias(kKind)>(
        params, holds_logits<kKind>(params) ? 1.0f : params.scale_softmax, rp_dropout, [&](int) { return row_mod; },
        lse, factor);
    clear_rows_without_keys(factor, acc_o);
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
        const int row = first_row_of_thread() + i * 8;
        if (threadIdx.x % 4 == 0) {
            output.store_lse(row, lse[i]);
        }
        store_row<Element, typename Output<Traits>::Vector>(
            acc_o, i, factor[i], [&](int col, const auto &vector) { output.store(row, col, vector); });
    }
}

// Stores a whole work tile whose rows see no key: zeros and their log-sum-exp. Called by one warp.
template <typename Traits>
__device__ __forceinline__ void store_nothing(const Flash_fwd_params &params, const WorkTile &tile,
                                              const Output<Traits> &output) {
    constexpr int kVector = Output<Traits>::kVector, kVectors = Traits::kHeadDimV / kVector;
    const int lane = threadIdx.x % 32;
    CUTE_NO_UNROLL
    for (int i = lane; i < Traits::kBlockM * kVectors; i += 32) {
        output.store(i / kVectors, i % kVectors * kVector, {});
    }
    const float lse = RowMod<float>(params, tile.place.bidb, tile.place.bidh).logit();
    CUTE_NO_UNROLL
    for (int row = lane; row < Traits::kBlockM; row += 32) {
        output.store_lse(row, lse);
    }
}

}  // namespace flash::sm90
