// The sm80 backward kernels at compile time: tile sizes, and the types that follow from them.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "dispatch/kind.h"
#include "flash.h"

namespace flash::sm80 {

// ---- tile sizes of the sm80 backward for each head dim. docs/tuning/sm80_backward.md has the measurements.

// The features that a kernel computes. A kernel that decides this in its loop at run time is up to 22 % slower.
enum class BwdMode {
    all,            // dQ, dK and dV; dQ is summed in any order
    deterministic,  // dQ, dK and dV; dQ is summed key block by key block
    general,        // some or all of dQ, dK and dV, in any order or not: decided at run time
};

// kRowWarps*: the number of warps along the rows of a product; the others lie along its columns. If all warps lie along
// the keys in S^T and in dK, dV, then P and dS stay in registers.
template <int kBlockM_, int kBlockN_, int kNWarps_, int kRowWarpsSdP_, int kRowWarpsDKV_, int kRowWarpsDQ_,
          int kStages_, int kMinBlocksPerSM_, bool kStagesDQ_, int kSlices_ = 1, bool kRecomputesAddresses_ = false,
          bool kDVFirst_ = false>
struct TileBwd {
    using TileSize = TileBwd;                 // the base of an entry of the tables below
    static constexpr int kBlockM = kBlockM_;  // query rows of a step
    static constexpr int kBlockN = kBlockN_;  // keys of a CTA
    static constexpr int kNWarps = kNWarps_;
    static constexpr int kRowWarpsSdP = kRowWarpsSdP_;        // S^T = K Q^T and dP^T = V dO^T [keys, queries]
    static constexpr int kRowWarpsDKV = kRowWarpsDKV_;        // dV = P^T dO and dK = dS^T Q [keys, head dim]
    static constexpr int kRowWarpsDQ = kRowWarpsDQ_;          // dQ = dS K [queries, head dim]
    static constexpr int kStages = kStages_;                  // buffers for Q and dO; 2: loads run one step ahead
    static constexpr int kMinBlocksPerSM = kMinBlocksPerSM_;  // CTAs per SM; limits the registers of a thread
    // dQ goes through shared memory and the copy engine, where the GPU has cp.reduce.async.bulk.
    static constexpr bool kStagesDQ = kStagesDQ_;
    static constexpr int kSlices = kSlices_;  // S and dP are computed for kBlockM / kSlices queries at a time
    static constexpr bool kRecomputesAddresses = kRecomputesAddresses_;  // in every step, to save registers
    static constexpr bool kDVFirst = kDVFirst_;                          // dV before dQ instead of after it
};

constexpr int kMinDeviceSmem =
    99 * 1024;  // bytes of shared memory that a CTA may have on every GPU (8.6 has the least)

// The tile, and a small tile for GPUs on which the first one needs too much shared memory.
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
struct TileSizesBwd<96, kKind, BwdMode::deterministic> : TileBwd<64, 128, 8, 4, 4, 4, 2, 1, true, 1, false, true> {};
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

// ---- types

using namespace cute;

// kHasBulkReduce: for compute capability 9.0 and later.
template <DType kDType, int kHeadDim_, typename TileSize_, bool kHasBulkReduce_, Kind kKind_>
struct Flash_bwd_kernel_traits {
    static_assert(kDType == DType::float16 || kDType == DType::bfloat16, "the tensor cores take 16-bit types");
    static_assert(kHeadDim_ % 32 == 0, "a head dim is a multiple of a 64-byte row of shared memory");

    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    using TileSize = TileSize_;
    static constexpr Kind kKind = kKind_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockM = TileSize::kBlockM;
    static constexpr int kBlockN = TileSize::kBlockN;
    static constexpr int kSliceM = kBlockM / TileSize::kSlices;
    static constexpr int kStages = TileSize::kStages;
    static constexpr int kNWarps = TileSize::kNWarps;
    static constexpr int kNThreads = kNWarps * 32;

    static constexpr bool kHasBulkReduce = kHasBulkReduce_;
    static constexpr bool kStagedDQ = TileSize::kStagesDQ && kHasBulkReduce;

    // True: the accumulators of S^T and dP^T, converted, are the A operands of dV and dK.
    static constexpr bool kPInRegisters = TileSize::kRowWarpsSdP == kNWarps && TileSize::kRowWarpsDKV == kNWarps;
    static_assert(kPInRegisters || TileSize::kSlices == 1, "slices need P in registers");
    static_assert(Flash_bwd_params::kRowsRounded % kBlockM == 0 && kBlockM >= 32,
                  "padded rows and semaphores are allocated for this");

    // True if a tile is a whole number of products of all warps.
    static constexpr bool fits(int rows, int columns, int warps_rows) {
        return kNWarps % warps_rows == 0 && rows % (16 * warps_rows) == 0 &&
               columns % (16 * (kNWarps / warps_rows)) == 0;
    }
    static_assert(fits(kBlockN, kSliceM, TileSize::kRowWarpsSdP) && fits(kBlockN, kHeadDim, TileSize::kRowWarpsDKV) &&
                  fits(kBlockM, kHeadDim, TileSize::kRowWarpsDQ));

    // m16n8k16 on the tensor cores, with kRowWarps warps along the rows of the result.
    using MmaAtom = std::conditional_t<kDType == DType::float16, MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>,
                                       MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>>;
    template <int kRowWarps>
    using TiledMma = TiledMMA<MmaAtom, Layout<Shape<Int<kRowWarps>, Int<kNWarps / kRowWarps>, _1>>,
                              cute::Tile<Int<16 * kRowWarps>, Int<16 * (kNWarps / kRowWarps)>, _16>>;
    // [keys, queries]. General: each warp has whole runs of 16 queries, which dropout needs.
    using TiledMmaSdP = std::conditional_t<
        is_general(kKind),
        TiledMMA<MmaAtom, Layout<Shape<Int<TileSize::kRowWarpsSdP>, Int<kNWarps / TileSize::kRowWarpsSdP>, _1>>,
                 cute::Tile<Int<16 * TileSize::kRowWarpsSdP>,
                            Layout<Shape<_8, Int<kNWarps / TileSize::kRowWarpsSdP>, _2>, Stride<_1, _16, _8>>, _16>>,
        TiledMma<TileSize::kRowWarpsSdP>>;
    using TiledMmadKV = TiledMma<TileSize::kRowWarpsDKV>;  // [keys, head dim]
    using TiledMmadQ = TiledMma<TileSize::kRowWarpsDQ>;    // [queries, head dim]

    // Shared memory: rows of 128 bytes (64 bytes if 64 does not divide kColumns). The swizzle permutes their 16-byte
    // pieces, so that cp.async and ldmatrix, transposed or not, have no bank conflicts.
    template <int kRows, int kColumns>
    struct Smem {
        static constexpr int kRow = kColumns % 64 == 0 ? 64 : 32;
        using Atom = decltype(composition(Swizzle<kRow == 64 ? 3 : 2, 3, 3>{},
                                          Layout<Shape<_8, Int<kRow>>, Stride<Int<kRow>, _1>>{}));
        using Layout = decltype(tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kColumns>>{}));
        using Transposed =
            decltype(composition(Layout{}, make_layout(Shape<Int<kColumns>, Int<kRows>>{}, LayoutRight{})));
    };
    using SmemQ = Smem<kBlockM, kHeadDim>;   // of Q and dO
    using SmemKV = Smem<kBlockN, kHeadDim>;  // of K and V; in the epilogue of dK and dV
    using SmemdS = Smem<kBlockN, kBlockM>;   // of P^T and dS^T: [keys, queries]

    static constexpr int kSizeQ = kBlockM * kHeadDim, kSizeKV = kBlockN * kHeadDim, kSizedS = kBlockN * kBlockM;
    struct SharedStorage {
        alignas(128) Element k[kSizeKV];  // the epilogue stages dK in k and dV in v
        alignas(128) Element v[kSizeKV];
        alignas(128) Element q[kStages][kSizeQ];
        alignas(128) Element dout[kStages][kSizeQ];
        alignas(128) Element ds[kSizedS];
        alignas(128) Element p[kPInRegisters ? 8 : kSizedS];
        alignas(128) float dq[kStagedDQ ? kSizeQ : 4];
        alignas(16) float lse[kStages][kBlockM];
        alignas(16) float delta[kStages][kBlockM];
        bool is_in_order;  // BwdMode::general: dQ is summed key block by key block
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);

    // Global memory: 16 bytes per thread. Neighbouring threads copy whole lines of 128 (64) bytes.
    static constexpr int kVector = 16 / sizeof(Element);
    static constexpr int kThreadsPerRow = SmemQ::kRow / kVector;
    static_assert(kBlockM % (kNThreads / kThreadsPerRow) == 0 && kBlockN % (kNThreads / kThreadsPerRow) == 0,
                  "the threads copy a tile in whole passes");
    using GmemThreadLayout =
        Layout<Shape<Int<kNThreads / kThreadsPerRow>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>;
    using GmemTiledCopyAsync =
        decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{}, GmemThreadLayout{},
                                 cute::Layout<Shape<_1, Int<kVector>>>{}));
    using GmemTiledCopyStore = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                                        GmemThreadLayout{}, cute::Layout<Shape<_1, Int<kVector>>>{}));

    using SmemCopyAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
    using SmemCopyAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
    using SmemCopyAtomStore = Copy_Atom<UniversalCopy<uint32_t>, Element>;
};

}  // namespace flash::sm80
