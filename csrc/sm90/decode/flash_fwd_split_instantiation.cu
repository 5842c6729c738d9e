// Compiled once per dtype and head dim: build_tools/kernels.py defines FLASH_DTYPE and FLASH_HEADDIM.

// wgmma of every width, for tiles of 112 and 80 keys.
#if FLASH_HEADDIM > 128
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif
#include "flash_fwd_split_launch_template.h"

namespace flash::sm90 {

template int64_t split_scratch_floats<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_fwd_params &);
template void run_flash_fwd_split<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_fwd_params &, cudaStream_t);

}  // namespace flash::sm90
