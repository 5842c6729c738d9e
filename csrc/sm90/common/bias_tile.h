// A tile of attn_bias in shared memory, as 16-bit values. Every warp of the consumers has its own, which it fills a
// step ahead: no other warp waits for it. Of type boolean the values are 0 and -inf. A bias in float32 does not fit; it
// is read from global memory.
#pragma once

#include <cute/tensor.hpp>

#include <cstdint>

#include "common/attn_bias.h"
#include "kvcache/instructions.h"

namespace flash::sm90 {

using namespace cute;

// Where the keys of a query lie in a tile, in pieces of 8 keys.

// Forward: 16 queries, read word by word. No bank conflicts: 8 queries and 4 words of a piece lie in different banks.
template <int kKeys_>
struct PlacesOfQueries {
    static constexpr int kQueries = 16, kKeys = kKeys_;
    static constexpr bool kIsPermuted = kKeys % 64 == 0;  // else padded
    static constexpr int kRow = kIsPermuted ? kKeys : kKeys + 8;
    static_assert(kKeys % 32 == 0);

    __device__ __forceinline__ static int place(int query, int piece) {
        return query * kRow + (kIsPermuted ? piece ^ (query % 8) : piece) * 8;
    }
};

// Backward: the 16 keys of a warp, read by ldmatrix. No bank conflicts: the pieces of 8 queries lie in different banks.
template <int kQueries_>
struct PlacesOfKeys {
    static constexpr int kQueries = kQueries_, kKeys = 16, kRow = 16;

    __device__ __forceinline__ static int place(int query, int piece) {
        return query * kRow + (piece ^ (query / 4 % 2)) * 8;
    }
};

template <typename Element, typename Places>
struct BiasTile {
    static constexpr int kQueries = Places::kQueries, kKeys = Places::kKeys, kPieces = kKeys / 8;
    static constexpr int kSize = kQueries * Places::kRow;  // elements
    Element *smem;

    __device__ __forceinline__ Element *at(int query, int piece) const { return smem + Places::place(query, piece); }

    // Starts to fill the tile with the values from first_query and first_key on; keys past the end are hidden. Called
    // by a whole warp, when all lanes have read the values before. wait() ends it. A bias with one row fills one row.
    __device__ __forceinline__ void start(const BiasOfHead<Element> &bias, int first_query, int first_key) const {
        const int rows = bias.row_stride == 0 ? 1 : kQueries;
        const bool has_whole_pieces = bias.seqlen_k % 8 == 0;
        if (bias.type == AttnBias::Type::float32) {
            return;
        }
        if (bias.type == AttnBias::Type::boolean && has_whole_pieces && bias.has_vectors(8)) {
            start_boolean(bias, first_query, first_key, rows);
        } else if (bias.type == AttnBias::Type::dtype_of_q && has_whole_pieces && bias.has_vectors(16)) {
            CUTE_NO_UNROLL
            for (int i = threadIdx.x % 32; i < rows * kPieces; i += 32) {
                const int query = i / kPieces, piece = i % kPieces, key = first_key + piece * 8;
                if (key < bias.seqlen_k) {
                    kvcache::cp_async_16(cast_smem_ptr_to_uint(at(query, piece)),
                                         bias.template row<Element>(first_query + query) + key, /*is_in_range=*/true);
                } else {
                    *reinterpret_cast<uint4 *>(at(query, piece)) = hidden({0, 0});
                }
            }
        } else {
            start_values(bias, first_query, first_key, rows);
        }
        kvcache::cp_async_commit();
    }

    // All lanes: the tile is filled.
    __device__ __forceinline__ static void wait() {
        kvcache::cp_async_wait_group<0>();
        __syncwarp();
    }

private:
    // A few loads of each lane wait together.
    __device__ __forceinline__ void start_boolean(const BiasOfHead<Element> &bias, int first_query, int first_key,
                                                  int rows) const {
        constexpr int kTogether = 4;
        CUTE_NO_UNROLL
        for (int first = threadIdx.x % 32; first < rows * kPieces; first += 32 * kTogether) {
            uint2 keys[kTogether];
            CUTE_UNROLL
            for (int i = 0; i < kTogether; ++i) {
                const int index = first + 32 * i, key = first_key + index % kPieces * 8;
                keys[i] = {0, 0};
                if (index < rows * kPieces && key < bias.seqlen_k) {
                    keys[i] = *reinterpret_cast<const uint2 *>(
                        bias.template row<uint8_t>(first_query + index / kPieces) + key);
                }
            }
            CUTE_UNROLL
            for (int i = 0; i < kTogether; ++i) {
                const int index = first + 32 * i;
                if (index < rows * kPieces) {
                    *reinterpret_cast<uint4 *>(at(index / kPieces, index % kPieces)) = hidden(keys[i]);
                }
            }
        }
    }

    // Any strides: value by value.
    __device__ __forceinline__ void start_values(const BiasOfHead<Element> &bias, int first_query, int first_key,
                                                 int rows) const {
#pragma unroll 2
        for (int i = threadIdx.x % 32; i < rows * kKeys; i += 32) {
            const int query = i / kKeys, key = i % kKeys;
            const int64_t offset = min(first_key + key, bias.seqlen_k - 1) * bias.key_stride;
            Element value =
                bias.type == AttnBias::Type::boolean
                    ? Element(bias.template row<uint8_t>(first_query + query)[offset] != 0 ? 0.0f : -INFINITY)
                    : bias.template row<Element>(first_query + query)[offset];
            value = first_key + key < bias.seqlen_k ? value : Element(-INFINITY);
            at(query, key / 8)[key % 8] = value;
        }
    }

    // 8 keys as values: those whose byte is 0 are -inf.
    __device__ __forceinline__ static uint4 hidden(const uint2 &keys) {
        constexpr uint32_t kInfinities = std::is_same_v<Element, cutlass::half_t> ? 0xfc00fc00u : 0xff80ff80u;
#ifdef __CUDA_ARCH__
        const uint32_t low = __vcmpeq4(keys.x, 0), high = __vcmpeq4(keys.y, 0);
        return {__byte_perm(low, 0, 0x1100) & kInfinities, __byte_perm(low, 0, 0x3322) & kInfinities,
                __byte_perm(high, 0, 0x1100) & kInfinities, __byte_perm(high, 0, 0x3322) & kInfinities};
#else
        static_cast<void>(keys);
        return {kInfinities, kInfinities, kInfinities, kInfinities};
#endif
    }
};

}  // namespace flash::sm90
