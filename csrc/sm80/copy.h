// Copies of one tile between global memory, shared memory and registers, and the products of tiles.
#pragma once

#include <cute/tensor.hpp>

#include "../common/block_info.h"

namespace flash::sm80 {

using namespace cute;

// threadIdx.x. kRecomputesAddresses: the register is read again at each call, so that the compiler recomputes the
// addresses derived from it instead of keeping them in registers.
template <bool kRecomputesAddresses>
__device__ __forceinline__ int thread_index() {
    if constexpr (!kRecomputesAddresses) {
        return threadIdx.x;
    }
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// The rows [begin, end) of a tile. begin may be negative; without kHasBegin it is 0. Either way a row costs one
// comparison.
template <bool kHasBegin>
struct RowRange {
    int begin, end;

    __device__ __forceinline__ bool contains(int row) const {
        return kHasBegin ? unsigned(row - begin) < unsigned(max(end - begin, 0)) : row < end;
    }
};

// The rows that see at least one key, in the tile that begins at first_row.
template <bool Is_local>
__device__ __forceinline__ RowRange<Is_local> rows_with_key(const KeyRange<Is_local> &range, int first_row) {
    return {range.begin_row() - first_row, range.end_row() - first_row};
}

// A [seqlen, headdim] slice of one head of one sequence, whose rows begin at `row`, as a CuTe tensor.
template <typename Element>
__device__ auto head_tensor(const TensorRef &x, int bidb, int bidh, int row, int seqlen, int d) {
    Element *base =
        static_cast<Element *>(x.ptr) + bidb * x.batch_stride + bidh * x.head_stride + int64_t(row) * x.row_stride;
    return make_tensor(make_gmem_ptr(base), make_shape(seqlen, d), make_stride(x.row_stride, _1{}));
}

// Starts the copy of a tile. rows.contains(row): whether the copy has this row of the tile. Other rows, and columns
// outside of the head dim, become zeros in shared memory; they are not read. source, target, coords: (copy, rows,
// columns) of one thread; column_in_range: (columns).
template <typename TiledCopy, typename TensorG, typename TensorS, typename TensorC, typename TensorP, typename Rows>
__device__ __forceinline__ void copy_tile_async(const TiledCopy &tiled_copy, const TensorG &source, TensorS &&target,
                                                const TensorC &coords, const TensorP &column_in_range,
                                                const Rows &rows) {
    CUTE_UNROLL
    for (int row = 0; row < size<1>(source); ++row) {
        const bool row_in_range = rows.contains(get<0>(coords(0, row, 0)));
        CUTE_UNROLL
        for (int col = 0; col < size<2>(source); ++col) {
            copy(tiled_copy.with(row_in_range && column_in_range(col)), source(_, row, col), target(_, row, col));
        }
    }
}

// The same for the keys from first_key on of a paged K or V. head: page 0 of the key/value head; page_table: the pages
// of the sequence, each clamped to the num_pages that there are; leftpad: keys in the pages before the first valid
// one; target: the tile in shared memory.
template <typename TiledCopy, typename Element, typename TensorS, typename TensorC, typename TensorP>
__device__ __forceinline__ void copy_paged_tile_async(const TiledCopy &tiled_copy, const TensorRef &x,
                                                      const Element *head, const int *page_table, int num_pages,
                                                      int page_size, TensorS &&target, const TensorC &coords,
                                                      const TensorP &column_in_range, int first_key, int leftpad,
                                                      int seqlen_k) {
    CUTE_UNROLL
    for (int row = 0; row < size<1>(target); ++row) {
        const int key = leftpad + first_key + get<0>(coords(0, row, 0));
        const bool row_in_range = key < leftpad + seqlen_k;
        const int64_t page = row_in_range ? min(unsigned(page_table[key / page_size]), unsigned(num_pages - 1)) : 0;
        const Element *source_row = head + page * x.batch_stride + key % page_size * x.row_stride;
        CUTE_UNROLL
        for (int col = 0; col < size<2>(target); ++col) {
            Tensor source =
                make_tensor(make_gmem_ptr(source_row + get<1>(coords(0, row, col))), shape(target(_, row, col)));
            copy(tiled_copy.with(row_in_range && column_in_range(col)), source, target(_, row, col));
        }
    }
}

// Stores this thread's (copy, rows, columns) pieces that lie inside the tensor.
template <typename TiledCopy, typename TensorR, typename TensorG, typename TensorC>
__device__ __forceinline__ void store_tile(const TiledCopy &tiled_copy, const TensorR &source, TensorG &&target,
                                           const TensorC &coords, int rows_left, int d) {
    CUTE_UNROLL
    for (int row = 0; row < size<1>(source); ++row) {
        if (get<0>(coords(0, row, 0)) < rows_left) {
            CUTE_UNROLL
            for (int col = 0; col < size<2>(source); ++col) {
                if (get<1>(coords(0, row, col)) < d) {
                    copy(tiled_copy, source(_, row, col), target(_, row, col));
                }
            }
        }
    }
}

struct NoOp {
    template <typename... Args>
    __device__ __forceinline__ void operator()(Args...) const {}
};

// acc += A B^T with A and B in shared memory; rA and rB are their fragments. The first kASteps of A are in rA already.
// after_step(k, steps) puts other instructions between the steps. The compiler moves the loads of later steps ahead by
// itself; asking for it here costs registers and time.
template <int kASteps, typename TensorAcc, typename TensorrA, typename TensorrB, typename TensorsA, typename TensorsB,
          typename TiledMma, typename CopyA, typename CopyB, typename AfterStep = NoOp>
__device__ __forceinline__ void gemm(TensorAcc &acc, TensorrA &rA, TensorrB &rB, const TensorsA &sA, const TensorsB &sB,
                                     const TiledMma &tiled_mma, const CopyA &copy_A, const CopyB &copy_B, int thread,
                                     const AfterStep &after_step = {}) {
    auto thr_copy_A = copy_A.get_thread_slice(thread);
    auto thr_copy_B = copy_B.get_thread_slice(thread);
    Tensor tAsA = thr_copy_A.partition_S(sA);  // (CPY, CPY_M, CPY_K)
    Tensor tBsB = thr_copy_B.partition_S(sB);  // (CPY, CPY_N, CPY_K)
    Tensor tArA = thr_copy_A.retile_D(rA);
    Tensor tBrB = thr_copy_B.retile_D(rB);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rA); ++k) {
        if (k >= kASteps) {
            copy(copy_A, tAsA(_, _, k), tArA(_, _, k));
        }
        copy(copy_B, tBsB(_, _, k), tBrB(_, _, k));
        cute::gemm(tiled_mma, rA(_, _, k), rB(_, _, k), acc);
        after_step(k, decltype(size<2>(rA))::value);
    }
}

// acc += A B with A in registers, as P is after the softmax. sB: this thread's part of B.
template <typename TensorAcc, typename TensorrA, typename TensorrB, typename TensorsB, typename TiledMma,
          typename CopyB, typename ThrCopyB>
__device__ __forceinline__ void gemm_rs(TensorAcc &acc, const TensorrA &rA, TensorrB &rB, const TensorsB &sB,
                                        const TiledMma &tiled_mma, const CopyB &copy_B, const ThrCopyB &thr_copy_B) {
    Tensor tBrB = thr_copy_B.retile_D(rB);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rA); ++k) {
        copy(copy_B, sB(_, _, k), tBrB(_, _, k));
        cute::gemm(tiled_mma, rA(_, _, k), rB(_, _, k), acc);
    }
}

}  // namespace flash::sm80
