// The pipeline of one group of warps: cp.async copies tiles of K and V from the cache to shared memory, a few tiles
// ahead. Keys lie in a contiguous cache or in pages of any size.
#pragma once

#include "mma.h"
#include "splitkv_traits.h"

namespace flash::kvcache {

// Byte offset of a 16-byte chunk of a row in a tile. Rows are cut into parts of 128 (64) bytes; chunks of a part are
// permuted so that ldmatrix and cp.async have no bank conflicts.
template <typename Traits>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
    constexpr int kPart = Traits::kHeadDim % 64 == 0 ? 8 : 4;  // chunks
    const int swizzle = kPart == 8 ? row % 8 : row / 2 % 4;
    return (chunk / kPart * Traits::kKeys + row) * kPart * 16 + ((chunk % kPart) ^ swizzle) * 16;
}

// The keys of one head of one sequence.
template <typename Traits>
class KeySource {
    using Element = typename Traits::Element;

public:
    __device__ KeySource(const Flash_fwd_params &params, const Sequence &sequence, int bidb, int bidh_k)
        : params(params),
          k(static_cast<const Element *>(params.k.ptr) + bidh_k * params.k.head_stride),
          v(static_cast<const Element *>(params.v.ptr) + bidh_k * params.v.head_stride),
          pages(params.block_table == nullptr ? nullptr : params.block_table + bidb * params.block_table_batch_stride),
          first(sequence.k_begin),
          bidb(sequence.k_bidb) {}

    // Where a key lies: a page and its row in there; without pages a batch index and its row. Needs key < seqlen_k.
    struct Row {
        int page, row;
    };
    __device__ __forceinline__ Row find(int key) const {
        const int row = first + key;
        if (pages == nullptr) {
            return {bidb, row};
        }
        const int index = row / params.page_size;
        return {static_cast<int>(min(unsigned(pages[index]), unsigned(params.num_pages - 1))),
                row - index * params.page_size};
    }

    __device__ __forceinline__ const Element *k_row(const Row &at) const {
        return k + at.page * params.k.batch_stride + at.row * params.k.row_stride;
    }
    __device__ __forceinline__ const Element *v_row(const Row &at) const {
        return v + at.page * params.v.batch_stride + at.row * params.v.row_stride;
    }

private:
    const Flash_fwd_params &params;
    const Element *k, *v;
    const int *pages;  // of the sequence
    const int first;   // left padding
    const int bidb;
};

// 8 elements from any address, and zeros past `columns`.
template <typename Element>
__device__ __forceinline__ uint4 load_chunk(const Element *source, int columns) {
    alignas(16) uint16_t elements[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        elements[i] = i < columns ? reinterpret_cast<const uint16_t *>(source)[i] : uint16_t(0);
    }
    return *reinterpret_cast<const uint4 *>(elements);
}

// Loads the tiles of one group: tile i holds the keys from begin + i * kStride on. Called by all threads of the group.
template <typename Traits>
class TileLoader {
    using Element = typename Traits::Element;
    static constexpr int kStride = Traits::kUnit;  // keys between the tiles of a group

public:
    __device__ TileLoader(const KeySource<Traits> &source,
                          Element (&buffers)[Traits::kStages][2][Traits::kTileElements], int thread, int begin, int end,
                          int d, bool is_aligned)
        : source(source), thread(thread), next_key(begin), end(end), d(d), is_aligned(is_aligned) {
        buffer = static_cast<uint32_t>(__cvta_generic_to_shared(&buffers));
        prefetch();
    }

    // Starts the copy of the next tile and commits it, as an empty group past the last tile. Keys and columns out of
    // range become zeros.
    __device__ __forceinline__ void load() {
        if (next_key < end) {
            const uint32_t tile_k = buffer + stage * kStageBytes, tile_v = tile_k + kStageBytes / 2;
            constexpr int kCopies = Traits::kKeys * Traits::kChunks / Traits::kGroupThreads;
            static_assert(Traits::kKeys * Traits::kChunks % Traits::kGroupThreads == 0);
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int index = i * Traits::kGroupThreads + thread;
                const int row = index / Traits::kChunks, chunk = index % Traits::kChunks;
                const typename KeySource<Traits>::Row at{__shfl_sync(0xffffffffu, next_row.page, row),
                                                         __shfl_sync(0xffffffffu, next_row.row, row)};
                const bool is_in_range = next_key + row < end && chunk * 8 < d;
                const Element *k = source.k_row(at) + chunk * 8, *v = source.v_row(at) + chunk * 8;
                const int offset = chunk_offset<Traits>(row, chunk);
                if (is_aligned) {
                    cp_async_16(tile_k + offset, k, is_in_range);
                    cp_async_16(tile_v + offset, v, is_in_range);
                } else {
                    const int columns = is_in_range ? d - chunk * 8 : 0;
                    store(tile_k + offset, load_chunk(k, columns));
                    store(tile_v + offset, load_chunk(v, columns));
                }
            }
            next_key += kStride;
            stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
            prefetch();
        }
        cp_async_commit();
    }

private:
    static constexpr int kStageBytes = 2 * Traits::kTileElements * sizeof(Element);
    const KeySource<Traits> &source;
    const int thread;  // in the group
    int next_key;      // of the next tile
    const int end, d;
    const bool is_aligned;
    uint32_t buffer;
    int stage = 0;
    typename KeySource<Traits>::Row next_row;  // of key `lane` of the next tile

    // Finds the rows of the next tile early, because reading the block table takes time.
    __device__ __forceinline__ void prefetch() {
        const int key = next_key + static_cast<int>(threadIdx.x % 32) % Traits::kKeys;
        next_row = source.find(min(key, end - 1));
    }

    __device__ __forceinline__ static void store(uint32_t address, const uint4 &x) {
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
    }
};

}  // namespace flash::kvcache
