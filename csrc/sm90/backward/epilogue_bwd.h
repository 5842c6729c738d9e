// Backward epilogue: dK and dV of a consumer warpgroup go from registers to global memory, scaled and rounded.
#pragma once

#include "dispatch/kind.h"
#include "kvcache/instructions.h"
#include "sm90/common/accumulator.h"
#include "sm90/common/store_rows.h"
#include "steps_bwd.h"

namespace flash::sm90 {

// Where 64 keys of one head are stored, from key_offset on in the key block.
template <typename Traits, Kind kKind>
struct TargetOfKeys {
    using Element = typename Traits::Element;
    Element *base;  // null: the gradient is not wanted
    int64_t stride;
    int keys, d;  // keys of the sequence from the first one on

    __device__ __forceinline__ TargetOfKeys(const Flash_bwd_params &params, const ColumnBlock<Traits, kKind> &block,
                                            const TensorRef &target, int key_offset)
        : stride(target.row_stride), keys(block.seqlen_k - block.first_key() - key_offset), d(params.d) {
        const int bidh_dkv = block.bidh / block.heads;
        base = static_cast<Element *>(target.ptr);
        if (base != nullptr) {
            base += block.bidb * target.batch_stride + bidh_dkv * target.head_stride +
                    int64_t(block.k_begin + block.first_key() + key_offset) * stride;
        }
    }

    __device__ __forceinline__ void store(int key, int col, const uint4 &vector) const {
        if (key < keys && col < d) {
            *reinterpret_cast<uint4 *>(base + key * stride + col) = vector;
        }
    }
};

// BwdSplit::keys. Stores acc (MMA, MMA_M, MMA_N) times `factor`. The rows of a warp pass through shared memory, and a
// loop stores whole rows from there: fewer instructions than shuffles among lanes.
//
// They lie in the rows of V that have their keys, which no other warp reads or writes.
template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_keys(typename Traits::SharedStorage &shared,
                                           const TargetOfKeys<Traits, kKind> &target, const TensorKV &acc, float factor,
                                           int key_offset) {
    using Element = typename Traits::Element;
    constexpr int kPart = Traits::kSmemRow, kChunks = kPart / 8;  // elements and vectors of a row of 128 or 64 bytes
    constexpr int kVectors = Traits::kHeadDim / 8, kRows = 16;    // of a row; of a warp
    if (target.base == nullptr) {
        return;
    }
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * kRows;
    Element *own = shared.v + (key_offset + first) * kPart;
    const auto place = [&](int row, int vector) {  // permuted, so that there are no bank conflicts
        const int chunk = vector % kChunks ^ (kChunks == 8 ? row % 8 : row / 2 % 4);
        return own + vector / kChunks * (Traits::kBlockN * kPart) + row * kPart + chunk * 8;
    };
    Tensor rows = make_tensor(acc.data(), rowcol_layout(acc.layout()));  // (row, col)
    CUTE_UNROLL
    for (int vector = 0; vector < kVectors; vector += 2) {
        // Four pieces of 8 x 8: the upper and the lower rows, for two vectors. Lane l has the address of a row of piece
        // l / 8.
        uint32_t words[4];
        CUTE_UNROLL
        for (int piece = 0; piece < 4; ++piece) {
            const int col = (vector + piece / 2) * 2;
            words[piece] = kvcache::pack<Element>(rows(piece % 2, col) * factor, rows(piece % 2, col + 1) * factor);
        }
        SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3],
                                *reinterpret_cast<uint128_t *>(place(lane / 8 % 2 * 8 + lane % 8, vector + lane / 16)));
    }
    __syncwarp();
    constexpr int kSteps = kRows * kVectors / 32;
    CUTE_NO_UNROLL
    for (int step = 0; step < kSteps; step += 2) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
            const int index = (step + i) * 32 + lane, row = index / kVectors, vector = index % kVectors;
            target.store(first + row, vector * 8, *reinterpret_cast<const uint4 *>(place(row, vector)));
        }
    }
    __syncwarp();  // all lanes have read
}

// BwdSplit::products. All 64 keys of the key block, from registers.
template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_product(const TargetOfKeys<Traits, kKind> &target, const TensorKV &acc,
                                              float factor) {
    if (target.base == nullptr) {
        return;
    }
    Tensor rows = make_tensor(acc.data(), rowcol_layout(acc.layout()));  // (row, col)
    CUTE_UNROLL
    for (int i = 0; i < size<0>(rows); ++i) {
        store_row<typename Traits::Element, uint4>(rows, i, factor, [&](int col, const uint4 &vector) {
            target.store(first_row_of_thread() + i * 8, col, vector);
        });
    }
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dkv(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                          const ColumnBlock<Traits, kKind> &block, const TensorRef &gradient,
                                          const TensorKV &acc, float factor, int key_offset) {
    const TargetOfKeys<Traits, kKind> target(params, block, gradient, key_offset);
    if constexpr (Traits::kSplitsKeys) {
        store_keys(shared, target, acc, factor, key_offset);
    } else {
        store_product(target, acc, factor);
    }
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dk(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                         const ColumnBlock<Traits, kKind> &block, const TensorKV &acc, int key_offset) {
    store_dkv(params, shared, block, params.dk, acc, params.qk_scale, key_offset);
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dv(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                         const ColumnBlock<Traits, kKind> &block, const TensorKV &acc, int key_offset) {
    store_dkv(params, shared, block, params.dv, acc, is_general(kKind) ? params.rp_dropout : 1.0f, key_offset);
}

}  // namespace flash::sm90
