// What leaves a consumer warpgroup: 64 rows of O, normalised and rounded, through the room of its Q, and the
// log-sum-exp of each.
#pragma once

#include "mainloop_fwd.h"

namespace flash::sm90 {

// Where the rows of one consumer warpgroup go.
template <typename Traits>
struct Output {
    using Element = typename Traits::Element;
    float *lse;      // of the first row
    Element *o;      // likewise
    int64_t stride;  // elements between rows of O
    int rows_left;   // of the sequence, from the first row on
    int d;

    __device__ Output(const Flash_fwd_params &params, const Sequence &sequence, int bidb, int bidh, int first_row)
        : stride(params.o.row_stride), rows_left(sequence.seqlen_q - first_row), d(params.d) {
        const int64_t row = sequence.q_begin + first_row;
        lse = static_cast<float *>(params.softmax_lse) + bidb * params.lse_batch_stride +
              bidh * params.lse_head_stride + row;
        o = static_cast<Element *>(params.o.ptr) + bidb * params.o.batch_stride + bidh * params.o.head_stride +
            row * stride;
    }

    // Stores vector(row, col) of 16 bytes to every (row, col) that lies inside. vector takes this thread's indices.
    template <typename VectorOf>
    __device__ __forceinline__ void store(const VectorOf &vector_of) const {
        typename Traits::GmemTiledCopyO gmem_copy;
        auto thr_copy = gmem_copy.get_thread_slice(threadIdx.x % 128);
        Tensor gO = make_tensor(make_gmem_ptr(o), typename Traits::TileQ{}, make_stride(stride, _1{}));  // (64, HD)
        Tensor tOgO = thr_copy.partition_D(gO);  // (CPY, row, col)
        Tensor tOcO = thr_copy.partition_D(make_identity_tensor(typename Traits::TileQ{}));
        CUTE_UNROLL
        for (int row = 0; row < size<1>(tOgO); ++row) {
            if (get<0>(tOcO(0, row, 0)) < rows_left) {
                CUTE_UNROLL
                for (int col = 0; col < size<2>(tOgO); ++col) {
                    if (get<1>(tOcO(0, row, col)) < d) {
                        copy(gmem_copy, vector_of(row, col), tOgO(_, row, col));
                    }
                }
            }
        }
    }
};

// acc_o and softmax as mma leaves them.
template <typename Traits, typename TensorO, typename SoftmaxState>
__device__ __forceinline__ void store(const Output<Traits> &output, float softmax_scale,
                                      typename Traits::SharedStorage &shared, int warpgroup, TensorO &acc_o,
                                      SoftmaxState &softmax) {
    using Element = typename Traits::Element;
    const int tidx = threadIdx.x % 128;

    // Normalise, and write the log-sum-exp: of the four lanes that share a row, the one that holds column 0.
    Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));
    constexpr int kRowsOfThread = decltype(size<0>(acc_o_rowcol))::value;
    float lse[kRowsOfThread];
    softmax.finalize(acc_o_rowcol, softmax_scale, /*out_factor=*/1.0f, lse);
    typename Traits::TiledMmaPV mma_pv;
    Tensor tOcO = mma_pv.get_slice(tidx).partition_C(make_identity_tensor(typename Traits::TileQ{}));
    Tensor coords = make_tensor(tOcO.data(), rowcol_layout(tOcO.layout()));  // (row, col) -> (row, column)
    CUTE_UNROLL
    for (int row = 0; row < kRowsOfThread; ++row) {
        if (get<1>(coords(row, 0)) == 0 && get<0>(coords(row, 0)) < output.rows_left) {
            output.lse[get<0>(coords(row, 0))] = lse[row];
        }
    }

    // Registers to shared memory to global memory.
    Tensor rO = make_tensor<Element>(acc_o.layout());
    constexpr int kCount = decltype(size(rO))::value;
    *reinterpret_cast<cutlass::Array<Element, kCount> *>(rO.data()) =
        cutlass::NumericArrayConverter<Element, float, kCount>::convert(
            *reinterpret_cast<const cutlass::Array<float, kCount> *>(acc_o.data()));
    Tensor sO = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{})(_, _, warpgroup);  // (64, HD)
    auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomO{}, mma_pv);
    auto thr_smem_copy = smem_copy.get_thread_slice(tidx);
    sync(Barrier::warpgroup, warpgroup, 128);  // all four warps are done with Q
    copy(smem_copy, thr_smem_copy.retile_S(rO), thr_smem_copy.partition_D(as_position_independent_swizzle_tensor(sO)));
    sync(Barrier::warpgroup, warpgroup, 128);  // O is whole
    Tensor tOsO = typename Traits::GmemTiledCopyO{}.get_thread_slice(tidx).partition_S(sO);
    output.store([&](int row, int col) { return tOsO(_, row, col); });
}

// Rows that see no key: zeros and -inf. Shared memory is left alone: Q's room may hold the next block's already.
template <typename Traits>
__device__ __forceinline__ void store_nothing(const Output<Traits> &output) {
    const int tidx = threadIdx.x % 128;
    if (tidx < Traits::kRows && tidx < output.rows_left) {
        output.lse[tidx] = -INFINITY;
    }
    Tensor zeros = make_tensor<typename Traits::Element>(Shape<Int<Traits::kVector>>{});
    clear(zeros);
    output.store([&](int, int) { return zeros; });
}

}  // namespace flash::sm90
