// The backward kernel: flash_bwd_kernel -> compute_dq_dk_dv -> compute_dq_dk_dv_1colblock. One warpgroup is
// the producer, which loads and adds dQ (load_bwd.h, reduce_dq.h). Two are consumers, which compute (mainloop_bwd.h).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue_bwd.h"
#include "mainloop_bwd.h"
#include "reduce_dq.h"

namespace flash::sm90 {

// One block of keys of one head of dK and dV.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_dq_dk_dv_1colblock(const Flash_bwd_params &params,
                                                           const typename Traits::Copies &copies,
                                                           typename Traits::SharedStorage &shared,
                                                           const ColumnBlock<Traits, kKind> &block) {
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        using Producer = std::conditional_t<Traits::kConsumersComputeDq, CopyProducer<Traits, kKind>,
                                            DqProducer<Traits, kKind>>;
        Producer(params, copies, shared, block).run();
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kConsumerRegisters>();
        using Accumulator = decltype(partition_fragment_C(typename Traits::TiledMmadKV{}, typename Traits::TiledKV{}));
        if constexpr (Traits::kSplitsKeys) {
            Accumulator acc_dk, acc_dv;  // (MMA, MMA_M, MMA_N)
            KeyConsumer<Traits, kKind>(params, shared, block, role - 1).run(acc_dk, acc_dv);
            store_dk(params, block, acc_dk, (role - 1) * Traits::kKeys);
            store_dv(params, block, acc_dv, (role - 1) * Traits::kKeys);
        } else if (role == 1) {
            Accumulator acc_dv;
            ProductConsumer<Traits, kKind>(params, shared, block, 0).run_dv(acc_dv);
            store_dv(params, block, acc_dv, 0);
        } else {
            Accumulator acc_dk;
            ProductConsumer<Traits, kKind>(params, shared, block, 1).run_dk(acc_dk);
            store_dk(params, block, acc_dk, 0);
        }
    }
}

template <typename Traits>
__device__ __forceinline__ void init_barriers(typename Traits::SharedStorage &shared) {
    constexpr int kWarps = 4;  // per warpgroup
    shared.q_barriers.init(kWarps * Traits::kConsumers);
    shared.dout_barriers.init(kWarps * Traits::kConsumers);
    shared.ds_barriers.init(kWarps, /*writers=*/Traits::kSplitsKeys ? kWarps * Traits::kConsumers : kWarps);
    shared.p_barriers.init(kWarps, /*writers=*/kWarps);
    for (auto &barriers : shared.dq_barriers) {
        barriers.init(/*warps=*/1, /*writers=*/kWarps);
    }
    shared.k_barrier.init(1);
    shared.v_barrier.init(1);
    cutlass::arch::fence_barrier_init();
}

// CTAs take the key blocks of a head, then the heads, then the batch, so that neighbours share Q and dO in L2. Causal:
// most rows see the first key blocks, so the CTAs that finish last are short.
// In order: CTAs take an atomic number when they start, so that none waits for a CTA that is not scheduled yet
// (deadlock): a CTA waits only for smaller numbers of its own head. Nothing but the number passes between them, so the
// atomic is relaxed. The key blocks of several heads are interleaved, so that a CTA starts well after the one that it
// waits for.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_dq_dk_dv(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                                                 typename Traits::SharedStorage &shared) {
    const RowBlocks blocks = key_blocks<may_be_varlen(kKind)>(params, params.h / params.heads_per_dkv, Traits::kBlockN);
    const bool is_in_order = params.dq_semaphore != nullptr;
    if (threadIdx.x == 0) {
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.dout.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        init_barriers<Traits>(shared);
        if (is_in_order) {
            shared.tile = blocks.interleaved(atomicAdd(params.dq_tile_counter, 1), params.interleaved_heads);
        }
    }
    __syncthreads();  // every thread sees the barriers
    // In order and local: the last key blocks add first (ColumnBlockInfo::order_in), so they start first.
    const auto [bidb, bidh_dkv, n_block] =
        blocks.place(uniform(is_in_order ? shared.tile : blockIdx.x), is_in_order && is_local(kKind));
    const Sequence seq = sequence<may_be_varlen(kKind)>(params, bidb);
    if (n_block * Traits::kBlockN < seq.seqlen_k) {
        const ColumnBlock<Traits, kKind> block(params, seq, bidb, bidh_dkv, n_block);
        compute_dq_dk_dv_1colblock<Traits, kKind>(params, copies, shared, block);
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
