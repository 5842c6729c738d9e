// run_flash_fwd: tile sizes, grid and shared memory for one kernel, and its launch.
#pragma once

#include "../trace.h"
#include "flash_fwd.h"
#include "flash_fwd_kernel.h"
#include "launch.h"

namespace flash::sm80 {

template <DType kDType, int kHeadDim, bool Is_causal, typename Tile>
void launch_flash_fwd(const Flash_fwd_params &params, cudaStream_t stream) {
    using Traits = Flash_fwd_kernel_traits<kDType, kHeadDim, Tile>;
    auto kernel = &flash_fwd_kernel<Traits, Is_causal>;
    const int64_t num_m_blocks = (params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
    const int64_t grid = num_m_blocks * params.h * params.b;
    check_grid(grid, "batch * nheads * blocks of query rows");
    reserve_smem(kernel, Traits::kSmemSize);
    if (trace_enabled()) {
        trace("flash_fwd_kernel", "kBlockM=%d kBlockN=%d grid=%lld threads=%d smem=%d", Traits::kBlockM,
              Traits::kBlockN, static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, Traits::kSmemSize, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching flash_fwd_kernel");
}

template <DType kDType, int kHeadDim, bool Is_causal>
void run_flash_fwd(const Flash_fwd_params &params, cudaStream_t stream) {
    launch_flash_fwd<kDType, kHeadDim, Is_causal, Tile_sizes_fwd<kHeadDim, Is_causal>>(params, stream);
}

}  // namespace flash::sm80
