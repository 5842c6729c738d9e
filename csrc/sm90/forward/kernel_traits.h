// The types of the sm90 forward kernel: tiles, wgmma, shared memory layouts and TMA copies.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "flash.h"
#include "sm90/common/pipeline.h"
#include "sm90/common/tma.h"
#include "tile_sizes.h"
#include "work_tile_ring.h"

namespace flash::sm90 {

using namespace cute;

template <DType kDType, int kHeadDim_, typename TileSize_>
struct Flash_fwd_kernel_traits {
    static_assert(kDType == DType::float16 || kDType == DType::bfloat16, "tensor cores multiply 16-bit types here");

    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    using TileSize = TileSize_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockM = TileSize::kBlockM;
    static constexpr int kBlockN = TileSize::kBlockN;
    static constexpr int kStages = TileSize::kStages;
    static constexpr int kConsumers = TileSize::kConsumers;
    static constexpr int kQStages = TileSize::kQStages;  // per consumer
    static constexpr int kNThreads = 128 * (kConsumers + 1);
    static constexpr int kRows = 64;  // query rows of a consumer warpgroup: the m64 of wgmma

    // A consumer skips at most one key block at either end of a work tile. With more it would wait for key blocks that
    // find no empty stage.
    static_assert(kRows * (kConsumers - 1) <= kBlockN && kStages >= 2);

    // S = Q K^T with both operands in shared memory; O += P V with P in registers and V transposed by wgmma.
    using TileQ = Shape<Int<kRows>, Int<kHeadDim>>;
    using TileKV = Shape<Int<kBlockN>, Int<kHeadDim>>;
    using TileS = Shape<Int<kRows>, Int<kBlockN>>;
    using TiledMmaQK = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kBlockN>, Int<kHeadDim>>>()));
    using TiledMmaPV = decltype(make_tiled_mma(
        GMMA::rs_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kHeadDim>, Int<kBlockN>>, GMMA::Major::K,
                             GMMA::Major::MN>()));

    // Rows of 128 bytes (64 bytes for head dims that are no multiple of 64), in the swizzle of wgmma and TMA.
    static constexpr int kSmemRow = kHeadDim % 64 == 0 ? 64 : 32;  // elements
    using SmemLayoutAtom =
        std::conditional_t<kSmemRow == 64, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
    using SmemLayoutQ =
        decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kRows>, Int<kHeadDim>, Int<kConsumers * kQStages>>{}));
    using SmemLayoutKV = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
    using SmemLayoutVt = decltype(composition(
        SmemLayoutKV{}, make_layout(Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>{},
                                    Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDim>>{})));  // (headdim, key, stage)

    using TmaQ = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutQ{})), TileQ>;
    using TmaKV = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutKV{})), TileKV>;
    struct Copies {
        TmaQ q;
        TmaKV k, v;
    };

    static constexpr int kAlignment = 1024;  // bytes: of the swizzled layouts
    struct SharedStorage {
        alignas(kAlignment) Element q[cosize_v<SmemLayoutQ>];
        alignas(kAlignment) Element k[cosize_v<SmemLayoutKV>];
        alignas(kAlignment) Element v[cosize_v<SmemLayoutKV>];
        PipelineBarriers<kConsumers * kQStages> q_barriers;  // stage 0 of all consumers, then stage 1
        PipelineBarriers<kStages> k_barriers, v_barriers;
        typename WorkTileRing<kConsumers>::SharedStorage tiles;
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);

    struct PipelineStates {
        PipelineState<kConsumers * kQStages> q;
        PipelineState<kStages> k, v;
    };
};

}  // namespace flash::sm90
