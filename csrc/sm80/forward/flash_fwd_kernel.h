// The forward kernel: flash_fwd_kernel -> compute_attn -> compute_attn_1rowblock.
#pragma once

#include "dispatch/kind.h"
#include "epilogue_fwd.h"
#include "mainloop_fwd.h"

namespace flash::sm80 {

// One block of query rows of one head: load, loop over the key blocks, store. A block whose rows see no key skips the
// loop and stores output 0 and log-sum-exp -inf.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_attn_1rowblock(const Flash_fwd_params &params, const Sequence &sequence,
                                                       int bidb, int bidh, int m_block) {
    extern __shared__ char smem[];
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (may_be_varlen(kKind) && threadIdx.x == 0) {
        shared.place = {bidb, bidh, m_block};
        shared.sequence = sequence;
    }
    const BlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)> info(params, sequence, m_block);

    Tensor acc_o = partition_fragment_C(typename Traits::TiledMma{},
                                        Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_K)
    clear(acc_o);
    Softmax<2 * decltype(size<1>(acc_o))::value> softmax(params.scale_softmax_log2);
    if (info.n_block_max > info.n_block_min) {
        mainloop_fwd<Traits, kKind>(params, info, shared, bidb, bidh, m_block, acc_o, softmax);
    }
    if constexpr (may_be_varlen(kKind)) {
        __syncthreads();  // place and sequence are visible to all threads
        const auto [bidb, bidh, m_block] = shared.place;
        epilogue_fwd<Traits, kKind>(params, shared.sequence, shared, bidb, bidh, m_block, acc_o, softmax);
    } else {
        epilogue_fwd<Traits, kKind>(params, sequence, shared, bidb, bidh, m_block, acc_o, softmax);
    }
}

// CTAs take the row blocks of a head, then the heads, then the batch, so that neighbours share K and V in L2. Causal
// and windowed: the last row blocks, which see most keys, come first, so the CTAs that finish last are short.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_attn(const Flash_fwd_params &params) {
    const auto [bidb, bidh, m_block] =
        row_blocks<may_be_varlen(kKind)>(params, Traits::kBlockM).place(blockIdx.x, is_local(kKind));
    const Sequence seq = sequence<may_be_varlen(kKind)>(params, bidb);
    if (m_block * Traits::kBlockM < seq.seqlen_q) {
        compute_attn_1rowblock<Traits, kKind>(params, seq, bidb, bidh, m_block);
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, Traits::TileSize::kMinBlocksPerSM)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params) {
    compute_attn<Traits, kKind>(params);
}

}  // namespace flash::sm80
