// The forward kernel: flash_fwd_kernel -> compute_attn -> compute_attn_1rowblock.
#pragma once

#include "common/key_ranges.h"
#include "dispatch/kind.h"
#include "mainloop_fwd.h"
#include "sm80/accumulator.h"

namespace flash::sm80 {

// Epilogue: normalises O, converts it, stages it in shared memory, stores 16 bytes per thread; stores the log-sum-exp
// of every row.
template <typename Traits, Kind kKind, typename SharedStorage, typename TensorO, typename SoftmaxState>
__device__ __forceinline__ void epilogue_fwd(const Flash_fwd_params &params, const Sequence &sequence,
                                             SharedStorage &shared, int bidb, int bidh, int m_block, TensorO &acc_o,
                                             SoftmaxState &softmax) {
    using Element = typename Traits::Element;
    constexpr int kBlockM = Traits::kBlockM, kHeadDim = Traits::kHeadDim;
    const int tidx = threadIdx.x;
    const int rows_left = sequence.seqlen_q - m_block * kBlockM;

    // Normalise. Four lanes share a row; the lane that holds column 0 writes its log-sum-exp.
    Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));
    float lse[decltype(size<0>(acc_o_rowcol))::value];
    const float rp_dropout = is_general(kKind) ? params.rp_dropout : 1.0f;
    softmax.template finalize<has_bias(kKind)>(acc_o_rowcol, has_bias(kKind) ? 1.0f : params.scale_softmax, rp_dropout,
                                               RowMod<float>(params, bidb, bidh), lse);
    typename Traits::TiledMma tiled_mma;
    Tensor tOcO =
        tiled_mma.get_thread_slice(tidx).partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{}));
    Tensor coords = make_tensor(tOcO.data(), rowcol_layout(tOcO.layout()));  // (row, col) -> (row, column)
    float *gLSE = static_cast<float *>(params.softmax_lse) + bidb * params.lse_batch_stride +
                  bidh * params.lse_head_stride + sequence.q_begin + m_block * kBlockM;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(coords); ++row) {
        if (get<1>(coords(row, 0)) == 0 && get<0>(coords(row, 0)) < rows_left) {
            gLSE[get<0>(coords(row, 0))] = lse[row];
        }
    }

    // Registers to shared memory to global memory.
    Tensor rO = convert_type<Element>(acc_o);
    Tensor sO = make_tensor(make_smem_ptr(shared.o), typename Traits::SmemLayoutO{});  // (BLK_M, HD)
    auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomO{}, tiled_mma);
    auto thr_smem_copy = smem_copy.get_thread_slice(tidx);
    __syncthreads();  // all threads are done with Q: O takes its buffer
    copy(smem_copy, thr_smem_copy.retile_S(rO), thr_smem_copy.partition_D(sO));
    __syncthreads();  // O is complete

    Tensor mO =
        head_tensor<Element>(params.o, bidb, bidh, sequence.q_begin, sequence.seqlen_q, params.d);  // (seqlen_q, d)
    Tensor gO = local_tile(mO, Shape<Int<kBlockM>, Int<kHeadDim>>{}, make_coord(m_block, 0));       // (BLK_M, HD)
    typename Traits::GmemTiledCopyO gmem_copy;
    auto thr_gmem_copy = gmem_copy.get_thread_slice(tidx);
    Tensor tOgO = thr_gmem_copy.partition_D(gO);
    Tensor tOrO = make_tensor<Element>(shape(tOgO));
    copy(gmem_copy, thr_gmem_copy.partition_S(sO), tOrO);
    store_tile(gmem_copy, tOrO, tOgO,
               thr_gmem_copy.partition_D(make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{})), rows_left,
               params.d);
}

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
    const auto info = [&] {
        if constexpr (has_ranges(kKind)) {
            return RangedBlockInfo<Traits::kBlockM, Traits::kBlockN>(params, sequence, bidb, bidh, m_block);
        } else {
            return BlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)>(params, sequence, m_block);
        }
    }();

    Tensor acc_o = partition_fragment_C(typename Traits::TiledMma{},
                                        Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_K)
    clear(acc_o);
    Softmax<2 * decltype(size<1>(acc_o))::value> softmax(has_bias(kKind) ? float(kLog2e) : params.scale_softmax_log2);
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
