// The tiles of the split-KV kernel (SplitkvTraits), and the pipeline that copies tiles of K and V from the cache to
// shared memory by cp.async, a few tiles ahead. Keys lie in a contiguous cache or in pages of any size.
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <type_traits>

#include "instructions.h"
#include "splitkv_schedule.h"

namespace flash::kvcache {

// ---- the tiles, in five forms (Form in splitkv_schedule.h). The warps of a group share a pipeline of key tiles, and
// each warp has 16 rows. At the end the kernel sums the results of the groups.
//   few_rows       four groups of one warp
//   cluster        eight groups of one warp, as wide CTAs; beyond head dim 128 four, in clusters
//   short_cluster  four groups of one warp
//   warp_pairs     two groups of two warps
//   many_rows      one group of four to eight warps

constexpr int kWarpRows = 16;  // the m16 of mma.sync
constexpr int kMaxWarps = 8;

template <DType kDType, int kHeadDim_, Form kForm>
struct SplitkvTraits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kIsOneGroup = kForm == Form::many_rows, kArePairs = kForm == Form::warp_pairs;
    static constexpr bool kIsCluster = kForm == Form::cluster || kForm == Form::short_cluster;
    // Up to head dim 128, wide CTAs read long caches faster.
    static constexpr bool kRunsInClusters = kForm == Form::short_cluster || (kForm == Form::cluster && kHeadDim > 128);
    static constexpr int kGroupWarps = kIsOneGroup ? kMaxWarps : kArePairs ? 2 : 1;  // at most
    static constexpr int kGroups = kIsOneGroup ? 1 : kArePairs ? 2 : kForm == Form::cluster && kHeadDim <= 128 ? 8 : 4;
    static constexpr int kMaxRows = kGroupWarps * kWarpRows;

    // Keys of a tile: at most 32, one for each lane.
    static constexpr int kKeys = kGroupWarps == 1 && kHeadDim > 64 ? 16 : 32;
    static constexpr int kRoundKeys = kGroups * kKeys;  // one tile for each group
    // Keys of a unit of the schedule: few in a cluster, so that a short cache has keys for all CTAs.
    static constexpr int kUnit = kIsCluster ? kKeys : kRoundKeys;
    // Few rows and warp pairs: three CTAs fit into an SM, two with head dim 192, one with 256.
    static constexpr bool kFitsThreeStages = kIsCluster || (kArePairs && kHeadDim <= 64) || kHeadDim > 192;
    static constexpr int kStages = (kIsOneGroup ? kHeadDim <= 128 : kFitsThreeStages) ? 3 : 2;
    // True: Q stays in registers over the loop. Else it is read from shared memory for each key tile.
    static constexpr bool kQInRegisters = !kIsOneGroup && kHeadDim <= 128;

    static constexpr int kChunks = kHeadDim / 8;  // pieces of 16 bytes in a row
    static constexpr int kTileElements = kKeys * kHeadDim;
    static constexpr int kOStride = kHeadDim + 4;  // floats of a row of O in shared memory; + 4: fewer bank conflicts

    struct Row {
        int query;
        float slope;  // ALiBi slope of its head, in units of the softmax scale
    };
    struct SharedStorage {
        Row rows[kMaxRows];
        float row_max[kGroups][kMaxRows];
        float row_sum[kGroups][kMaxRows];
        float2 of_cta[kMaxRows];                                         // maximum and sum of a CTA of a cluster
        alignas(128) Element tiles[kGroups][kStages][2][kTileElements];  // K and V; then Q, then O in the place of both
    };

    static constexpr int threads(int tile_rows) { return 32 * kGroups * (tile_rows / kWarpRows); }
    static constexpr int smem_size(int tile_rows) {
        const int q = tile_rows * kHeadDim * int(sizeof(Element)),
                  o = kGroups * tile_rows * kOStride * int(sizeof(float));
        return int(sizeof(SharedStorage)) + std::max(q, o - int(sizeof(SharedStorage::tiles)));
    }
    // The registers of a thread are limited to what this many CTAs of kMaxThreads threads leave.
    static constexpr int kMaxThreads = threads(kMaxRows);
    static constexpr int kMinCtas = kIsCluster ? 1 : (kHeadDim <= 128 ? 2 : 1) + (kIsOneGroup ? 0 : 1);
    // CTAs that the registers of an SM hold.
    static constexpr int ctas_by_registers(int tile_rows) { return kMinCtas * kMaxThreads / threads(tile_rows); }
};

// Beyond head dim 128 the cluster has four groups, too.
template <int kHeadDim>
constexpr Form kShortCluster = kHeadDim <= 128 ? Form::short_cluster : Form::cluster;

// Calls function with the traits of a form.
template <DType kDType, int kHeadDim, typename Function>
auto call_with_traits(Form form, const Function &function) {
    switch (form) {
        case Form::many_rows:
            return function(SplitkvTraits<kDType, kHeadDim, Form::many_rows>{});
        case Form::warp_pairs:
            return function(SplitkvTraits<kDType, kHeadDim, Form::warp_pairs>{});
        case Form::cluster:
            return function(SplitkvTraits<kDType, kHeadDim, Form::cluster>{});
        case Form::short_cluster:
            return function(SplitkvTraits<kDType, kHeadDim, kShortCluster<kHeadDim>>{});
        default:
            return function(SplitkvTraits<kDType, kHeadDim, Form::few_rows>{});
    }
}

// ---- copies

// Byte offset of a 16-byte chunk of a row in a tile of kRows rows. Rows are cut into parts of 128 (64) bytes; chunks of
// a part are permuted so that ldmatrix and cp.async have no bank conflicts.
template <int kHeadDim, int kRows>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
    constexpr int kPart = kHeadDim % 64 == 0 ? 8 : 4;  // chunks
    const int swizzle = kPart == 8 ? row % 8 : row / 2 % 4;
    return (chunk / kPart * kRows + row) * kPart * 16 + ((chunk % kPart) ^ swizzle) * 16;
}

// The L2 policy of a copy. Data that is read once is replaced first, so that machine code, lengths and block tables
// stay.
__device__ __forceinline__ uint64_t l2_policy(bool is_read_once) {
    uint64_t policy;
    if (is_read_once) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

// cp_async_16 of instructions.h with such a policy.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void *source, bool is_in_range, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source),
                 "r"(is_in_range ? 16 : 0), "l"(policy)
                 : "memory");
}

// The keys of one head of one sequence.
template <typename Traits>
class KeySource {
    using Element = typename Traits::Element;

public:
    __device__ KeySource(const Flash_fwd_params &params, const Sequence &sequence, int bidb, int bidh_k)
        : k(static_cast<const Element *>(params.k.ptr) + bidh_k * params.k.head_stride),
          v(static_cast<const Element *>(params.v.ptr) + bidh_k * params.v.head_stride),
          params(params),
          pages(params.block_table == nullptr ? nullptr : params.block_table + bidb * params.block_table_batch_stride),
          first(sequence.k_begin),
          bidb(sequence.k_bidb) {}

    // Where a key lies. Reading the number of a page takes time, so nothing is computed from it here.
    struct Place {
        int page;  // batch index without pages; as the block table has it, maybe out of range
        int row;
    };
    __device__ __forceinline__ Place find(int key) const {  // needs key < seqlen_k
        const int row = first + key;
        if (pages == nullptr) {
            return {bidb, row};
        }
        const int index = row / params.page_size;
        return {pages[index], row - index * params.page_size};
    }
    // Offsets of a place in K and in V, in elements.
    struct Offsets {
        int64_t k, v;
    };
    __device__ __forceinline__ Offsets offsets_of(const Place &place) const {
        const int page =
            pages == nullptr ? place.page : static_cast<int>(min(unsigned(place.page), unsigned(params.num_pages - 1)));
        return {page * params.k.batch_stride + place.row * params.k.row_stride,
                page * params.v.batch_stride + place.row * params.v.row_stride};
    }

    const Element *const k, *const v;  // of the head

private:
    const Flash_fwd_params &params;
    const int *pages;  // of the sequence
    const int first;   // left padding
    const int bidb;
};

// Copies 8 elements from any address to shared memory, and zeros past `columns`.
template <typename Element>
__device__ __forceinline__ void copy_chunk(uint32_t target, const Element *source, int columns) {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        const uint16_t x = i < columns ? reinterpret_cast<const uint16_t *>(source)[i] : uint16_t(0);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(target + 2 * i), "h"(x) : "memory");
    }
}

// Loads the tiles of one group: tile i holds the keys from begin + i * kRoundKeys on. Called by all threads of the
// group.
template <typename Traits>
class TileLoader {
    using Element = typename Traits::Element;

public:
    __device__ TileLoader(const KeySource<Traits> &source, const SplitkvPlan &plan, uint32_t buffers, int begin,
                          int end, int d)
        : source(source),
          buffers(buffers),
          next_key(begin),
          end(end),
          d(d),
          is_aligned(plan.is_aligned),
          policy(l2_policy(plan.row_tiles == 1)) {
        find_places();
    }

    // Starts the copy of the next tile, if there is one. Keys and columns out of range become zeros.
    __device__ __forceinline__ void load() {
        if (next_key < end) {
            const uint32_t tile = buffers + stage * kStageBytes;
            if (is_aligned) {
                copy_rows<true>(tile);
            } else {
                copy_rows<false>(tile);
            }
            next_key += Traits::kRoundKeys;
            stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
            first_place = (first_place + Traits::kKeys) % 32;
            if (first_place == 0) {
                find_places();
            }
        }
    }

private:
    static constexpr int kStageBytes = 2 * Traits::kTileElements * sizeof(Element);
    const KeySource<Traits> &source;
    const uint32_t buffers;  // address of stage 0 in shared memory
    int next_key;            // of the next tile
    const int end, d;
    const bool is_aligned;
    const uint64_t policy;
    int stage = 0;
    typename KeySource<Traits>::Place place;  // of a key of the next tiles, one for each lane
    int first_place = 0;                      // the lane that has the first key of the next tile

    // Finds 32 rows: one tile, or two that the group loads one after the other. Early, because reading the block table
    // takes time, and longer than a tile where the copies of a few tiles wait in front of it.
    __device__ __forceinline__ void find_places() {
        const int lane = threadIdx.x % 32;
        const int key = next_key + lane / Traits::kKeys * Traits::kRoundKeys + lane % Traits::kKeys;
        place = source.find(min(key, end - 1));
    }

    template <bool kIsAligned>
    __device__ __forceinline__ void copy_rows(uint32_t tile) {
        constexpr int kChunksOfWarp = 32, kSteps = Traits::kKeys * Traits::kChunks / kChunksOfWarp;
        static_assert(Traits::kKeys * Traits::kChunks % kChunksOfWarp == 0);
        const auto offsets = source.offsets_of(place);
        const int first = Traits::kGroupWarps == 1 ? 0 : warp_index() % Traits::kGroupWarps;
        const int stride = Traits::kIsOneGroup ? blockDim.x / 32 : Traits::kGroupWarps;
#pragma unroll(kIsAligned ? (Traits::kIsOneGroup ? 2 : kSteps) : 1)
        for (int i = 0; i < kSteps; i += stride) {
            const int step = i + first;
            if (Traits::kIsOneGroup && step >= kSteps) {
                break;
            }
            const int index = step * kChunksOfWarp + threadIdx.x % 32;
            const int row = index / Traits::kChunks, chunk = index % Traits::kChunks;
            const bool is_in_range = next_key + row < end && chunk * 8 < d;
            const Element *k = source.k + __shfl_sync(0xffffffffu, offsets.k, first_place + row) + chunk * 8;
            const Element *v = source.v + __shfl_sync(0xffffffffu, offsets.v, first_place + row) + chunk * 8;
            const uint32_t target_k = tile + chunk_offset<Traits::kHeadDim, Traits::kKeys>(row, chunk),
                           target_v = target_k + kStageBytes / 2;
            if constexpr (kIsAligned) {
                cp_async_16(target_k, k, is_in_range, policy);
                cp_async_16(target_v, v, is_in_range, policy);
            } else {
                copy_chunk(target_k, k, is_in_range ? d - chunk * 8 : 0);
                copy_chunk(target_v, v, is_in_range ? d - chunk * 8 : 0);
            }
        }
    }
};

}  // namespace flash::kvcache
