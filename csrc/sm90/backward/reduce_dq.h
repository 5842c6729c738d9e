// The producer warpgroup of the backward. Its warp 0 loads (load_bwd.h). It adds dQ to the float32 accumulator in
// global memory, in one of two ways, one for each DqBy.
#pragma once

#include "consumer_bwd.h"
#include "dq_tile.h"
#include "load_bwd.h"
#include "work_counts.h"

namespace flash::sm90 {

// DqBy::consumers. Warp 1 + c adds what consumer c puts into shared memory, by the copy engine.
template <typename Traits, Kind kKind>
class CopyProducer {
    using Block = ColumnBlock<Traits, kKind>;
    const Flash_bwd_params &params;
    typename Traits::SharedStorage &shared;
    const Block &block;

public:
    static constexpr int kWarpsThatAdd = Traits::kConsumers;

    __device__ CopyProducer(const Flash_bwd_params &params, typename Traits::SharedStorage &shared, const Block &block)
        : params(params), shared(shared), block(block) {}

    // Calls done() in one thread of each warp that adds, when its sums are written.
    template <typename Loader, typename Wait, typename Done>
    __device__ __forceinline__ void run(Loader &loader, const Wait &wait_for_statistics, const Done &done) const {
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            loader.load_first(wait_for_statistics);
            loader.load_rest();
        } else if (warp <= kWarpsThatAdd) {
            add(warp - 1);
            if (threadIdx.x % 32 == 0) {
                // Completion is a fence from the async proxy to the generic proxy.
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                done();
            }
        }
    }

private:
    __device__ __forceinline__ void add(int tile) const {
        const DqOrder<Traits, /*kCopyEngine=*/true, Block> order(params, block, tile);
        Step step(block);
        PipelineState<1> state;
        const uint32_t source = cute::cast_smem_ptr_to_uint(shared.dq[tile]);
        for (int steps_left = block.num_steps(); steps_left > 0; --steps_left) {
            state.wait(shared.dq_barriers[tile]);
            if (params.dq_accum != nullptr) {
                order.wait(step);
                if (threadIdx.x % 32 == 0) {
                    fence_copies_from_global();  // preprocess has written zeros there
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
    typename Traits::SharedStorage &shared;
    const Block &block;
    const int warp;
    PipelineState<Traits::kStagesdS> state;

public:
    static constexpr int kWarpsThatAdd = 4;

    __device__ DqProducer(const Flash_bwd_params &params, typename Traits::SharedStorage &shared, const Block &block)
        : params(params), shared(shared), block(block), warp(uniform(threadIdx.x / 32)) {}

    // As CopyProducer's.
    template <typename Loader, typename Wait, typename Done>
    __device__ __forceinline__ void run(Loader &loader, const Wait &wait_for_statistics, const Done &done) {
        if (warp == 0) {
            loader.load_first(wait_for_statistics);
        }
        int steps_left = block.num_steps();
        if (steps_left > 0) {
            PipelineState<1>().wait(shared.k_barriers);
        }
        // In order: to wait for the CTA before takes as long as a load from the L2 cache, so it comes before dS does.
        // To pass on takes until all sums are written, so it comes a step later.
        const DqOrder<Traits, /*kCopyEngine=*/false, Block> order(params, block, warp);
        Step step(block), added = step;
        for (bool has_added = false; steps_left > 0; --steps_left, has_added = true) {
            if (warp == 0) {
                loader.load_next();
            }
            if (params.dq_accum != nullptr) {
                order.wait(step);
            }
            state.wait(shared.ds_barriers);
            if (params.dq_accum != nullptr) {
                if (has_added) {
                    order.pass(added);
                }
                add(step);
            } else {
                state.release(shared.ds_barriers);
            }
            state.advance();
            added = step;
            step.advance(block);
        }
        if (params.dq_accum != nullptr && block.num_steps() > 0) {
            order.pass(added);
        }
        __syncwarp();  // one lane's release covers what the others added
        if (threadIdx.x % 32 == 0) {
            done();
        }
    }

private:
    __device__ __forceinline__ void add(const Step &step) const {
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
    }
};

}  // namespace flash::sm90
