// Tile sizes of the sm80 backward per head dim: the one table. docs/tuning.md says how they were found.
#pragma once

#include "kind.h"

namespace flash::sm80 {

// What a kernel is asked for. One that decides in its loop at run time is up to 22 % slower than one that does not have
// to.
enum class Bwd_mode {
    all,            // dQ, dK and dV; dQ added up in any order
    deterministic,  // dQ, dK and dV; dQ added up key block by key block
    general,        // some or all of dQ, dK and dV, in any order or not: decided at run time
};

// The three kinds of product spread the warps over a tile in their own way: kWarps* over its rows, the rest over its
// columns. With all warps over the keys in both S^T and dK, dV, P and dS stay in registers.
template <int kBlockM_, int kBlockN_, int kNWarps_, int kWarpsN_SdP_, int kWarpsN_dKV_, int kWarpsM_dQ_, int kStages_,
          int kMinBlocksPerSM_, bool kStages_dQ_, int kSlices_ = 1, bool kSpares_registers_ = false,
          bool kDV_first_ = false>
struct Tile_bwd {
    using Tile = Tile_bwd;                    // what heirs in the tables below are, whatever their name
    static constexpr int kBlockM = kBlockM_;  // query rows of a step
    static constexpr int kBlockN = kBlockN_;  // keys of a thread block
    static constexpr int kNWarps = kNWarps_;
    static constexpr int kWarpsN_SdP = kWarpsN_SdP_;          // of S^T = K Q^T and dP^T = V dO^T [keys, queries]
    static constexpr int kWarpsN_dKV = kWarpsN_dKV_;          // of dV = P^T dO and dK = dS^T Q [keys, head dim]
    static constexpr int kWarpsM_dQ = kWarpsM_dQ_;            // of dQ = dS K [queries, head dim]
    static constexpr int kStages = kStages_;                  // buffers for Q and dO: 2 loads a step ahead
    static constexpr int kMinBlocksPerSM = kMinBlocksPerSM_;  // what the register count has to allow
    // Where the GPU can: dQ through shared memory and the copy engine rather than by reductions from registers.
    static constexpr bool kStages_dQ = kStages_dQ_;
    static constexpr int kSlices = kSlices_;  // of the query rows, for which S and dP are computed in turn
    static constexpr bool kSpares_registers = kSpares_registers_;  // recompute addresses in every step
    static constexpr bool kDV_first = kDV_first_;                  // dV before dQ rather than behind its reductions
};

constexpr int kLeastSmem = 99 * 1024;  // bytes that a thread block may have on every GPU (compute capability 8.6)

// For GPUs that give a thread block enough shared memory, and for those that do not.
template <int kHeadDim, Kind kKind, Bwd_mode kMode>
struct Tile_sizes_bwd;
template <int kHeadDim>
struct Tile_sizes_bwd_small;

template <Kind kKind, Bwd_mode kMode>
struct Tile_sizes_bwd<32, kKind, kMode> : Tile_bwd<128, 128, 4, 4, 4, 4, 2, 2, true, 4> {};
template <Kind kKind, Bwd_mode kMode>
struct Tile_sizes_bwd<64, kKind, kMode> : Tile_bwd<64, 128, 4, 4, 4, 2, 1, 2, true, 2> {};
template <>
struct Tile_sizes_bwd<64, Kind::local, Bwd_mode::all> : Tile_bwd<64, 128, 4, 4, 4, 2, 1, 2, true, 2, true> {};
template <Kind kKind, Bwd_mode kMode>
struct Tile_sizes_bwd<96, kKind, kMode> : Tile_bwd<64, 64, 4, 2, 2, 2, 2, 2, false> {};
template <Kind kKind>
struct Tile_sizes_bwd<96, kKind, Bwd_mode::deterministic> : Tile_bwd<64, 128, 8, 4, 4, 4, 2, 1, true, 1, false, true> {
};
template <Kind kKind, Bwd_mode kMode>
struct Tile_sizes_bwd<128, kKind, kMode> : Tile_bwd<64, 128, 8, 4, 4, 2, 2, 1, true, 1, false, true> {};
template <Kind kKind, Bwd_mode kMode>
struct Tile_sizes_bwd<192, kKind, kMode> : Tile_bwd<64, 64, 8, 2, 2, 2, 2, 1, true> {};
template <Kind kKind, Bwd_mode kMode>
struct Tile_sizes_bwd<256, kKind, kMode> : Tile_bwd<64, 64, 8, 2, 2, 2, 1, 1, true> {};
template <>
struct Tile_sizes_bwd<256, Kind::full, Bwd_mode::all> : Tile_bwd<64, 64, 8, 2, 2, 2, 2, 1, false> {};

template <>
struct Tile_sizes_bwd_small<32> : Tile_bwd<64, 64, 4, 2, 2, 2, 1, 1, false> {};
template <>
struct Tile_sizes_bwd_small<64> : Tile_bwd<64, 64, 4, 2, 2, 2, 1, 1, false> {};
template <>
struct Tile_sizes_bwd_small<96> : Tile_bwd<64, 64, 4, 2, 2, 2, 1, 1, false> {};
template <>
struct Tile_sizes_bwd_small<128> : Tile_bwd<64, 64, 8, 2, 2, 2, 1, 1, false> {};
template <>
struct Tile_sizes_bwd_small<192> : Tile_bwd<32, 64, 8, 4, 2, 2, 1, 1, false> {};
template <>
struct Tile_sizes_bwd_small<256> : Tile_bwd<32, 32, 4, 2, 2, 2, 1, 1, false> {};

}  // namespace flash::sm80
