// The producer warpgroup of the backward. Its warp 0 loads (load_bwd.h). It adds dQ to the float32 accumulator in
// global memory, in one of two ways, one for each DqBy.
#pragma once

#include "consumer_bwd.h"
#include "dq_tile.h"
#include "load_bwd.h"
#include "work_tiles_bwd.h"

namespace flash::sm90 {

// DqBy::consumers. Warp 1 + c adds what consumer c puts into shared memory, by the copy engine.
template <typename Traits, Kind kKind>
class CopyProducer {
    using Block = ColumnBlock<Traits, kKind>;
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;

public:
    static constexpr int kWarps = 1 + Traits::kConsumers;  // that work

    __device__ CopyProducer(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                            typename Traits::SharedStorage &shared)
        : params(params), copies(copies), shared(shared) {}

    __device__ __forceinline__ void run() const {
        const int warp = uniform(threadIdx.x / 32);
        WorkTilesBwd<Traits, kKind> tiles(params, shared);
        if (warp == 0) {
            LoaderStates<Traits> states;
            do {
                if (!tiles.next(/*is_load_warp=*/true)) {
                    break;
                }
                const Block block = tiles.block();
                LoaderBwd<Traits, kKind> loader(params, copies, shared, block, states);
                loader.load_first();
                loader.load_rest();
            } while (Traits::kIsPersistent);
        } else if (warp < kWarps) {
            PipelineState<1> state;
            do {
                if (!tiles.next(/*is_load_warp=*/false)) {
                    break;
                }
                add(tiles.block(), warp - 1, state);
            } while (Traits::kIsPersistent);
        }
    }

private:
    __device__ __forceinline__ void add(const Block &block, int tile, PipelineState<1> &state) const {
        const DqOrder<Traits, /*kCopyEngine=*/true, Block> order(params, block, tile);
        Step step(block);
        const uint32_t source = cute::cast_smem_ptr_to_uint(shared.dq[tile]);
        for (int steps_left = block.num_steps(); steps_left > 0; --steps_left) {
            state.wait(shared.dq_barriers[tile]);
            if (params.dq_accum != nullptr) {
                order.wait(step);
                if (threadIdx.x % 32 == 0) {
                    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                                     DqTile<Traits>::target(params, block, step, tile)),
                                 "r"(source), "n"(Traits::kTileOfDq * sizeof(float))
                                 : "memory");
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // shared memory has been read
                }
                order.pass(step);
                __syncwarp();
            }
            if (threadIdx.x % 32 == 0) {
                shared.dq_barriers[tile].empty[0].arrive();
            }
            state.advance();
            step.advance(block);
        }
    }
};

// DqBy::producer. All four warps compute dQ, and add it from registers.
template <typename Traits, Kind kKind>
class DqProducer {
    using Block = ColumnBlock<Traits, kKind>;
    using Tile = DqTile<Traits>;
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;
    const int warp;
    LoaderStates<Traits> states;
    PipelineState<1> k_state;
    PipelineState<Traits::kStagesdS> state;

public:
    static constexpr int kWarps = 4;

    __device__ DqProducer(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                          typename Traits::SharedStorage &shared)
        : params(params), copies(copies), shared(shared), warp(uniform(threadIdx.x / 32)) {}

    __device__ __forceinline__ void run() {
        WorkTilesBwd<Traits, kKind> tiles(params, shared);
        do {
            if (!tiles.next(/*is_load_warp=*/warp == 0)) {
                break;
            }
            const Block block = tiles.block();
            LoaderBwd<Traits, kKind> loader(params, copies, shared, block, states);
            if (warp == 0) {
                loader.load_first();
            }
            k_state.wait(shared.k_barriers);
            clear_foreign_keys<Traits, kKind>(block, shared.k, Traits::kConsumers);
            Step step(block);
            for (int steps_left = block.num_steps(); steps_left > 0; --steps_left) {
                if (warp == 0) {
                    loader.load_next();
                }
                state.wait(shared.ds_barriers);
                if (params.dq_accum != nullptr) {
                    add(block, step);
                } else {
                    state.release(shared.ds_barriers);
                }
                state.advance();
                step.advance(block);
            }
            k_state.release(shared.k_barriers);
            k_state.advance();
        } while (Traits::kIsPersistent);
    }

private:
    __device__ __forceinline__ void add(const Block &block, const Step &step) const {
        const DqOrder<Traits, /*kCopyEngine=*/false, Block> order(params, block, warp);
        order.wait(step);
        // Not unrolled: its addresses would take more registers than the warpgroup has.
        CUTE_NO_UNROLL
        for (int tile = 0; tile < Traits::kTilesOfDq; ++tile) {
            auto acc = Tile::accumulator();
            Tile::issue(shared, state.stage, tile, acc);
            wait_for<0>(acc);
            if (tile == Traits::kTilesOfDq - 1) {
                state.release(shared.ds_barriers);
            }
            Tile::add(Tile::target(params, block, step, tile), acc);
        }
        order.pass(step);
    }
};

}  // namespace flash::sm90
