// The backward kernel: flash_bwd_kernel -> compute_dq_dk_dv -> compute_dk_dv_1colblock. One warpgroup is
// the producer, which loads and adds dQ (load_bwd.h, reduce_dq.h). Two are consumers, which compute (mainloop_bwd.h).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue_bwd.h"
#include "mainloop_bwd.h"
#include "reduce_dq.h"

namespace flash::sm90 {

template <typename Traits, Kind kKind>
using ProducerOf =
    std::conditional_t<Traits::kConsumersComputeDq, CopyProducer<Traits, kKind>, DqProducer<Traits, kKind>>;

// The part of a consumer in one block of keys of one head of dK and dV.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_dk_dv_1colblock(const Flash_bwd_params &params,
                                                        typename Traits::SharedStorage &shared,
                                                        const ColumnBlock<Traits, kKind> &block,
                                                        ConsumerStates<Traits> &states, int warpgroup) {
    using Accumulator = decltype(partition_fragment_C(typename Traits::TiledMmadKV{}, typename Traits::TiledKV{}));
    if constexpr (Traits::kSplitsKeys) {
        Accumulator acc_dk, acc_dv;  // (MMA, MMA_M, MMA_N)
        KeyConsumer<Traits, kKind> consumer(params, shared, block, states, warpgroup);
        consumer.run(acc_dk, acc_dv);
        states = consumer.states();
        store_dk(params, block, acc_dk, warpgroup * Traits::kKeys);
        store_dv(params, block, acc_dv, warpgroup * Traits::kKeys);
    } else if (warpgroup == 0) {
        Accumulator acc_dv;
        ProductConsumer<Traits, kKind> consumer(params, shared, block, states, warpgroup);
        consumer.run_dv(acc_dv);
        states = consumer.states();
        store_dv(params, block, acc_dv, 0);
    } else {
        Accumulator acc_dk;
        ProductConsumer<Traits, kKind> consumer(params, shared, block, states, warpgroup);
        consumer.run_dk(acc_dk);
        states = consumer.states();
        store_dk(params, block, acc_dk, 0);
    }
}

template <typename Traits, Kind kKind>
__device__ __forceinline__ void init_barriers(typename Traits::SharedStorage &shared) {
    constexpr int kWarps = 4, kOfConsumers = kWarps * Traits::kConsumers;  // per warpgroup, of the consumers
    constexpr int kOfDq = Traits::kConsumersComputeDq ? 0 : kWarps;        // that read dS and K for dQ alone
    constexpr int kOfProduct = Traits::kSplitsKeys ? kOfConsumers : kWarps;
    shared.tile_barriers.init(kOfConsumers + ProducerOf<Traits, kKind>::kWarps - 1);  // - 1: the load warp
    shared.k_barriers.init(kOfProduct + kOfDq);
    shared.v_barriers.init(kOfProduct);
    shared.q_barriers.init(kOfConsumers);
    shared.dout_barriers.init(kOfConsumers);
    shared.ds_barriers.init(/*warps=*/kWarps, /*writers=*/kOfProduct);
    shared.p_barriers.init(/*warps=*/kWarps, /*writers=*/kWarps);
    for (auto &barriers : shared.dq_barriers) {
        barriers.init(/*warps=*/1, /*writers=*/kWarps);
    }
    cutlass::arch::fence_barrier_init();
}

template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_dq_dk_dv(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                                                 typename Traits::SharedStorage &shared) {
    if (threadIdx.x == 0) {
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.dout.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        init_barriers<Traits, kKind>(shared);
    }
    __syncthreads();  // every thread sees the barriers
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        ProducerOf<Traits, kKind>(params, copies, shared).run();
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kConsumerRegisters>();
        ConsumerStates<Traits> states;
        WorkTilesBwd<Traits, kKind> tiles(params, shared);
        do {
            if (!tiles.next(/*is_load_warp=*/false)) {
                break;
            }
            compute_dk_dv_1colblock(params, shared, tiles.block(), states, role - 1);
        } while (Traits::kIsPersistent);
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_bwd_kernel(const __grid_constant__ Flash_bwd_params params,
                     const __grid_constant__ typename Traits::Copies copies) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    compute_dq_dk_dv<Traits, kKind>(params, copies, *reinterpret_cast<typename Traits::SharedStorage *>(smem));
}

}  // namespace flash::sm90
