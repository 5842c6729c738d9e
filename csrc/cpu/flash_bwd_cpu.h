// The CPU end of the backward chain: mha_bwd -> run_mha_bwd -> run_mha_bwd_cpu.
#pragma once

#include "../flash.h"

namespace flash {

// Computes the wanted ones of params.dq, dk and dv, and params.dsoftmax_sum, on the calling thread's at::parallel_for
// pool. Never throws for valid params.
void run_mha_bwd_cpu(const Flash_bwd_params &params);

}  // namespace flash
