// Epilogue where keys are split. The rows of a tile are the queries of all heads of a group. A tile with all keys of
// its rows stores the output; another stores its partial result in a slot.
#pragma once

#include "kvcache/splitkv_results.h"
#include "sm90/forward/epilogue_fwd.h"

namespace flash::sm90 {

// Rows of a tile: those whose columns a thread holds. kHeadDimV: columns of a row of O.
template <typename Traits, int kHeadDimV = Traits::kHeadDimV>
class SplitOutput {
    using Element = typename Traits::Element;
    using Vector = typename Output<Traits>::Vector;
    static constexpr int kRowsOfThread = 2;

public:
    // They normalise the rows of O that a thread holds; 0 for a row without a key. Partial results are not normalised.
    struct Factors {
        float of_row[kRowsOfThread];
    };

    // first_row: the first of this thread's rows in the tile; the other one is 8 rows further on.
    __device__ SplitOutput(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan, const WorkTile &tile,
                           int first_row)
        : params(params), plan(plan), tile(tile), first_row(first_row) {}

    // acc_o: (row, col), not normalised.
    template <typename TensorO, typename SoftmaxState>
    __device__ __forceinline__ void store(TensorO &acc_o, const SoftmaxState &softmax) const {
        store_columns(acc_o, store_statistics(softmax), /*first_column=*/0);
    }

    // Stores the log-sum-exp, or maximum and sum of a partial result.
    template <typename SoftmaxState>
    __device__ __forceinline__ Factors store_statistics(const SoftmaxState &softmax) const {
        Factors factors{};
        if (tile.slot >= 0) {
            store_partial_statistics(softmax);
            return factors;
        }
        float lse[kRowsOfThread];
        softmax.finalize(
            params, params.scale_softmax, /*out_factor=*/1.0f, [&](int i) { return pointers_of(row_of(i)).row_mod; },
            lse, factors.of_row);
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (row_of(i) < rows_of_tile() && threadIdx.x % 4 == 0) {
                *pointers_of(row_of(i)).lse = lse[i];
            }
        }
        return factors;
    }

    // Stores the columns of acc_o, from first_column on.
    template <typename TensorO>
    __device__ __forceinline__ void store_columns(TensorO &acc_o, const Factors &factors, int first_column) const {
        if (tile.slot >= 0) {
            store_partial(acc_o, first_column);
        } else {
            store_finished(acc_o, factors, first_column);
        }
    }

    // A tile whose rows see no key. Called by one warp.
    __device__ __forceinline__ void store_nothing() const {
        const int lane = threadIdx.x % 32;
        const kvcache::Slot slot(params, plan, kHeadDimV, max(tile.slot, 0), tile.place.block);
        CUTE_NO_UNROLL
        for (int row = lane; row < rows_of_tile(); row += 32) {
            if (tile.slot >= 0) {
                *reinterpret_cast<float2 *>(slot.statistics + row * 2) = {-INFINITY, 0.0f};
                continue;
            }
            const RowPointers at = pointers_of(row);
            *at.lse = at.row_mod.logit();
            CUTE_NO_UNROLL
            for (int column = 0; column < params.d_v; column += 8) {
                *reinterpret_cast<uint4 *>(at.o + column) = {};
            }
        }
    }

private:
    const Flash_fwd_params &params;
    const kvcache::SplitkvPlan &plan;
    const WorkTile &tile;
    const int first_row;

    struct RowPointers {
        Element *o;
        float *lse;
        RowMod<float> row_mod;
    };
    __device__ __forceinline__ RowPointers pointers_of(int row) const {
        const int packed = tile.place.block * Traits::kBlockM + row, query = packed / params.h_h_k_ratio;
        const int bidh = tile.place.bidh + packed - query * params.h_h_k_ratio, bidb = tile.place.bidb;
        return {static_cast<Element *>(params.o.ptr) + bidb * params.o.batch_stride + bidh * params.o.head_stride +
                    query * params.o.row_stride,
                static_cast<float *>(params.softmax_lse) + bidb * params.lse_batch_stride +
                    bidh * params.lse_head_stride + query,
                RowMod<float>(params, bidb, bidh)};
    }
    __device__ __forceinline__ int rows_of_tile() const {
        return min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio - tile.place.block * Traits::kBlockM);
    }

    __device__ __forceinline__ int row_of(int i) const { return first_row + i * 8; }

    template <typename TensorO>
    __device__ __forceinline__ void store_finished(TensorO &acc_o, const Factors &factors, int first_column) const {
        static_assert(decltype(size<0>(acc_o))::value == kRowsOfThread);
        clear_rows_without_keys(factors.of_row, acc_o);
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfThread; ++i) {
            const bool is_in_range = row_of(i) < rows_of_tile();
            const RowPointers at = pointers_of(row_of(i));
            store_row<Element, Vector>(acc_o, i, factors.of_row[i], [&](int col, const auto &vector) {
                if (is_in_range && first_column + col < params.d_v) {
                    *reinterpret_cast<Vector *>(at.o + first_column + col) = vector;
                }
            });
        }
    }

    __device__ __forceinline__ kvcache::Slot slot_of_tile() const {
        return kvcache::Slot(params, plan, kHeadDimV, tile.slot, tile.place.block);
    }

    template <typename SoftmaxState>
    __device__ __forceinline__ void store_partial_statistics(const SoftmaxState &softmax) const {
        static_assert(!SoftmaxState::kReferenceIsAboveMaximum, "weights of slots are relative to their references");
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfThread; ++i) {
            const float sum = quad_allreduce(softmax.row_sum[i], [](float a, float b) { return a + b; });
            if (row_of(i) < rows_of_tile() && threadIdx.x % 4 == 0) {
                *reinterpret_cast<float2 *>(slot_of_tile().statistics + row_of(i) * 2) = {softmax.row_max[i], sum};
            }
        }
    }

    template <typename TensorO>
    __device__ __forceinline__ void store_partial(const TensorO &acc_o, int first_column) const {
        const kvcache::Slot slot = slot_of_tile();
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (row_of(i) >= rows_of_tile()) {
                continue;
            }
            float *const o = slot.o + row_of(i) * kHeadDimV + first_column + threadIdx.x % 4 * 2;
            CUTE_UNROLL
            for (int col = 0; col < decltype(size<1>(acc_o))::value; col += 2) {
                *reinterpret_cast<float2 *>(o + col * 4) = {acc_o(i, col), acc_o(i, col + 1)};
            }
        }
    }
};

}  // namespace flash::sm90
