// Compiled once per dtype and head dim: build_tools/kernels.py defines FLASH_DTYPE and FLASH_HEADDIM.
#include "splitkv_launch_template.h"

namespace flash {

template int64_t splitkv_scratch_floats<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_fwd_params &, int);
template void run_flash_fwd_splitkv<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_fwd_params &, int, bool,
                                                                       cudaStream_t);
template void run_combine_splits<DType::FLASH_DTYPE, FLASH_HEADDIM>(const Flash_fwd_params &,
                                                                    const kvcache::SplitkvPlan &, cudaStream_t);

}  // namespace flash
