// Preprocess and convert of query rows: as work tiles of all threads, and by two warps of a work tile of compute.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "../common/preprocess_rows.h"
#include "convert_dq.h"
#include "dropout_bwd.h"
#include "work_counts.h"
#include "work_tiles_bwd.h"

namespace flash::sm90 {

// Padded query rows of a head of dK and dV: part `index` of all of them, in parts of kRows.
template <typename Traits, Kind kKind, int kRows>
struct WorkRows {
    int64_t begin;     // in the padded row statistics
    int count;         // a multiple of 64
    int bidb, bidh;    // bidh: of the first query head
    int64_t in_heads;  // the first row, counted from the first row of that head

    __device__ WorkRows(const Flash_bwd_params &params, const WorkOrder &order, int head, int index) {
        int bidh_dkv;
        order.by_sequence(bidb, bidh_dkv, head);
        bidh = bidh_dkv * params.heads_per_dkv;
        in_heads = int64_t{index} * kRows;
        const int64_t of_head = params.padded_head_stride * params.heads_per_dkv;
        begin = head * of_head + in_heads;
        count = static_cast<int>(cute::min(of_head - in_heads, int64_t{kRows}));
    }

    // offset: a row of the work tile.
    __device__ __forceinline__ PaddedRow at(const Flash_bwd_params &params, int offset) const {
        constexpr int kRounded = Flash_bwd_params::kRowsRounded;
        int64_t in_head = in_heads + offset;
        int head = bidh;
        if (params.heads_per_dkv > 1) {
            head += static_cast<int>(in_head / params.padded_head_stride);
            in_head %= params.padded_head_stride;
        }
        if (!may_be_varlen(kKind) || params.cu_seqlens_q == nullptr) {
            return {begin + offset, bidb, head, sequence<may_be_varlen(kKind)>(params, bidb), int(in_head)};
        }
        const auto [found, block] =
            find_block(params.cu_seqlens_q, params.b, params.total_q, kRounded, in_head / kRounded);
        return {begin + offset, found, head, sequence(params, found), block * kRounded + int(in_head % kRounded)};
    }
};

// A warp of a work tile has 16 rows at a time, every 12th part.
constexpr int kRowsOfWarp = 16;
template <typename Traits>
constexpr int kWarps = Traits::kNThreads / 32;

// A work tile of phase preprocess. All threads.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void preprocess(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                           const WorkCounts &counts, const WorkOrder &order, const WorkTile &tile) {
    using Rows = WorkRows<Traits, kKind, kRowsOfWorkTile>;
    constexpr int kZeros = sizeof(shared.zeros) / sizeof(uint4), kFlagRows = Flash_bwd_params::kRowsPerFlag;
    const Rows rows(params, order, tile.head, tile.index);
    for (int i = threadIdx.x; i < kZeros; i += Traits::kNThreads) {
        shared.zeros[i] = {};
    }
    if (threadIdx.x < kRowsOfWorkTile / kFlagRows) {
        shared.large_rows[threadIdx.x] = 0;
    }
    cutlass::arch::fence_view_async_shared();  // before the copy engine reads the zeros
    __syncthreads();
    if (threadIdx.x == Traits::kNThreads - 32 && params.dq_accum != nullptr) {
        auto *accum = reinterpret_cast<char *>(params.dq_accum + rows.begin * Traits::kHeadDim);
        const auto *end = reinterpret_cast<char *>(params.dq_accum + (rows.begin + rows.count) * Traits::kHeadDim);
        for (; accum < end; accum += sizeof(shared.zeros)) {
            SM90_BULK_COPY_S2G::copy(shared.zeros, accum, sizeof(shared.zeros));
        }
        tma_store_arrive();
    }
    CUTE_NO_UNROLL
    for (int row = threadIdx.x / 32 * kRowsOfWarp; row < rows.count; row += kWarps<Traits> * kRowsOfWarp) {
        const PaddedRow first = rows.at(params, row);
        if (preprocess_rows<typename Traits::Element, Traits::kHeadDim, kRowsOfWarp>(params, first) &&
            threadIdx.x % 32 == 0) {
            shared.large_rows[row / kFlagRows] = 1;
        }
    }
    if (threadIdx.x == Traits::kNThreads - 32) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the zeros are written
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < rows.count / kFlagRows; ++i) {
            params.large_rows[rows.begin / kFlagRows + i] = shared.large_rows[i];
        }
        counts.add(counts.preprocessed(tile.head), rows.count / kRowsOfUnit);
    }
}

// A work tile of phase convert. All threads.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void convert(const Flash_bwd_params &params, const WorkCounts &counts,
                                        const WorkOrder &order, const WorkTile &tile) {
    using Rows = WorkRows<Traits, kKind, kRowsOfWorkTile>;
    const Rows rows(params, order, tile.head, tile.index);
    if (threadIdx.x == 0) {
        counts.wait(counts.computed(tile.head), order.compute * Traits::kPartsOfDq);
    }
    __syncthreads();
    // As many parts are loaded together as registers hold.
    constexpr int kTogether = Traits::kHeadDim <= 64 ? 4 : Traits::kHeadDim <= 128 ? 2 : 1;
    constexpr int kStride = kWarps<Traits> * kRowsOfWarp;
    CUTE_NO_UNROLL
    for (int row = threadIdx.x / 32 * kRowsOfWarp; row < rows.count; row += kTogether * kStride) {
        decltype(load_dq<Traits>(params, 0)) acc[kTogether];
        CUTE_UNROLL
        for (int i = 0; i < kTogether; ++i) {
            if (row + i * kStride < rows.count) {
                acc[i] = load_dq<Traits>(params, rows.begin + row + i * kStride);
            }
        }
        CUTE_UNROLL
        for (int i = 0; i < kTogether; ++i) {
            if (row + i * kStride < rows.count) {
                store_dq<Traits, kKind>(params, rows.at(params, row + i * kStride), acc[i]);
            }
        }
    }
}

// Whether row work comes with compute: where the copy engine adds dQ, and no warps draw.
template <typename Traits, Kind kKind>
constexpr bool kHasRowWarps = Traits::kConsumersComputeDq && !kHasDrawingWarps<Traits, kKind>;

// Warps 2 and 3 of the producer warpgroup, which have few registers: what a lane loads waits in shared memory.
template <typename Traits, Kind kKind>
class RowWarps {
    using Element = typename Traits::Element;
    using Rows = WorkRows<Traits, kKind, kRowsOfUnit>;
    static constexpr int kHeadDim = Traits::kHeadDim, kChunks = Traits::kChunksOfRowWarp;
    const Flash_bwd_params &params;
    const WorkOrder &order;
    const WorkCounts &counts;
    const int warp, lane;
    uint4 *const chunks;  // of this lane: every 32nd

public:
    static constexpr int kFirstWarp = 2, kWarps = 2;

    __device__ RowWarps(const Flash_bwd_params &params, typename Traits::SharedStorage &shared, const WorkOrder &order,
                        const WorkCounts &counts)
        : params(params),
          order(order),
          counts(counts),
          warp(uniform(threadIdx.x / 32) - kFirstWarp),
          lane(threadIdx.x % 32),
          chunks(&shared.chunks[warp][lane]) {}

    // The row work that comes with a work tile of compute.
    __device__ __forceinline__ void run(const WorkTile &tile) const {
        const RowUnits prepared = order.prepared_beside(tile);
        CUTE_NO_UNROLL
        for (int unit = prepared.begin + warp; unit < prepared.end; unit += kWarps) {
            preprocess(Rows(params, order, prepared.head, unit).at(params, 0));
            __syncwarp();  // one lane's release covers what the others wrote
            if (lane == 0) {
                counts.add(counts.preprocessed(prepared.head));
            }
        }
        const RowUnits converted = order.converted_beside(tile);
        if (converted.begin + warp >= converted.end) {
            return;
        }
        if (lane == 0) {
            counts.wait(counts.computed(converted.head), order.compute * Traits::kPartsOfDq);
        }
        __syncwarp();
        CUTE_NO_UNROLL
        for (int unit = converted.begin + warp; unit < converted.end; unit += kWarps) {
            convert(Rows(params, order, converted.head, unit).at(params, 0));
        }
    }

private:
    // Copies 16 bytes into chunk i of this lane.
    __device__ __forceinline__ void load(int i, const void *source) const {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(*static_cast<const uint4 *>(source), chunks[i * 32]);
    }
    __device__ __forceinline__ static void wait_for_loads() {
        cute::cp_async_fence();
        cute::cp_async_wait<0>();
    }

    // kRowsOfUnit rows.
    __device__ __forceinline__ void preprocess(const PaddedRow &first) const {
        constexpr int kVector = 16 / sizeof(Element), kLanes = kHeadDim / kVector;  // lanes share a row
        constexpr int kStride = 32 / kLanes, kTogether = kChunks / 2, kLoaded = kStride * kTogether;
        static_assert(kLoaded <= 32 && kRowsOfUnit % kLoaded == 0);
        if (params.dq_accum != nullptr) {
            auto *accum = reinterpret_cast<uint4 *>(params.dq_accum + first.padded_row * kHeadDim) + lane;
            CUTE_NO_UNROLL
            for (int i = 0; i < kRowsOfUnit * kHeadDim / 4; i += 128) {
                accum[i] = accum[i + 32] = accum[i + 64] = accum[i + 96] = {};
            }
        }
        const Sequence &seq = first.seq;
        const int rows = seq.seqlen_q - first.row, column = lane % kLanes * kVector;  // rows of the sequence
        const auto row_of = [&](const TensorRef &x, int row) {
            return static_cast<const Element *>(x.ptr) + first.bidb * x.batch_stride + first.bidh * x.head_stride +
                   int64_t(seq.q_begin + first.row + row) * x.row_stride + (column < params.d ? column : 0);
        };
        const int64_t lse_begin =
            first.bidb * params.lse_batch_stride + first.bidh * params.lse_head_stride + seq.q_begin + first.row;
        bool is_large = false;
        CUTE_NO_UNROLL
        for (int begin = 0; begin < kRowsOfUnit; begin += kLoaded) {
            const int row = begin + lane;  // whose statistics this lane stores
            float lse = -INFINITY, dlse = 0.0f, dot_of_row = 0.0f;
            if (row < rows && lane < kLoaded) {
                lse = static_cast<const float *>(params.softmax_lse)[lse_begin + row];
                if (params.dsoftmax_lse != nullptr) {
                    dlse = static_cast<const float *>(params.dsoftmax_lse)[lse_begin + row];
                }
            }
            if (begin < rows) {
                CUTE_NO_UNROLL
                for (int i = 0; i < kTogether; ++i) {  // rows past the end load the last one
                    const int loaded = cute::min(begin + i * kStride + lane / kLanes, rows - 1);
                    load(2 * i, row_of(params.o, loaded));
                    load(2 * i + 1, row_of(params.dout, loaded));
                }
                wait_for_loads();
                CUTE_NO_UNROLL
                for (int i = 0; i < kTogether; ++i) {
                    float sum = column < params.d ? dot<Element>(chunks[2 * i * 32], chunks[(2 * i + 1) * 32]) : 0.0f;
                    CUTE_UNROLL
                    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
                        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                    }
                    sum = __shfl_sync(0xffffffffu, sum, lane % kStride * kLanes);
                    dot_of_row = lane / kStride == i ? sum : dot_of_row;
                }
            }
            if (lane < kLoaded) {
                is_large |= store_statistics(params, first.padded_row + row, row < rows, dot_of_row, lse, dlse);
            }
        }
        is_large = __any_sync(0xffffffffu, is_large);
        if (lane == 0) {
            params.large_rows[first.padded_row / kRowsOfUnit] = is_large;
        }
    }

    // kRowsOfUnit rows, 16 at a time.
    __device__ __forceinline__ void convert(const PaddedRow &first) const {
        using Tile = DqTile<Traits>;
        constexpr int kVectors = kHeadDim / 8;
        static_assert(kVectors <= kChunks && kRowsOfUnit == 64);
        const auto *accum = reinterpret_cast<const float4 *>(params.dq_accum + first.padded_row * kHeadDim);
        CUTE_NO_UNROLL
        for (int part = 0; part < 4 && first.row + 16 * part < first.seq.seqlen_q; ++part) {
            CUTE_UNROLL
            for (int i = 0; i < kVectors; ++i) {
                load(i, &accum[i / Tile::kVectors * (Traits::kTileOfDq / 4) +
                               Tile::place(i % Tile::kVectors, 32 * part + lane)]);
            }
            wait_for_loads();
            const PaddedRow row{first.padded_row + 16 * part, first.bidb, first.bidh, first.seq, first.row + 16 * part};
            // (row, col) of this lane, of 32 columns: vector i is the columns 2 i and 2 i + 1 of both rows.
            using Layout = cute::Layout<Shape<_2, Shape<_2, _4>>, Stride<_2, Stride<_1, Int<128>>>>;
            CUTE_NO_UNROLL
            for (int i = 0; i < kVectors; i += 4) {
                const auto *of_vector = reinterpret_cast<const float *>(&chunks[i * 32]);
                store_dq<Traits, kKind>(params, row, make_tensor(make_smem_ptr(of_vector), Layout{}), 8 * i);
            }
        }
    }
};

}  // namespace flash::sm90
