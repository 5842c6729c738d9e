// Tile sizes of the sm90 forward per head dim: the one table. docs/tuning/sm90_forward.md and
// docs/tuning/kvcache.md say how they were found.
#pragma once

namespace flash::sm90 {

template <int kConsumers_, int kBlockN_, int kStages_, int kQStages_, bool kPingPong_>
struct TileFwd {
    static constexpr int kConsumers = kConsumers_;  // consumer warpgroups, 64 query rows each
    static constexpr int kBlockN = kBlockN_;        // keys per step
    static constexpr int kStages = kStages_;        // pipeline stages of K, and of V
    static constexpr int kQStages = kQStages_;      // pipeline stages of Q: with 2, the next work tile loads ahead
    static constexpr bool kPingPong = kPingPong_;   // consumers issue their products one after the other
    static constexpr int kBlockM = 64 * kConsumers;
    // setmaxnreg: the registers that the producer gives up go to the consumers.
    static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kConsumers == 2 ? 40 : 56;
    static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kConsumers == 2 ? 232 : 256;
};

template <int kHeadDim, bool kIsLocal>
struct TileSizesFwd;

template <bool kIsLocal>
struct TileSizesFwd<64, kIsLocal> : TileFwd<3, 128, 4, 2, true> {};
template <bool kIsLocal>
struct TileSizesFwd<96, kIsLocal> : TileFwd<2, 128, 3, 2, true> {};
template <bool kIsLocal>
struct TileSizesFwd<128, kIsLocal> : TileFwd<2, 128, 2, 2, true> {};
template <bool kIsLocal>
struct TileSizesFwd<192, kIsLocal> : TileFwd<2, 112, 2, 1, false> {};
template <bool kIsLocal>
struct TileSizesFwd<256, kIsLocal> : TileFwd<2, 80, 2, 1, false> {};

// Tiles of fewer rows, for two cases. Local calls of up to kShortSeqlen queries: large tiles waste more under the mask
// and at the end of the sequence than they gain. Full calls for which large tiles leave SMs idle; in a short tile a row
// costs kCostOfShortTiles times as much.
constexpr int kShortSeqlen = 1024;
constexpr double kCostOfShortTiles = 1.2;
template <int kHeadDim>
struct TileSizesFwdShort : TileSizesFwd<kHeadDim, true> {};
template <>
struct TileSizesFwdShort<64> : TileFwd<2, 128, 4, 2, true> {};

// Tiles of the kernel with split keys, for more than 64 rows of a group of heads and for up to 64.
template <int kHeadDim, bool kIsNarrow>
struct TileSizesSplit : TileSizesFwdShort<kHeadDim> {};
template <>
struct TileSizesSplit<64, true> : TileFwd<1, 128, 5, 2, false> {};
template <>
struct TileSizesSplit<96, true> : TileFwd<1, 128, 4, 2, false> {};
template <>
struct TileSizesSplit<128, true> : TileFwd<1, 128, 3, 2, false> {};
template <>
struct TileSizesSplit<192, true> : TileFwd<1, 112, 2, 2, false> {};
template <>
struct TileSizesSplit<256, true> : TileFwd<1, 80, 2, 2, false> {};

}  // namespace flash::sm90
