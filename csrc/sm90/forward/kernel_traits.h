// The sm90 forward kernel at compile time: tile sizes, and the types that follow from them.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "flash.h"
#include "sm90/common/bias_tile.h"
#include "sm90/common/pipeline.h"
#include "sm90/common/tma.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// ---- tile sizes per head dim: the one table, but for the tiles of 192 rows in sm90/decode.
// docs/tuning/sm90_forward.md and docs/tuning/kvcache.md say how they were found.

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
    static constexpr bool kHasBias = false;  // shared memory has a tile of attn_bias
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

// Head dims of q and k up to 192 with head dims of v up to 128, as in multi-head latent attention, have a kernel of
// their own (dispatch/kind.h).
struct TileSizesFwdLatent : TileFwd<2, 128, 2, 1, true> {};

// Tiles of fewer rows or keys, for two cases. Local calls of up to kShortSeqlen queries: large tiles waste more under
// the mask and at the end of the sequence than they gain. Full calls for which tiles of many rows leave SMs idle; in a
// tile of fewer a row costs kCostOfShortTiles times as much.
constexpr int kShortSeqlen = 1024;
constexpr double kCostOfShortTiles = 1.2;
template <int kHeadDim>
struct TileSizesFwdShort : TileSizesFwd<kHeadDim, true> {};
template <>
struct TileSizesFwdShort<64> : TileFwd<2, 128, 4, 2, true> {};
template <>
struct TileSizesFwdShort<256> : TileFwd<2, 64, 2, 1, false> {};

// Tiles of the kernel with split keys, for more than 64 rows of a group of heads and for up to 64. It also has
// TileSizesSplitTall.
template <int kHeadDim, bool kIsNarrow>
struct TileSizesSplit : TileSizesFwd<kHeadDim, true> {};
template <>
struct TileSizesSplit<64, false> : TileSizesFwdShort<64> {};
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

// Tiles of the kernel with attn_bias, which takes shared memory. Three consumers at head dim 64 would spill 1,244
// bytes.
template <int kConsumers, int kBlockN, int kStages, int kQStages, bool kPingPong>
struct TileFwdBiased : TileFwd<kConsumers, kBlockN, kStages, kQStages, kPingPong> {
    static constexpr bool kHasBias = true;
};
template <int kHeadDim>
struct TileSizesFwdBiased;
template <>
struct TileSizesFwdBiased<64> : TileFwdBiased<2, 128, 4, 2, true> {};
template <>
struct TileSizesFwdBiased<96> : TileFwdBiased<2, 128, 3, 2, true> {};
template <>
struct TileSizesFwdBiased<128> : TileFwdBiased<2, 128, 2, 2, true> {};
template <>
struct TileSizesFwdBiased<192> : TileFwdBiased<2, 96, 2, 1, false> {};
template <>
struct TileSizesFwdBiased<256> : TileFwdBiased<2, 64, 2, 1, false> {};

// ---- types: wgmma, shared memory layouts and TMA copies

using namespace cute;

template <DType kDType, int kHeadDim_, typename TileSize_, int kHeadDimV_ = kHeadDim_>
struct Flash_fwd_kernel_traits {
    static_assert(kDType == DType::float16 || kDType == DType::bfloat16, "tensor cores multiply 16-bit types here");

    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    using TileSize = TileSize_;
    static constexpr int kHeadDim = kHeadDim_;    // of Q and K
    static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
    static constexpr int kBlockM = TileSize::kBlockM;
    static constexpr int kBlockN = TileSize::kBlockN;
    static constexpr int kStages = TileSize::kStages;
    static constexpr int kConsumers = TileSize::kConsumers;
    static constexpr int kQStages = TileSize::kQStages;  // per consumer
    static constexpr int kNThreads = 128 * (kConsumers + 1);
    static constexpr int kRows = 64;  // query rows of a consumer warpgroup: the m64 of wgmma

    static_assert(kStages >= 2);

    // S = Q K^T with both operands in shared memory; O += P V with P in registers and V transposed by wgmma.
    using TileQ = Shape<Int<kRows>, Int<kHeadDim>>;
    using TileK = Shape<Int<kBlockN>, Int<kHeadDim>>;
    using TileV = Shape<Int<kBlockN>, Int<kHeadDimV>>;
    using TileO = Shape<Int<kRows>, Int<kHeadDimV>>;
    using TileS = Shape<Int<kRows>, Int<kBlockN>>;
    using TiledMmaQK = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kBlockN>, Int<kHeadDim>>>()));
    using TiledMmaPV = decltype(make_tiled_mma(
        GMMA::rs_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kHeadDimV>, Int<kBlockN>>, GMMA::Major::K,
                             GMMA::Major::MN>()));

    // Rows of 128 bytes (64 bytes for head dims that are no multiple of 64), in the swizzle of wgmma and TMA.
    static constexpr int kSmemRow = kHeadDim % 64 == 0 ? 64 : 32;  // elements
    static_assert(kHeadDimV % kSmemRow == 0);
    using SmemLayoutAtom =
        std::conditional_t<kSmemRow == 64, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
    using SmemLayoutQ =
        decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kRows>, Int<kHeadDim>, Int<kConsumers * kQStages>>{}));
    using SmemLayoutK = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
    using SmemLayoutV = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDimV>, Int<kStages>>{}));
    using SmemLayoutVt = decltype(composition(
        SmemLayoutV{}, make_layout(Shape<Int<kHeadDimV>, Int<kBlockN>, Int<kStages>>{},
                                   Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDimV>>{})));  // (headdim, key, stage)

    using TmaQ = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutQ{})), TileQ>;
    using TmaK = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutK{})), TileK>;
    using TmaV = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutV{})), TileV>;
    struct Copies {
        TmaQ q;
        TmaK k;
        TmaV v;
    };

    using BiasTile = sm90::BiasTile<Element, PlacesOfQueries<kBlockN>>;  // of a warp

    static constexpr bool kTracksLogits = false;

    static constexpr int kAlignment = 1024;  // bytes: of the swizzled layouts
    struct SharedStorageWithoutBias {
        alignas(kAlignment) Element q[cosize_v<SmemLayoutQ>];
        alignas(kAlignment) Element k[cosize_v<SmemLayoutK>];
        alignas(kAlignment) Element v[cosize_v<SmemLayoutV>];
        PipelineBarriers<kConsumers * kQStages> q_barriers;  // stage 0 of all consumers, then stage 1
        PipelineBarriers<kStages> k_barriers, v_barriers;
        typename WorkTileRing<kConsumers>::SharedStorage tiles;
    };
    struct SharedStorageWithBias : SharedStorageWithoutBias {
        alignas(16) Element bias[4 * kConsumers][BiasTile::kSize];  // of each warp of the consumers
    };
    using SharedStorage = std::conditional_t<TileSize::kHasBias, SharedStorageWithBias, SharedStorageWithoutBias>;
    static constexpr int kSmemSize = sizeof(SharedStorage);

    struct PipelineStates {
        PipelineState<kConsumers * kQStages> q;
        PipelineState<kStages> k, v;
    };
};

// A kernel for calls whose only option is return_max_logits (largest_logit.h). The general kernels decide at run time.
template <typename Traits>
struct TracksLogits : Traits {
    static constexpr bool kTracksLogits = true;
};

}  // namespace flash::sm90
