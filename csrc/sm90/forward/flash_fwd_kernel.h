// The forward kernel: flash_fwd_kernel -> compute_attn. One warpgroup is the producer: its warp 0 loads (load_fwd.h),
// its warp 1 schedules the work tiles. The others are consumers (mainloop_fwd.h).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue_fwd.h"
#include "load_fwd.h"
#include "mainloop_fwd.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// The scheduler warp. It hands out the work tiles, and passes those whose rows see no key to store_nothing(tile).
template <typename Traits, Kind kKind, typename Scheduler, typename StoreNothing>
__device__ __forceinline__ void schedule_tiles(const Flash_fwd_params &params, typename Traits::SharedStorage &shared,
                                               Scheduler scheduler, const StoreNothing &store_nothing) {
    WorkTileRing<Traits::kConsumers> tiles{shared.tiles};
    for (;;) {
        tiles.acquire();  // before a tile is taken: with varlen, another CTA may have an empty stage earlier
        WorkTile tile = scheduler.next();
        while (!tile.is_end && !tile.has_keys()) {
            store_nothing(tile);
            tile = scheduler.next();
        }
        const ScoreMod score_mod(params, tile.place.bidb, tile.place.bidh,
                                 tile.sequence.seqlen_k - tile.sequence.seqlen_q);
        RowMod<float>(params, tile.place.bidb, tile.place.bidh).prefetch();
        tiles.template push<kKind>(params, tile, score_mod, [&](int consumer) {
            const int first_row = tile.place.block * Traits::kBlockM + consumer * Traits::kRows;
            KeyBlocks blocks = key_blocks<kKind, Traits::kRows, Traits::kBlockN>(
                params, tile.sequence, first_row, tile.n_block_min, tile.n_block_max, score_mod);
            blocks.flags |= tile.is_end ? KeyBlocks::is_end : 0;
            return blocks;
        });
        if (tile.is_end) {
            return;
        }
    }
}

template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_attn(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                             typename Traits::SharedStorage &shared, const WorkTileOrder &order) {
    if (threadIdx.x / 128 == 0) {  // producer
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            Loader<Traits, kKind>(params, copies, shared).load();
        } else if (threadIdx.x / 32 == 1) {
            schedule_tiles<Traits, kKind>(
                params, shared, TileScheduler<kKind, Traits::kBlockM, Traits::kBlockN>(params, order),
                [&](const WorkTile &tile) {
                    store_nothing(params, tile, Output<Traits>(params, tile, /*warpgroup=*/0));
                });
        }
    } else {  // consumer
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kConsumerRegisters>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
        Consumer<Traits, kKind>(params, shared, warpgroup)
            .mma([&](const WorkTile &tile, auto &acc_o, const auto &softmax) {
                store<Traits, kKind>(params, tile, Output<Traits>(params, tile, warpgroup), acc_o, softmax);
            });
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params,
                     const __grid_constant__ typename Traits::Copies copies,
                     const __grid_constant__ WorkTileOrder order) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4;  // per warpgroup
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        shared.q_barriers.init(kWarps);
        shared.k_barriers.init(kWarps * Traits::kConsumers);
        shared.v_barriers.init(kWarps * Traits::kConsumers);
        shared.tiles.barriers.init(kWarps * Traits::kConsumers + 1, /*writers=*/Traits::kConsumers);  // + 1: load warp
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();  // every thread sees the barriers
    compute_attn<Traits, kKind>(params, copies, shared, order);
}

}  // namespace flash::sm90
