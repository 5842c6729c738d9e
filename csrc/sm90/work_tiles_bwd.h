// The work tiles of a CTA of the backward, one key block of one head of dK and dV each. A persistent CTA has many,
// another one. The load warp takes them and hands them to the other warps through a pipeline.
#pragma once

#include "kernel_traits_bwd.h"
#include "steps_bwd.h"

namespace flash::sm90 {

// The work tiles as one warp sees them. Every warp of a CTA sees the same.
//
// Their order: the key blocks of a head, then the heads, then the batch, so that CTAs that run together share Q and dO
// in L2. Local: the key blocks of several heads are interleaved and, causal, most rows see the first ones, so that the
// last work tiles are short.
// CTA i of n takes number i. A persistent one goes on with every n-th number after it where work tiles take equal time
// (full), else with the next number from a counter in global memory. In order, every CTA takes its numbers from the
// counter: it waits only for smaller numbers of its own head, so none waits for a tile that nobody works on (deadlock).
// Nothing but the number passes between CTAs here, so the atomic is relaxed.
template <typename Traits, Kind kKind>
class WorkTilesBwd {
    const Flash_bwd_params &params;
    typename Traits::SharedStorage &shared;
    const RowBlocks blocks;
    PipelineState<Traits::kStagesOfTiles> state;
    int next_number = blockIdx.x;  // without a counter
    RowBlocks::Place place;
    Sequence seq;

public:
    __device__ WorkTilesBwd(const Flash_bwd_params &params, typename Traits::SharedStorage &shared)
        : params(params),
          shared(shared),
          blocks(key_blocks<may_be_varlen(kKind)>(params, params.h / params.heads_per_dkv, Traits::kBlockN)) {}

    // Goes on to the next work tile that has keys; false: there is none for this CTA. is_load_warp: this warp takes the
    // tiles.
    __device__ __forceinline__ bool next(bool is_load_warp) {
        const int count = static_cast<int>(blocks.count());
        for (;;) {
            const int number = is_load_warp ? push() : take();
            if (number >= count) {
                return false;
            }
            const bool is_in_order = params.dq_semaphore != nullptr;
            const int index =
                is_local(kKind) || is_in_order ? blocks.interleaved(number, params.interleaved_heads) : number;
            // In order and local: the last key blocks add first (ColumnBlockInfo::order_in), so they start first.
            place = blocks.place(index, is_in_order && is_local(kKind));
            seq = sequence<may_be_varlen(kKind)>(params, place.bidb);
            if (place.block * Traits::kBlockN < seq.seqlen_k) {
                return true;
            }
            if (!Traits::kIsPersistent) {
                return false;
            }
        }
    }

    __device__ __forceinline__ ColumnBlock<Traits, kKind> block() const {
        return {params, seq, place.bidb, place.bidh, place.block};
    }

private:
    __device__ __forceinline__ int push() {
        state.acquire(shared.tile_barriers);
        int number;
        if (Traits::kIsPersistent ? params.dq_tile_counter != nullptr : params.dq_semaphore != nullptr) {
            number = threadIdx.x % 32 == 0 ? atomicAdd(params.dq_tile_counter, 1) : 0;
            number = __shfl_sync(0xffffffffu, number, 0);
        } else if (!Traits::kIsPersistent) {
            number = blockIdx.x;
        } else {
            number = next_number;
            next_number += gridDim.x;
        }
        if (cute::elect_one_sync()) {
            shared.tiles[state.stage] = number;
            shared.tile_barriers.full[state.stage].arrive();
        }
        __syncwarp();
        state.advance();
        return uniform(number);
    }

    __device__ __forceinline__ int take() {
        state.wait(shared.tile_barriers);
        const int number = shared.tiles[state.stage];
        state.release(shared.tile_barriers);
        state.advance();
        return uniform(number);
    }
};

}  // namespace flash::sm90
