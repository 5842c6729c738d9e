// Compiled once per dtype, head dim and kind: build_tools/kernels.py defines FLASH_DTYPE, FLASH_HEADDIM and FLASH_KIND.
#include "flash_bwd_launch_template.h"

namespace flash::sm90 {

template void run_flash_bwd<DType::FLASH_DTYPE, FLASH_HEADDIM, Kind::FLASH_KIND>(const Flash_bwd_params &,
                                                                                 cudaStream_t);

}  // namespace flash::sm90
