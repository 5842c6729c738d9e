// A tile of the kernels for short sequences: all queries and keys of one sequence and head. A warp has 16 of its rows.
#pragma once

#include <cute/tensor.hpp>

#include <cstdint>
#include <type_traits>

#include "common/block_info.h"
#include "common/store_rows.h"
#include "flash.h"
#include "kvcache/instructions.h"

namespace flash::single_tile {

using namespace cute;

constexpr int kMaxSmem = 99 * 1024;  // bytes of a CTA on the GPUs that have the least

// kTile: queries, and keys, of a tile: 16, 32 or 64.
template <DType kDType, int kHeadDim_, int kTile_>
struct Traits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kHeadDim = kHeadDim_, kTile = kTile_;
    static constexpr int kRowsOfWarp = 16, kWarps = 4;  // the m16 of mma.sync; of a CTA
    static constexpr int kWarpsOfTile = kTile / kRowsOfWarp, kTiles = kWarps / kWarpsOfTile;
    static constexpr int kNThreads = 32 * kWarps, kThreadsOfTile = 32 * kWarpsOfTile;
    static_assert(kTile == 16 || kTile == 32 || kTile == 64);
};

// Rows in shared memory. Eight elements more than a row has put the 8 rows that ldmatrix reads into different banks.
template <typename Element, int kRows, int kColumns>
struct Rows {
    static constexpr int kStride = kColumns + 8;
    static_assert(kColumns % 16 == 0);
    alignas(16) Element elements[kRows * kStride];

    __device__ __forceinline__ uint32_t address(int row, int column) const {
        return cast_smem_ptr_to_uint(elements + row * kStride + column);
    }
};

// ---- the place of a warp

template <typename Traits>
struct Place {
    int tile;  // in the CTA
    int warp;  // in the tile
    int bidb, head;
    bool exists;

    // heads: of a sequence, with a tile each.
    __device__ __forceinline__ Place(const Flash_fwd_params &params, int heads) {
        const int warp_of_cta = uniform(threadIdx.x / 32);
        tile = warp_of_cta / Traits::kWarpsOfTile;
        warp = warp_of_cta % Traits::kWarpsOfTile;
        const int64_t index = int64_t{blockIdx.x} * Traits::kTiles + tile;
        bidb = static_cast<int>(index / heads);
        head = static_cast<int>(index % heads);
        exists = bidb < params.b;
    }

    __device__ __forceinline__ int first_row() const { return warp * Traits::kRowsOfWarp; }
    // The rows of a thread in an accumulator are this one and the one 8 further on.
    __device__ __forceinline__ int row_of_thread() const { return first_row() + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int thread() const { return threadIdx.x % Traits::kThreadsOfTile; }

    // Waits for the warps of the tile.
    __device__ __forceinline__ void sync() const {
        if constexpr (Traits::kWarpsOfTile == 1) {
            __syncwarp();
        } else {
            kvcache::named_barrier_sync(1 + tile, Traits::kThreadsOfTile);
        }
    }
};

// ---- which keys and rows count

// The rows that see a key, and the keys that one of these rows sees. Zeros are loaded in place of all others: NaN times
// 0 is NaN.
struct Visible : KeyRange<true> {
    int row_begin, row_end, key_begin, key_end;
    bool is_local;

    __device__ __forceinline__ Visible(const Flash_fwd_params &params)
        : KeyRange<true>(params, params.seqlen_q, params.seqlen_k), is_local(params.is_local()) {
        row_begin = begin_row();
        row_end = end_row();
        key_begin = row_begin < row_end ? begin_key(row_begin) : 0;
        key_end = row_begin < row_end ? end_key(row_end - 1) : 0;
    }
    __device__ __forceinline__ bool has_keys(int row) const { return row >= row_begin && row < row_end; }
    __device__ __forceinline__ bool has_rows_without_keys() const { return row_begin > 0 || row_end < seqlen_q; }
    // False if every row sees all keys of the tile.
    template <int kTile>
    __device__ __forceinline__ bool needs_mask() const {
        return is_local || seqlen_k < kTile;
    }
};

// ---- loads

template <typename Element>
__device__ __forceinline__ Element *head_of(const TensorRef &x, int bidb, int bidh) {
    return static_cast<Element *>(x.ptr) + bidb * x.batch_stride + bidh * x.head_stride;
}

// The threads of a tile start to load the rows [begin, end) of a head; other rows, and columns from d on, become zeros.
template <typename Traits, typename RowsOfTile, typename Element>
__device__ __forceinline__ void load_rows(RowsOfTile &rows, const Element *head, int64_t row_stride, int begin, int end,
                                          int d, int thread) {
    constexpr int kVectors = Traits::kHeadDim / 8;  // of 16 bytes
    static_assert(Traits::kTile * kVectors % Traits::kThreadsOfTile == 0);
    const auto load = [&](int row, int column, const Element *from) {
        const bool is_in_range = unsigned(row - begin) < unsigned(end - begin) && column < d;
        kvcache::cp_async_16(rows.address(row, column), is_in_range ? from : head, is_in_range);
    };
    if constexpr (Traits::kThreadsOfTile % kVectors == 0) {  // a thread has one column
        constexpr int kRowsAtOnce = Traits::kThreadsOfTile / kVectors;
        const int row = thread / kVectors, column = thread % kVectors * 8;
        const Element *from = head + row * row_stride + column;
        CUTE_UNROLL
        for (int i = 0; i < Traits::kTile; i += kRowsAtOnce) {
            load(row + i, column, from + i * row_stride);
        }
    } else {
        CUTE_UNROLL
        for (int i = 0; i < Traits::kTile * kVectors; i += Traits::kThreadsOfTile) {
            const int row = (i + thread) / kVectors, column = (i + thread) % kVectors * 8;
            load(row, column, head + row * row_stride + column);
        }
    }
}

// ---- operands of m16n8k16

// 16 rows and 16 columns as an A operand.
template <typename RowsOfTile>
__device__ __forceinline__ void load_A(uint32_t (&a)[4], const RowsOfTile &rows, int row, int column) {
    const int lane = threadIdx.x % 32;
    kvcache::ldmatrix_x4(a, rows.address(row + lane % 16, column + lane / 16 * 8));
}

// The transpose of 16 rows and 16 columns as an A operand.
template <typename RowsOfTile>
__device__ __forceinline__ void load_A_transposed(uint32_t (&a)[4], const RowsOfTile &rows, int row, int column) {
    const int lane = threadIdx.x % 32;
    kvcache::ldmatrix_x4_transposed(a, rows.address(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
}

// acc[0], acc[1] += A B^T for 16 rows and 16 columns of B: two n8 of 8 rows each.
template <typename Element, typename RowsOfTile>
__device__ __forceinline__ void multiply_by_transpose(float (*acc)[4], const uint32_t (&a)[4], const RowsOfTile &rows,
                                                      int row, int column) {
    const int lane = threadIdx.x % 32;
    uint32_t b[4];
    kvcache::ldmatrix_x4(b, rows.address(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
    kvcache::mma_m16n8k16<Element>(acc[0], a, b[0], b[1]);
    kvcache::mma_m16n8k16<Element>(acc[1], a, b[2], b[3]);
}

// acc[0], acc[1] += A B for 16 rows and 16 columns of B: two n8 of 8 columns each.
template <typename Element, typename RowsOfTile>
__device__ __forceinline__ void multiply_by(float (*acc)[4], const uint32_t (&a)[4], const RowsOfTile &rows, int row,
                                            int column) {
    const int lane = threadIdx.x % 32;
    uint32_t b[4];
    kvcache::ldmatrix_x4_transposed(b, rows.address(row + lane % 16, column + lane / 16 * 8));
    kvcache::mma_m16n8k16<Element>(acc[0], a, b[0], b[1]);
    kvcache::mma_m16n8k16<Element>(acc[1], a, b[2], b[3]);
}

// ---- scores and results

// The scores of a warp: 16 rows, all keys of the tile. Element i of an n8 has row i / 2 of the thread, and the key
// key_of(n8, i).
template <typename Traits>
struct Scores {
    static constexpr int kN8 = Traits::kTile / 8;
    float values[kN8][4] = {};

    __device__ __forceinline__ static int key_of(int n8, int i) { return n8 * 8 + threadIdx.x % 4 * 2 + i % 2; }

    // Values of keys that a row does not see become -inf.
    __device__ __forceinline__ void mask(const Visible &visible, int row_of_thread) {
        if (visible.template needs_mask<Traits::kTile>()) {
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                const int row = row_of_thread + i / 2 * 8;
                const int begin = visible.begin_key(row), end = visible.end_key(row);
                CUTE_UNROLL
                for (int n8 = 0; n8 < kN8; ++n8) {
                    const int key = key_of(n8, i);
                    values[n8][i] = key >= begin && key < end ? values[n8][i] : -INFINITY;
                }
            }
        }
    }

    // The values of 16 keys, rounded, as an A operand of a product over keys.
    template <typename Element = typename Traits::Element>
    __device__ __forceinline__ void to_A(uint32_t (&a)[4], int first_key) const {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
            const float (&pair)[4] = values[first_key / 8 + i / 2];
            a[i] = kvcache::pack<Element>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
    }

    // Writes the values of the warp, rounded, to rows of the tile, from the same operands.
    template <typename RowsOfTile>
    __device__ __forceinline__ void store(RowsOfTile &rows, int row_of_thread) const {
        CUTE_UNROLL
        for (int n8 = 0; n8 < kN8; ++n8) {
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
                auto *to = rows.elements + (row_of_thread + i * 8) * RowsOfTile::kStride + key_of(n8, 0);
                *reinterpret_cast<uint32_t *>(to) =
                    kvcache::pack<typename Traits::Element>(values[n8][2 * i], values[n8][2 * i + 1]);
            }
        }
    }
};

// acc += A B^T over the columns [0, d) of both, for the rows of A from first_row and all keys of the tile.
// on_operand(a, column) sees the operands of A.
template <typename Traits, typename RowsOfA, typename RowsOfB, typename OnOperand>
__device__ __forceinline__ void multiply_scores(Scores<Traits> &acc, const RowsOfA &rows_a, int first_row,
                                                const RowsOfB &rows_b, int d, int keys, const OnOperand &on_operand) {
    CUTE_UNROLL
    for (int column = 0; column < Traits::kHeadDim; column += 16) {
        if (column < d) {
            uint32_t a[4];
            load_A(a, rows_a, first_row, column);
            on_operand(a, column);
            CUTE_UNROLL
            for (int key = 0; key < Traits::kTile; key += 16) {
                if (key < keys) {
                    multiply_by_transpose<typename Traits::Element>(acc.values + key / 8, a, rows_b, key, column);
                }
            }
        }
    }
}

// 16 rows of a result.
template <typename Traits>
struct Result {
    float values[Traits::kHeadDim / 8][4] = {};

    // += A B, for 16 rows of B from `row` and its columns [0, d).
    template <typename RowsOfTile>
    __device__ __forceinline__ void add(const uint32_t (&a)[4], const RowsOfTile &rows, int row, int d) {
        CUTE_UNROLL
        for (int column = 0; column < Traits::kHeadDim; column += 16) {
            if (column < d) {
                multiply_by<typename Traits::Element>(values + column / 8, a, rows, row, column);
            }
        }
    }

    // Rows without a key become zeros, whatever they hold.
    __device__ __forceinline__ void clear_rows_without_keys(const Visible &visible, int row_of_thread) {
        if (visible.has_rows_without_keys()) {
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
                CUTE_UNROLL
                for (int n8 = 0; n8 < Traits::kHeadDim / 8; ++n8) {
                    CUTE_UNROLL
                    for (int j = 2 * i; j < 2 * i + 2; ++j) {
                        values[n8][j] = visible.has_keys(row_of_thread + i * 8) ? values[n8][j] : 0.0f;
                    }
                }
            }
        }
    }

    // Stores the rows of the thread times factor(i), i = 0 and 1.
    template <typename Factor>
    __device__ __forceinline__ void store(typename Traits::Element *head, int64_t row_stride, int row_of_thread,
                                          int rows, int d, const Factor &factor) const {
        constexpr int kN8 = Traits::kHeadDim / 8;
        const Tensor acc = make_tensor(&values[0][0], make_layout(make_shape(_2{}, make_shape(_2{}, Int<kN8>{})),
                                                                  make_stride(_2{}, make_stride(_1{}, _4{}))));
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
            const int row = row_of_thread + i * 8;
            typename Traits::Element *const to = head + row * row_stride;
            store_row<typename Traits::Element, uint2>(acc, i, factor(i), [&](int column, const uint2 &vector) {
                if (row < rows && column < d) {
                    *reinterpret_cast<uint2 *>(to + column) = vector;
                }
            });
        }
    }
};

}  // namespace flash::single_tile
