// The kernel before the backward kernel: the row statistics, and zeros in the accumulator of dQ.
#pragma once

#include "../common/preprocess_rows.h"

namespace flash::sm80 {

constexpr int kPreprocessRows = Flash_bwd_params::kRowsPerFlag;  // padded query rows of a CTA
constexpr int kPreprocessThreads = 256;

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPreprocessThreads)
    flash_bwd_dot_do_o(const __grid_constant__ Flash_bwd_params params) {
    __shared__ FlagRows place;
    const int64_t padded_row = int64_t(blockIdx.x) * kPreprocessRows;
    preprocess_rows<Element, kHeadDim, kPreprocessRows, kPreprocessThreads>(params, padded_row, kPreprocessRows,
                                                                            &place);
    if (params.dq_accum != nullptr) {
        auto *accum = reinterpret_cast<float4 *>(params.dq_accum + padded_row * kHeadDim);
        CUTE_UNROLL
        for (int i = threadIdx.x; i < kPreprocessRows * kHeadDim / 4; i += kPreprocessThreads) {
            accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

}  // namespace flash::sm80
