// The plan of a call whose keys are split, and the launches of its kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/trace.h"
#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "flash_fwd_split_kernel.h"
#include "kvcache/splitkv.h"

namespace flash::sm90 {

constexpr bool has_tall_tiles(int headdim) {
    return headdim <= 128;
}

// True if tiles of 192 rows take less time than tiles of 128, that is, if they are much fewer. rows: of a group.
inline bool prefers_tall_tiles(int64_t rows) {
    constexpr int kTallTime = 14, kTime = 10;                    // of a tile, for the same keys (H200, head dim 128)
    constexpr int kTallRows = 192, kRows = 128, kMaxRows = 768;  // more were not measured
    return rows <= kMaxRows && ((rows - 1) / kTallRows + 1) * kTallTime < ((rows - 1) / kRows + 1) * kTime;
}

// CTAs for each of row_tiles row tiles, for the keys of `heads` heads. Pieces that begin and end with heads need no
// partial results, if lengths are equal. Times are counted in key blocks.
inline int64_t pieces_for(int64_t heads, int64_t row_tiles, int64_t sms) {
    constexpr double kBlocksOfHead = 32, kCostOfRun = 1.5, kCostOfPartial = 2.0;
    constexpr int kMaxWaves = 4;
    int64_t best = 1;
    double min_time = 1e300;
    const auto consider = [&](int64_t pieces) {
        const bool is_whole = heads % pieces == 0, is_part = pieces % heads == 0;
        const double waves = double((pieces * row_tiles + sms - 1) / sms), heads_of_piece = double(heads) / pieces;
        const double runs = is_whole ? heads_of_piece : is_part ? 1.0 : heads_of_piece + 1.0;
        const double partial = is_whole ? 0.0 : is_part ? 1.0 : 2.0;
        const double time = waves * (heads_of_piece * kBlocksOfHead + kCostOfRun * runs + kCostOfPartial * partial);
        if (time < min_time) {
            min_time = time;
            best = pieces;
        }
    };
    for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
        const int64_t max_pieces = waves * sms / row_tiles;
        if (max_pieces == 0) {
            continue;
        }
        consider(max_pieces);
        int64_t aligned = max_pieces;
        while (heads % aligned != 0 && aligned % heads != 0) {
            --aligned;
        }
        consider(aligned);
    }
    return best;
}

template <typename Traits>
kvcache::SplitkvPlan split_plan(const Flash_fwd_params &params) {
    const int64_t rows = int64_t{params.seqlen_q} * params.h_h_k_ratio, heads = int64_t{params.b} * params.h_k;
    const int64_t row_tiles = (rows + Traits::kBlockM - 1) / Traits::kBlockM;
    int64_t unit = Traits::kBlockN;
    while ((params.cache.capacity / unit + 1) * heads > INT32_MAX) {
        unit *= 2;
    }
    const int64_t units = (params.cache.capacity + unit - 1) / unit;  // of a head, at most
    const int64_t wanted = pieces_for(heads, row_tiles, device_properties().sm_count);
    kvcache::SplitkvPlan plan{};
    plan.tile_rows = Traits::kBlockM;
    plan.row_tiles = static_cast<int>(row_tiles);
    plan.pieces = static_cast<int>(std::clamp<int64_t>(heads * units / 2, 1, wanted));
    plan.align_pieces(heads % plan.pieces == 0 || plan.pieces % heads == 0 ? plan.pieces : 0, heads);
    plan.align_units(static_cast<int>(unit));
    plan.sum_factor = 1.0f / Softmax<typename Traits::Element, 2>::kOne;
    plan.by_ratio = cutlass::FastDivmod(params.h_h_k_ratio);
    return plan;
}

// headdim_v: columns of a row of O.
inline int64_t scratch_floats(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan, int headdim_v) {
    const int64_t rows = std::min<int64_t>(plan.tile_rows, int64_t{params.seqlen_q} * params.h_h_k_ratio);
    return plan.pieces > 1 ? plan.scratch_floats(params, rows, headdim_v) : 0;
}

// Launches `kernel`, which traces call `name`.
template <typename Traits, typename Kernel>
void launch_split(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan, const KeyBoxes &boxes,
                  Kernel *kernel, const char *name, cudaStream_t stream) {
    static_assert(Traits::kSmemSize <= 227 * 1024, "more shared memory than a thread block may have");
    const int64_t grid = int64_t{plan.pieces} * plan.row_tiles;
    check_grid(grid, "blocks of query rows * pieces of the keys");
    if (trace_enabled()) {
        trace(name, "rows=%d row_tiles=%d pieces=%d kBlockN=%d stages=%d threads=%d smem=%d", plan.tile_rows,
              plan.row_tiles, plan.pieces, Traits::kBlockN, Traits::kStages, Traits::kNThreads, Traits::kSmemSize);
    }
    reserve_smem(kernel, Traits::kSmemSize);
    ProgrammaticLaunch(dim3(static_cast<unsigned>(grid)), 1, Traits::kNThreads, Traits::kSmemSize, stream)
        .run(kernel, "launching a kernel with split keys", params, boxes, plan);
}

// Calls function with the traits of the tiles that a call needs.
template <DType kDType, int kHeadDim, typename Function>
auto call_with_split_traits(const Flash_fwd_params &params, const Function &function) {
    const int64_t rows = int64_t{params.seqlen_q} * params.h_h_k_ratio;
    if (rows <= TileSizesSplit<kHeadDim, true>::kBlockM) {
        return function(Flash_fwd_kernel_traits<kDType, kHeadDim, SplitTile<TileSizesSplit<kHeadDim, true>>>{});
    }
    if constexpr (has_tall_tiles(kHeadDim)) {
        using Tall = SplitTile<TileSizesSplitTall<kHeadDim>>;
        if (params.h_h_k_ratio >= min_ratio(Tall::kConsumers) && prefers_tall_tiles(rows)) {
            return function(Flash_fwd_kernel_traits<kDType, kHeadDim, Tall>{});
        }
    }
    return function(Flash_fwd_kernel_traits<kDType, kHeadDim, SplitTile<TileSizesSplit<kHeadDim, false>>>{});
}

template <DType kDType, int kHeadDim>
int64_t split_scratch_floats(const Flash_fwd_params &params) {
    const kvcache::SplitkvPlan plan = call_with_split_traits<kDType, kHeadDim>(
        params, [&](auto traits) { return split_plan<decltype(traits)>(params); });
    return scratch_floats(params, plan, kHeadDim);
}

template <DType kDType, int kHeadDim>
void run_flash_fwd_split(const Flash_fwd_params &params, cudaStream_t stream) {
    const kvcache::SplitkvPlan plan = call_with_split_traits<kDType, kHeadDim>(params, [&](auto traits) {
        using Traits = decltype(traits);
        const kvcache::SplitkvPlan plan = split_plan<Traits>(params);
        launch_split<Traits>(params, plan, make_key_boxes<Traits>(params), &flash_fwd_split_kernel<Traits>,
                             "flash_fwd_split_kernel", stream);
        return plan;
    });
    if (plan.pieces > 1) {
        run_combine_splits<kDType, kHeadDim>(params, plan, stream);
    }
}

}  // namespace flash::sm90
