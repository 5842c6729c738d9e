// The CPU end of the backward chain: mha_bwd -> run_mha_bwd -> run_mha_bwd_cpu.
#pragma once

#include "../flash.h"

namespace flash {

// Computes params.dq, dk, dv (those that are not null) and dsoftmax_sum on the calling thread's at::parallel_for pool,
// bitwise the same for every number of threads. Throws std::bad_alloc for lack of memory.
void run_mha_bwd_cpu(const Flash_bwd_params &params);

}  // namespace flash
