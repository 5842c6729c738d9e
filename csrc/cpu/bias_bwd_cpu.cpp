// run_mha_bias_bwd_cpu: the gradient of attn_bias on the CPU.
#include "../common/message.h"
#include "../dispatch/run_flash.h"

namespace flash {

void run_mha_bias_bwd_cpu(const Flash_bias_bwd_params &) {
    FLASH_CHECK_NOT_IMPLEMENTED(false, "flash_attn_mini: the cpu backend does not implement the gradient of attn_bias");
}

}  // namespace flash
