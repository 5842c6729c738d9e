// The tiles of the split-KV kernel, in three forms. Few rows: each warp has its own pipeline of key tiles, and the
// warps' results are summed at the end; a CTA has four warps, in a cluster eight. Many rows: four to eight warps have
// 16 rows each and share every key tile.
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <type_traits>

#include "splitkv_schedule.h"

namespace flash::kvcache {

constexpr int kWarpRows = 16;  // the m16 of mma.sync
constexpr int kMaxWarps = 8;

enum class Form { few_rows, cluster, many_rows };

template <DType kDType, int kHeadDim_, Form kForm>
struct SplitkvTraits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kSharesTiles = kForm == Form::many_rows;
    static constexpr bool kIsCluster = kForm == Form::cluster;  // one CTA an SM
    // Groups of warps with key tiles of their own.
    static constexpr int kGroups = kSharesTiles ? 1 : kIsCluster && kHeadDim <= 128 ? 8 : 4;

    static constexpr int kKeys = !kSharesTiles && kHeadDim > 64 ? 16 : 32;  // of a tile; at most 32: one for each lane
    static constexpr int kUnit = kGroups * kKeys;
    // Few rows: with two stages, three CTAs fit into an SM; with head dim 256 one CTA does, with three.
    static constexpr int kStages = kSharesTiles ? (kHeadDim <= 128 ? 3 : 2) : kIsCluster || kHeadDim > 192 ? 3 : 2;
    // Over the loop; else Q is read from shared memory for each key tile.
    static constexpr bool kQInRegisters = !kSharesTiles && kHeadDim <= 128;

    static constexpr int kChunks = kHeadDim / 8;  // pieces of 16 bytes in a row
    static constexpr int kTileElements = kKeys * kHeadDim;
    static constexpr int kOStride = kHeadDim + 4;  // floats of a row of O in shared memory; + 4: fewer bank conflicts

    struct Row {
        int query;
        float slope;  // ALiBi slope of its head, in units of the softmax scale
    };
    struct SharedStorage {
        Row rows[kSharesTiles ? kMaxWarps * kWarpRows : kWarpRows];
        float row_max[kGroups][kMaxWarps * kWarpRows / kGroups];
        float row_sum[kGroups][kMaxWarps * kWarpRows / kGroups];
        float2 of_cta[kSharesTiles ? kMaxWarps * kWarpRows : kWarpRows];  // maximum and sum of a CTA of a cluster
        alignas(128) Element tiles[kGroups][kStages][2][kTileElements];  // K and V; then Q, then O in the place of both
    };

    static constexpr int threads(int tile_rows) { return 32 * (kSharesTiles ? tile_rows / kWarpRows : kGroups); }
    static constexpr int smem_size(int tile_rows) {
        const int q = tile_rows * kHeadDim * int(sizeof(Element)),
                  o = kGroups * tile_rows * kOStride * int(sizeof(float));
        return int(sizeof(SharedStorage)) + std::max(q, o - int(sizeof(SharedStorage::tiles)));
    }
    // The registers of a thread are limited to what this many CTAs of kMaxThreads threads leave.
    static constexpr int kMaxThreads = threads(kMaxWarps * kWarpRows);
    static constexpr int kMinCtas = kIsCluster ? 1 : (kHeadDim <= 128 ? 2 : 1) + (kSharesTiles ? 0 : 1);
    // CTAs that the registers of an SM hold.
    static constexpr int ctas_by_registers(int tile_rows) { return kMinCtas * kMaxThreads / threads(tile_rows); }
};

// Calls function with the traits for tiles of `tile_rows` rows, in clusters or not.
template <DType kDType, int kHeadDim, typename Function>
auto call_with_traits(int tile_rows, bool is_cluster, const Function &function) {
    return tile_rows > kWarpRows ? function(SplitkvTraits<kDType, kHeadDim, Form::many_rows>{})
           : is_cluster          ? function(SplitkvTraits<kDType, kHeadDim, Form::cluster>{})
                                 : function(SplitkvTraits<kDType, kHeadDim, Form::few_rows>{});
}

}  // namespace flash::kvcache
