// The last phase of the backward, for the rows of a work tile: dQ from the float32 accumulator, whose layout dq_tile.h
// describes.
#pragma once

#include "dq_tile.h"
#include "work_counts.h"
#include "work_rows.h"

namespace flash::sm90 {

template <typename Traits, Kind kKind>
class ConvertDq {
    using Element = typename Traits::Element;
    using Rows = WorkRows<Traits, kKind>;
    using Tile = DqTile<Traits>;
    static constexpr int kVectors = Tile::kVectors, kColumnTiles = Tile::kColumnTiles;

    // What one warp added to a tile of the accumulator: 16 rows of 8 kVectors columns. The parts of a work tile lie one
    // after the other in the accumulator.
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
        rows.template for_each_part<kStages>(
            rows.count / kRows * kColumnTiles, [&](int stage, int part) { load(stages[stage], part); }, [] {},
            [&](int stage, int part) {  // four parts of a tile, then the next columns, then the next 64 rows
                const int first_row = part / (4 * kColumnTiles) * 64 + part % 4 * kRows;
                store(stages[stage], rows.at(params, first_row), part / 4 % kColumnTiles * kVectors);
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
        const KeyRange<is_local(kKind)> range(params, seq.seqlen_q, seq.seqlen_k);
        const int row_of_lane = lane % 8, row = first.row + row_of_lane;
        auto *target = static_cast<Element *>(params.dq.ptr) + first.bidb * params.dq.batch_stride +
                       first.bidh * params.dq.head_stride + int64_t(seq.q_begin + row) * params.dq.row_stride;
        const auto store_row = [&](int i, Element *to, int row, const uint4 &vector) {
            const int col = (first_vector + i) * 8;
            if (row < seq.seqlen_q && col < params.d) {
                const bool has_keys = row >= range.begin_row() && row < range.end_row();
                *reinterpret_cast<uint4 *>(to + col) = has_keys ? vector : uint4{};
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
