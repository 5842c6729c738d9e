// The backward kernel: flash_bwd_kernel -> compute_dq_dk_dv -> compute_dq_dk_dv_1colblock.
#pragma once

#include "epilogue_bwd.h"
#include "mainloop_bwd.h"

namespace flash::sm80 {

// One block of keys of one head of dK and dV: load K and V, loop over the query rows that see them, store.
template <typename Traits, Kind kKind, BwdMode kMode>
__device__ __forceinline__ void compute_dq_dk_dv_1colblock(const Flash_bwd_params &params, const Sequence &sequence,
                                                           int bidb, int bidh_dkv, int n_block, bool is_in_order) {
    extern __shared__ char smem[];
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    const ColumnBlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)> info(params, sequence, n_block);

    using TileKV = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
    Tensor acc_dk = partition_fragment_C(typename Traits::TiledMmadKV{}, TileKV{});  // (MMA, MMA_N, MMA_K)
    Tensor acc_dv = partition_fragment_C(typename Traits::TiledMmadKV{}, TileKV{});  // (MMA, MMA_N, MMA_K)
    clear(acc_dk);
    clear(acc_dv);
    if (info.num_m_blocks() > 0) {
        const int bidh = bidh_dkv * params.heads_per_dkv;
        MainloopBwd<Traits, kKind, kMode>(params, info, shared, bidb, bidh, is_in_order).run(acc_dk, acc_dv);
    }
    epilogue_bwd<Traits, kKind>(params, sequence, shared, bidb, bidh_dkv, n_block, acc_dk, acc_dv);
}

// CTAs take the key blocks of a head, then the heads, then the batch, so that neighbours share Q and dO in L2. Causal:
// most rows see the first key blocks, so the CTAs that finish last are short.
// In order: CTAs take an atomic number when they start, so that none waits for a CTA that is not scheduled yet
// (deadlock): a CTA waits only for smaller numbers of its own head. Nothing but the number passes between them, so the
// atomic is relaxed. The key blocks of several heads are interleaved, so that a CTA starts well after the one that it
// waits for.
template <typename Traits, Kind kKind, BwdMode kMode>
__device__ __forceinline__ void compute_dq_dk_dv(const Flash_bwd_params &params) {
    const bool is_in_order =
        kMode == BwdMode::deterministic || (kMode == BwdMode::general && params.dq_semaphore != nullptr);
    const RowBlocks blocks = key_blocks<may_be_varlen(kKind)>(params, params.h / params.heads_per_dkv, Traits::kBlockN);
    int tile = blockIdx.x;
    if (is_in_order) {
        extern __shared__ char smem[];
        int &number = *reinterpret_cast<int *>(smem);
        if (threadIdx.x == 0) {
            number = atomicAdd(params.dq_tile_counter, 1);
        }
        __syncthreads();
        tile = blocks.interleaved(number, params.interleaved_heads);
        __syncthreads();  // all threads have read it
    }
    // In order and local: the last key blocks add first (ColumnBlockInfo::order_in), so they start first.
    const auto [bidb, bidh_dkv, n_block] = blocks.place(tile, is_in_order && is_local(kKind));
    const Sequence seq = sequence<may_be_varlen(kKind)>(params, bidb);
    if (n_block * Traits::kBlockN < seq.seqlen_k) {
        compute_dq_dk_dv_1colblock<Traits, kKind, kMode>(params, seq, bidb, bidh_dkv, n_block, is_in_order);
    }
}

template <typename Traits, Kind kKind, BwdMode kMode>
__global__ void __launch_bounds__(Traits::kNThreads, Traits::TileSize::kMinBlocksPerSM)
    flash_bwd_kernel(const __grid_constant__ Flash_bwd_params params) {
#ifdef FLASH_HAS_BULK_REDUCE
    constexpr bool kHasBulkReduce = true;
#else
    constexpr bool kHasBulkReduce = false;
#endif
    if constexpr (Traits::kHasBulkReduce == kHasBulkReduce) {
        compute_dq_dk_dv<Traits, kKind, kMode>(params);
    }
}

}  // namespace flash::sm80
