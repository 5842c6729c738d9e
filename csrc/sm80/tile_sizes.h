// Tile sizes of the sm80 forward per head dim: the one table. docs/tuning.md says how they were found.
#pragma once

namespace flash::sm80 {

template <int kBlockM_, int kBlockN_, int kNWarps_, int kMinBlocksPerSM_, bool kSparesRegisters_ = false,
          int kQStepsInRegisters_ = 0>
struct TileFwd {
    static constexpr int kBlockM = kBlockM_;                  // query rows of a thread block
    static constexpr int kBlockN = kBlockN_;                  // keys of a step
    static constexpr int kNWarps = kNWarps_;                  // warps, 16 rows each at a time
    static constexpr int kMinBlocksPerSM = kMinBlocksPerSM_;  // what the register count has to allow
    // Recompute addresses in every step: up to 4 % slower, for tiles that would spill.
    static constexpr bool kSparesRegisters = kSparesRegisters_;
    // How many 16-wide slices of Q stay in registers over the loop: less to read where shared memory is the limit.
    static constexpr int kQStepsInRegisters = kQStepsInRegisters_;
};

// The kinds that have extras want fewer registers for the tile.
template <int kHeadDim, bool kIsGeneral>
struct TileSizesFwd;

template <bool kIsGeneral>
struct TileSizesFwd<32, kIsGeneral> : TileFwd<128, 64, 4, 3> {};
template <>
struct TileSizesFwd<64, false> : TileFwd<128, 128, 4, 2> {};
template <>
struct TileSizesFwd<64, true> : TileFwd<64, 128, 4, 3> {};
template <bool kIsGeneral>
struct TileSizesFwd<96, kIsGeneral> : TileFwd<128, 64, 4, 2> {};
template <bool kIsGeneral>
struct TileSizesFwd<128, kIsGeneral> : TileFwd<128, 64, 4, 2, true> {};
template <bool kIsGeneral>
struct TileSizesFwd<192, kIsGeneral> : TileFwd<64, 64, 4, 2, false, 12> {};
template <>
struct TileSizesFwd<256, false> : TileFwd<64, 64, 4, 2, false, 8> {};
template <>
struct TileSizesFwd<256, true> : TileFwd<64, 64, 4, 2, false, 6> {};

}  // namespace flash::sm80
