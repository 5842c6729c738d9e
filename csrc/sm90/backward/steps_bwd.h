// The steps of a CTA of the backward: each of its key blocks against every row block that sees it, of every query head
// that shares the key block's head. Also the counts by which its phases wait for each other.
#pragma once

#include <type_traits>

#include "common/attn_bias.h"
#include "common/block_info.h"
#include "common/key_ranges.h"
#include "dispatch/kind.h"

namespace flash::sm90 {

// The place of a CTA and its rows. Every warpgroup has the same.
template <typename Traits, Kind kKind>
using InfoOfColumnBlock = std::conditional_t<has_ranges(kKind), RangedColumnBlockInfo<Traits::kBlockM, Traits::kBlockN>,
                                             ColumnBlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)>>;

template <typename Traits, Kind kKind>
struct ColumnBlock : InfoOfColumnBlock<Traits, kKind> {
    using Info = InfoOfColumnBlock<Traits, kKind>;
    static constexpr int kBlockM = Traits::kBlockM;
    static constexpr bool kHasRanges = has_ranges(kKind);
    int bidb, bidh;  // bidh: the first query head
    int padded_row;  // first row of the sequence in head bidh, in the padded row statistics
    int heads;       // query heads

    __device__ ColumnBlock(const Flash_bwd_params &params, const Sequence &sequence, int bidb, int bidh_dkv,
                           int n_block)
        : Info(info_of(params, sequence, bidb, bidh_dkv, n_block)),
          bidb(bidb),
          bidh(bidh_dkv * params.heads_per_dkv),
          padded_row(static_cast<int>(bidb * params.padded_batch_stride + bidh * params.padded_head_stride +
                                      padded_begin<may_be_varlen(kKind)>(params, bidb, sequence.q_begin))),
          heads(params.heads_per_dkv) {
        if constexpr (has_bias(kKind)) {
            if (hides_all_keys(params)) {
                this->m_block_max = this->m_block_min;
            }
        }
    }

    // True if a bias that all queries and heads share hides the whole key block, which then adds nothing to dQ. In
    // order (dq_semaphore), other key blocks wait for it. Called by whole warps.
    __device__ __forceinline__ bool hides_all_keys(const Flash_bwd_params &params) const {
        const AttnBias &bias = params.attn_bias;
        if (bias.row_stride != 0 || bias.head_stride != 0 || params.dq_semaphore != nullptr) {
            return false;
        }
        bool is_hidden = true;
        CUTE_UNROLL
        for (int i = 0; i < Traits::kBlockN; i += 32) {
            const int key = first_key() + i + threadIdx.x % 32;
            is_hidden &= BiasOfHead<typename Traits::Element>(params, bidb, bidh).at(/*query=*/0, key) == -INFINITY;
        }
        return __all_sync(0xffffffffu, is_hidden) != 0;
    }

    __device__ __forceinline__ static Info info_of(const Flash_bwd_params &params, const Sequence &sequence,
                                                   [[maybe_unused]] int bidb, [[maybe_unused]] int bidh_dkv,
                                                   int n_block) {
        if constexpr (has_ranges(kKind)) {
            return Info(params, sequence, bidb, bidh_dkv * params.heads_per_dkv, params.heads_per_dkv, n_block);
        } else {
            return Info(params, sequence, n_block);
        }
    }

    // Moves what the steps need into uniform registers. It is the same in every lane, but was computed in ordinary
    // ones, whose operations have a shorter latency.
    __device__ __forceinline__ void make_uniform() {
        this->n_block = uniform(this->n_block);
        this->m_block_min = uniform(this->m_block_min);
        this->m_block_max = uniform(this->m_block_max);
        bidb = uniform(bidb);
        bidh = uniform(bidh);
        padded_row = uniform(padded_row);
    }

    __device__ __forceinline__ int first_key() const { return this->n_block * Traits::kBlockN; }
    __device__ __forceinline__ int num_steps() const { return heads * this->num_m_blocks(); }
};

// One step. Warpgroups walk the steps in the same order.
struct Step {
    int head = 0;  // counted from ColumnBlock::bidh
    int m_block;

    template <typename Block>
    __device__ explicit Step(const Block &block) : m_block(block.m_block_min) {}

    template <typename Block>
    __device__ __forceinline__ void advance(const Block &block) {
        if (++m_block == block.m_block_max) {
            m_block = block.m_block_min;
            ++head;
        }
    }

    template <typename Block>
    __device__ __forceinline__ Step next(const Block &block) const {
        Step step = *this;
        step.advance(block);
        return step;
    }

    // First row of the step in the padded row statistics.
    template <typename Block>
    __device__ __forceinline__ int padded_row(const Flash_bwd_params &params, const Block &block) const {
        return block.padded_row + head * static_cast<int>(params.padded_head_stride) + m_block * Block::kBlockM;
    }
};

// attn_bias: a bit of Flash_bwd_params::large_rows. A row of the step sees no key, or lies past the end.
constexpr int kRowsWithoutKey = 2;

// ---- how work tiles of one phase of the backward wait for those of the phase before: counts in global memory, one for
// each head of dK and dV and each phase. A work tile that is done counts with a release. One that waits takes an
// acquire.

struct WorkCounts {
    int *counts;  // 2 * heads + 1 zeros when the kernel begins
    int heads;    // of dK and dV; equal lengths: of all sequences

    __device__ __forceinline__ int *preprocessed(int head) const { return counts + head; }
    __device__ __forceinline__ int *computed(int head) const { return counts + heads + head; }
    __device__ __forceinline__ int *taken() const { return counts + 2 * heads; }  // work tiles, by CTAs

    // Called by one thread. Threads that wait for the count see its earlier writes, and those of other threads before a
    // barrier.
    __device__ __forceinline__ static void add(int *count, int value = 1) {
        asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
    }

    // Called by one thread. Other threads may read after a barrier.
    __device__ __forceinline__ static void wait(const int *count, int expected) {
        int value;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
        while (value < expected) {
            __nanosleep(64);
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
        }
    }
};

// Call it before the copy engine reads or adds to data that other threads wrote with plain stores.
__device__ __forceinline__ void fence_copies_from_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flash::sm90
