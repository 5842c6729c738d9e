// Calls of flash_attn_with_kvcache on a cache of latent vectors: headdim 576, and v_cache is k_cache[..., :512].
#pragma once

#include <string>

#include "api/options.h"

namespace flash {

// True for CUDA tensors of these head dims. Takes any tensors: the checks come later.
bool has_latent_head_dims(const KvCacheArgs &args);

// For a call that has_latent_head_dims: empty if the CUDA kernel takes it, else why not.
std::string reason_against_latent(const KvCacheArgs &args);

}  // namespace flash
