// Epilogue where keys are split. The rows of a tile are the queries of all heads of a group. A tile with all keys of
// its rows stores the output; another stores its partial result in a slot.
#pragma once

#include "kvcache/splitkv_results.h"
#include "sm90/forward/epilogue_fwd.h"

namespace flash::sm90 {

// The rows that one consumer warpgroup stores.
template <typename Traits>
class SplitOutput {
    using Element = typename Traits::Element;
    using Vector = typename Output<Traits>::Vector;
    static constexpr int kHeadDim = Traits::kHeadDim;

public:
    __device__ SplitOutput(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan, const WorkTile &tile,
                           int warpgroup)
        : params(params), plan(plan), tile(tile), first_row(warpgroup * Traits::kRows) {}

    // acc_o: (row, col), not normalised.
    template <typename TensorO, typename SoftmaxState>
    __device__ __forceinline__ void store(TensorO &acc_o, const SoftmaxState &softmax) const {
        if (tile.slot < 0) {
            store_finished(acc_o, softmax);
        } else {
            store_partial(acc_o, softmax);
        }
    }

    // A tile whose rows see no key. Called by one warp.
    __device__ __forceinline__ void store_nothing() const {
        const int lane = threadIdx.x % 32;
        const kvcache::Slot slot(params, plan, kHeadDim, max(tile.slot, 0), tile.place.block);
        CUTE_NO_UNROLL
        for (int row = lane; row < rows_of_tile(); row += 32) {
            if (tile.slot >= 0) {
                *reinterpret_cast<float2 *>(slot.statistics + row * 2) = {-INFINITY, 0.0f};
                continue;
            }
            const RowPointers at = pointers_of(row);
            *at.lse = at.row_mod.logit();
            CUTE_NO_UNROLL
            for (int column = 0; column < params.d; column += 8) {
                *reinterpret_cast<uint4 *>(at.o + column) = {};
            }
        }
    }

private:
    const Flash_fwd_params &params;
    const kvcache::SplitkvPlan &plan;
    const WorkTile &tile;
    const int first_row;  // in the tile

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

    template <typename TensorO, typename SoftmaxState>
    __device__ __forceinline__ void store_finished(TensorO &acc_o, const SoftmaxState &softmax) const {
        constexpr int kRowsOfThread = decltype(size<0>(acc_o))::value;
        float lse[kRowsOfThread], factor[kRowsOfThread];
        const auto row_of = [&](int i) { return first_row + first_row_of_thread() + i * 8; };
        softmax.finalize(
            params, params.scale_softmax, /*out_factor=*/1.0f, [&](int i) { return pointers_of(row_of(i)).row_mod; },
            lse, factor);
        clear_rows_without_keys(factor, acc_o);
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfThread; ++i) {
            const bool is_in_range = row_of(i) < rows_of_tile();
            const RowPointers at = pointers_of(row_of(i));
            if (is_in_range && threadIdx.x % 4 == 0) {
                *at.lse = lse[i];
            }
            store_row<Element, Vector>(acc_o, i, factor[i], [&](int col, const auto &vector) {
                if (is_in_range && col < params.d) {
                    *reinterpret_cast<Vector *>(at.o + col) = vector;
                }
            });
        }
    }

    template <typename TensorO, typename SoftmaxState>
    __device__ __forceinline__ void store_partial(TensorO &acc_o, const SoftmaxState &softmax) const {
        static_assert(!SoftmaxState::kReferenceIsAboveMaximum, "weights of slots are relative to their references");
        const kvcache::Slot slot(params, plan, kHeadDim, tile.slot, tile.place.block);
        CUTE_UNROLL
        for (int i = 0; i < decltype(size<0>(acc_o))::value; ++i) {
            const int row = first_row + first_row_of_thread() + i * 8;
            const float sum = quad_allreduce(softmax.row_sum[i], [](float a, float b) { return a + b; });
            if (row >= rows_of_tile()) {
                continue;
            }
            if (threadIdx.x % 4 == 0) {
                *reinterpret_cast<float2 *>(slot.statistics + row * 2) = {softmax.row_max[i], sum};
            }
            float *const o = slot.o + row * kHeadDim + threadIdx.x % 4 * 2;
            CUTE_UNROLL
            for (int col = 0; col < kHeadDim / 4; col += 2) {
                *reinterpret_cast<float2 *>(o + col * 4) = {acc_o(i, col), acc_o(i, col + 1)};
            }
        }
    }
};

}  // namespace flash::sm90
