// Tile sizes of the sm90 backward per head dim: the one table. docs/tuning/sm90_backward.md says how they were found.
#pragma once

namespace flash::sm90 {

// How the two consumer warpgroups share the work of a step.
enum class BwdSplit {
    keys,      // each has 64 keys, and computes S, dP, dV and dK of them
    products,  // both have the same 64 keys: one computes S and dV, the other dP and dK
};

template <BwdSplit kSplit_, int kBlockM_, int kStages_, int kDsStages_, int kDqColumns_, int kDqRegisters_,
          int kConsumerRegisters_>
struct TileBwd {
    static constexpr BwdSplit kSplit = kSplit_;
    static constexpr int kBlockM = kBlockM_;                                 // query rows of a step
    static constexpr int kBlockN = kSplit_ == BwdSplit::keys ? 2 * 64 : 64;  // keys of a CTA
    static constexpr int kStages = kStages_;                                 // pipeline stages of Q, and of dO
    static constexpr int kDsStages = kDsStages_;                             // pipeline stages of dS
    static constexpr int kDqColumns = kDqColumns_;  // columns of dQ that are multiplied at a time, 64 rows each
    // setmaxnreg, for the dQ warpgroup and two consumers. A launch of 384 threads gets 3 * 168 = 504; with more, the
    // kernel would wait for ever.
    static constexpr int kDqRegisters = kDqRegisters_;
    static constexpr int kConsumerRegisters = kConsumerRegisters_;
    static_assert(kDqRegisters + 2 * kConsumerRegisters <= 3 * 168);
};

template <int kHeadDim>
struct TileSizesBwd;

template <>
struct TileSizesBwd<64> : TileBwd<BwdSplit::keys, 128, 3, 2, 64, 88, 208> {};
template <>
struct TileSizesBwd<96> : TileBwd<BwdSplit::keys, 64, 3, 2, 96, 120, 192> {};
template <>
struct TileSizesBwd<128> : TileBwd<BwdSplit::keys, 64, 3, 2, 64, 88, 208> {};
template <>
struct TileSizesBwd<192> : TileBwd<BwdSplit::products, 64, 2, 2, 64, 120, 192> {};
template <>
struct TileSizesBwd<256> : TileBwd<BwdSplit::products, 64, 2, 2, 64, 120, 192> {};

}  // namespace flash::sm90
