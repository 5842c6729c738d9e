// run_mha_fwd and run_mha_bwd run the kernel of a filled params struct. choose_kernel.h chooses its architecture and
// kind.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "flash.h"

namespace flash {

// Runs on `device`; on CUDA, on the current stream.
void run_mha_fwd(Flash_fwd_params &params, c10::Device device);
void run_mha_bwd(Flash_bwd_params &params, c10::Device device);

// The gradient of attn_bias, after the backward. Writes every element of params.dbias.
void run_mha_bias_bwd(Flash_bias_bwd_params &params, c10::Device device);

// Appends the new keys of params.cache, then attends to the cache.
void run_mha_fwd_kvcache(Flash_fwd_params &params, c10::Device device);

#ifdef FLASH_WITH_CUDA
// The gradient of what joins each row (run_flash.h), on the current stream. False if no kernel of this build runs on
// the GPU.
bool run_row_mod_gradient(const Flash_bwd_params &params, void *gradient);

// Floats that a call with a cache needs as KvCache::scratch on CUDA.
int64_t splitkv_scratch_floats(const Flash_fwd_params &params);
#endif

// True if the backward of a CUDA call on the current device needs CudaScratch.
bool needs_scratch(const Flash_bwd_params &params);

// True if the backward of a CUDA call on the current device computes dQ in a pass of its own
// (sm90/backward/flash_bwd_dq.h). It then needs neither dq_accum nor dq_semaphore.
bool takes_dq_pass(const Flash_bwd_params &params);

// Empty if the kernel of a cache of latent vectors (sm90/decode/flash_fwd_latent.h) takes a call on the current device,
// else why not. params: of the call; the log-sum-exp and the options other than alibi_slopes are not read.
std::string reason_against_latent(const Flash_fwd_params &params);

// True if forward and backward on the current device take q and k of d columns with v of d_v, another number, as they
// are, except in pages. False: the kernels need q, k and v with one head dim.
bool takes_own_headdim_v(int64_t d, int64_t d_v);

// Empty if a compiled kernel runs on compute capability major.minor; else why not, with the command that builds one.
std::string cuda_unavailable_reason(int major, int minor);

// Empty if FLASH_ATTN_MINI_ARCH=80 takes every call on compute capability major.minor; else why not, with the command
// that builds the kernels.
std::string sm80_unavailable_reason(int major, int minor);

// The architectures of this build as FLASH_ATTN_MINI_ARCHS lists them: "80", "90a".
std::vector<std::string> built_arch_names();

}  // namespace flash
