// The first half of a call with a KV cache: new keys and values are written to the cache.
#pragma once

#include "../flash.h"

namespace flash::cpu {

// Writes cache.k_new and cache.v_new behind the keys of each sequence. With rotary, rotates the new keys, and writes
// the rotated cache.q_input to params.q.
void append_kv(const Flash_fwd_params &params);

}  // namespace flash::cpu
