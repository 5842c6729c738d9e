// The tiles of the split-KV kernel. 4 warps share a CTA in two ways. Few rows: each warp has its own pipeline of key
// tiles, and the warps' results are summed at the end. Many rows: the warps share each key tile.
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <type_traits>

#include "splitkv_schedule.h"

namespace flash::kvcache {

template <DType kDType, int kHeadDim_, int kRowWarps_, int kRowTiles_>
struct SplitkvTraits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kThreads = 128;
    static constexpr int kRowWarps = kRowWarps_;          // warps that share a key tile
    static constexpr int kRowTiles = kRowTiles_;          // m16 tiles of a warp
    static constexpr int kGroups = 4 / kRowWarps;         // groups of warps with key tiles of their own
    static constexpr int kGroupThreads = 32 * kRowWarps;  // threads of a group
    static constexpr int kRows = 16 * kRowTiles * kRowWarps;
    // Over the loop; else Q is read from shared memory for each key tile.
    static constexpr bool kQInRegisters = kRowTiles == 1 && kHeadDim <= 128;

    // Keys of a tile; at most 32, one for each lane.
    static constexpr int kKeys = (kRowWarps == 1 && kHeadDim > 64) || (kRowTiles > 1 && kHeadDim == 128) ? 16 : 32;
    static constexpr int kUnit = kGroups * kKeys;
    static constexpr int kStages = kRowWarps == 1 ? 3 : kHeadDim <= 128 ? 4 : 2;

    static constexpr int kChunks = kHeadDim / 8;  // pieces of 16 bytes in a row
    static constexpr int kTileElements = kKeys * kHeadDim;
    static constexpr int kQElements = kQInRegisters ? 0 : kRows * kHeadDim;
    static constexpr int kOStride = kHeadDim + 4;  // floats of a row of O in shared memory; + 4: fewer bank conflicts

    struct Pipeline {
        alignas(128) Element q[std::max(kQElements, 8)];
        alignas(128) Element kv[kGroups][kStages][2][kTileElements];
    };
    struct Results {
        float o[kGroups][kRows][kOStride];
        float row_max[kGroups][kRows];
        float row_sum[kGroups][kRows];
    };
    struct SharedStorage {
        union {
            Pipeline pipeline;
            Results results;
        };
        int query[kRows];    // of each row
        float slope[kRows];  // ALiBi slope of its head, in units of the softmax scale
        typename Schedule<kThreads, kUnit>::Shared schedule;
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);
    static constexpr int kCtasPerSM = std::clamp(227 * 1024 / (kSmemSize + 1024), 1, kHeadDim <= 32 ? 3 : 2);
};

// Rows of a head that fit a tile of one warp.
constexpr int kFewRows = 16;

// Tile rows for `rows` rows in all.
constexpr int tile_rows_for(int64_t rows, int headdim) {
    return rows <= kFewRows ? kFewRows : rows <= 64 || headdim > 128 ? 64 : 128;
}

// Calls function with the traits of a tile of `tile_rows` rows.
template <DType kDType, int kHeadDim, typename Function>
auto call_with_traits(int tile_rows, const Function &function) {
    if (tile_rows == kFewRows) {
        return function(SplitkvTraits<kDType, kHeadDim, 1, 1>{});
    }
    if constexpr (kHeadDim <= 128) {
        if (tile_rows == 128) {
            return function(SplitkvTraits<kDType, kHeadDim, 4, 2>{});
        }
    }
    return function(SplitkvTraits<kDType, kHeadDim, 4, 1>{});
}

}  // namespace flash::kvcache
