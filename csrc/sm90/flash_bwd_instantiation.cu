// Compiled once per dtype, head dim and kind: build_tools/kernels.py defines FLASH_DTYPE, FLASH_HEADDIM and FLASH_KIND.

// CuTe comes without wgmma of every width: no tile needs them, and their headers take as long as the kernel to compile.
// kernel_traits_bwd.h asks for the macro.
#include <cute/tensor.hpp>
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "flash_bwd_launch_template.h"

namespace flash::sm90 {

template void run_flash_bwd<DType::FLASH_DTYPE, FLASH_HEADDIM, Kind::FLASH_KIND>(const Flash_bwd_params &,
                                                                                 cudaStream_t);

}  // namespace flash::sm90
