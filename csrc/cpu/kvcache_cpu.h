// The CPU end of the chain of flash_attn_with_kvcache: mha_fwd_kvcache -> run_mha_fwd_kvcache -> here.
#pragma once

#include "../flash.h"

namespace flash {

// Appends the new keys to the cache, rotates them and the queries, then computes params.o and params.softmax_lse. Runs
// on the calling thread's at::parallel_for pool. Throws std::bad_alloc for lack of memory.
void run_mha_fwd_kvcache_cpu(const Flash_fwd_params &params);

}  // namespace flash
