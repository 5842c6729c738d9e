// Compiled once per dtype and head dim: build_tools/kernels.py defines FLASH_DTYPE and FLASH_HEADDIM.
#include "flash_bwd_launch_template.h"

namespace flash::sm80 {

template void run_flash_bwd<DType::FLASH_DTYPE, FLASH_HEADDIM, false>(const Flash_bwd_params &, cudaStream_t);
template void run_flash_bwd<DType::FLASH_DTYPE, FLASH_HEADDIM, true>(const Flash_bwd_params &, cudaStream_t);

}  // namespace flash::sm80
