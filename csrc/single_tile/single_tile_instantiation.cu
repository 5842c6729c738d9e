// Compiled for each dtype and head dim with has_single_tile: build_tools/kernels.py defines FLASH_DTYPE and
// FLASH_HEADDIM.
#include "single_tile_launch_template.h"

namespace flash {

template void run_flash_fwd_single_tile<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_fwd_params &, cudaStream_t);
template void run_flash_bwd_single_tile<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_bwd_params &, cudaStream_t);

}  // namespace flash
