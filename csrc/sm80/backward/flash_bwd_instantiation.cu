// Compiled for each dtype, head dim and kind: build_tools/kernels.py defines FLASH_DTYPE, FLASH_HEADDIM and FLASH_KIND.
// Without FLASH_KIND it is the general kernel, which takes any call.
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
