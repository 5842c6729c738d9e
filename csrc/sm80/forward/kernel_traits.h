// The sm80 forward kernel at compile time: tile sizes, and the types that follow from them.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "common/sequence.h"

namespace flash::sm80 {

// ---- tile sizes for each head dim; docs/tuning/sm80_forward.md has the measurements

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

// Kind biased: loads of the bias in flight need registers.
template <int kHeadDim>
struct TileSizesFwdBiased : TileSizesFwd<kHeadDim, true> {};
template <>
struct TileSizesFwdBiased<64> : TileFwd<64, 128, 4, 2> {};

// ---- types

using namespace cute;

template <DType kDType, int kHeadDim_, typename TileSize_>
struct Flash_fwd_kernel_traits {
    static_assert(kDType == DType::float16 || kDType == DType::bfloat16, "the tensor cores take 16-bit types");
    static_assert(kHeadDim_ % 32 == 0, "a head dim is a multiple of a 64-byte row of shared memory");

    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    using TileSize = TileSize_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockM = TileSize::kBlockM;
    static constexpr int kBlockN = TileSize::kBlockN;
    static constexpr int kNWarps = TileSize::kNWarps;
    static constexpr int kNThreads = kNWarps * 32;

    static_assert(kBlockM % (16 * kNWarps) == 0 && kBlockN % 16 == 0,
                  "a tile is a whole number of m16n8k16 products of all warps");

    // m16n8k16 on the tensor cores; each warp owns 16 rows out of every 16 * kNWarps.
    using MmaAtom = std::conditional_t<kDType == DType::float16, MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>,
                                       MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>>;
    using TiledMma = TiledMMA<MmaAtom, Layout<Shape<Int<kNWarps>, _1, _1>>, cute::Tile<Int<16 * kNWarps>, _16, _16>>;

    // Shared memory: rows of 128 bytes (64 bytes if 64 does not divide the head dim). The swizzle permutes their
    // 16-byte pieces, so that cp.async and ldmatrix have no bank conflicts.
    static constexpr int kSmemRow = kHeadDim % 64 == 0 ? 64 : 32;
    using SmemLayoutAtom = decltype(composition(Swizzle<kSmemRow == 64 ? 3 : 2, 3, 3>{},
                                                Layout<Shape<_8, Int<kSmemRow>>, Stride<Int<kSmemRow>, _1>>{}));
    using SmemLayoutQ = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
    using SmemLayoutKV = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));
    using SmemLayoutVt = decltype(composition(
        SmemLayoutKV{}, make_layout(Shape<Int<kHeadDim>, Int<kBlockN>>{}, LayoutRight{})));  // (headdim, key)
    using SmemLayoutO = SmemLayoutQ;

    struct SharedStorage {
        union {  // O takes the buffer of Q in the epilogue
            alignas(128) Element q[cosize_v<SmemLayoutQ>];
            alignas(128) Element o[cosize_v<SmemLayoutO>];
        };
        alignas(128) Element k[cosize_v<SmemLayoutKV>];
        alignas(128) Element v[cosize_v<SmemLayoutKV>];
        RowBlocks::Place place;  // for the epilogue of varlen kinds: keeps registers free in the main loop
        Sequence sequence;
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);

    // Global memory: 16 bytes per thread. Neighbouring threads copy whole lines of 128 (64) bytes.
    static constexpr int kVector = 16 / sizeof(Element);
    static constexpr int kThreadsPerRow = kSmemRow / kVector;
    static_assert(kBlockM % (kNThreads / kThreadsPerRow) == 0 && kBlockN % (kNThreads / kThreadsPerRow) == 0,
                  "the threads copy a tile in whole passes");
    using GmemThreadLayout =
        Layout<Shape<Int<kNThreads / kThreadsPerRow>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>;
    using GmemTiledCopyQKV = decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{},
                                                      GmemThreadLayout{}, Layout<Shape<_1, Int<kVector>>>{}));
    using GmemTiledCopyO = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{}, GmemThreadLayout{},
                                                    Layout<Shape<_1, Int<kVector>>>{}));

    using SmemCopyAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
    using SmemCopyAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
    using SmemCopyAtomO = Copy_Atom<UniversalCopy<uint32_t>, Element>;
};

}  // namespace flash::sm80
