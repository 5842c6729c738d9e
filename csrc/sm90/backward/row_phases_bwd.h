// The phases of the backward that work on rows: before the products preprocess (delta, zeros for dQ), after them
// convert (dQ from float32 to the dtype of q).
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/key_ranges.h"
#include "common/preprocess_rows.h"
#include "cta_pair_bwd.h"
#include "dispatch/kind.h"
#include "dq_tile.h"
#include "kvcache/instructions.h"
#include "sm90/common/find_block.h"
#include "steps_bwd.h"
#include "work_tiles_bwd.h"

namespace flash::sm90 {

// ---- the rows of a work tile, and how its warps divide them

// A row tile: the padded query rows of a work tile, or a CTA's share of them in a cluster. A part has a few of them, of
// one head and one sequence, or some of their columns. Warp w of n works on parts w, w + n, w + 2 n, ...
template <typename Traits, Kind kKind>
struct RowTile {
    static constexpr int kWarps = Traits::kNThreads / 32;
    int64_t begin;     // in the padded row statistics
    int count;         // a multiple of 128, or 0
    int bidb, bidh;    // bidh: of the first query head
    int64_t in_heads;  // the first row, counted from the first row of that head

    __device__ RowTile(const Flash_bwd_params &params, const WorkOrder &order, const WorkTile &tile) {
        int bidh_dkv;
        order.by_sequence(bidb, bidh_dkv, tile.head);
        bidh = bidh_dkv * params.heads_per_dkv;
        in_heads = (int64_t{tile.index} * Traits::kCtas + rank_in_cluster<Traits>()) * Traits::kRowsPerTile;
        const int64_t of_head = params.padded_head_stride * params.heads_per_dkv;  // of dK and dV
        begin = tile.head * of_head + in_heads;
        const int64_t left = of_head - in_heads;  // a pair of CTAs: the second one may have none
        count = static_cast<int>(
            cute::min(Traits::kCtas > 1 ? cute::max(left, int64_t{0}) : left, int64_t{Traits::kRowsPerTile}));
    }

    // Says to which sequence rows of the tile belong. It keeps the sequence of one row for the next.
    class Places {
        const Flash_bwd_params &params;
        const RowTile &tile;
        FoundBlock known{};
        int64_t begin = 0, end = 0;  // the padded blocks of `known`, counted from the first one of the head

    public:
        __device__ __forceinline__ Places(const Flash_bwd_params &params, const RowTile &tile)
            : params(params), tile(tile) {}

        // offset: a row of the tile, the same in all lanes of a warp.
        __device__ __forceinline__ PaddedRow at(int offset) {
            constexpr int kRounded = Flash_bwd_params::kRowsRounded;
            int64_t in_head = tile.in_heads + offset;
            int head = tile.bidh;
            if (params.heads_per_dkv > 1) {
                head += static_cast<int>(in_head / params.padded_head_stride);
                in_head %= params.padded_head_stride;
            }
            if (!may_be_varlen(kKind) || params.cu_seqlens_q == nullptr) {
                return {tile.begin + offset, tile.bidb, head, sequence</*kMayBeVarlen=*/false>(params, tile.bidb),
                        int(in_head)};
            }
            const int64_t block = in_head / kRounded;
            if (block < begin || block >= end) {
                known = find_block_by_warp</*kOfKeys=*/false>(params, kRounded, block);
                begin = first_block(known.sequence.q_begin, known.bidb, kRounded);
                end = first_block(known.sequence.q_begin + known.sequence.seqlen_q, known.bidb + 1, kRounded);
            }
            return {tile.begin + offset, known.bidb, head, known.sequence,
                    static_cast<int>(max(block - begin, int64_t{0})) * kRounded + int(in_head % kRounded)};
        }
    };

    // How many stages of `bytes` bytes each warp has: as many as fit into `capacity` bytes, at most one for each of its
    // parts. `parts`: of a work tile.
    static constexpr int stages(int capacity, int bytes, int parts) {
        return cute::max(cute::min(capacity / (kWarps * bytes), (parts + kWarps - 1) / kWarps), 1);
    }

    // Calls load(stage, part) and finish(stage, part) for every part of the warp, of `parts` in all. Each warp has
    // `kStages` stages in shared memory. load() copies a part by cp.async, and the copies of all stages are in flight
    // at once. A loop needs less of the instruction cache than parts in registers. meanwhile() runs once, after the
    // first loads are issued.
    template <int kStages, typename Load, typename Meanwhile, typename Finish>
    __device__ __forceinline__ static void for_each_part(int parts, const Load &load, const Meanwhile &meanwhile,
                                                         const Finish &finish) {
        int next = threadIdx.x / 32;
        CUTE_NO_UNROLL
        for (int stage = 0; stage < kStages; ++stage, next += kWarps) {
            if (next < parts) {
                load(stage, next);
            }
            kvcache::cp_async_commit();
        }
        meanwhile();
        int stage = 0;
        CUTE_NO_UNROLL
        for (int part = threadIdx.x / 32; part < parts; part += kWarps, next += kWarps) {
            kvcache::cp_async_wait_group<kStages - 1>();
            __syncwarp();  // all lanes' copies are there
            finish(stage, part);
            __syncwarp();  // all lanes have read the stage
            if (next < parts) {
                load(stage, next);
            }
            kvcache::cp_async_commit();
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
    }
};

// The rows of a sequence that see a key.
struct RowsOfMask {
    int begin, end;

    __device__ __forceinline__ bool contains(int row) const { return row >= begin && row < end; }
};

// row: of the head and the sequence. With attn_bias these are the rows that may see a key.
template <Kind kKind>
__device__ __forceinline__ auto rows_with_keys(const Flash_bwd_params &params, const PaddedRow &row) {
    if constexpr (has_ranges(kKind)) {
        return RowsWithKeys{RangesOfHead(params, row.bidb, row.bidh), 0, row.seq.seqlen_q};
    } else {
        const KeyRange<is_local(kKind)> range(params, row.seq.seqlen_q, row.seq.seqlen_k);
        return RowsOfMask{range.begin_row(), range.end_row()};
    }
}

// ---- preprocess: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded to whole tiles, a flag for large ones, and
// zeros in the accumulator of dQ.

template <typename Traits, Kind kKind>
class PreprocessBwd {
    using Element = typename Traits::Element;
    using Rows = RowTile<Traits, kKind>;
    static constexpr int kVector = 16 / sizeof(Element), kVectors = Traits::kHeadDim / kVector;
    static constexpr int kLanes = kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;  // that share a row, 16 bytes each
    static constexpr int kStride = 32 / kLanes;                                  // rows of a warp at a time
    static constexpr int kSteps = 4, kRows = kSteps * kStride;                   // of a part
    static constexpr int kFlagRows = Traits::kBlockM;                            // that share a flag
    static_assert(Flash_bwd_params::kRowsRounded % kFlagRows == 0 && kFlagRows % kRows == 0);
    static_assert(kFlagRows >= Flash_bwd_params::kRowsPerFlag, "large_rows has one flag per kRowsPerFlag rows");
    static_assert(Traits::kRowsPerTile / kFlagRows <= 32, "a warp writes the flags of a work tile");
    static constexpr bool kLseInBase2 = stores_lse_in_base_2<Traits, kKind>();
    static constexpr int kThreadOfZeros = Traits::kNThreads - 32;  // of a warp that may have fewer parts

    struct Part {
        uint4 out[kRows][kLanes], dout[kRows][kLanes];
        float lse[kRows], dlse[kRows];  // lse: -inf for rows without a key, and past the end of the sequence
    };
    struct SharedByWarps {
        uint4 zeros[512];
        int large_rows[Traits::kRowsPerTile / kFlagRows];
    };
    static constexpr int kStages =
        Rows::stages(Traits::kSmemForRows - sizeof(SharedByWarps), sizeof(Part), Traits::kRowsPerTile / kRows);

    const Flash_bwd_params &params;
    const Rows rows;
    const int lane, lane_of_row, row_of_lane;

public:
    struct SharedStorage {
        Part parts[Rows::kWarps][kStages];
        SharedByWarps by_warps;
    };
    static_assert(sizeof(SharedStorage) <= Traits::kSmemForRows);

    __device__ PreprocessBwd(const Flash_bwd_params &params, const WorkOrder &order, const WorkTile &tile)
        : params(params),
          rows(params, order, tile),
          lane(threadIdx.x % 32),
          lane_of_row(lane % kLanes),
          row_of_lane(lane / kLanes) {}

    // All threads.
    __device__ __forceinline__ void run(SharedStorage &shared, const WorkCounts &counts, int head) const {
        Part *stages = shared.parts[threadIdx.x / 32];
        bool has_large_rows = false;
        typename Rows::Places loaded(params, rows);
        [[maybe_unused]] typename Rows::Places finished(params, rows);
        rows.template for_each_part<kStages>(
            rows.count / kRows, [&](int stage, int part) { load(stages[stage], loaded.at(part * kRows)); },
            [&] { start_zeros(shared.by_warps); },
            [&](int stage, int part) {
                if constexpr (has_bias(kKind)) {
                    const PaddedRow first = finished.at(part * kRows);
                    const int flags = finish(stages[stage], first.padded_row, logit_of(first));
                    has_large_rows |= flags % 2 != 0;
                    if (lane == 0) {
                        atomicOr(&shared.by_warps.large_rows[part * kRows / kFlagRows], flags);
                    }
                } else if (finish(stages[stage], rows.begin + part * kRows, -INFINITY)) {
                    has_large_rows = true;
                    if (lane == 0) {
                        shared.by_warps.large_rows[part * kRows / kFlagRows] = 1;
                    }
                }
            });
        if (threadIdx.x == kThreadOfZeros) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the zeros are written
        }
        if (__syncthreads_or(has_large_rows) && kLseInBase2) {
            store_large_lse(shared.by_warps);
            __syncthreads();
        }
        if (threadIdx.x < 32) {
            if (lane < rows.count / kFlagRows) {
                params.large_rows[rows.begin / kFlagRows + lane] = shared.by_warps.large_rows[lane];
            }
            __syncwarp();  // lane 0's release covers what the others have written
            if (lane == 0) {
                counts.add(counts.preprocessed(head));
            }
        }
    }

private:
    // Rows past the end of the sequence are not read.
    __device__ __forceinline__ void load(Part &part, const PaddedRow &first) const {
        const int valid = first.seq.seqlen_q - first.row, begin = first.seq.q_begin + first.row;
        const auto source = [&](const TensorRef &x) {
            return static_cast<const Element *>(x.ptr) + first.bidb * x.batch_stride + first.bidh * x.head_stride +
                   int64_t(begin + row_of_lane) * x.row_stride + lane_of_row * kVector;
        };
        const Element *out = source(params.o), *dout = source(params.dout);
        const bool has_columns = lane_of_row * kVector < params.d_v;
        CUTE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
            const int row = step * kStride + row_of_lane;
            if (row < valid) {
                copy_16(part.out[row][lane_of_row], out + step * kStride * params.o.row_stride, has_columns);
                copy_16(part.dout[row][lane_of_row], dout + step * kStride * params.dout.row_stride, has_columns);
            }
        }
        if (lane < kRows) {
            const int64_t place =
                first.bidb * params.lse_batch_stride + first.bidh * params.lse_head_stride + begin + lane;
            if (lane < valid && rows_with_keys<kKind>(params, first).contains(first.row + lane)) {
                copy_4(part.lse[lane], static_cast<const float *>(params.softmax_lse) + place);
                if (params.dsoftmax_lse != nullptr) {
                    copy_4(part.dlse[lane], static_cast<const float *>(params.dsoftmax_lse) + place);
                }
            } else {
                part.lse[lane] = -INFINITY;
            }
        }
    }

    // What joins a row's softmax: with attn_bias it is the log-sum-exp of rows that see no key.
    __device__ __forceinline__ float logit_of(const PaddedRow &row) const {
        return RowMod<float>(params, row.bidb, row.bidh).logit();
    }

    // Returns, in every lane, whether a row has a large log-sum-exp; with attn_bias also whether one sees no key
    // (kRowsWithoutKey).
    __device__ __forceinline__ int finish(const Part &part, int64_t padded_row, float logit) const {
        float dot_of_own = 0.0f;
        [[maybe_unused]] bool is_zero = false;  // attn_bias: out of the own row
        CUTE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
            const int row = step * kStride + row_of_lane;
            const auto out = floats(part.out[row][lane_of_row]), dout = floats(part.dout[row][lane_of_row]);
            float dot = 0.0f;
            CUTE_UNROLL
            for (int i = 0; i < kVector; ++i) {
                dot += out[i] * dout[i];
            }
            CUTE_UNROLL
            for (int offset = kLanes / 2; offset > 0; offset /= 2) {
                dot += __shfl_xor_sync(0xffffffffu, dot, offset);
            }
            dot_of_own = lane_of_row == step ? dot : dot_of_own;
            if constexpr (has_bias(kKind)) {
                const bool of_step = is_row_of_zeros<kLanes>(part.out[row][lane_of_row], row_of_lane);
                is_zero = lane_of_row == step ? of_step : is_zero;
            }
        }
        bool is_large = false;
        [[maybe_unused]] bool is_without_key = false;
        if (lane_of_row < kSteps) {  // the lane has the sum of a row
            const int row = lane_of_row * kStride + row_of_lane;
            // A row without a key has no gradient, even if dO is NaN or its lse is the sink. Its stored lse is +inf, so
            // P = exp(s - inf) = 0.
            const float lse = part.lse[row], dlse = params.dsoftmax_lse == nullptr ? 0.0f : part.dlse[row];
            // With a sink, a row has none either if the probabilities of its keys are rounded to 0.
            const bool has_keys = lse != -INFINITY && !(has_bias(kKind) && lse == logit && is_zero);
            is_without_key = !has_keys;
            static_cast<float *>(params.dsoftmax_sum)[padded_row + row] = has_keys ? dot_of_own - dlse : 0.0f;
            const float stored_lse = kLseInBase2 ? lse * float(kLog2e) : lse;
            params.lse_padded[padded_row + row] = has_keys ? stored_lse : INFINITY;
            is_large = has_keys && fabsf(lse) > kLargeExponent;
        }
        if constexpr (has_bias(kKind)) {
            return (__any_sync(0xffffffffu, is_large) != 0 ? 1 : 0) |
                   (__any_sync(0xffffffffu, is_without_key) != 0 ? kRowsWithoutKey : 0);
        }
        return __any_sync(0xffffffffu, is_large);
    }

    // Rows that share a flag with a large log-sum-exp keep it as it is: the error of a rounded product with log2(e)
    // would show in the probability. All threads.
    __device__ __forceinline__ void store_large_lse(const SharedByWarps &shared) const {
        typename Rows::Places places(params, rows);
        CUTE_NO_UNROLL
        for (int i = threadIdx.x / 32 * 32; i < rows.count; i += Traits::kNThreads) {
            if (has_bias(kKind) ? shared.large_rows[i / kFlagRows] % 2 == 0 : shared.large_rows[i / kFlagRows] == 0) {
                continue;
            }
            const PaddedRow first = places.at(i);
            const int row = first.row + lane;
            float lse = -INFINITY;
            if (has_bias(kKind) ? params.lse_padded[first.padded_row + lane] != INFINITY
                                : rows_with_keys<kKind>(params, first).contains(row)) {
                lse = static_cast<const float *>(
                    params.softmax_lse)[first.bidb * params.lse_batch_stride + first.bidh * params.lse_head_stride +
                                        first.seq.q_begin + row];
            }
            params.lse_padded[first.padded_row + lane] = lse == -INFINITY ? INFINITY : lse;
        }
    }

    // All threads. The copy engine writes the zeros.
    __device__ __forceinline__ void start_zeros(SharedByWarps &shared) const {
        constexpr int kZeros = sizeof(shared.zeros) / sizeof(uint4);
        for (int i = threadIdx.x; i < kZeros; i += Traits::kNThreads) {
            shared.zeros[i] = {};
        }
        if (threadIdx.x < Traits::kRowsPerTile / kFlagRows) {
            shared.large_rows[threadIdx.x] = 0;
        }
        cutlass::arch::fence_view_async_shared();  // before the copy engine reads the zeros
        __syncthreads();
        if (threadIdx.x == kThreadOfZeros && params.dq_accum != nullptr) {
            auto *accum = reinterpret_cast<char *>(params.dq_accum + rows.begin * Traits::kHeadDim);
            const auto *end = reinterpret_cast<char *>(params.dq_accum + (rows.begin + rows.count) * Traits::kHeadDim);
            CUTE_NO_UNROLL
            for (; accum < end; accum += sizeof(shared.zeros)) {
                cute::SM90_BULK_COPY_S2G::copy(shared.zeros, accum, sizeof(shared.zeros));
            }
            cute::tma_store_arrive();
        }
    }

    __device__ __forceinline__ static auto floats(const uint4 &bits) {
        using Converter = cutlass::NumericArrayConverter<float, Element, kVector>;
        return Converter::convert(reinterpret_cast<const cutlass::Array<Element, kVector> &>(bits));
    }
    __device__ __forceinline__ static void copy_16(uint4 &target, const Element *source, bool has_columns) {
        kvcache::cp_async_16(cute::cast_smem_ptr_to_uint(&target), source, has_columns);
    }
    __device__ __forceinline__ static void copy_4(float &target, const float *source) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(&target)), "l"(source)
                     : "memory");
    }
};

// ---- convert: dQ from the float32 accumulator, whose layout dq_tile.h describes

template <typename Traits, Kind kKind>
class ConvertDq {
    using Element = typename Traits::Element;
    using Rows = RowTile<Traits, kKind>;
    using Tile = DqTile<Traits>;
    static constexpr int kVectors = Tile::kVectors, kColumnTiles = Tile::kColumnTiles;

    // The sums that one warp added to a tile of the accumulator: 16 rows of 8 kVectors columns. The parts of a work
    // tile lie one after the other in the accumulator.
    struct Part {
        float4 accum[kVectors][32];  // vector i of each lane that added it
    };
    static constexpr int kRows = 16;
    static constexpr int kStages =
        Rows::stages(Traits::kSmemForRows, sizeof(Part), Traits::kRowsPerTile / kRows * kColumnTiles);

    const Flash_bwd_params &params;
    const Rows rows;
    const int lane;

public:
    struct SharedStorage {
        Part parts[Rows::kWarps][kStages];
    };
    static_assert(sizeof(SharedStorage) <= Traits::kSmemForRows);

    __device__ ConvertDq(const Flash_bwd_params &params, const WorkOrder &order, const WorkTile &tile)
        : params(params), rows(params, order, tile), lane(threadIdx.x % 32) {}

    // All threads. `computed` counts the warps that have added to the head; of them there are `adding`.
    __device__ __forceinline__ void run(SharedStorage &shared, const WorkCounts &counts, int head, int adding) const {
        if (threadIdx.x == 0) {
            counts.wait(counts.computed(head), adding);
        }
        __syncthreads();
        Part *stages = shared.parts[threadIdx.x / 32];
        typename Rows::Places places(params, rows);
        rows.template for_each_part<kStages>(
            rows.count / kRows * kColumnTiles, [&](int stage, int part) { load(stages[stage], part); }, [] {},
            [&](int stage, int part) {  // four parts of a tile, then the next columns, then the next 64 rows
                const int first_row = part / (4 * kColumnTiles) * 64 + part % 4 * kRows;
                store(stages[stage], places.at(first_row), part / 4 % kColumnTiles * kVectors);
            });
    }

private:
    __device__ __forceinline__ void load(Part &part, int index) const {
        const auto *parts = reinterpret_cast<const Part *>(params.dq_accum + rows.begin * Traits::kHeadDim);
        CUTE_UNROLL
        for (int i = 0; i < kVectors; ++i) {
            kvcache::cp_async_16(cast_smem_ptr_to_uint(&part.accum[i][lane]), &parts[index].accum[i][lane],
                                 /*is_in_range=*/true);
        }
    }

    // dQ = softmax_scale * accumulator. A lane does 8 columns of two rows, which the four lanes of a quad have added.
    // Rows without a key get 0: the accumulator of such a row holds NaN if one of its tiles has an infinite key.
    __device__ __forceinline__ void store(const Part &part, const PaddedRow &first, int first_vector) const {
        const Sequence &seq = first.seq;
        const auto rows = [&] {
            if constexpr (has_bias(kKind)) {
                return RowsByLse{params.lse_padded + first.padded_row - first.row};
            } else {
                return rows_with_keys<kKind>(params, first);
            }
        }();
        const int row_of_lane = lane % 8, row = first.row + row_of_lane;
        auto *target = static_cast<Element *>(params.dq.ptr) + first.bidb * params.dq.batch_stride +
                       first.bidh * params.dq.head_stride + int64_t(seq.q_begin + row) * params.dq.row_stride;
        const auto store_row = [&](int i, Element *to, int row, const uint4 &vector) {
            const int col = (first_vector + i) * 8;
            if (row < seq.seqlen_q && col < params.d) {
                *reinterpret_cast<uint4 *>(to + col) = rows.contains(row) ? vector : uint4{};
            }
        };
        CUTE_NO_UNROLL
        for (int i = lane / 8; i < kVectors; i += 4) {
            uint32_t upper[4], lower[4];  // words of the row, and of the one 8 further on
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
                // Four rows lie in the same banks, so their lanes read the lanes of their quads in different orders.
                const float4 x = part.accum[i][row_of_lane * 4 + (j + row_of_lane / 2) % 4];
                upper[j] = pack(x.x, x.y);
                lower[j] = pack(x.z, x.w);
            }
            store_row(i, target, row, rotated(upper, row_of_lane / 2));
            store_row(i, target + 8 * params.dq.row_stride, row + 8, rotated(lower, row_of_lane / 2));
        }
    }

    __device__ __forceinline__ uint32_t pack(float low, float high) const {
        return kvcache::pack<Element>(low * params.qk_scale, high * params.qk_scale);
    }

    // Word (j + by) % 4 of the result is word j.
    __device__ __forceinline__ static uint4 rotated(const uint32_t (&x)[4], int by) {
        const bool by_one = by % 2 != 0, by_two = by / 2 % 2 != 0;
        const uint32_t y[4] = {by_one ? x[3] : x[0], by_one ? x[0] : x[1], by_one ? x[1] : x[2], by_one ? x[2] : x[3]};
        return {by_two ? y[2] : y[0], by_two ? y[3] : y[1], by_two ? y[0] : y[2], by_two ? y[1] : y[3]};
    }
};

}  // namespace flash::sm90
