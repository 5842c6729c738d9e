// The sm90 backward kernels at compile time: tile sizes, and the types that follow from them.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "dispatch/kind.h"
#include "flash.h"
#include "sm90/common/bias_tile.h"
#include "sm90/common/pipeline.h"
#include "sm90/common/tma.h"
#include "work_tiles_bwd.h"

namespace flash::sm90 {

// ---- tile sizes per head dim: the one table. docs/tuning/sm90_backward.md says how they were found.

// The way in which the two consumer warpgroups share the work of a step.
enum class BwdSplit {
    keys,      // each has 64 keys, and computes S, dP, dV and dK of them
    products,  // both have the same 64 keys: one computes S and dV, the other dP and dK
};

// The warpgroups that compute dQ.
enum class DqBy {
    consumers,  // each a half; it goes through shared memory, and the copy engine adds it to global memory
    producer,   // the producer warpgroup, which adds it from registers
};

// The place of dS as an operand of dK.
enum class DsIn { registers, shared_memory };

// kBlockM: query rows of a step.
// kStagesQ, kStagesdO, kStagesdS: stages of the pipelines.
// kDqColumns: dQ is multiplied in tiles of 64 rows and this many columns.
// kProducerRegisters, kConsumerRegisters: setmaxnreg, for the producer warpgroup and each of two consumers. A launch of
// 384 threads gets 3 * 168 = 504; with more, the kernel would wait for ever. With a dropout warpgroup see
// Flash_bwd_kernel_traits::kConsumerRegisters.
// kRowsPerTile: query rows of a CTA in preprocess or convert.
template <int kHeadDim>
struct TileSizesBwd;

// kCtas: CTAs of a cluster that share a key block (cta_pair_bwd.h).
// kCyclesPerAdd: DqBy::producer: cycles from one addition of a warp to dQ to the next.
struct OneCta {
    static constexpr int kCtas = 1, kCyclesPerAdd = 0;
};

template <>
struct TileSizesBwd<64> : OneCta {
    static constexpr BwdSplit kSplit = BwdSplit::keys;
    static constexpr DqBy kDqBy = DqBy::consumers;
    static constexpr DsIn kDsIn = DsIn::shared_memory;
    static constexpr int kBlockM = 128;
    static constexpr int kStagesQ = 3, kStagesdO = 2, kStagesdS = 2;
    static constexpr int kDqColumns = 64;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr int kRowsPerTile = 1024;
};

template <>
struct TileSizesBwd<96> : OneCta {
    static constexpr BwdSplit kSplit = BwdSplit::keys;
    static constexpr DqBy kDqBy = DqBy::producer;
    static constexpr DsIn kDsIn = DsIn::shared_memory;
    static constexpr int kBlockM = 64;
    static constexpr int kStagesQ = 3, kStagesdO = 3, kStagesdS = 2;
    static constexpr int kCyclesPerAdd = 50;
    static constexpr int kDqColumns = 96;
    static constexpr int kProducerRegisters = 120, kConsumerRegisters = 192;
    static constexpr int kRowsPerTile = 1024;
};

template <>
struct TileSizesBwd<128> : OneCta {
    static constexpr BwdSplit kSplit = BwdSplit::keys;
    static constexpr DqBy kDqBy = DqBy::consumers;
    static constexpr DsIn kDsIn = DsIn::registers;
    static constexpr int kBlockM = 64;
    static constexpr int kStagesQ = 3, kStagesdO = 2, kStagesdS = 2;
    static constexpr int kDqColumns = 64;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr int kRowsPerTile = 512;
};

template <>
struct TileSizesBwd<192> : OneCta {
    static constexpr BwdSplit kSplit = BwdSplit::products;
    static constexpr DqBy kDqBy = DqBy::producer;
    static constexpr DsIn kDsIn = DsIn::registers;
    static constexpr int kBlockM = 64;
    static constexpr int kStagesQ = 2, kStagesdO = 2, kStagesdS = 2;
    static constexpr int kDqColumns = 64;
    static constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;
    static constexpr int kRowsPerTile = 256;
};

template <>
struct TileSizesBwd<256> : TileSizesBwd<192> {};

// Two CTAs with 64 keys each, which exchange dS: each multiplies half of the columns of dQ (has_cta_pair_bwd).
struct TileSizesBwdPair : TileSizesBwd<256> {
    static constexpr int kCtas = 2, kCyclesPerAdd = 80;
    static constexpr int kStagesdS = 1;
    static constexpr int kDqColumns = 128;
    static constexpr int kProducerRegisters = 104, kConsumerRegisters = 200;
};

// Multi-head latent attention (has_latent_bwd).
struct TileSizesBwdLatent : OneCta {
    static constexpr BwdSplit kSplit = BwdSplit::keys;
    static constexpr DqBy kDqBy = DqBy::consumers;
    static constexpr DsIn kDsIn = DsIn::shared_memory;
    static constexpr int kBlockM = 64;
    static constexpr int kStagesQ = 2, kStagesdO = 1, kStagesdS = 2;
    static constexpr int kDqColumns = 64;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr int kRowsPerTile = 256;
};

// Calls for which two CTAs share a key block, if dQ is added in no order (TileSizesBwdPair).
constexpr bool has_cta_pair_bwd(int headdim, Kind kind) {
    return headdim == 256 && !is_general(kind);
}

// A pair of CTAs loads each half of Q and dO once, for both. Rows out of bounds are cleared when both halves have come,
// and their barrier cannot tell the halves of two steps apart: kinds that have such rows load twice.
template <typename Traits, Kind kKind>
constexpr bool multicasts() {
    return Traits::kCtas > 1 && !may_be_varlen(kKind);
}

// Head dims whose kind general has three kernels, for no factors, a cap and dropout (Factors): a kernel without a
// feature needs fewer registers, and only the kernel with dropout has a warpgroup for it. The other head dims have one
// kernel.
constexpr bool has_kernel_per_factors(int headdim) {
    return headdim == 64 || headdim == 128;
}

// ---- the types of the sm90 backward kernel: tiles, wgmma, shared memory layouts and TMA copies.

using namespace cute;

// The features that scale dS by more than P. Softcap and dropout need separate P operands for dV and dS.
enum class Factors {
    none,
    cap,
    dropout,
    cap_or_dropout,  // decided at run time: cap, dropout or neither
    bias,            // a bias, which scales nothing, without a cap and dropout
    bias_cap_or_dropout,
};

template <DType kDType, int kHeadDim_, Factors kFactors_, int kHeadDimV_ = kHeadDim_,
          typename TileSize_ = TileSizesBwd<kHeadDim_>>
struct Flash_bwd_kernel_traits {
    static_assert(kDType == DType::float16 || kDType == DType::bfloat16, "tensor cores multiply 16-bit types here");

    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    using TileSize = TileSize_;
    static constexpr int kHeadDim = kHeadDim_;    // of Q, K, dQ and dK
    static constexpr int kHeadDimV = kHeadDimV_;  // of V, O, dO and dV
    static constexpr Factors kFactors = kFactors_;
    static constexpr bool kHasBias = kFactors == Factors::bias || kFactors == Factors::bias_cap_or_dropout;
    static constexpr bool kHasFactors = kFactors != Factors::none && kFactors != Factors::bias;
    static constexpr bool kMayDrop =
        kFactors == Factors::dropout || kFactors == Factors::cap_or_dropout || kFactors == Factors::bias_cap_or_dropout;
    static constexpr int kBlockM = TileSize::kBlockM;
    static constexpr int kRowsPerTile = TileSize::kRowsPerTile;
    // At head dim 64 a tile of the bias takes the place of a stage.
    static constexpr int kStagesQ = kHasBias && kHeadDim == 64 ? 2 : TileSize::kStagesQ;
    static constexpr int kStagesdO = TileSize::kStagesdO;
    static constexpr int kStagesdS = TileSize::kStagesdS;
    static constexpr bool kSplitsKeys = TileSize::kSplit == BwdSplit::keys;
    static constexpr bool kConsumersComputeDq = TileSize::kDqBy == DqBy::consumers;
    static constexpr int kConsumers = 2;
    static constexpr int kKeys = 64;  // keys of a consumer warpgroup: the m64 of wgmma
    static constexpr int kCtas = TileSize::kCtas;
    static constexpr int kKeysOfCta = kSplitsKeys ? kConsumers * kKeys : kKeys;
    static constexpr int kBlockN = kCtas * kKeysOfCta;                          // keys of a key block
    static constexpr bool kHasDropoutWarpgroup = kFactors == Factors::dropout;  // draws its bits
    static constexpr int kNThreads = 128 * (kConsumers + 1 + kHasDropoutWarpgroup);
    // The descriptors of the operands that stay in shared memory are more than the uniform registers.
    static constexpr bool kHasManyDescriptors = kHeadDim > 128;
    // Arguments of setmaxnreg. A launch of 512 threads gets 4 * 128 registers.
    static constexpr int kProducerRegisters = TileSize::kProducerRegisters;  // of the dropout warpgroup, too
    static_assert(kProducerRegisters + 2 * TileSize::kConsumerRegisters <= 3 * 168);
    static constexpr int kConsumerRegisters =
        kHasDropoutWarpgroup ? 256 - kProducerRegisters : TileSize::kConsumerRegisters;
    static constexpr DsIn kDsIn = kHasDropoutWarpgroup ? DsIn::shared_memory : TileSize::kDsIn;  // saves registers
    // The accumulator of dP starts at delta, and the product is subtracted. Head dim 96: faster.
    static constexpr bool kDpStartsAtDelta = kFactors == Factors::cap || (kHeadDim == 96 && !kMayDrop);

    // S^T = K Q^T and dP^T = V dO^T, keys as rows: both operands in shared memory, or V in registers. dV += P^T dO and
    // dK += dS^T Q: P and dS in registers, dO and Q transposed by wgmma. dQ = dS K: both in shared memory, K transposed
    // by wgmma.
    using TileS = Shape<Int<kKeys>, Int<kBlockM>>;  // of a consumer
    using TiledMmaSdP = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<Int<kKeys>, Int<kBlockM>, Int<kHeadDim>>>()));
    // delta - dP^T, where the accumulator starts at delta.
    using TiledMmaMinusdP = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<Int<kKeys>, Int<kBlockM>, Int<kHeadDim>>, GMMA::Major::K,
                             GMMA::Major::K, GMMA::ScaleIn::Neg, GMMA::ScaleIn::One>()));
    using TiledMmadP = decltype(make_tiled_mma(
        GMMA::rs_op_selector<Element, Element, float,
                             Shape<Int<kKeys>, Int<kBlockM>, Int<kHeadDim>>>()));  // head dim 64: V in registers
    using TiledMmadK = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<Int<kKeys>, Int<kHeadDim>, Int<kBlockM>>, GMMA::Major::MN,
                             GMMA::Major::MN>()));  // BwdSplit::keys: dS in shared memory, to save registers
    using TiledMmadQ = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<TileSize::kDqColumns>, Int<kBlockN>>,
                             GMMA::Major::K, GMMA::Major::MN>()));

    // Rows of 128 bytes (64 bytes for head dims that are no multiple of 64), in the swizzle of wgmma and TMA.
    static constexpr int kSmemRow = kHeadDim % 64 == 0 ? 64 : 32;  // elements
    using SmemLayoutAtom =
        std::conditional_t<kSmemRow == 64, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
    static_assert(kHeadDimV % kSmemRow == 0);
    // Where a row of a tile of Q or dO begins, counted from the first element of the tile. Each block of kSmemRow
    // columns has a line for it. The swizzle permutes 16-byte chunks within lines.
    FLASH_HOST_DEVICE static constexpr int line_of_row(int row, int column) {
        return (column / kSmemRow * kBlockM + row) * kSmemRow;
    }
    // Tiles of kColumns columns: of Q, or of dO, with those of K, or of V.
    template <int kColumns_>
    struct Tiles {
        static constexpr int kColumns = kColumns_;
        using TileQ = Shape<Int<kBlockM>, Int<kColumns>>;
        using TileKV = Shape<Int<kKeysOfCta>, Int<kColumns>>;
        using TiledKV = Shape<Int<kKeys>, Int<kColumns>>;  // of a consumer
        using TiledMmadKV = decltype(make_tiled_mma(
            GMMA::rs_op_selector<Element, Element, float, Shape<Int<kKeys>, Int<kColumns>, Int<kBlockM>>,
                                 GMMA::Major::K, GMMA::Major::MN>()));
        template <int kStages>
        using SmemLayoutQ =
            decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockM>, Int<kColumns>, Int<kStages>>{}));
        template <int kStages>
        using SmemLayoutQt = decltype(composition(
            SmemLayoutQ<kStages>{},
            make_layout(Shape<Int<kColumns>, Int<kBlockM>, Int<kStages>>{},
                        Stride<Int<kBlockM>, _1, Int<kBlockM * kColumns>>{})));  // (column, query, stage)
        using SmemLayoutKV = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kKeysOfCta>, Int<kColumns>, _1>{}));
        // Kind varlen, which has no multicast, loads with it into the own CTA.
        using TmaOpQ = std::conditional_t<(kCtas > 1), SM90_TMA_LOAD_MULTICAST, SM90_TMA_LOAD>;
        using TmaQ = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutQ<1>{})), TileQ, TmaOpQ>;
        using TmaKV = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutKV{})), TileKV>;
    };
    using TilesQK = Tiles<kHeadDim>;
    using TilesdOV = Tiles<kHeadDimV>;
    using SmemLayoutKt = decltype(composition(
        take<0, 2>(typename TilesQK::SmemLayoutKV{}),
        make_layout(Shape<Int<kHeadDim>, Int<kKeysOfCta>>{}, Stride<Int<kKeysOfCta>, _1>{})));  // (headdim, key)
    // A pair of CTAs: half of the columns of 64 rows. Of Q and dO each CTA loads one half for both. Of K, it multiplies
    // one half with dS of all keys, and so holds that of the other one's keys.
    static constexpr int kColumnsOfCta = kHeadDim / kCtas;
    static_assert(kCtas == 1 || (kBlockM == kKeysOfCta && kHeadDim == kHeadDimV));
    using TileOfHalf = Shape<Int<kKeysOfCta>, Int<kColumnsOfCta>>;
    using SmemLayoutHalf = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kKeysOfCta>, Int<kColumnsOfCta>, _1>{}));
    using SmemLayoutKtOfPeer = decltype(composition(
        take<0, 2>(SmemLayoutHalf{}),
        make_layout(Shape<Int<kColumnsOfCta>, Int<kKeysOfCta>>{}, Stride<Int<kKeysOfCta>, _1>{})));  // (column, key)
    // dS [queries, keys]: each consumer's 64 keys are contiguous.
    using SmemLayoutdS = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                                Shape<Int<kBlockM>, Int<kBlockN>, Int<kStagesdS>>{}));

    using SmemLayoutdSt = decltype(composition(
        SmemLayoutdS{}, make_layout(Shape<Int<kBlockN>, Int<kBlockM>, Int<kStagesdS>>{},
                                    Stride<Int<kBlockM>, _1, Int<kBlockM * kBlockN>>{})));  // (key, query, stage)

    struct Copies {
        typename TilesQK::TmaQ q;
        typename TilesdOV::TmaQ dout;
        typename TilesQK::TmaKV k;
        typename TilesdOV::TmaKV v;
    };

    static constexpr int kAlignment = 1024;                      // bytes: of the swizzled layouts
    static constexpr int kTileOfDq = 64 * TileSize::kDqColumns;  // elements
    static constexpr int kTilesOfDq = kBlockM * kHeadDim / kTileOfDq;
    // Each consumer has one tile of dQ in each step. A third tile is the consumers' by turns.
    static_assert(!kConsumersComputeDq || kTilesOfDq == kConsumers || kTilesOfDq == kConsumers + 1);
    static constexpr int kWordsOfScores = kKeys * kBlockM / 2;
    static constexpr int kWordsOfDropoutBits = kKeys * kBlockM / 128 / 32;  // of a thread
    using DropoutBitsOfCta = uint32_t[kWordsOfDropoutBits][kHasDropoutWarpgroup ? kConsumers * 128 : 1];
    // attn_bias in shared memory, for each warp that computes S; else it is read from global memory.
    using BiasTile = sm90::BiasTile<Element, PlacesOfKeys<kBlockM>>;
    static constexpr bool kStagesBias = kHasBias && kHeadDim != 256;
    struct SharedStorageWithoutBias {
        alignas(kAlignment) Element k[kKeysOfCta * kHeadDim];
        alignas(kAlignment) Element v[kKeysOfCta * kHeadDimV];
        alignas(kAlignment) Element q[kStagesQ * kBlockM * kHeadDim];
        alignas(kAlignment) Element dout[kStagesdO * kBlockM * kHeadDimV];
        alignas(kAlignment) Element ds[cosize_v<SmemLayoutdS>];
        // P on its way between consumers. In a pair of CTAs it goes through the place of dS.
        alignas(16) uint32_t p[kSplitsKeys || kCtas > 1 ? 4 : kStagesdS * kWordsOfScores];
        alignas(128) float dq[kConsumersComputeDq ? kTilesOfDq : 1][kConsumersComputeDq ? kTileOfDq : 4];
        alignas(16) float lse[kStagesQ][kBlockM];
        alignas(16) float delta[kStagesdO][kBlockM];
        DropoutBitsOfCta dropout_bits[kStagesQ];    // dropout: which probabilities drop
        PipelineBarriers<kStagesQ> q_barriers;      // Q with lse
        PipelineBarriers<kStagesdO> dout_barriers;  // dO with delta
        PipelineBarriers<1> dq_barriers[kConsumersComputeDq ? kTilesOfDq : kConsumers];
        PipelineBarriers<kStagesdS> ds_barriers, p_barriers;
        PipelineBarriers<1> k_barriers, v_barriers;
        cutlass::arch::ClusterBarrier dropout_bits_full[kStagesQ];  // the stage of Q has its bits
        int number;                                                 // of the work tile
        cutlass::arch::ClusterTransactionBarrier
            oob_copy_barrier;                 // Q and dO of a step with rows out of bounds (producer_bwd.h)
        int is_masked[kStagesQ][kConsumers];  // key_ranges: whether some query of Q does not see some of the keys
    };
    struct SharedStorageWithBias : SharedStorageWithoutBias {
        alignas(16) Element bias[kSplitsKeys ? 4 * kConsumers : 4][BiasTile::kSize];
    };
    struct SharedStorageOfPair : SharedStorageWithoutBias {
        alignas(kAlignment) Element k_of_peer[cosize_v<SmemLayoutHalf>];
        PipelineBarriers<1> k_of_peer_barriers;
        cutlass::arch::ClusterTransactionBarrier ds_of_peer_full[kStagesdS];
    };
    using SharedStorage =
        std::conditional_t<(kCtas > 1), SharedStorageOfPair,
                           std::conditional_t<kStagesBias, SharedStorageWithBias, SharedStorageWithoutBias>>;
    static constexpr int kSmemSize = sizeof(SharedStorage);
    static constexpr int kSmemForRows =
        offsetof(SharedStorageWithoutBias, lse);  // bytes, for the phases preprocess and convert
    static_assert(kSmemSize <= 227 * 1024, "more shared memory than a thread block may have");
};

// A work tile may have two key blocks: docs/tuning/sm90_backward.md, "Two key blocks a work tile".
template <typename Traits, Kind kKind>
constexpr bool may_group_key_blocks() {
    return Traits::kHeadDim == 64 && kKind == Kind::local;
}

// Whether the compiler must inline a consumer's work into the loop over key blocks: docs/tuning/sm90_backward.md,
// "Inlining".
template <typename Traits, Kind kKind>
constexpr bool inlines_consumers() {
    return has_bias(kKind) || (Traits::kHeadDim == 64 && !Traits::kHasDropoutWarpgroup);
}

// Which arithmetic a step has, as measured: docs/tuning/sm90_backward.md, "The arithmetic of a step".
// Preprocess stores the log-sum-exp times log2(e), except for steps with a large one.
template <typename Traits, Kind kKind>
constexpr bool stores_lse_in_base_2() {
    return Traits::kHeadDim == 64 ? kKind == Kind::full || is_general(kKind)
                                  : Traits::kSplitsKeys && !Traits::kHasFactors;
}

// A mask and large log-sum-exps change the scores in place, before the arithmetic that all steps have.
template <typename Traits, Kind kKind>
constexpr bool changes_scores_in_place() {
    return Traits::kHeadDim == 128 && !is_general(kKind);
}

// S and dP: the descriptors of K and V are computed in each step (sm90/common/unhoisted.h). At head dim 128 the kinds
// with variable lengths keep more values of a key block, and have too few uniform registers for the descriptors.
template <typename Traits, Kind kKind>
constexpr bool computes_descriptors_in_step() {
    return Traits::kHasManyDescriptors || (Traits::kHeadDim == 128 && may_be_varlen(kKind));
}

}  // namespace flash::sm90
