// The launches of the kernels of a single tile.
#pragma once

#include <algorithm>

#include "common/trace.h"
#include "dispatch/launch.h"
#include "flash_bwd_single_tile_kernel.h"
#include "flash_fwd_single_tile_kernel.h"
#include "single_tile.h"

namespace flash {

namespace single_tile {

// Calls function(traits) with the smallest tile that holds the sequences.
template <DType kDType, int kHeadDim, typename Function>
void call_with_tile(const Flash_fwd_params &params, const Function &function) {
    const int rows = std::max(params.seqlen_q, params.seqlen_k);
    if (rows <= 16) {
        function(Traits<kDType, kHeadDim, 16>());
    } else if (rows <= 32) {
        function(Traits<kDType, kHeadDim, 32>());
    } else {
        function(Traits<kDType, kHeadDim, 64>());
    }
}

// heads: of a sequence, with a tile each. smem_of_tile: bytes.
template <typename Traits, typename Params>
void launch(void (*kernel)(Params), const char *name, const Params &params, int heads, int smem_of_tile,
            cudaStream_t stream) {
    const int64_t tiles = int64_t{params.b} * heads, grid = (tiles + Traits::kTiles - 1) / Traits::kTiles;
    const int smem = smem_of_tile * Traits::kTiles;
    check_grid(grid, "batch * nheads");
    reserve_smem(kernel, smem);
    if (trace_enabled()) {
        trace(name, "kTile=%d kTiles=%d grid=%lld threads=%d smem=%d", Traits::kTile, Traits::kTiles,
              static_cast<long long>(grid), Traits::kNThreads, smem);
    }
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, smem, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching the kernel of a single tile");
}

}  // namespace single_tile

template <DType kDType, int kHeadDim>
void run_flash_fwd_single_tile(const Flash_fwd_params &params, cudaStream_t stream) {
    single_tile::call_with_tile<kDType, kHeadDim>(params, [&](auto traits) {
        using Traits = decltype(traits);
        single_tile::launch<Traits>(single_tile::flash_fwd_single_tile_kernel<Traits>, "flash_fwd_single_tile_kernel",
                                    params, params.h, sizeof(single_tile::SharedStorageFwd<Traits>), stream);
    });
}

template <DType kDType, int kHeadDim>
void run_flash_bwd_single_tile(const Flash_bwd_params &params, cudaStream_t stream) {
    single_tile::call_with_tile<kDType, kHeadDim>(params, [&](auto traits) {
        using Traits = decltype(traits);
        auto *const kernel = params.heads_per_dkv > 1
                                 ? single_tile::flash_bwd_single_tile_kernel<Traits, /*kIsGroup=*/true>
                                 : single_tile::flash_bwd_single_tile_kernel<Traits, /*kIsGroup=*/false>;
        single_tile::launch<Traits>(kernel, "flash_bwd_single_tile_kernel", params, params.h / params.heads_per_dkv,
                                    sizeof(single_tile::SharedStorageBwd<Traits>), stream);
    });
}

}  // namespace flash
