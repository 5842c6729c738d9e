// The forward kernel: flash_fwd_kernel -> compute_attn, where the warpgroups part: the producer goes to load_tiles, the
// consumers to mma_tiles, and both walk the same tiles.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue_fwd.h"
#include "mainloop_fwd.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// The producer: one warp finds the tiles, tells the consumers, and has TMA load them.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void load_tiles(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                           typename Traits::SharedStorage &shared, const Tile_order &order) {
    Tile_scheduler<kKind, Traits::kBlockM, Traits::kBlockN> scheduler(params, order);
    Tile_ring tiles{shared.tiles};
    Rings<Traits> rings;
    const auto find = [&] { return tiles.push(scheduler.next()); };
    for (int tile = find(), ahead; tiles[tile].state != Tile::is_no_tile; tile = ahead) {
        ahead = find();  // before the loads of this tile, which may have to wait
        if (tiles[tile].state == Tile::has_keys) {
            load<Traits, kKind>(params, copies, tiles[tile], shared, rings);
        }
    }
}

// A consumer warpgroup: 64 rows of every tile.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void mma_tiles(const Flash_fwd_params &params, typename Traits::SharedStorage &shared,
                                          int warpgroup) {
    Tile_ring tiles{shared.tiles};
    const auto output_of = [&](int tile) { return Output<Traits>(params, tiles[tile], warpgroup); };
    const auto next_tile = [&](int &tile) {
        for (;;) {
            tile = tiles.take();
            const int state = uniform(tiles[tile].state);
            if (state != Tile::has_no_keys) {
                return state == Tile::has_keys;
            }
            store_nothing(output_of(tile));
            tiles.release(tile);
        }
    };
    const auto store_tile = [&](int tile, const auto &acc_o, const auto &softmax) {
        store(output_of(tile), static_cast<float>(params.softmax_scale), acc_o, softmax);
        tiles.release(tile);
    };
    Consumer<Traits, kKind>(params, shared, warpgroup).mma(tiles, next_tile, store_tile);
}

template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_attn(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                             typename Traits::SharedStorage &shared, const Tile_order &order) {
    if (threadIdx.x / 128 == 0) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::Tile_size::kProducerRegisters>();
        if (threadIdx.x < 32) {
            load_tiles<Traits, kKind>(params, copies, shared, order);
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::Tile_size::kConsumerRegisters>();
        mma_tiles<Traits, kKind>(params, shared, __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1);
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params,
                     const __grid_constant__ typename Traits::Copies copies, const __grid_constant__ Tile_order order) {
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
        shared.tiles.barriers.init(kWarps * Traits::kConsumers);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();  // the barriers are there for all
    compute_attn<Traits, kKind>(params, copies, shared, order);
}

}  // namespace flash::sm90
