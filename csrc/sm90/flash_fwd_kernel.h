// The forward kernel: flash_fwd_kernel -> compute_attn, where the warps part: the producer's go to schedule_tiles and
// load_tiles, the consumers' to mma_tiles, and all walk the same tiles.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue_fwd.h"
#include "load_fwd.h"
#include "mainloop_fwd.h"
#include "work_tile_ring.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// The producer's warp that finds the tiles and tells the others. Tiles whose rows see no key it stores itself.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void schedule_tiles(const Flash_fwd_params &params, typename Traits::SharedStorage &shared,
                                           const WorkTileOrder &order) {
    TileScheduler<kKind, Traits::kBlockM, Traits::kBlockN> scheduler(params, order);
    WorkTileRing<Traits::kConsumers> tiles{shared.tiles};
    for (;;) {
        tiles.await_room();  // varlen: before a tile is taken, as a thread block with more room may take it
        WorkTile tile = scheduler.next();
        while (!tile.is_end && !tile.has_keys()) {
            store_nothing(Output<Traits>(params, tile, /*warpgroup=*/0));
            tile = scheduler.next();
        }
        const ScoreMod score_mod(params, tile.place.bidb, tile.place.bidh,
                                  tile.sequence.seqlen_k - tile.sequence.seqlen_q);
        tiles.template push<kKind>(params, tile, score_mod, [&](int consumer) {
            const int m_block = tile.place.block * Traits::kConsumers + consumer;
            KeyBlocks blocks = key_blocks<kKind, Traits::kRows, Traits::kBlockN>(
                params, tile.sequence, m_block, tile.n_block_min, tile.n_block_max, score_mod);
            blocks.flags |= tile.is_end ? KeyBlocks::is_end : 0;
            return blocks;
        });
        if (tile.is_end) {
            return;
        }
    }
}

// The producer's warp that has TMA load them.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void load_tiles(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                           typename Traits::SharedStorage &shared) {
    Loader<Traits, kKind>(params, copies, shared).load();
}

// A consumer warpgroup: 64 rows of every tile.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void mma_tiles(const Flash_fwd_params &params, typename Traits::SharedStorage &shared,
                                          int warpgroup) {
    Consumer<Traits, kKind>(params, shared, warpgroup)
        .mma([&](const WorkTile &tile, const auto &acc_o, const auto &softmax) {
            store<Traits, kKind>(params, Output<Traits>(params, tile, warpgroup), acc_o, softmax);
        });
}

template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_attn(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                             typename Traits::SharedStorage &shared, const WorkTileOrder &order) {
    if (threadIdx.x / 128 == 0) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            load_tiles<Traits, kKind>(params, copies, shared);
        } else if (threadIdx.x / 32 == 1) {
            schedule_tiles<Traits, kKind>(params, shared, order);
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kConsumerRegisters>();
        mma_tiles<Traits, kKind>(params, shared, __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1);
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params,
                     const __grid_constant__ typename Traits::Copies copies, const __grid_constant__ WorkTileOrder order) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4;  // of a warpgroup
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        shared.q_barriers.init(kWarps);
        shared.k_barriers.init(kWarps * Traits::kConsumers);
        shared.v_barriers.init(kWarps * Traits::kConsumers);
        shared.tiles.barriers.init(kWarps * Traits::kConsumers + 1, /*writers=*/Traits::kConsumers);  // 1: the loader
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();  // the barriers are there for all
    compute_attn<Traits, kKind>(params, copies, shared, order);
}

}  // namespace flash::sm90
