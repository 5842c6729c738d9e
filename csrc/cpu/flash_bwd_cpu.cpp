// run_mha_bwd_cpu.
#include "flash_bwd_cpu.h"

#include "../message.h"

namespace flash {

void run_mha_bwd_cpu(const Flash_bwd_params &) {
    FLASH_CHECK_NOT_IMPLEMENTED(false, "the CPU backward is not implemented");
}

}  // namespace flash
