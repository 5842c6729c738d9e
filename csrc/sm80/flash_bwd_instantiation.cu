// Compiled for each dtype, head dim and kind of call: build_tools/kernels.py defines FLASH_DTYPE, FLASH_HEADDIM and
// FLASH_KIND; for the kernel that takes any call, FLASH_KIND is not defined.
#include "flash_bwd_launch_template.h"

namespace flash::sm80 {

#ifdef FLASH_KIND
extern template void run_flash_bwd_general<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_bwd_params &, cudaStream_t);
template void run_flash_bwd<DType::FLASH_DTYPE, FLASH_HEADDIM, Kind::FLASH_KIND>(const Flash_bwd_params &,
                                                                                 cudaStream_t);
#else
template void run_flash_bwd_general<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_bwd_params &, cudaStream_t);
#endif

}  // namespace flash::sm80
