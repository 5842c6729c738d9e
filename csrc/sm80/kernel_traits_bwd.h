// The types of the sm80 backward kernel: shared memory layouts, copies and the tensor-core mma of its three kinds of
// product.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "../flash.h"
#include "tile_sizes_bwd.h"

namespace flash::sm80 {

using namespace cute;

// kHasBulkReduce: for compute capability 9.0 and later.
template <DType kDType, int kHeadDim_, typename Tile_, bool kHasBulkReduce_, Kind kKind>
struct Flash_bwd_kernel_traits {
    static_assert(kDType == DType::float16 || kDType == DType::bfloat16, "tensor cores multiply 16-bit types here");
    static_assert(kHeadDim_ % 32 == 0, "a head dim is made of 64-byte rows of shared memory");

    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    using Tile = Tile_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockM = Tile::kBlockM;
    static constexpr int kBlockN = Tile::kBlockN;
    static constexpr int kSliceM = kBlockM / Tile::kSlices;
    static constexpr int kStages = Tile::kStages;
    static constexpr int kNWarps = Tile::kNWarps;
    static constexpr int kNThreads = kNWarps * 32;

    static constexpr bool kHasBulkReduce = kHasBulkReduce_;
    static constexpr bool kStagedDQ = Tile::kStagesDQ && kHasBulkReduce;

    // The accumulators of S^T and dP^T are then the A operands of dV and dK as they are.
    static constexpr bool kPInRegisters = Tile::kWarpsNSdP == kNWarps && Tile::kWarpsNDKV == kNWarps;
    static_assert(kPInRegisters || Tile::kSlices == 1, "slices are for P in registers");
    static_assert(Flash_bwd_params::kRowsRounded % kBlockM == 0 && kBlockM >= 32, "as the scratch is allocated");

    // A tile is a whole number of the products that its warps make side by side.
    static constexpr bool fits(int rows, int columns, int warps_rows) {
        return kNWarps % warps_rows == 0 && rows % (16 * warps_rows) == 0 &&
               columns % (16 * (kNWarps / warps_rows)) == 0;
    }
    static_assert(fits(kBlockN, kSliceM, Tile::kWarpsNSdP) && fits(kBlockN, kHeadDim, Tile::kWarpsNDKV) &&
                  fits(kBlockM, kHeadDim, Tile::kWarpsMDQ));

    // m16n8k16 on the tensor cores, kWarpsRows warps over the rows of the result.
    using MmaAtom = std::conditional_t<kDType == DType::float16, MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>,
                                        MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>>;
    template <int kWarpsRows>
    using TiledMma = TiledMMA<MmaAtom, Layout<Shape<Int<kWarpsRows>, Int<kNWarps / kWarpsRows>, _1>>,
                              cute::Tile<Int<16 * kWarpsRows>, Int<16 * (kNWarps / kWarpsRows)>, _16>>;
    // [keys, queries]; of a general call, each warp's queries are whole runs of 16, as dropout wants them.
    using TiledMmaSdP = std::conditional_t<
        kKind == Kind::general,
        TiledMMA<MmaAtom, Layout<Shape<Int<Tile::kWarpsNSdP>, Int<kNWarps / Tile::kWarpsNSdP>, _1>>,
                 cute::Tile<Int<16 * Tile::kWarpsNSdP>,
                            Layout<Shape<_8, Int<kNWarps / Tile::kWarpsNSdP>, _2>, Stride<_1, _16, _8>>, _16>>,
        TiledMma<Tile::kWarpsNSdP>>;
    using TiledMmadKV = TiledMma<Tile::kWarpsNDKV>;  // [keys, head dim]
    using TiledMmadQ = TiledMma<Tile::kWarpsMDQ>;    // [queries, head dim]

    // Shared memory: rows of 128 bytes (64 where 64 elements do not divide a row), their 16-byte pieces permuted so
    // that both the copies into it and ldmatrix out of it, transposed or not, touch all banks.
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
    using SmemKV = Smem<kBlockN, kHeadDim>;  // of K and V, and of dK and dV on their way out
    using SmemdS = Smem<kBlockN, kBlockM>;   // of P^T and dS^T: [keys, queries]

    static constexpr int kSizeQ = kBlockM * kHeadDim, kSizeKV = kBlockN * kHeadDim, kSizedS = kBlockN * kBlockM;
    struct SharedStorage {
        alignas(128) Element k[kSizeKV];  // dK leaves through the room of K, dV through that of V
        alignas(128) Element v[kSizeKV];
        alignas(128) Element q[kStages][kSizeQ];
        alignas(128) Element dout[kStages][kSizeQ];
        alignas(128) Element ds[kSizedS];
        alignas(128) Element p[kPInRegisters ? 8 : kSizedS];
        alignas(128) float dq[kStagedDQ ? kSizeQ : 4];
        alignas(16) float lse[kStages][kBlockM];
        alignas(16) float delta[kStages][kBlockM];
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);

    // Global memory moves in 16-byte pieces, whole 128-byte (64-byte) lines to neighbouring threads.
    static constexpr int kVector = 16 / sizeof(Element);
    static constexpr int kThreadsPerRow = SmemQ::kRow / kVector;
    static_assert(kBlockM % (kNThreads / kThreadsPerRow) == 0 && kBlockN % (kNThreads / kThreadsPerRow) == 0,
                  "a tile is a whole number of passes of the copy");
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
