// Tile sizes of the sm80 forward for each head dim. docs/tuning/sm80_forward.md has the measurements.
#pragma once

namespace flash::sm80 {

template <int kBlockM_, int kBlockN_, int kNWarps_, int kMinBlocksPerSM_, bool kRecomputesAddresses_ = false,
          int kQStepsInRegisters_ = 0>
struct TileFwd {
    static constexpr int kBlockM = kBlockM_;                  // query rows of a CTA
    static constexpr int kBlockN = kBlockN_;                  // keys of a step
    static constexpr int kNWarps = kNWarps_;                  // each takes 16 rows at a time
    static constexpr int kMinBlocksPerSM = kMinBlocksPerSM_;  // CTAs per SM; limits the registers of a thread
    // Addresses are recomputed in every step: up to 4 % slower, for tiles that would spill otherwise.
    static constexpr bool kRecomputesAddresses = kRecomputesAddresses_;
    // 16-wide slices of Q that stay in registers over the loop: fewer reads where shared memory is the limit.
    static constexpr int kQStepsInRegisters = kQStepsInRegisters_;
};

// kIsGeneral: kinds with score modifiers and dropout, which leave fewer registers for the tile.
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
