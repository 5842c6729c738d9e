// The kernel before the backward kernel: the row statistics, and zeros in the accumulator of dQ.
#pragma once

#include "common/preprocess_rows.h"

namespace flash::sm80 {

constexpr int kPreprocessRows = Flash_bwd_params::kRowsPerFlag;  // padded query rows of a CTA
constexpr int kPreprocessThreads = 256;

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPreprocessThreads)
    flash_bwd_dot_do_o(const __grid_constant__ Flash_bwd_params params) {
    constexpr int kRounded = Flash_bwd_params::kRowsRounded, kRowsOfWarp = kPreprocessRows / (kPreprocessThreads / 32);
    const int64_t padded_row = int64_t(blockIdx.x) * kPreprocessRows;
    const auto [bidb, bidh, block] =
        row_blocks(params, kRounded).place(static_cast<int>(padded_row / kRounded), /*is_reversed=*/false);
    const int in_cta = threadIdx.x / 32 * kRowsOfWarp;
    const PaddedRow first{padded_row + in_cta, bidb, bidh, sequence(params, bidb),
                          block * kRounded + static_cast<int>(padded_row % kRounded) + in_cta};
    const bool is_large = __syncthreads_or(preprocess_rows<Element, kHeadDim, kRowsOfWarp>(params, first));
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

}  // namespace flash::sm80
