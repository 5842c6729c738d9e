// The kernel before the backward kernel.
#pragma once

#include "../common/preprocess_rows.h"

namespace flash::sm80 {

constexpr int kPreprocessRows = Flash_bwd_params::kRowsPerFlag;  // padded query rows of a CTA
constexpr int kPreprocessThreads = 256;

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPreprocessThreads)
    flash_bwd_dot_do_o(const __grid_constant__ Flash_bwd_params params) {
    __shared__ FlagRows place;
    preprocess_rows<Element, kHeadDim, kPreprocessRows, kPreprocessThreads>(
        params, int64_t(blockIdx.x) * kPreprocessRows, kPreprocessRows, &place);
}

}  // namespace flash::sm80
