// Which probabilities of a step dropout drops: one bit for each, with the random numbers of common/philox.h. At head
// dims 64 and 128 a separate warpgroup draws them while the consumers multiply (DropoutWarpgroup). At other head dims
// the CTA has no registers left for it, and the consumers draw (draw, exchanged).
#pragma once

#include "common/block_info.h"
#include "common/dropout.h"
#include "dispatch/kind.h"
#include "kernel_traits_bwd.h"
#include "sm90/common/accumulator.h"
#include "sm90/common/pipeline.h"
#include "steps_bwd.h"

namespace flash::sm90 {

// Bits of a thread's scores, in the order of wgmma's accumulators: bits i and i + 16 of word w belong to pair 16 w + i,
// which is one key and the queries q and q + 1. A set bit drops.
template <typename Traits>
struct DropoutBits {
    uint32_t words[Traits::kWordsOfDropoutBits];
};

// Four bits of one call of Philox, of an even or an odd key: bit 2 * far_query + far_key, where a far key or query is 8
// further on.
__device__ __forceinline__ uint32_t dropped(const Random4 &bits, int odd_key, unsigned threshold) {
    uint32_t result = 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
        result |= is_below(bits.x[2 * odd_key + i % 2], /*upper=*/i / 2 == 1, threshold) ? 1u << i : 0u;
    }
    return result;
}

// The warpgroup that draws. The bits of a step belong to its stage of Q: consumers release both at once.
template <typename Traits, Kind kKind>
class DropoutWarpgroup {
    using Block = ColumnBlock<Traits, kKind>;
    const Flash_bwd_params &params;
    typename Traits::SharedStorage &shared;
    const Block &block;
    const unsigned thread;  // of the warpgroup

public:
    __device__ DropoutWarpgroup(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                const Block &block)
        : params(params), shared(shared), block(block), thread(threadIdx.x % 128) {}

    __device__ __forceinline__ void run() const {
        const uint64_t seed = uniform64(params.rng_state[0]), offset = uniform64(params.rng_state[1]);
        PipelineState<Traits::kStagesQ> state;
        Step step(block);
        for (int steps_left = block.num_steps(); steps_left > 0; --steps_left) {
            const DropoutStream stream(seed, offset, block.bidb, params.h, block.bidh + step.head);
            state.acquire(shared.q_barriers);
            CUTE_NO_UNROLL
            for (unsigned word = 0; word < Traits::kWordsOfDropoutBits; ++word) {
                draw(stream, step, shared.dropout_bits[state.stage], word);
            }
            __syncwarp();
            if (cute::elect_one_sync()) {
                shared.dropout_bits_full[state.stage].arrive();
            }
            state.advance();
            step.advance(block);
        }
    }

private:
    // Uniform registers leave the others to Philox.
    __device__ __forceinline__ static uint64_t uniform64(int64_t x) {
        return uint64_t(uint32_t(uniform(int(x >> 32)))) << 32 | uint32_t(uniform(int(x)));
    }

    // A thread draws for two others, which have the keys k and k + 1 and the same queries: the same calls of Philox
    // have the bits of both.
    __device__ __forceinline__ void draw(const DropoutStream &stream, const Step &step,
                                         typename Traits::DropoutBitsOfCta &dropout_bits, unsigned word) const {
        const unsigned column = thread % 4, row = thread / 4 % 4, warp = thread / 16;
        const unsigned key = block.first_key() + 16 * warp + 2 * row;
        const unsigned query = step.m_block * Traits::kBlockM + 64 * word + 2 * column;
        const uint32_t minus_threshold = 0u - (params.dropout_threshold << 16);
        uint32_t even = 0, odd = 0;  // of the thread with the even key, and with the odd one: a set bit keeps
#pragma unroll 2
        for (int i = 7; i >= 0; --i) {
            // A uniform register each time: the compiler would keep the keys of all rounds in 14 other registers.
            DropoutStream of_call = stream;
            of_call.key0 = uniform_volatile(stream.key0);
            of_call.key1 = uniform_volatile(stream.key1);
            const Random4 bits = of_call.bits(query + 16 * (i % 4) + i / 4, key);
            CUTE_UNROLL
            for (int place = 3; place >= 0; --place) {
                const int shift = place < 2 ? 16 : 0;  // the lower half belongs to the near query
                append_kept(even, bits.x[place % 2] << shift, minus_threshold);
                append_kept(odd, bits.x[2 + place % 2] << shift, minus_threshold);
            }
        }
        const bool drops_none = params.dropout_threshold == 0;
        const unsigned consumer = 32 * warp + 8 * row + column;  // the thread with the even key
        dropout_bits[word][consumer] = drops_none ? 0u : ~even;
        dropout_bits[word][consumer + 4] = drops_none ? 0u : ~odd;
    }

    // Like uniform() of common/block_info.h, but volatile, so that the compiler does not move it out of a loop. x is
    // the same in all lanes.
    __device__ __forceinline__ static uint32_t uniform_volatile(uint32_t x) {
        uint32_t result;
        asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(x));
        return result;
    }

    // Appends a bit: whether x is at least the threshold. The carry of x - threshold says it.
    __device__ __forceinline__ static void append_kept(uint32_t &kept, uint32_t x, uint32_t minus_threshold) {
        asm("{\n\t.reg .u32 unused;\n\tadd.cc.u32 unused, %1, %2;\n\taddc.u32 %0, %0, %0;\n\t}"
            : "+r"(kept)
            : "r"(x), "r"(minus_threshold));
    }
};

// The bits that DropoutWarpgroup has drawn for this thread.
template <typename Traits>
__device__ __forceinline__ DropoutBits<Traits> load_dropout_bits(const typename Traits::DropoutBitsOfCta &dropout_bits,
                                                                 int warpgroup) {
    DropoutBits<Traits> result;
    CUTE_UNROLL
    for (int w = 0; w < Traits::kWordsOfDropoutBits; ++w) {
        result.words[w] = dropout_bits[w][warpgroup * 128 + threadIdx.x % 128];
    }
    return result;
}

// The consumers draw. This takes hundreds of cycles, which overlap products. A thread holds one key of a pair (k, k +
// 1) and both queries (q, q + 1). The bits of these four come from two calls of Philox. The lane with the other key
// needs the same two calls, so each lane makes one: the lower half of a word is of even keys, the upper half of odd
// ones.
template <typename Traits>
__device__ __forceinline__ DropoutBits<Traits> draw(const DropoutStream &stream, int first_query, int first_key,
                                                    unsigned threshold) {
    DropoutBits<Traits> dropout_bits;
    const int key = first_key + first_row_of_thread(), is_odd = key % 2;
    const int query = first_query + threadIdx.x % 4 * 2 + is_odd;
    CUTE_UNROLL
    for (int w = 0; w < Traits::kWordsOfDropoutBits; ++w) {
        dropout_bits.words[w] = 0;
        CUTE_NO_UNROLL  // registers are few here
            for (int group = 0; group < 4; ++group) {
            const Random4 bits = stream.bits(query + 64 * w + 16 * group, key - is_odd);
            dropout_bits.words[w] |= (dropped(bits, 0, threshold) | dropped(bits, 1, threshold) << 16) << 4 * group;
        }
    }
    return dropout_bits;
}

// Lanes exchange what they have drawn for each other. A shuffle waits for products that were issued before it, so none
// may be in flight.
template <typename Traits>
__device__ __forceinline__ DropoutBits<Traits> exchanged(const DropoutBits<Traits> &dropout_bits) {
    DropoutBits<Traits> result;
    CUTE_UNROLL
    for (int w = 0; w < Traits::kWordsOfDropoutBits; ++w) {
        const uint32_t mine = dropout_bits.words[w], theirs = __shfl_xor_sync(0xffffffffu, mine, 4);
        result.words[w] = first_row_of_thread() % 2 == 0 ? __byte_perm(mine, theirs, 0x5410)   // the lower halves
                                                         : __byte_perm(theirs, mine, 0x7632);  // the upper halves
    }
    return result;
}

}  // namespace flash::sm90
