// The backward in two passes: dK and dV, then dQ (flash_bwd_dq_kernel.h). Host interface; no CUDA here.
#pragma once

#include "dispatch/kind.h"
#include "flash.h"

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash::sm90 {

// The kernels of the second pass. build_tools/kernels.py has the same list.
constexpr int kMinHeadDimDqPass = 192;
constexpr bool has_dq_pass(int headdim, Kind kind) {
    return headdim >= kMinHeadDimDqPass && !is_general(kind);
}

// The second pass. It reads the row statistics that run_flash_bwd leaves, whose params have no dq_accum, and writes
// every row of params.dq. Throws std::runtime_error if the launch fails.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd_dq(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace flash::sm90
