// Compiled for each dtype and head dim: build_tools/kernels.py defines FLASH_DTYPE and FLASH_HEADDIM. Kinds that
// get separate object files define FLASH_KIND.
#include "flash_fwd_launch_template.h"

namespace flash::sm80 {

#define INSTANTIATE(KIND) \
    template void run_flash_fwd<DType::FLASH_DTYPE, FLASH_HEADDIM, Kind::KIND>(const Flash_fwd_params &, cudaStream_t);

#ifdef FLASH_KIND
INSTANTIATE(FLASH_KIND)
#else
INSTANTIATE(full)
INSTANTIATE(local)
INSTANTIATE(varlen)
INSTANTIATE(general)
#endif

}  // namespace flash::sm80
