// Tile sizes of the sm80 backward per head dim: the one table. docs/tuning.md says how they were found.
#pragma once

#include "../kind.h"

namespace flash::sm80 {

// What a kernel is asked for. One that decides in its loop at run time is up to 22 % slower than one that does not have
// to.
enum class BwdMode {
    all,            // dQ, dK and dV; dQ added up in any order
    deterministic,  // dQ, dK and dV; dQ added up key block by key block
    general,        // some or all of dQ, dK and dV, in any order or not: decided at run time
};

// The three kinds of product spread the warps over a tile in their own way: kWarps* over its rows, the rest over its
// columns. With all warps over the keys in both S^T and dK, dV, P and dS stay in registers.
template <int kBlockM_, int kBlockN_, int kNWarps_, int kWarpsNSdP_, int kWarpsNDKV_, int kWarpsMDQ_, int kStages_,
          int kMinBlocksPerSM_, bool kStagesDQ_, int kSlices_ = 1, bool kSparesRegisters_ = false,
          bool kDVFirst_ = false>
struct TileBwd {
    using Tile = TileBwd;                    // what heirs in the tables below are, whatever their name
    static constexpr int kBlockM = kBlockM_;  // query rows of a step
    static constexpr int kBlockN = kBlockN_;  // keys of a thread block
    static constexpr int kNWarps = kNWarps_;
    static constexpr int kWarpsNSdP = kWarpsNSdP_;          // of S^T = K Q^T and dP^T = V dO^T [keys, queries]
    static constexpr int kWarpsNDKV = kWarpsNDKV_;          // of dV = P^T dO and dK = dS^T Q [keys, head dim]
    static constexpr int kWarpsMDQ = kWarpsMDQ_;            // of dQ = dS K [queries, head dim]
    static constexpr int kStages = kStages_;                  // buffers for Q and dO: 2 loads a step ahead
    static constexpr int kMinBlocksPerSM = kMinBlocksPerSM_;  // what the register count has to allow
    // Where the GPU can: dQ through shared memory and the copy engine rather than by reductions from registers.
    static constexpr bool kStagesDQ = kStagesDQ_;
    static constexpr int kSlices = kSlices_;  // of the query rows, for which S and dP are computed in turn
    static constexpr bool kSparesRegisters = kSparesRegisters_;  // recompute addresses in every step
    static constexpr bool kDVFirst = kDVFirst_;                  // dV before dQ rather than behind its reductions
};

constexpr int kLeastSmem = 99 * 1024;  // bytes that a thread block may have on every GPU (compute capability 8.6)

// For GPUs that give a thread block enough shared memory, and for those that do not.
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
struct TileSizesBwd<96, kKind, BwdMode::deterministic> : TileBwd<64, 128, 8, 4, 4, 4, 2, 1, true, 1, false, true> {
};
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
