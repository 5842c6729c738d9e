// run_flash_fwd: tile sizes, grid and shared memory for one kernel, and its launch.
#pragma once

#include "common/trace.h"
#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "flash_fwd_kernel.h"

namespace flash::sm80 {

template <DType kDType, int kHeadDim, Kind kKind, typename TileSize>
void launch_flash_fwd(const Flash_fwd_params &params, cudaStream_t stream) {
    using Traits = Flash_fwd_kernel_traits<kDType, kHeadDim, TileSize>;
    auto kernel = &flash_fwd_kernel<Traits, kKind>;
    const int64_t grid = row_blocks(params, Traits::kBlockM).count();
    check_grid(grid, "batch * nheads * blocks of query rows");
    reserve_smem(kernel, Traits::kSmemSize);
    if (trace_enabled()) {
        trace("flash_fwd_kernel", "kBlockM=%d kBlockN=%d grid=%lld threads=%d smem=%d", Traits::kBlockM,
              Traits::kBlockN, static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, Traits::kSmemSize, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching flash_fwd_kernel");
}

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, cudaStream_t stream) {
    using TileSize =
        std::conditional_t<has_bias(kKind), TileSizesFwdBiased<kHeadDim>, TileSizesFwd<kHeadDim, is_general(kKind)>>;
    launch_flash_fwd<kDType, kHeadDim, kKind, TileSize>(params, stream);
}

}  // namespace flash::sm80
