// The forward kernel: flash_fwd_kernel -> compute_attn -> compute_attn_1rowblock.
#pragma once

#include "epilogue_fwd.h"
#include "mainloop_fwd.h"

namespace flash::sm80 {

// One block of query rows of one head: load, loop over the key blocks, write. A block whose rows see no key falls
// through the loop and writes zeros and -inf.
template <typename Traits, bool Is_causal>
__device__ __forceinline__ void compute_attn_1rowblock(const Flash_fwd_params &params, int bidb, int bidh,
                                                       int m_block) {
    extern __shared__ char smem[];
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    const BlockInfo<Traits::kBlockM, Traits::kBlockN, Is_causal> info(params, m_block);

    Tensor acc_o = partition_fragment_C(typename Traits::TiledMma{},
                                        Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_K)
    clear(acc_o);
    Softmax<2 * decltype(size<1>(acc_o))::value> softmax(params.scale_softmax_log2);
    if (info.n_block_max > 0) {
        mainloop_fwd<Traits>(params, info, shared, bidb, bidh, m_block, acc_o, softmax);
    }
    epilogue_fwd<Traits>(params, shared, bidb, bidh, m_block, acc_o, softmax);
}

// Thread blocks walk the row blocks of a head, then the heads, then the batch, so that neighbours share K and V in L2;
// when causal the row blocks that see most keys come first, so that the last ones to finish are short.
template <typename Traits, bool Is_causal>
__device__ __forceinline__ void compute_attn(const Flash_fwd_params &params) {
    const int num_m_blocks = (params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
    const int head = blockIdx.x / num_m_blocks;  // of all batch * h
    const int m = blockIdx.x - head * num_m_blocks;
    const int m_block = Is_causal ? num_m_blocks - 1 - m : m;
    compute_attn_1rowblock<Traits, Is_causal>(params, head / params.h, head % params.h, m_block);
}

template <typename Traits, bool Is_causal>
__global__ void __launch_bounds__(Traits::kNThreads, Traits::Tile::kMinBlocksPerSM)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params) {
    compute_attn<Traits, Is_causal>(params);
}

}  // namespace flash::sm80
