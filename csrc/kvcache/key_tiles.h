// The pipeline of one group of warps: cp.async copies tiles of K and V from the cache to shared memory, a few tiles
// ahead. Keys lie in a contiguous cache or in pages of any size.
#pragma once

#include "instructions.h"
#include "splitkv_traits.h"

namespace flash::kvcache {

// Byte offset of a 16-byte chunk of a row in a tile of kRows rows. Rows are cut into parts of 128 (64) bytes; chunks of
// a part are permuted so that ldmatrix and cp.async have no bank conflicts.
template <int kHeadDim, int kRows>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
    constexpr int kPart = kHeadDim % 64 == 0 ? 8 : 4;  // chunks
    const int swizzle = kPart == 8 ? row % 8 : row / 2 % 4;
    return (chunk / kPart * kRows + row) * kPart * 16 + ((chunk % kPart) ^ swizzle) * 16;
}

// How the L2 cache treats what a copy brings. What is read once shall be the first to be replaced: machine code,
// lengths and block tables stay.
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
