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
//   few_rows    four groups of one warp
//   wide        the same with larger tiles, or up to head dim 64 with eight groups; one CTA an SM
//   cluster     four groups of one warp
//   warp_pairs  two groups of two warps
//   many_rows   one group of four to eight warps

constexpr int kWarpRows = 16;  // the m16 of mma.sync
constexpr int kMaxWarps = 8;

// Stages of a group. round_bytes: of the tiles of one stage of all groups.
constexpr int stages_of(Form form, int headdim, int round_bytes) {
    // Of the wide form: 128 KB of stages on an SM keep the memory busy. With 192 KB it is up to 3 % slower (H200).
    constexpr int kEnoughBytes = 128 << 10;
    const bool has_three = form == Form::many_rows    ? headdim <= 128
                           : form == Form::warp_pairs ? headdim <= 64 || headdim > 192
                           : form == Form::wide       ? 2 * round_bytes < kEnoughBytes
                                                      : form == Form::cluster || headdim > 192;
    return has_three ? 3 : 2;
}

// CTAs wanted on an SM, for the compiler, which limits the registers of a thread. Shared memory may hold fewer.
constexpr int ctas_of(Form form, int headdim) {
    switch (form) {
        case Form::many_rows:
            return headdim <= 128 ? 2 : 1;
        case Form::warp_pairs:
            return headdim <= 128 ? 3 : 2;
        case Form::few_rows:
            return headdim <= 64 ? 3 : 2;
        default:
            return 1;
    }
}

template <DType kDType, int kHeadDim_, Form kForm>
struct SplitkvTraits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kIsOneGroup = kForm == Form::many_rows, kArePairs = kForm == Form::warp_pairs;
    static constexpr bool kIsCluster = kForm == Form::cluster, kIsWide = kForm == Form::wide;
    static constexpr int kGroupWarps = kIsOneGroup ? kMaxWarps : kArePairs ? 2 : 1;  // at most
    static constexpr int kGroups = kIsOneGroup ? 1 : kArePairs ? 2 : kIsWide && kHeadDim <= 64 ? 8 : 4;
    static constexpr int kMaxRows = kGroupWarps * kWarpRows;

    // Keys of a tile: at most 32, one for each lane.
    static constexpr int kKeys = kGroupWarps == 1 && kHeadDim > 64 && !kIsWide ? 16 : 32;
    static constexpr int kRoundKeys = kGroups * kKeys;  // one tile for each group
    // Keys of a unit of the schedule: few where CTAs are few, so that a short cache has keys for all of them.
    static constexpr int kUnit = kIsCluster || kIsWide ? kKeys : kRoundKeys;
    static constexpr int kChunks = kHeadDim / 8;  // pieces of 16 bytes in a row
    static constexpr int kTileElements = kKeys * kHeadDim;
    static constexpr int kStages = stages_of(kForm, kHeadDim, kGroups * 2 * kTileElements * int(sizeof(Element)));
    // True: Q stays in registers over the loop. Else it is read from shared memory for each key tile.
    static constexpr bool kQInRegisters = !kIsOneGroup && kHeadDim <= 128;

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
        alignas(128) Element tiles[kGroups][kStages][2][kTileElements];  // K and V; Q follows. O: results_of
    };

    static constexpr int threads(int tile_rows) { return 32 * kGroups * (tile_rows / kWarpRows); }
    // True: while a CTA stores the results of a run, it loads the keys of the next one. O lies in the place of the
    // tiles that were multiplied last, so it has to fit there.
    static constexpr bool kLoadsNextRun =
        kIsWide && kWarpRows * kOStride * int(sizeof(float)) <= 2 * kTileElements * int(sizeof(Element));
    static constexpr int smem_size(int tile_rows) {
        const int q = tile_rows * kHeadDim * int(sizeof(Element)),
                  o = kGroups * tile_rows * kOStride * int(sizeof(float));
        return int(sizeof(SharedStorage)) + std::max(q, kLoadsNextRun ? 0 : o - int(sizeof(SharedStorage::tiles)));
    }
    static constexpr int kMaxThreads = threads(kMaxRows);
    static constexpr int kMinCtas = ctas_of(kForm, kHeadDim);
    // The most CTAs of `tile_rows` rows on an SM.
    static constexpr int ctas_by_registers(int tile_rows) { return kMinCtas * kMaxThreads / threads(tile_rows); }
};

// Beyond head dim 128 tiles of few_rows have 12 and 16 KB, like those of the wide form at 96 and 128.
template <int kHeadDim>
constexpr bool kHasWideForm = kHeadDim <= 128;

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
        case Form::wide:
            if constexpr (kHasWideForm<kHeadDim>) {
                return function(SplitkvTraits<kDType, kHeadDim, Form::wide>{});
            }
            [[fallthrough]];
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
struct KeySource {
    using Element = typename Traits::Element;
    const Element *k, *v;  // of the head
    const int *pages;      // of the sequence; null: a contiguous cache
    int first;             // left padding
    int bidb;

    KeySource() = default;
    __device__ KeySource(const Flash_fwd_params &params, const Sequence &sequence, int bidb, int bidh_k)
        : k(static_cast<const Element *>(params.k.ptr) + bidh_k * params.k.head_stride),
          v(static_cast<const Element *>(params.v.ptr) + bidh_k * params.v.head_stride),
          pages(params.block_table == nullptr ? nullptr : params.block_table + bidb * params.block_table_batch_stride),
          first(sequence.k_begin),
          bidb(sequence.k_bidb) {}

    // Where a key lies. Reading the number of a page takes time, so nothing is computed from it here.
    struct Place {
        int page;  // batch index without pages; as the block table has it, maybe out of range
        int row;
    };
    __device__ __forceinline__ Place find(const Flash_fwd_params &params, int key) const {  // needs key < seqlen_k
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
    __device__ __forceinline__ Offsets offsets_of(const Flash_fwd_params &params, const Place &place) const {
        const int page =
            pages == nullptr ? place.page : static_cast<int>(min(unsigned(place.page), unsigned(params.num_pages - 1)));
        return {page * params.k.batch_stride + place.row * params.k.row_stride,
                page * params.v.batch_stride + place.row * params.v.row_stride};
    }
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

// Loads the tiles of one group to its stages in turn, run after run: tile i of the group in a run holds the keys from
// begin + group * kKeys + i * kRoundKeys on. Called by all threads of the group.
template <typename Traits>
class TileLoader {
    using Element = typename Traits::Element;

public:
    // buffers: address of the group's stage 0 in shared memory.
    __device__ TileLoader(const Flash_fwd_params &params, const SplitkvPlan &plan, int group, uint32_t buffers)
        : params(params),
          buffers(buffers),
          group(group),
          is_aligned(plan.is_aligned),
          policy(l2_policy(plan.row_tiles == 1)) {}

    // The next tiles are those of a run with keys [begin, end).
    __device__ __forceinline__ void start(const KeySource<Traits> &source, int begin, int end) {
        this->source = source;
        round_key = begin;
        this->end = end;
        first_place = 0;
        if (begin < end) {
            find_places();
        }
    }

    // Starts the copy of the next tile, if there is one. Keys and columns out of range become zeros.
    __device__ __forceinline__ void load() {
        if (round_key < end) {
            const uint32_t tile = buffers + stage * kStageBytes;
            if (next_key() < end) {
                if (is_aligned) {
                    copy_rows<true>(tile);
                } else {
                    copy_rows<false>(tile);
                }
            }
            round_key += Traits::kRoundKeys;
            stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
            first_place = (first_place + Traits::kKeys) % 32;
            if (first_place == 0) {
                find_places();
            }
        }
    }

private:
    static constexpr int kStageBytes = 2 * Traits::kTileElements * sizeof(Element);
    const Flash_fwd_params &params;
    const uint32_t buffers;
    const int group;
    const bool is_aligned;
    const uint64_t policy;
    KeySource<Traits> source;
    int round_key = 0, end = 0;  // of the next tiles of all groups
    int stage = 0;
    typename KeySource<Traits>::Place place;  // of a key of the next tiles, one for each lane
    int first_place = 0;                      // the lane that has the first key of the next tile

    __device__ __forceinline__ int next_key() const { return round_key + group * Traits::kKeys; }

    // Finds 32 rows: one tile, or two that the group loads one after the other. Early, because reading the block table
    // takes time, and longer than a tile where the copies of a few tiles wait in front of it.
    __device__ __forceinline__ void find_places() {
        const int lane = threadIdx.x % 32;
        const int key = next_key() + lane / Traits::kKeys * Traits::kRoundKeys + lane % Traits::kKeys;
        place = source.find(params, min(key, end - 1));
    }

    template <bool kIsAligned>
    __device__ __forceinline__ void copy_rows(uint32_t tile) {
        constexpr int kChunksOfWarp = 32, kSteps = Traits::kKeys * Traits::kChunks / kChunksOfWarp;
        static_assert(Traits::kKeys * Traits::kChunks % kChunksOfWarp == 0);
        const auto offsets = source.offsets_of(params, place);
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
            const bool is_in_range = next_key() + row < end && chunk * 8 < params.d;
            const Element *k = source.k + __shfl_sync(0xffffffffu, offsets.k, first_place + row) + chunk * 8;
            const Element *v = source.v + __shfl_sync(0xffffffffu, offsets.v, first_place + row) + chunk * 8;
            const uint32_t target_k = tile + chunk_offset<Traits::kHeadDim, Traits::kKeys>(row, chunk),
                           target_v = target_k + kStageBytes / 2;
            if constexpr (kIsAligned) {
                cp_async_16(target_k, k, is_in_range, policy);
                cp_async_16(target_v, v, is_in_range, policy);
            } else {
                copy_chunk(target_k, k, is_in_range ? params.d - chunk * 8 : 0);
                copy_chunk(target_v, v, is_in_range ? params.d - chunk * 8 : 0);
            }
        }
    }
};

}  // namespace flash::kvcache
