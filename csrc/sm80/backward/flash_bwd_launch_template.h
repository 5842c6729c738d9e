// run_flash_bwd: tile sizes, grids and shared memory of the three kernels of a backward, and their launches.
#pragma once

#include <algorithm>

#include "common/trace.h"
#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "flash_bwd_kernel.h"

namespace flash::sm80 {

// The heads whose key blocks are interleaved. A CTA that adds in order waits for the one before it in its head, so CTAs
// that start together belong to different heads. They are as many as run at the same time; twice as many with small
// tiles, where a head has so many key blocks that the last ones would start late.
template <typename Traits>
int interleaved_heads(const RowBlocks &blocks) {
    constexpr int kFactor = Traits::kBlockN <= 64 ? 2 : 1;
    const int ctas = kFactor * device_properties().sm_count * Traits::TileSize::kMinBlocksPerSM;
    return clamp_to(ctas / std::max(blocks.per_sequence(), 1), 1, std::max(blocks.all_heads(), 1));
}

template <DType kDType, int kHeadDim, Kind kKind, typename TileSize, bool kHasBulkReduce, BwdMode kMode>
void launch_flash_bwd(Flash_bwd_params params, cudaStream_t stream) {
    using Traits = Flash_bwd_kernel_traits<kDType, kHeadDim, TileSize, kHasBulkReduce, kKind>;
    const int64_t preprocess_grid = padded_rows(params) / kPreprocessRows;
    const RowBlocks blocks = key_blocks(params, params.h / params.heads_per_dkv, Traits::kBlockN);
    const int64_t grid = blocks.count();
    params.interleaved_heads = interleaved_heads<Traits>(blocks);
    const int64_t convert_grid = row_blocks(params, Traits::kBlockM).count();
    check_grid(padded_rows(params), "batch * nheads * query rows");
    check_grid(preprocess_grid, "batch * nheads * blocks of query rows");
    check_grid(grid, "batch * nheads * blocks of keys");
    if (trace_enabled()) {
        trace("flash_bwd_dot_do_o", "rows=%d grid=%lld threads=%d", kPreprocessRows,
              static_cast<long long>(preprocess_grid), kPreprocessThreads);
        trace("flash_bwd_kernel", "kBlockM=%d kBlockN=%d grid=%lld threads=%d smem=%d", Traits::kBlockM,
              Traits::kBlockN, static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    flash_bwd_dot_do_o<typename Traits::Element, kHeadDim, has_ranges(kKind), has_bias(kKind)>
        <<<static_cast<unsigned>(preprocess_grid), kPreprocessThreads, 0, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching flash_bwd_dot_do_o");

    auto kernel = &flash_bwd_kernel<Traits, kKind, kMode>;
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

// A GPU with too little shared memory for the tile runs the call on the general kernel, in its small tile if need be.
template <DType kDType, int kHeadDim, Kind kKind, BwdMode kMode, bool kHasBulkReduce>
void choose_tile(const Flash_bwd_params &params, cudaStream_t stream) {
    using Large = typename TileSizesBwd<kHeadDim, kKind, kMode>::TileSize;
    using Small = typename TileSizesBwdSmall<kHeadDim>::TileSize;
    constexpr int kSmem = Flash_bwd_kernel_traits<kDType, kHeadDim, Large, kHasBulkReduce, kKind>::kSmemSize;
    if (kSmem <= kMinDeviceSmem || kSmem <= params.max_smem) {
        launch_flash_bwd<kDType, kHeadDim, kKind, Large, kHasBulkReduce, kMode>(params, stream);
    } else if constexpr (kSmem > kMinDeviceSmem && kMode == BwdMode::general) {
        launch_flash_bwd<kDType, kHeadDim, kKind, Small, kHasBulkReduce, kMode>(params, stream);
    } else if constexpr (kSmem > kMinDeviceSmem) {
        run_flash_bwd_general<kDType, kHeadDim>(params, stream);
    }
}

// GPUs with and without cp.reduce.async.bulk have different kernels. A kernel is empty when compiled for the others
// (flash_bwd_kernel).
template <DType kDType, int kHeadDim, Kind kKind, BwdMode kMode>
void choose_reduction(const Flash_bwd_params &params, cudaStream_t stream) {
    if (params.has_bulk_reduce) {
        choose_tile<kDType, kHeadDim, kKind, kMode, true>(params, stream);
    } else {
        choose_tile<kDType, kHeadDim, kKind, kMode, false>(params, stream);
    }
}

template <DType kDType, int kHeadDim>
void run_flash_bwd_general(const Flash_bwd_params &params, cudaStream_t stream) {
    choose_reduction<kDType, kHeadDim, Kind::general, BwdMode::general>(params, stream);
}

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    if constexpr (has_ranges(kKind) || has_bias(kKind)) {
        choose_reduction<kDType, kHeadDim, kKind, BwdMode::general>(params, stream);
    } else {
        const bool wants_all = params.dq.ptr != nullptr && params.dk.ptr != nullptr && params.dv.ptr != nullptr;
        if (!wants_all || (may_be_varlen(kKind) && params.deterministic)) {
            run_flash_bwd_general<kDType, kHeadDim>(params, stream);
        } else if (!params.deterministic) {
            choose_reduction<kDType, kHeadDim, kKind, BwdMode::all>(params, stream);
        } else if constexpr (!may_be_varlen(kKind)) {
            choose_reduction<kDType, kHeadDim, kKind, BwdMode::deterministic>(params, stream);
        }
    }
}

}  // namespace flash::sm80
