// The types of the sm80 backward kernel: shared memory layouts, copies, and a tensor-core mma for each kind of product.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "flash.h"
#include "tile_sizes_bwd.h"

namespace flash::sm80 {

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

    // Whether a tile is a whole number of products of all warps.
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
        kKind == Kind::general,
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
