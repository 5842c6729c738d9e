// Compiled for each dtype and head dim: build_tools/kernels.py defines FLASH_DTYPE and FLASH_HEADDIM.
#include "bias_gradient.h"

namespace flash::sm80 {

template void run_bias_gradient<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_bias_bwd_params &, cudaStream_t);

}  // namespace flash::sm80
