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

// Warps 2 and 3 of the producer warpgroup. They have few registers, and what they read from shared memory or shuffle
// waits long beside wgmma. So many loads wait together in shared memory, and lanes exchange next to nothing.
template <typename Traits, Kind kKind>
class RowWarps {
    using Element = typename Traits::Element;
    using Rows = WorkRows<Traits, kKind, kRowsOfUnit>;
    static constexpr int kHeadDim = Traits::kHeadDim, kChunks = Traits::kChunksOfRowWarp;
    const Flash_bwd_params &params;
    const WorkOrder &order;
    const WorkCounts &counts;
    const int warp, lane;
    uint4 *const chunks;  // [kChunks * 32] of this warp

public:
    static constexpr int kFirstWarp = 2, kWarps = 2;

    __device__ RowWarps(const Flash_bwd_params &params, typename Traits::SharedStorage &shared, const WorkOrder &order,
                        const WorkCounts &counts)
        : params(params),
          order(order),
          counts(counts),
          warp(uniform(threadIdx.x / 32) - kFirstWarp),
          lane(threadIdx.x % 32),
          chunks(shared.chunks[warp]) {}

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
    __device__ __forceinline__ static void load(uint4 &chunk, const void *source) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(*static_cast<const uint4 *>(source), chunk);
    }
    __device__ __forceinline__ static void wait_for_loads() {
        cute::cp_async_fence();
        cute::cp_async_wait<0>();
        __syncwarp();
    }

    // kRowsOfUnit rows, kLoaded at a time.
    __device__ __forceinline__ void preprocess(const PaddedRow &first) const {
        constexpr int kVector = 16 / sizeof(Element), kVectors = kHeadDim / kVector;   // of a row
        constexpr int kLoaded = kChunks * 32 / (2 * kVectors), kLanes = 32 / kLoaded;  // that share a row
        constexpr int kTogether = kVectors / kLanes;                                   // vectors of a lane
        static_assert(kLanes <= 2 && kRowsOfUnit % kLoaded == 0);
        if (params.dq_accum != nullptr) {
            auto *accum = reinterpret_cast<uint4 *>(params.dq_accum + first.padded_row * kHeadDim) + lane;
            CUTE_NO_UNROLL
            for (int i = 0; i < kRowsOfUnit * kHeadDim / 4; i += 128) {
                accum[i] = accum[i + 32] = accum[i + 64] = accum[i + 96] = {};
            }
        }
        const Sequence &seq = first.seq;
        const int rows = seq.seqlen_q - first.row;  // of the sequence
        const auto begin_of = [&](const TensorRef &x) {
            return static_cast<const Element *>(x.ptr) + first.bidb * x.batch_stride + first.bidh * x.head_stride +
                   int64_t(seq.q_begin + first.row) * x.row_stride;
        };
        // Chunk `vector` of a row. Neighbouring rows have other banks for the same vector.
        const auto place = [](int row, int vector) { return row * kVectors + (vector ^ row % 8); };
        const int64_t lse_begin =
            first.bidb * params.lse_batch_stride + first.bidh * params.lse_head_stride + seq.q_begin + first.row;
        bool is_large = false;
        CUTE_NO_UNROLL
        for (int begin = 0; begin < kRowsOfUnit; begin += kLoaded) {
            const int row = begin + lane / kLanes;  // of this lane
            float lse = -INFINITY, dlse = 0.0f, sum = 0.0f;
            if (begin < rows) {
                const int vector = lane % kVectors, column = vector * kVector < params.d ? vector * kVector : 0;
                const Element *out = begin_of(params.o) + column, *dout = begin_of(params.dout) + column;
                CUTE_NO_UNROLL
                for (int i = lane / kVectors; i < kLoaded; i += 32 / kVectors) {  // rows past the end load the last one
                    const int loaded = cute::min(begin + i, rows - 1);
                    load(chunks[place(i, vector)], out + loaded * params.o.row_stride);
                    load(chunks[place(kLoaded + i, vector)], dout + loaded * params.dout.row_stride);
                }
                if (row < rows) {
                    lse = static_cast<const float *>(params.softmax_lse)[lse_begin + row];
                    if (params.dsoftmax_lse != nullptr) {
                        dlse = static_cast<const float *>(params.dsoftmax_lse)[lse_begin + row];
                    }
                }
                wait_for_loads();
                const int in_chunks = lane / kLanes, first_vector = lane % kLanes * kTogether;
#pragma unroll 2
                for (int i = 0; i < kTogether; ++i) {
                    const float part = dot<Element>(chunks[place(in_chunks, first_vector + i)],
                                                    chunks[place(kLoaded + in_chunks, first_vector + i)]);
                    sum += (first_vector + i) * kVector < params.d ? part : 0.0f;
                }
                if (kLanes == 2) {
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                }
            }
            if (lane % kLanes == 0) {
                is_large |= store_statistics(params, first.padded_row + row, row < rows, sum, lse, dlse);
            }
            __syncwarp();  // the chunks have been read
        }
        is_large = __any_sync(0xffffffffu, is_large);
        if (lane == 0) {
            params.large_rows[first.padded_row / kRowsOfUnit] = is_large;
        }
    }

    // kRowsOfUnit rows, 16 at a time. Rows without a key get 0, as in store_dq.
    __device__ __forceinline__ void convert(const PaddedRow &first) const {
        using Tile = DqTile<Traits>;
        constexpr int kVectors = kHeadDim / 8;  // of a row, of 8 columns
        static_assert(kVectors <= kChunks && kRowsOfUnit == 64);
        const Sequence &seq = first.seq;
        const KeyRange<is_local(kKind)> range(params, seq.seqlen_q, seq.seqlen_k);
        const auto *accum = reinterpret_cast<const float4 *>(params.dq_accum + first.padded_row * kHeadDim);
        Element *target = static_cast<Element *>(params.dq.ptr) + first.bidb * params.dq.batch_stride +
                          first.bidh * params.dq.head_stride;
        // The chunk of a vector and of the lane that had it in its accumulator. Neighbouring vectors have other banks.
        const auto place = [](int vector, int of_lane) { return vector * 32 + (of_lane ^ vector % 8); };
        CUTE_NO_UNROLL
        for (int part = 0; part < 4 && first.row + 16 * part < seq.seqlen_q; ++part) {
            CUTE_UNROLL
            for (int i = 0; i < kVectors; ++i) {
                load(chunks[place(i, lane)], &accum[i / Tile::kVectors * (Traits::kTileOfDq / 4) +
                                                    Tile::place(i % Tile::kVectors, 32 * part + lane)]);
            }
            wait_for_loads();
            const int vector = lane % kVectors;
#pragma unroll 2
            for (int i = lane / kVectors; i < 16; i += 32 / kVectors) {
                const int row = first.row + 16 * part + i;
                uint32_t words[4];
                CUTE_UNROLL
                for (int quad = 0; quad < 4;
                     ++quad) {  // a chunk has two columns of row i % 8 and of the row 8 further on
                    const auto *of_row = reinterpret_cast<const float2 *>(&chunks[place(vector, i % 8 * 4 + quad)]);
                    const float2 x = of_row[i / 8];
                    using Pair = cutlass::Array<Element, 2>;
                    const Pair pair = cutlass::NumericArrayConverter<Element, float, 2>::convert(
                        {x.x * params.qk_scale, x.y * params.qk_scale});
                    words[quad] = reinterpret_cast<const uint32_t &>(pair);
                }
                if (row < seq.seqlen_q && vector * 8 < params.d) {
                    const bool has_keys = row >= range.begin_row() && row < range.end_row();
                    *reinterpret_cast<uint4 *>(target + int64_t(seq.q_begin + row) * params.dq.row_stride +
                                               vector * 8) =
                        has_keys ? make_uint4(words[0], words[1], words[2], words[3]) : uint4{};
                }
            }
            __syncwarp();  // the chunks have been read
        }
    }
};

}  // namespace flash::sm90
