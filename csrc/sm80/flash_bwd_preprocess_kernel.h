// Before the backward kernel: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded to whole tiles, and zeros for dQ's
// accumulator. After it: the accumulator becomes dQ.
#pragma once

#include <cmath>

#include "layout.h"
#include "../common/sequence.h"
#include "../common/softmax.h"
#include "copy.h"
#include "kernel_traits_bwd.h"

namespace flash::sm80 {

constexpr int kPreprocessRows = Flash_bwd_params::kRowsPerFlag;  // query rows of a thread block
constexpr int kPreprocessThreads = 256;

// A group of lanes takes a row, each lane 16 bytes of it.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPreprocessThreads)
    flash_bwd_dot_do_o(const __grid_constant__ Flash_bwd_params params) {
    constexpr int kVector = 16 / sizeof(Element);
    constexpr int kVectors = kHeadDim / kVector;
    constexpr int kLanes = kVectors <= 4 ? 4 : kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;  // of a row
    constexpr int kRounded = Flash_bwd_params::kRowsRounded;
    const int64_t stats = int64_t(blockIdx.x) * kPreprocessRows;  // padded row
    const RowBlocks::Place place =
        row_blocks(params, kRounded).place(static_cast<int>(stats / kRounded), /*is_reversed=*/false);
    const int bidb = place.bidb, bidh = place.bidh;
    const Sequence seq = sequence(params, bidb);
    const int first_row = place.block * kRounded + static_cast<int>(stats % kRounded);
    const int lane = threadIdx.x % kLanes;

    bool is_large = false;
    CUTE_UNROLL
    for (int row = threadIdx.x / kLanes; row < kPreprocessRows; row += kPreprocessThreads / kLanes) {
        const int query = first_row + row;
        float dot = 0.0f;
        if (query < seq.seqlen_q && lane * kVector < params.d) {
            const auto vector_of = [&](const TensorRef &x) {
                const Element *source = static_cast<const Element *>(x.ptr) + bidb * x.batch_stride +
                                        int64_t(seq.q_begin + query) * x.row_stride + bidh * x.head_stride +
                                        lane * kVector;
                cutlass::Array<Element, kVector> bits;
                *reinterpret_cast<uint4 *>(&bits) = *reinterpret_cast<const uint4 *>(source);
                return cutlass::NumericArrayConverter<float, Element, kVector>::convert(bits);
            };
            const auto out = vector_of(params.o), dout = vector_of(params.dout);
            CUTE_UNROLL
            for (int i = 0; i < kVector; ++i) {
                dot += out[i] * dout[i];
            }
        }
        CUTE_UNROLL
        for (int offset = kLanes / 2; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        }
        if (lane == 0) {
            float lse = INFINITY;  // rows without a key, and past the end: P = exp(s - inf) = 0
            if (query < seq.seqlen_q) {
                const int64_t index =
                    bidb * params.lse_batch_stride + bidh * params.lse_head_stride + seq.q_begin + query;
                lse = static_cast<const float *>(params.softmax_lse)[index];
                if (lse == -INFINITY) {  // without a key: no gradient, whatever arrives (0 * NaN would be one)
                    lse = INFINITY;
                    dot = 0.0f;
                } else if (params.dsoftmax_lse != nullptr) {
                    dot -= static_cast<const float *>(params.dsoftmax_lse)[index];
                }
                is_large |= fabsf(lse) > kLargeExponent && lse != INFINITY;
            }
            static_cast<float *>(params.dsoftmax_sum)[stats + row] = dot;
            params.lse_padded[stats + row] = lse;
        }
    }

    is_large = __syncthreads_or(is_large);
    if (threadIdx.x == 0) {
        params.large_rows[blockIdx.x] = is_large;
    }

    if (params.dq_accum != nullptr) {
        auto *accum = reinterpret_cast<float4 *>(params.dq_accum + stats * kHeadDim);
        CUTE_UNROLL
        for (int i = threadIdx.x; i < kPreprocessRows * kHeadDim / 4; i += kPreprocessThreads) {
            accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

// dQ = softmax_scale * accumulator for one row block, which lies there as reduce_dq.h has it.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads)
    flash_bwd_convert_dq(const __grid_constant__ Flash_bwd_params params) {
    using Element = typename Traits::Element;
    using Tile = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;
    __shared__ alignas(128) Element room[Traits::kSizeQ];
    const auto [bidb, bidh, m_block] = row_blocks(params, Traits::kBlockM).place(blockIdx.x, /*is_reversed=*/false);
    const Sequence seq = sequence(params, bidb);
    if (m_block * Traits::kBlockM >= seq.seqlen_q) {
        return;
    }

    typename Traits::TiledMmadQ mma_dq;
    Tensor acc = partition_fragment_C(mma_dq, Tile{});  // (MMA, MMA_M, MMA_K)
    const auto *accum = reinterpret_cast<const float4 *>(
        params.dq_accum + (bidb * params.padded_batch_stride + bidh * params.padded_head_stride +
                           padded_begin(params, bidb) + m_block * Traits::kBlockM) *
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
    Tensor sdQ = make_tensor(make_smem_ptr(room), typename Traits::SmemQ::Layout{});  // (BLK_M, HD)
    auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomStore{}, mma_dq);
    auto thr_smem_copy = smem_copy.get_thread_slice(threadIdx.x);
    copy(smem_copy, thr_smem_copy.retile_S(rdQ), thr_smem_copy.partition_D(sdQ));
    __syncthreads();  // the tile is whole

    Tensor mdQ = head_tensor<Element>(params.dq, bidb, bidh, seq.q_begin, seq.seqlen_q, params.d);  // (seqlen_q, d)
    Tensor gdQ = local_tile(mdQ, Tile{}, make_coord(m_block, 0));                                   // (BLK_M, HD)
    typename Traits::GmemTiledCopyStore gmem_copy;
    auto thr_gmem_copy = gmem_copy.get_thread_slice(threadIdx.x);
    Tensor tdQgdQ = thr_gmem_copy.partition_D(gdQ);
    Tensor tdQrdQ = make_tensor<Element>(shape(tdQgdQ));
    copy(gmem_copy, thr_gmem_copy.partition_S(sdQ), tdQrdQ);
    store_tile(gmem_copy, tdQrdQ, tdQgdQ, thr_gmem_copy.partition_D(make_identity_tensor(Tile{})),
               seq.seqlen_q - m_block * Traits::kBlockM, params.d);
}

}  // namespace flash::sm80
