// The kernel after the backward kernel: the float32 accumulator, in the layout of reduce_dq.h, becomes dQ.
#pragma once

#include "common/block_info.h"
#include "kernel_traits_bwd.h"
#include "sm80/copy.h"
#include "sm80/layout.h"

namespace flash::sm80 {

// dQ = softmax_scale * accumulator for one row block. Rows without a key get 0: the accumulator of such a row holds NaN
// if one of its tiles has an infinite key.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads)
    flash_bwd_convert_dq(const __grid_constant__ Flash_bwd_params params) {
    using Element = typename Traits::Element;
    using TileQ = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;
    __shared__ alignas(128) Element buffer[Traits::kSizeQ];
    const auto [bidb, bidh, m_block] = row_blocks(params, Traits::kBlockM).place(blockIdx.x, /*is_reversed=*/false);
    const Sequence seq = sequence(params, bidb);
    const int first_row = m_block * Traits::kBlockM;
    if (first_row >= seq.seqlen_q) {
        return;
    }

    typename Traits::TiledMmadQ mma_dq;
    Tensor acc = partition_fragment_C(mma_dq, TileQ{});  // (MMA, MMA_M, MMA_K)
    const auto *accum = reinterpret_cast<const float4 *>(params.dq_accum + (bidb * params.padded_batch_stride +
                                                                            bidh * params.padded_head_stride +
                                                                            padded_begin(params, bidb) + first_row) *
                                                                               Traits::kHeadDim);
    const float scale = params.qk_scale;
    CUTE_UNROLL
    for (int i = 0; i < size(acc) / 4; ++i) {
        const float4 x = accum[(threadIdx.x / 32 * (size(acc) / 4) + i) * 32 + threadIdx.x % 32];
        acc(4 * i) = x.x * scale;
        acc(4 * i + 1) = x.y * scale;
        acc(4 * i + 2) = x.z * scale;
        acc(4 * i + 3) = x.w * scale;
    }
    Tensor rdQ = convert_type<Element>(acc);
    Tensor sdQ = make_tensor(make_smem_ptr(buffer), typename Traits::SmemQ::Layout{});  // (BLK_M, HD)
    auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomStore{}, mma_dq);
    auto thr_smem_copy = smem_copy.get_thread_slice(threadIdx.x);
    copy(smem_copy, thr_smem_copy.retile_S(rdQ), thr_smem_copy.partition_D(sdQ));
    __syncthreads();  // the tile is complete

    Tensor mdQ = head_tensor<Element>(params.dq, bidb, bidh, seq.q_begin, seq.seqlen_q, params.d);  // (seqlen_q, d)
    Tensor gdQ = local_tile(mdQ, TileQ{}, make_coord(m_block, 0));                                  // (BLK_M, HD)
    typename Traits::GmemTiledCopyStore gmem_copy;
    auto thr_gmem_copy = gmem_copy.get_thread_slice(threadIdx.x);
    Tensor tdQgdQ = thr_gmem_copy.partition_D(gdQ);                            // (copy, rows, columns)
    Tensor coords = thr_gmem_copy.partition_D(make_identity_tensor(TileQ{}));  // (copy, rows, columns)
    Tensor tdQrdQ = make_tensor<Element>(shape(tdQgdQ));
    copy(gmem_copy, thr_gmem_copy.partition_S(sdQ), tdQrdQ);
    const auto rows = rows_with_key(KeyRange<is_local(Traits::kKind)>(params, seq.seqlen_q, seq.seqlen_k), first_row);
    CUTE_UNROLL
    for (int row = 0; row < size<1>(tdQrdQ); ++row) {
        if (!rows.contains(get<0>(coords(0, row, 0)))) {
            clear(tdQrdQ(_, row, _));
        }
    }
    store_tile(gmem_copy, tdQrdQ, tdQgdQ, coords, seq.seqlen_q - first_row, params.d);
}

}  // namespace flash::sm80
