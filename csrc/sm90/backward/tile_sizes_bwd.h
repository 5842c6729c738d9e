// Tile sizes of the sm90 backward per head dim: the one table. docs/tuning/sm90_backward.md says how they were found.
#pragma once

namespace flash::sm90 {

// How the two consumer warpgroups share the work of a step.
enum class BwdSplit {
    keys,      // each has 64 keys, and computes S, dP, dV and dK of them
    products,  // both have the same 64 keys: one computes S and dV, the other dP and dK
};

// Who computes dQ.
enum class DqBy {
    consumers,  // each a half; it goes through shared memory, and the copy engine adds it to global memory
    producer,   // the producer warpgroup, which adds it from registers
};

// Where wgmma finds dS as an operand of dK.
enum class DsIn { registers, shared_memory };

template <BwdSplit kSplit_, DqBy kDqBy_, DsIn kDsIn_, int kBlockM_, int kStagesQ_, int kStagesdO_, int kStagesdS_,
          int kDqColumns_, int kProducerRegisters_, int kConsumerRegisters_, int kRowsPerTile_>
struct TileBwd {
    static constexpr BwdSplit kSplit = kSplit_;
    static constexpr DqBy kDqBy = kDqBy_;
    static constexpr DsIn kDsIn = kDsIn_;
    static constexpr int kBlockM = kBlockM_;                                                    // query rows of a step
    static constexpr int kBlockN = kSplit_ == BwdSplit::keys ? 2 * 64 : 64;                     // keys of a CTA
    static constexpr int kStagesQ = kStagesQ_, kStagesdO = kStagesdO_, kStagesdS = kStagesdS_;  // of the pipelines
    static constexpr int kDqColumns = kDqColumns_;  // dQ is multiplied in tiles of 64 rows and this many columns
    // setmaxnreg, for the producer warpgroup and two consumers. A launch of 384 threads gets 3 * 168 = 504; with more,
    // the kernel would wait for ever. With a dropout warpgroup: Flash_bwd_kernel_traits::kConsumerRegisters.
    static constexpr int kProducerRegisters = kProducerRegisters_;
    static constexpr int kConsumerRegisters = kConsumerRegisters_;
    static constexpr int kRowsPerTile = kRowsPerTile_;  // query rows of a work tile of preprocess or convert
    static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168);
};

template <int kHeadDim>
struct TileSizesBwd;

// Head dims whose kind general has three kernels, for no factors, a cap and dropout (kernel_traits_bwd.h, Factors):
// what a call does not need takes no registers, and only calls with dropout have a warpgroup for it. The others have
// one kernel.
constexpr bool has_kernel_per_factors(int headdim) {
    return headdim == 64 || headdim == 128;
}

template <>
struct TileSizesBwd<64>
    : TileBwd<BwdSplit::keys, DqBy::consumers, DsIn::shared_memory, 128, 3, 2, 2, 64, 24, 240, 1024> {};
template <>
struct TileSizesBwd<96>
    : TileBwd<BwdSplit::keys, DqBy::producer, DsIn::shared_memory, 64, 3, 3, 2, 96, 120, 192, 1024> {};
template <>
struct TileSizesBwd<128> : TileBwd<BwdSplit::keys, DqBy::consumers, DsIn::registers, 64, 3, 2, 2, 64, 24, 240, 512> {};
template <>
struct TileSizesBwd<192> : TileBwd<BwdSplit::products, DqBy::producer, DsIn::registers, 64, 2, 2, 2, 64, 88, 208, 256> {
};
template <>
struct TileSizesBwd<256> : TileBwd<BwdSplit::products, DqBy::producer, DsIn::registers, 64, 2, 2, 2, 64, 88, 208, 256> {
};

}  // namespace flash::sm90
