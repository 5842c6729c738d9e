// The entries of the CPU kernels, which run_mha.cpp calls.
#pragma once

#include "../flash.h"

namespace flash {

// Computes params.o and params.softmax_lse on the calling thread's at::parallel_for pool. Throws
// std::bad_alloc for lack of memory.
void run_mha_fwd_cpu(const Flash_fwd_params &params);

// Computes params.dq, dk, dv (those that are not null) and dsoftmax_sum on the calling thread's at::parallel_for pool,
// bitwise the same for every number of threads. Throws std::bad_alloc for lack of memory.
void run_mha_bwd_cpu(const Flash_bwd_params &params);

// Appends the new keys to the cache, rotates them and the queries, then computes params.o and params.softmax_lse. Runs
// on the calling thread's at::parallel_for pool. Throws std::bad_alloc for lack of memory.
void run_mha_fwd_kvcache_cpu(const Flash_fwd_params &params);

}  // namespace flash
