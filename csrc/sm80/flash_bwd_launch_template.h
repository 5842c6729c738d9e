// run_flash_bwd: tile sizes, grids and shared memory of the three kernels of a backward, and their launches.
#pragma once

#include "../trace.h"
#include "flash_bwd.h"
#include "flash_bwd_kernel.h"
#include "flash_bwd_preprocess_kernel.h"
#include "launch.h"

namespace flash::sm80 {

template <DType kDType, int kHeadDim, bool Is_causal, typename Tile>
void launch_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    using Traits = Flash_bwd_kernel_traits<kDType, kHeadDim, Tile>;
    const int64_t heads = int64_t(params.b) * params.h;
    const int64_t preprocess_grid = heads * (params.seqlen_q_rounded / kPreprocessRows);
    const int64_t grid =
        (int64_t(params.seqlen_k) + Traits::kBlockN - 1) / Traits::kBlockN * (heads / params.heads_per_dkv);
    const int64_t convert_grid = heads * ((int64_t(params.seqlen_q) + Traits::kBlockM - 1) / Traits::kBlockM);
    check_grid(preprocess_grid, "batch * nheads * blocks of query rows");
    check_grid(grid, "batch * nheads * blocks of keys");
    if (trace_enabled()) {
        trace("flash_bwd_dot_do_o", "rows=%d grid=%lld threads=%d", kPreprocessRows,
              static_cast<long long>(preprocess_grid), kPreprocessThreads);
        trace("flash_bwd_kernel", "kBlockM=%d kBlockN=%d grid=%lld threads=%d smem=%d", Traits::kBlockM,
              Traits::kBlockN, static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    flash_bwd_dot_do_o<typename Traits::Element, kHeadDim>
        <<<static_cast<unsigned>(preprocess_grid), kPreprocessThreads, 0, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching flash_bwd_dot_do_o");

    auto kernel = &flash_bwd_kernel<Traits, Is_causal>;
    reserve_smem(kernel, Traits::kSmemSize);
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, Traits::kSmemSize, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching flash_bwd_kernel");

    if (params.dq.ptr != nullptr) {
        if (trace_enabled()) {
            trace("flash_bwd_convert_dq", "kBlockM=%d grid=%lld threads=%d", Traits::kBlockM,
                  static_cast<long long>(convert_grid), Traits::kNThreads);
        }
        flash_bwd_convert_dq<Traits><<<static_cast<unsigned>(convert_grid), Traits::kNThreads, 0, stream>>>(params);
        check_cuda(cudaGetLastError(), "launching flash_bwd_convert_dq");
    }
}

template <DType kDType, int kHeadDim, bool Is_causal>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    using Large = typename Tile_sizes_bwd<kHeadDim, Is_causal>::Tile;
    using Small = typename Tile_sizes_bwd_small<kHeadDim>::Tile;
    if (Flash_bwd_kernel_traits<kDType, kHeadDim, Large>::kSmemSize <= params.max_smem) {
        launch_flash_bwd<kDType, kHeadDim, Is_causal, Large>(params, stream);
    } else {
        launch_flash_bwd<kDType, kHeadDim, Is_causal, Small>(params, stream);
    }
}

}  // namespace flash::sm80
