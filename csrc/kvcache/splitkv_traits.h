// The tiles of the split-KV kernel, in five forms (Form in splitkv_schedule.h). A group of warps shares a pipeline of
// key tiles, and each of its warps has 16 rows; the results of the groups are summed at the end. Few rows: four groups
// of one warp. Cluster: eight, as wide CTAs, or four in clusters beyond head dim 128; short cluster: four. Warp pairs:
// two groups of two warps. Many rows: one group of four to eight warps.
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <type_traits>

#include "splitkv_schedule.h"

namespace flash::kvcache {

constexpr int kWarpRows = 16;  // the m16 of mma.sync
constexpr int kMaxWarps = 8;

template <DType kDType, int kHeadDim_, Form kForm>
struct SplitkvTraits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kIsOneGroup = kForm == Form::many_rows, kArePairs = kForm == Form::warp_pairs;
    static constexpr bool kIsCluster = kForm == Form::cluster || kForm == Form::short_cluster;
    // Up to head dim 128, wide CTAs read long caches faster.
    static constexpr bool kRunsInClusters = kForm == Form::short_cluster || (kForm == Form::cluster && kHeadDim > 128);
    static constexpr int kGroupWarps = kIsOneGroup ? kMaxWarps : kArePairs ? 2 : 1;  // at most
    static constexpr int kGroups = kIsOneGroup ? 1 : kArePairs ? 2 : kForm == Form::cluster && kHeadDim <= 128 ? 8 : 4;
    static constexpr int kMaxRows = kGroupWarps * kWarpRows;

    // Of a tile; at most 32: one for each lane.
    static constexpr int kKeys = kGroupWarps == 1 && kHeadDim > 64 ? 16 : 32;
    static constexpr int kRoundKeys = kGroups * kKeys;  // one tile for each group
    // Of the schedule; short in a cluster, so that a short cache has keys for all CTAs.
    static constexpr int kUnit = kIsCluster ? kKeys : kRoundKeys;
    // Few rows and warp pairs: three CTAs fit into an SM, two with head dim 192, one with 256.
    static constexpr bool kFitsThreeStages = kIsCluster || (kArePairs && kHeadDim <= 64) || kHeadDim > 192;
    static constexpr int kStages = (kIsOneGroup ? kHeadDim <= 128 : kFitsThreeStages) ? 3 : 2;
    // Over the loop; else Q is read from shared memory for each key tile.
    static constexpr bool kQInRegisters = !kIsOneGroup && kHeadDim <= 128;

    static constexpr int kChunks = kHeadDim / 8;  // pieces of 16 bytes in a row
    static constexpr int kTileElements = kKeys * kHeadDim;
    static constexpr int kOStride = kHeadDim + 4;  // floats of a row of O in shared memory; + 4: fewer bank conflicts

    struct Row {
        int query;
        float slope;  // ALiBi slope of its head, in units of the softmax scale
    };
    struct SharedStorage {
        Row rows[kMaxRows];
        float row_max[kGroups][kMaxRows];
        float row_sum[kGroups][kMaxRows];
        float2 of_cta[kMaxRows];                                         // maximum and sum of a CTA of a cluster
        alignas(128) Element tiles[kGroups][kStages][2][kTileElements];  // K and V; then Q, then O in the place of both
    };

    static constexpr int threads(int tile_rows) { return 32 * kGroups * (tile_rows / kWarpRows); }
    static constexpr int smem_size(int tile_rows) {
        const int q = tile_rows * kHeadDim * int(sizeof(Element)),
                  o = kGroups * tile_rows * kOStride * int(sizeof(float));
        return int(sizeof(SharedStorage)) + std::max(q, o - int(sizeof(SharedStorage::tiles)));
    }
    // The registers of a thread are limited to what this many CTAs of kMaxThreads threads leave.
    static constexpr int kMaxThreads = threads(kMaxRows);
    static constexpr int kMinCtas = kIsCluster ? 1 : (kHeadDim <= 128 ? 2 : 1) + (kIsOneGroup ? 0 : 1);
    // CTAs that the registers of an SM hold.
    static constexpr int ctas_by_registers(int tile_rows) { return kMinCtas * kMaxThreads / threads(tile_rows); }
};

// Beyond head dim 128 the cluster has four groups, too.
template <int kHeadDim>
constexpr Form kShortCluster = kHeadDim <= 128 ? Form::short_cluster : Form::cluster;

// Calls function with the traits of a form.
template <DType kDType, int kHeadDim, typename Function>
auto call_with_traits(Form form, const Function &function) {
    switch (form) {
        case Form::many_rows:
            return function(SplitkvTraits<kDType, kHeadDim, Form::many_rows>{});
        case Form::warp_pairs:
            return function(SplitkvTraits<kDType, kHeadDim, Form::warp_pairs>{});
        case Form::cluster:
            return function(SplitkvTraits<kDType, kHeadDim, Form::cluster>{});
        case Form::short_cluster:
            return function(SplitkvTraits<kDType, kHeadDim, kShortCluster<kHeadDim>>{});
        default:
            return function(SplitkvTraits<kDType, kHeadDim, Form::few_rows>{});
    }
}

}  // namespace flash::kvcache
