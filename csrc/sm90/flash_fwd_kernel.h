// The forward kernel: flash_fwd_kernel -> compute_attn -> compute_attn_1rowblock, which the producer warpgroup
// (load_1rowblock) and the consumer warpgroups (mma_1rowblock) go through side by side.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue_fwd.h"
#include "mainloop_fwd.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// The producer's part of one block of query rows of one head.
template <typename Traits, Kind kKind, typename Info>
__device__ __forceinline__ void load_1rowblock(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                               const Info &info, typename Traits::SharedStorage &shared,
                                               Rings<Traits> &rings, const Row_blocks::Place &place) {
    if (info.n_block_max > info.n_block_min) {
        load<Traits, kKind>(params, copies, info, shared, rings, place.bidb, place.bidh, place.block);
    }
}

// A consumer's part: 64 of the rows.
template <typename Traits, Kind kKind, typename Info, typename TurnsState>
__device__ __forceinline__ void mma_1rowblock(const Flash_fwd_params &params, const Info &info,
                                              typename Traits::SharedStorage &shared, Rings<Traits> &rings,
                                              const Row_blocks::Place &place, int warpgroup, const TurnsState &turns) {
    const int first_row = place.block * Traits::kBlockM + warpgroup * Traits::kRows;
    const Output<Traits> output(params, info, place.bidb, place.bidh, first_row);
    if (info.n_block_max <= info.n_block_min) {
        store_nothing(output);
        return;
    }
    Tensor acc_o =
        partition_fragment_C(typename Traits::TiledMmaPV{}, typename Traits::TileQ{});  // (MMA, MMA_M, MMA_K)
    clear(acc_o);
    Softmax<2> softmax(params.scale_softmax_log2);
    mma<Traits, kKind>(info, shared, rings, place.block, warpgroup, acc_o, softmax, turns);
    store(output, float(params.softmax_scale), shared, warpgroup, acc_o, softmax);
    cutlass::arch::fence_view_async_shared();  // TMA writes where O was written
    __syncwarp();
    Ring<Traits::kConsumers> own_q = rings.q;
    own_q.stage = warpgroup;
    own_q.release(shared.q_barriers);
    rings.q.phase ^= 1;
}

// One block of query rows of one head, by a warpgroup in either role: compute(info).
template <typename Traits, Kind kKind, typename Compute>
__device__ __forceinline__ void compute_attn_1rowblock(const Flash_fwd_params &params, const Row_blocks::Place &place,
                                                       const Compute &compute) {
    const Sequence seq = sequence<may_be_varlen(kKind)>(params, place.bidb);
    if (place.block * Traits::kBlockM < seq.seqlen_q) {
        compute(BlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)>(params, seq, place.block));
    }
}

template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_attn(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                             typename Traits::SharedStorage &shared) {
    Tile_scheduler<kKind, Traits::kBlockM> scheduler(params);
    Rings<Traits> rings;
    if (threadIdx.x / 128 == 0) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::Tile::kProducerRegisters>();
        if (threadIdx.x == 0) {
            for (; scheduler.has_tile(); scheduler.next()) {
                const Row_blocks::Place place = scheduler.place();
                compute_attn_1rowblock<Traits, kKind>(params, place, [&](const auto &info) {
                    load_1rowblock<Traits, kKind>(params, copies, info, shared, rings, place);
                });
            }
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::Tile::kConsumerRegisters>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be the same in the warp
        const Turns<Traits::kConsumers, Traits::Tile::kTakes_turns> turns(warpgroup);
        for (; scheduler.has_tile(); scheduler.next()) {
            const Row_blocks::Place place = scheduler.place();
            compute_attn_1rowblock<Traits, kKind>(params, place, [&](const auto &info) {
                mma_1rowblock<Traits, kKind>(params, info, shared, rings, place, warpgroup, turns);
            });
        }
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params,
                     const __grid_constant__ typename Traits::Copies copies) {
    extern __shared__ char smem[];
    const uintptr_t aligned =
        (reinterpret_cast<uintptr_t>(smem) + Traits::kAlignment - 1) / Traits::kAlignment * Traits::kAlignment;
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(aligned);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4;  // of a warpgroup
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        shared.q_barriers.init(kWarps);
        shared.k_barriers.init(kWarps * Traits::kConsumers);
        shared.v_barriers.init(kWarps * Traits::kConsumers);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();  // the barriers are there for all
    compute_attn<Traits, kKind>(params, copies, shared);
}

}  // namespace flash::sm90
