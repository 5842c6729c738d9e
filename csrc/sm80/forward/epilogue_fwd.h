// Forward epilogue: normalises O, converts it, stages it in shared memory, stores 16 bytes per thread; stores the
// log-sum-exp of every row.
#pragma once

#include "mainloop_fwd.h"
#include "sm80/accumulator.h"

namespace flash::sm80 {

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
    softmax.finalize(acc_o_rowcol, params.scale_softmax, rp_dropout, RowMod<float>(params, bidb, bidh), lse);
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

}  // namespace flash::sm80
