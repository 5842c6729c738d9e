// The three kernels of the backward: flash_bwd_dot_do_o, flash_bwd_kernel, flash_bwd_convert_dq.
#pragma once

#include "common/block_info.h"
#include "common/key_ranges.h"
#include "common/preprocess_rows.h"
#include "common/sequence.h"
#include "kernel_traits_bwd.h"
#include "mainloop_bwd.h"
#include "sm80/accumulator.h"
#include "sm80/copy.h"

namespace flash::sm80 {

// ---- before it: the row statistics, and zeros in the accumulator of dQ

constexpr int kPreprocessRows = Flash_bwd_params::kRowsPerFlag;  // padded query rows of a CTA
constexpr int kPreprocessThreads = 256;

template <typename Element, int kHeadDim, bool kHasRanges, bool kHasBias>
__global__ void __launch_bounds__(kPreprocessThreads)
    flash_bwd_dot_do_o(const __grid_constant__ Flash_bwd_params params) {
    constexpr int kRounded = Flash_bwd_params::kRowsRounded, kRowsOfWarp = kPreprocessRows / (kPreprocessThreads / 32);
    const int64_t padded_row = int64_t(blockIdx.x) * kPreprocessRows;
    const auto [bidb, bidh, block] =
        row_blocks(params, kRounded).place(static_cast<int>(padded_row / kRounded), /*is_reversed=*/false);
    const int in_cta = threadIdx.x / 32 * kRowsOfWarp;
    const PaddedRow first{padded_row + in_cta, bidb, bidh, sequence(params, bidb),
                          block * kRounded + static_cast<int>(padded_row % kRounded) + in_cta};
    const bool is_large =
        __syncthreads_or(preprocess_rows<Element, kHeadDim, kRowsOfWarp, kHasRanges, kHasBias>(params, first));
    if (threadIdx.x == 0) {
        params.large_rows[blockIdx.x] = is_large;
    }
    if (params.dq_accum != nullptr) {
        auto *accum = reinterpret_cast<float4 *>(params.dq_accum + padded_row * kHeadDim);
        CUTE_UNROLL
        for (int i = threadIdx.x; i < kPreprocessRows * kHeadDim / 4; i += kPreprocessThreads) {
            accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

// ---- the epilogue of the backward kernel: scales dK and dV, converts them, stages them in shared memory, stores 16
// bytes per thread

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
    const float rp_dropout = is_general(kKind) ? params.rp_dropout : 1.0f;
    if (params.dk.ptr != nullptr) {
        store_dkv<Traits>(params, seq, params.dk, acc_dk, params.qk_scale, shared.k, bidb, bidh, n_block);
    }
    if (params.dv.ptr != nullptr) {
        store_dkv<Traits>(params, seq, params.dv, acc_dv, rp_dropout, shared.v, bidb, bidh, n_block);
    }
}

// ---- the backward kernel: flash_bwd_kernel -> compute_dq_dk_dv -> compute_dq_dk_dv_1colblock

// One block of keys of one head of dK and dV: load K and V, loop over the query rows that see them, store.
template <typename Traits, Kind kKind, BwdMode kMode>
__device__ __forceinline__ void compute_dq_dk_dv_1colblock(const Flash_bwd_params &params, const Sequence &sequence,
                                                           int bidb, int bidh_dkv, int n_block, bool is_in_order) {
    extern __shared__ char smem[];
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    const auto info = [&] {
        if constexpr (has_ranges(kKind)) {
            return RangedColumnBlockInfo<Traits::kBlockM, Traits::kBlockN>(
                params, sequence, bidb, bidh_dkv * params.heads_per_dkv, params.heads_per_dkv, n_block);
        } else {
            return ColumnBlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)>(params, sequence, n_block);
        }
    }();

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

// ---- the kernel after the backward kernel: the float32 accumulator, in the layout of reduce_dq.h, becomes dQ.

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
    const auto rows = [&, bidb = bidb, bidh = bidh] {
        if constexpr (has_ranges(Traits::kKind)) {
            return RowsWithKeys{RangesOfHead(params, bidb, bidh), first_row, seq.seqlen_q};
        } else if constexpr (has_bias(Traits::kKind)) {
            return RowsByLse{params.lse_padded + bidb * params.padded_batch_stride + bidh * params.padded_head_stride +
                             first_row};
        } else {
            return rows_with_key(KeyRange<is_local(Traits::kKind)>(params, seq.seqlen_q, seq.seqlen_k), first_row);
        }
    }();
    CUTE_UNROLL
    for (int row = 0; row < size<1>(tdQrdQ); ++row) {
        if (!rows.contains(get<0>(coords(0, row, 0)))) {
            clear(tdQrdQ(_, row, _));
        }
    }
    store_tile(gmem_copy, tdQrdQ, tdQgdQ, coords, seq.seqlen_q - first_row, params.d);
}

}  // namespace flash::sm80
