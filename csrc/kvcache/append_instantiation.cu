// Compiled once per dtype: build_tools/kernels.py defines FLASH_DTYPE.
#include "splitkv_launch_template.h"

namespace flash {

template void run_append_kv<DType::FLASH_DTYPE>(const Flash_fwd_params &, cudaStream_t);

}  // namespace flash
