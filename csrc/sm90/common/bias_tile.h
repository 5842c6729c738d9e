// A tile of attn_bias in shared memory, as 16-bit values. Every warp of the consumers has its own, which it fills a step
// ahead: no other warp waits for it. Of type boolean the values are 0 and -inf. A bias in float32 does not fit; it is
// read from global memory.
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

    // Starts to fill the tile with the values from first_query and first_key on; keys past the end are hidden. Called by
    // a whole warp, when all lanes have read the values before. wait() ends it. A bias with one row fills one row.
    __device__ __forceinline__ void start(const BiasOfHead<Element> &bias, int first_query, int first_key) const {
        const int lane = threadIdx.x % 32, rows = bias.row_stride == 0 ? 1 : kQueries;
        const bool is_inside = first_key + kKeys <= bias.seqlen_k && bias.has_vectors(16);
        if (bias.type == AttnBias::Type::dtype_of_q && is_inside) {
            CUTE_NO_UNROLL
            for (int i = lane; i < rows * kPieces; i += 32) {
                const int query = i / kPieces, piece = i % kPieces;
                kvcache::cp_async_16(cast_smem_ptr_to_uint(at(query, piece)),
                                     bias.template row<Element>(first_query + query) + first_key + piece * 8,
                                     /*is_in_range=*/true);
            }
        } else if (bias.type == AttnBias::Type::boolean && is_inside) {
#pragma unroll 4
            for (int i = lane; i < rows * (kPieces / 2); i += 32) {
                const int query = i / (kPieces / 2), piece = i % (kPieces / 2) * 2;
                const uint4 bytes =
                    *reinterpret_cast<const uint4 *>(bias.template row<uint8_t>(first_query + query) + first_key +
                                                     piece * 8);
                *reinterpret_cast<uint4 *>(at(query, piece)) = hidden(bytes.x, bytes.y);
                *reinterpret_cast<uint4 *>(at(query, piece + 1)) = hidden(bytes.z, bytes.w);
            }
        } else if (bias.type != AttnBias::Type::float32) {
#pragma unroll 4
            for (int i = lane; i < rows * kKeys; i += 32) {
                const int query = i / kKeys, key = i % kKeys;
                Element value(-INFINITY);
                if (first_key + key < bias.seqlen_k) {
                    const int64_t offset = (first_key + key) * bias.key_stride;
                    if (bias.type == AttnBias::Type::boolean) {
                        value = Element(bias.template row<uint8_t>(first_query + query)[offset] != 0 ? 0.0f : -INFINITY);
                    } else {
                        value = bias.template row<Element>(first_query + query)[offset];
                    }
                }
                at(query, key / 8)[key % 8] = value;
            }
        }
        kvcache::cp_async_commit();
    }

    // All lanes: the tile is filled.
    __device__ __forceinline__ static void wait() {
        kvcache::cp_async_wait_group<0>();
        __syncwarp();
    }

private:
    // 8 keys as values: those whose byte is 0 are -inf.
    __device__ __forceinline__ static uint4 hidden(uint32_t low, uint32_t high) {
        constexpr uint32_t kInfinities = std::is_same_v<Element, cutlass::half_t> ? 0xfc00fc00u : 0xff80ff80u;
        const uint32_t of_low = __vcmpeq4(low, 0), of_high = __vcmpeq4(high, 0);
        return {__byte_perm(of_low, 0, 0x1100) & kInfinities, __byte_perm(of_low, 0, 0x3322) & kInfinities,
                __byte_perm(of_high, 0, 0x1100) & kInfinities, __byte_perm(of_high, 0, 0x3322) & kInfinities};
    }
};

}  // namespace flash::sm90
