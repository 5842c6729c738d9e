// Dropout: which probabilities are dropped is one function of (seed, offset, sequence, head, query, key), the same on
// every backend, whatever its tiles. flash_attn_mini/reference/philox.py and the Triton kernels say the same.
//
// Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter of
// 128 bits into 128 random ones: 16 for each of 8 (query, key) pairs. The pairs are spread over a tile of 16 x 16 as a
// thread holds them in an accumulator of tensor-core products: queries q and q + 8, keys k, k + 1, k + 8 and k + 9,
// where q < 8 and k < 8 is even.
#pragma once

#include <cmath>
#include <cstdint>

#include "sequence.h"

namespace flash {

constexpr int kPhiloxRounds = 7;  // the fewest that pass every test of the paper; docs/tuning.md has what 10 cost

// A pair is dropped when its 16 bits are below this: p_dropout to the next 2^-16.
inline unsigned dropout_threshold(double p_dropout) {
    return static_cast<unsigned>(std::floor(p_dropout * 65536.0 + 0.5));
}

struct Random4 {
    uint32_t x[4];
};

FLASH_HOST_DEVICE Random4 philox4x32(Random4 counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53u} * counter.x[0];
        const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.x[2];
        counter = {uint32_t(product1 >> 32) ^ counter.x[1] ^ key0, uint32_t(product1),
                   uint32_t(product0 >> 32) ^ counter.x[3] ^ key1, uint32_t(product0)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// The stream of one head of one sequence.
struct DropoutStream {
    uint32_t key0, key1, head, offset;

    FLASH_HOST_DEVICE DropoutStream(const int64_t *rng_state, int bidb, int h, int bidh)
        : key0(uint32_t(uint64_t(rng_state[0]))),
          key1(uint32_t(uint64_t(rng_state[0]) >> 32) ^ uint32_t(uint64_t(rng_state[1]) >> 32)),
          head(uint32_t(bidb) * uint32_t(h) + uint32_t(bidh)),
          offset(uint32_t(uint64_t(rng_state[1]))) {
#ifdef __CUDA_ARCH__
        key0 = __shfl_sync(0xffffffffu, key0, 0);  // so that the compiler knows them to be the same in all lanes
        key1 = __shfl_sync(0xffffffffu, key1, 0);
#endif
    }

    // The random bits of the 8 pairs of which `query` and `key` are one. x[2 * (key & 1) + (key / 8 & 1)] holds those
    // of that key: in its lower half for the query below 8 of the tile's 16, in its upper half for the query 8 further
    // on.
    FLASH_HOST_DEVICE Random4 bits(uint32_t query, uint32_t key) const {
        const uint32_t lane = query % 8 * 4 + key % 8 / 2;
        return philox4x32({query / 16 * 32 + lane, key / 16, head, offset}, key0, key1);
    }
};

}  // namespace flash
