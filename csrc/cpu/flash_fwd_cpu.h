// The CPU end of the forward chain: mha_fwd -> run_mha_fwd -> run_mha_fwd_cpu.
#pragma once

#include "../flash.h"

namespace flash {

// Computes params.o and params.softmax_lse on the calling thread's at::parallel_for pool. Throws
// std::bad_alloc for lack of memory.
void run_mha_fwd_cpu(const Flash_fwd_params &params);

}  // namespace flash
