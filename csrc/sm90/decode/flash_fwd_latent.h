// Attention over a cache of latent vectors, as in multi-head latent attention after the projections are absorbed: K has
// 576 columns, and V is their first 512. Host interface; no CUDA here.
#pragma once

#include <cstdint>

#include "flash.h"

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash {

constexpr int kHeadDimLatentCache = 576, kHeadDimVLatentCache = 512;

namespace sm90 {

// Floats of KvCache::scratch.
template <DType kDType>
int64_t latent_scratch_floats(const Flash_fwd_params &params);

// The keys are split over the CTAs, as in run_flash_fwd_split. Reads params.k only. Throws std::runtime_error when a
// launch fails.
template <DType kDType>
void run_flash_fwd_latent(const Flash_fwd_params &params, cudaStream_t stream);

}  // namespace sm90
}  // namespace flash
