// Compiled once per dtype, head dim and mask: build_tools/kernels.py defines FLASH_DTYPE, FLASH_HEADDIM and
// FLASH_CAUSAL.
#include "flash_bwd_launch_template.h"

namespace flash::sm80 {

template void run_flash_bwd<DType::FLASH_DTYPE, FLASH_HEADDIM, FLASH_CAUSAL>(const Flash_bwd_params &, cudaStream_t);

}  // namespace flash::sm80
