// Tile sizes of the sm80 backward for each head dim. docs/tuning/sm80_backward.md has the measurements.
#pragma once

#include "dispatch/kind.h"

namespace flash::sm80 {

// What a kernel computes. A kernel that decides this in its loop at run time is up to 22 % slower.
enum class BwdMode {
    all,            // dQ, dK and dV; dQ is summed in any order
    deterministic,  // dQ, dK and dV; dQ is summed key block by key block
    general,        // some or all of dQ, dK and dV, in any order or not: decided at run time
};

// kRowWarps*: the number of warps along the rows of a product; the others lie along its columns. If all warps lie along
// the keys in S^T and in dK, dV, then P and dS stay in registers.
template <int kBlockM_, int kBlockN_, int kNWarps_, int kRowWarpsSdP_, int kRowWarpsDKV_, int kRowWarpsDQ_,
          int kStages_, int kMinBlocksPerSM_, bool kStagesDQ_, int kSlices_ = 1, bool kRecomputesAddresses_ = false,
          bool kDVFirst_ = false>
struct TileBwd {
    using TileSize = TileBwd;                 // the base of an entry of the tables below
    static constexpr int kBlockM = kBlockM_;  // query rows of a step
    static constexpr int kBlockN = kBlockN_;  // keys of a CTA
    static constexpr int kNWarps = kNWarps_;
    static constexpr int kRowWarpsSdP = kRowWarpsSdP_;        // S^T = K Q^T and dP^T = V dO^T [keys, queries]
    static constexpr int kRowWarpsDKV = kRowWarpsDKV_;        // dV = P^T dO and dK = dS^T Q [keys, head dim]
    static constexpr int kRowWarpsDQ = kRowWarpsDQ_;          // dQ = dS K [queries, head dim]
    static constexpr int kStages = kStages_;                  // buffers for Q and dO; 2: loads run one step ahead
    static constexpr int kMinBlocksPerSM = kMinBlocksPerSM_;  // CTAs per SM; limits the registers of a thread
    // dQ goes through shared memory and the copy engine, where the GPU has cp.reduce.async.bulk.
    static constexpr bool kStagesDQ = kStagesDQ_;
    static constexpr int kSlices = kSlices_;  // S and dP are computed for kBlockM / kSlices queries at a time
    static constexpr bool kRecomputesAddresses = kRecomputesAddresses_;  // in every step, to save registers
    static constexpr bool kDVFirst = kDVFirst_;                          // dV before dQ instead of after it
};

constexpr int kLeastSmem = 99 * 1024;  // bytes of shared memory that a CTA may have on every GPU (8.6 has the least)

// The tile, and a small tile for GPUs on which the first one needs too much shared memory.
template <int kHeadDim, Kind kKind, BwdMode kMode>
struct TileSizesBwd;
template <int kHeadDim>
struct TileSizesBwdSmall;

template <Kind kKind, BwdMode kMode>
struct TileSizesBwd<32, kKind, kMode> : TileBwd<128, 128, 4, 4, 4, 4, 2, 2, true, 4> {};
template <Kind kKind, BwdMode kMode>
struct TileSizesBwd<64, kKind, kMode> : TileBwd<64, 128, 4, 4, 4, 2, 1, 2, true, 2> {};
template <>
struct TileSizesBwd<64, Kind::local, BwdMode::all> : TileBwd<64, 128, 4, 4, 4, 2, 1, 2, true, 2, true> {};
template <Kind kKind, BwdMode kMode>
struct TileSizesBwd<96, kKind, kMode> : TileBwd<64, 64, 4, 2, 2, 2, 2, 2, false> {};
template <Kind kKind>
struct TileSizesBwd<96, kKind, BwdMode::deterministic> : TileBwd<64, 128, 8, 4, 4, 4, 2, 1, true, 1, false, true> {};
template <Kind kKind, BwdMode kMode>
struct TileSizesBwd<128, kKind, kMode> : TileBwd<64, 128, 8, 4, 4, 2, 2, 1, true, 1, false, true> {};
template <Kind kKind, BwdMode kMode>
struct TileSizesBwd<192, kKind, kMode> : TileBwd<64, 64, 8, 2, 2, 2, 2, 1, true> {};
template <Kind kKind, BwdMode kMode>
struct TileSizesBwd<256, kKind, kMode> : TileBwd<64, 64, 8, 2, 2, 2, 1, 1, true> {};
template <>
struct TileSizesBwd<256, Kind::full, BwdMode::all> : TileBwd<64, 64, 8, 2, 2, 2, 2, 1, false> {};

template <>
struct TileSizesBwdSmall<32> : TileBwd<64, 64, 4, 2, 2, 2, 1, 1, false> {};
template <>
struct TileSizesBwdSmall<64> : TileBwd<64, 64, 4, 2, 2, 2, 1, 1, false> {};
template <>
struct TileSizesBwdSmall<96> : TileBwd<64, 64, 4, 2, 2, 2, 1, 1, false> {};
template <>
struct TileSizesBwdSmall<128> : TileBwd<64, 64, 8, 2, 2, 2, 1, 1, false> {};
template <>
struct TileSizesBwdSmall<192> : TileBwd<32, 64, 8, 4, 2, 2, 1, 1, false> {};
template <>
struct TileSizesBwdSmall<256> : TileBwd<32, 32, 4, 2, 2, 2, 1, 1, false> {};

}  // namespace flash::sm80
