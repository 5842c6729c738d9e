// Backward epilogue: scales dK and dV, converts them, stages them in shared memory, stores 16 bytes per thread.
#pragma once

#include "common/sequence.h"
#include "kernel_traits_bwd.h"
#include "sm80/accumulator.h"
#include "sm80/copy.h"

namespace flash::sm80 {

// Writes acc (MMA, MMA_N, MMA_K) times factor to key block n_block of head bidh of `target`. `buffer` is kBlockN *
// kHeadDim elements of shared memory that no thread reads any more.
template <typename Traits, typename TensorKV>
__device__ __forceinline__ void store_dkv(const Flash_bwd_params &params, const Sequence &sequence,
                                          const TensorRef &target, TensorKV &acc, float factor,
                                          typename Traits::Element *buffer, int bidb, int bidh, int n_block) {
    using Element = typename Traits::Element;
    using TileKV = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) {
        acc(i) *= factor;
    }
    Tensor rX = convert_type<Element>(acc);
    Tensor sX = make_tensor(make_smem_ptr(buffer), typename Traits::SmemKV::Layout{});  // (BLK_N, HD)
    auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomStore{}, typename Traits::TiledMmadKV{});
    auto thr_smem_copy = smem_copy.get_thread_slice(threadIdx.x);
    copy(smem_copy, thr_smem_copy.retile_S(rX), thr_smem_copy.partition_D(sX));
    __syncthreads();  // the tile is complete

    Tensor mX =
        head_tensor<Element>(target, bidb, bidh, sequence.k_begin, sequence.seqlen_k, params.d);  // (seqlen_k, d)
    Tensor gX = local_tile(mX, TileKV{}, make_coord(n_block, 0));                                 // (BLK_N, HD)
    typename Traits::GmemTiledCopyStore gmem_copy;
    auto thr_gmem_copy = gmem_copy.get_thread_slice(threadIdx.x);
    Tensor tXgX = thr_gmem_copy.partition_D(gX);
    Tensor tXrX = make_tensor<Element>(shape(tXgX));
    copy(gmem_copy, thr_gmem_copy.partition_S(sX), tXrX);
    store_tile(gmem_copy, tXrX, tXgX, thr_gmem_copy.partition_D(make_identity_tensor(TileKV{})),
               sequence.seqlen_k - n_block * Traits::kBlockN, params.d);
}

template <typename Traits, Kind kKind, typename SharedStorage, typename TensorKV>
__device__ __forceinline__ void epilogue_bwd(const Flash_bwd_params &params, const Sequence &seq, SharedStorage &shared,
                                             int bidb, int bidh, int n_block, TensorKV &acc_dk, TensorKV &acc_dv) {
    __syncthreads();  // all threads are done with K and V: dK and dV take their buffers
    const float rp_dropout = kKind == Kind::general ? params.rp_dropout : 1.0f;
    if (params.dk.ptr != nullptr) {
        store_dkv<Traits>(params, seq, params.dk, acc_dk, params.qk_scale, shared.k, bidb, bidh, n_block);
    }
    if (params.dv.ptr != nullptr) {
        store_dkv<Traits>(params, seq, params.dv, acc_dv, rp_dropout, shared.v, bidb, bidh, n_block);
    }
}

}  // namespace flash::sm80
