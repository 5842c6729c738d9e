// Compiled for each dtype and head dim: build_tools/kernels.py defines FLASH_DTYPE and FLASH_HEADDIM. Kinds that get
// separate object files define FLASH_KIND.

// wgmma of every width, for tiles of 112 and 80 keys. The headers take as long as the kernels to compile.
#if FLASH_HEADDIM > 128
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif
#include "flash_fwd_launch_template.h"

namespace flash::sm90 {

#define INSTANTIATE(KIND)                                                                                       \
    template void run_flash_fwd<DType::FLASH_DTYPE, FLASH_HEADDIM, Kind::KIND>(const Flash_fwd_params &, int *, \
                                                                               cudaStream_t);

#ifdef FLASH_KIND
INSTANTIATE(FLASH_KIND)
#else
INSTANTIATE(full)
INSTANTIATE(local)
INSTANTIATE(general)
#endif

}  // namespace flash::sm90
