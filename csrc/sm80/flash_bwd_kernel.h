// The backward kernel: flash_bwd_kernel -> compute_dq_dk_dv -> compute_dq_dk_dv_1colblock.
#pragma once

#include "epilogue_bwd.h"
#include "mainloop_bwd.h"

namespace flash::sm80 {

// One block of keys of one head of dK and dV: load K and V, loop over the query rows that see them, write.
template <typename Traits, bool Is_causal>
__device__ __forceinline__ void compute_dq_dk_dv_1colblock(const Flash_bwd_params &params, int bidb, int bidh_dkv,
                                                           int n_block) {
    extern __shared__ char smem[];
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    const ColumnBlockInfo<Traits::kBlockM, Traits::kBlockN, Is_causal> info(params, n_block);

    using Tile = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
    Tensor acc_dk = partition_fragment_C(typename Traits::TiledMmadKV{}, Tile{});  // (MMA, MMA_N, MMA_K)
    Tensor acc_dv = partition_fragment_C(typename Traits::TiledMmadKV{}, Tile{});  // (MMA, MMA_N, MMA_K)
    clear(acc_dk);
    clear(acc_dv);
    mainloop_bwd<Traits>(params, info, shared, bidb, bidh_dkv * params.heads_per_dkv, acc_dk, acc_dv);
    epilogue_bwd<Traits>(params, shared, bidb, bidh_dkv, n_block, acc_dk, acc_dv);
}

// Thread blocks walk the key blocks of a head, then the heads, then the batch, so that neighbours share Q and dO in L2;
// when causal the first key blocks are seen by most rows, so that the last thread blocks to finish are short.
// Deterministic: a block that waits for its turn must not keep the one it waits for from starting, so tiles are handed
// out in the order in which blocks start.
template <typename Traits, bool Is_causal>
__device__ __forceinline__ void compute_dq_dk_dv(const Flash_bwd_params &params) {
    int tile = blockIdx.x;
    if (params.dq_turn != nullptr) {
        __shared__ int ticket;
        if (threadIdx.x == 0) {
            constexpr int kSmallestRowBlock = 32;
            const int64_t turns = int64_t(params.b) * params.h * (params.seqlen_q_rounded / kSmallestRowBlock);
            ticket = atomicAdd(params.dq_turn + turns, 1);
        }
        __syncthreads();
        tile = ticket;
    }
    const int num_n_blocks = (params.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN;
    const int heads_dkv = params.h / params.heads_per_dkv;
    const int head = tile / num_n_blocks;  // of all batch * heads_dkv
    const int n_block = tile - head * num_n_blocks;
    compute_dq_dk_dv_1colblock<Traits, Is_causal>(params, head / heads_dkv, head % heads_dkv, n_block);
}

template <typename Traits, bool Is_causal>
__global__ void __launch_bounds__(Traits::kNThreads, Traits::Tile::kMinBlocksPerSM)
    flash_bwd_kernel(const __grid_constant__ Flash_bwd_params params) {
    compute_dq_dk_dv<Traits, Is_causal>(params);
}

}  // namespace flash::sm80
