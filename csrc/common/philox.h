// The random bits of dropout: one function of (seed, offset, sequence, head, query, key), the same on every backend and
// for every tile size. flash_attn_mini/reference/philox.py and the Triton kernels compute the same function.
//
// Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a 128-bit
// counter into 128 random bits: 16 for each of 8 (query, key) pairs. In a tile of 16 x 16 these are the pairs that one
// thread holds in an accumulator of m16n8 products: queries q and q + 8, keys k, k + 1, k + 8 and k + 9, for q < 8 and
// even k < 8.
#pragma once

#include <cmath>
#include <cstdint>

#include "sequence.h"

namespace flash {

constexpr int kPhiloxRounds = 7;  // the fewest that pass every test of the paper; docs/tuning has the cost of 10

// A pair is dropped if its 16 bits are below this: p_dropout rounded to a multiple of 2^-16.
inline unsigned dropout_threshold(double p_dropout) {
    return static_cast<unsigned>(std::floor(p_dropout * 65536.0 + 0.5));
}

struct Random4 {
    uint32_t x[4];
};

// The product in 64 bits. nvcc would add the upper halves of the factors, which are 0.
FLASH_HOST_DEVICE uint64_t multiply_wide(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
    return product;
#else
    return uint64_t{x} * y;
#endif
}

FLASH_HOST_DEVICE Random4 philox4x32(Random4 counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t product0 = multiply_wide(0xD2511F53u, counter.x[0]);
        const uint64_t product1 = multiply_wide(0xCD9E8D57u, counter.x[2]);
        counter = {uint32_t(product1 >> 32) ^ counter.x[1] ^ key0, uint32_t(product1),
                   uint32_t(product0 >> 32) ^ counter.x[3] ^ key1, uint32_t(product0)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// The random bits of one head of one sequence.
struct DropoutStream {
    uint32_t key0, key1, head, offset;

    FLASH_HOST_DEVICE DropoutStream(uint64_t rng_seed, uint64_t rng_offset, int bidb, int h, int bidh)
        : key0(uint32_t(rng_seed)),
          key1(uint32_t(rng_seed >> 32) ^ uint32_t(rng_offset >> 32)),
          head(uint32_t(bidb) * uint32_t(h) + uint32_t(bidh)),
          offset(uint32_t(rng_offset)) {}

    FLASH_HOST_DEVICE DropoutStream(const int64_t *rng_state, int bidb, int h, int bidh)
        : DropoutStream(uint64_t(rng_state[0]), uint64_t(rng_state[1]), bidb, h, bidh) {
#ifdef __CUDA_ARCH__
        key0 = __shfl_sync(0xffffffffu, key0, 0);  // tells the compiler that all lanes have the same keys
        key1 = __shfl_sync(0xffffffffu, key1, 0);
#endif
    }

    // The random bits of the 8 pairs that (query, key) belongs to. Word x[2 * (key & 1) + (key / 8 & 1)] belongs to the
    // key: its lower half to the query below 8 of the tile's 16, its upper half to the query 8 further on.
    FLASH_HOST_DEVICE Random4 bits(uint32_t query, uint32_t key) const {
        const uint32_t lane = query % 8 * 4 + key % 8 / 2;
        return philox4x32({query / 16 * 32 + lane, key / 16, head, offset}, key0, key1);
    }
};

}  // namespace flash
