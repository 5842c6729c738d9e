// run_flash_bwd: tile sizes, grids and shared memory of the three kernels of a backward, and their launches.
#pragma once

#include "../trace.h"
#include "flash_bwd.h"
#include "flash_bwd_kernel.h"
#include "flash_bwd_preprocess_kernel.h"
#include "launch.h"

namespace flash::sm80 {

template <DType kDType, int kHeadDim, bool Is_causal, typename Tile, bool kHas_bulk_reduce, Bwd_mode kMode>
void launch_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    using Traits = Flash_bwd_kernel_traits<kDType, kHeadDim, Tile, kHas_bulk_reduce>;
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

    auto kernel = &flash_bwd_kernel<Traits, Is_causal, kMode>;
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

// A kernel is empty where it would not run (flash_bwd_kernel): GPUs with and without the copy engine's reductions have
// their own.
template <DType kDType, int kHeadDim, bool Is_causal, Bwd_mode kMode, bool kHas_bulk_reduce>
void choose_tile(const Flash_bwd_params &params, cudaStream_t stream) {
    using Large = typename Tile_sizes_bwd<kHeadDim, Is_causal, kMode>::Tile;
    using Small = typename Tile_sizes_bwd_small<kHeadDim>::Tile;
    if (Flash_bwd_kernel_traits<kDType, kHeadDim, Large, kHas_bulk_reduce>::kSmemSize <= params.max_smem) {
        launch_flash_bwd<kDType, kHeadDim, Is_causal, Large, kHas_bulk_reduce, kMode>(params, stream);
    } else {
        launch_flash_bwd<kDType, kHeadDim, Is_causal, Small, kHas_bulk_reduce, kMode>(params, stream);
    }
}

template <DType kDType, int kHeadDim, bool Is_causal, Bwd_mode kMode>
void choose_reduction(const Flash_bwd_params &params, cudaStream_t stream) {
    if (params.has_bulk_reduce) {
        choose_tile<kDType, kHeadDim, Is_causal, kMode, true>(params, stream);
    } else {
        choose_tile<kDType, kHeadDim, Is_causal, kMode, false>(params, stream);
    }
}

template <DType kDType, int kHeadDim, bool Is_causal>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    if (params.dq.ptr == nullptr || params.dk.ptr == nullptr || params.dv.ptr == nullptr) {
        choose_reduction<kDType, kHeadDim, Is_causal, Bwd_mode::partial>(params, stream);
    } else if (params.dq_turn != nullptr) {
        choose_reduction<kDType, kHeadDim, Is_causal, Bwd_mode::deterministic>(params, stream);
    } else {
        choose_reduction<kDType, kHeadDim, Is_causal, Bwd_mode::all>(params, stream);
    }
}

}  // namespace flash::sm80
