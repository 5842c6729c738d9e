// The producer warpgroup of the backward. Its warp 0 loads (load_bwd.h). It adds dQ to the float32 accumulator in
// global memory, in one of two ways, one for each DqBy.
#pragma once

#include "consumer_bwd.h"
#include "dq_tile.h"
#include "load_bwd.h"

namespace flash::sm90 {

// DqBy::consumers. Warp 1 + c adds what consumer c puts into shared memory, by the copy engine.
template <typename Traits, Kind kKind>
class CopyProducer {
public:
    __device__ CopyProducer(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                            typename Traits::SharedStorage &shared, const ColumnBlock<Traits, kKind> &block)
        : params(params), copies(copies), shared(shared), block(block) {}

    __device__ __forceinline__ void run() const {
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            LoaderBwd<Traits, kKind> loader(params, copies, shared, block);
            loader.load_first();
            loader.load_rest();
        } else if (warp <= Traits::kConsumers) {
            add(warp - 1);
        }
    }

private:
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;
    const ColumnBlock<Traits, kKind> &block;

    __device__ __forceinline__ void add(int tile) const {
        Step step(block);
        PipelineState<1> state;
        const uint32_t source = cute::cast_smem_ptr_to_uint(shared.dq[tile]);
        for (int steps_left = block.num_steps(); steps_left > 0; --steps_left) {
            state.wait(shared.dq_barriers[tile]);
            if (params.dq_accum != nullptr) {
                DqOrder<Traits, /*kCopyEngine=*/true> order(params, block, step, tile);
                if (threadIdx.x % 32 == 0) {
                    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                                     DqTile<Traits>::target(params, block, step, tile)),
                                 "r"(source), "n"(Traits::kTileOfDq * sizeof(float))
                                 : "memory");
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // shared memory has been read
                }
                order.pass();
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
public:
    __device__ DqProducer(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                          typename Traits::SharedStorage &shared, const ColumnBlock<Traits, kKind> &block)
        : params(params),
          shared(shared),
          block(block),
          warp(uniform(threadIdx.x / 32)),
          loader(params, copies, shared, block) {}

    __device__ __forceinline__ void run() {
        if (warp == 0) {
            loader.load_first();
        }
        int steps_left = block.num_steps();
        if (steps_left == 0) {
            return;
        }
        const bool wants_dq = params.dq_accum != nullptr;
        Step step(block);
        PipelineState<Traits::kStagesdS> state;
        shared.k_barrier.wait(0);
        clear_foreign_keys<Traits, kKind>(block, shared.k, Traits::kConsumers);
        for (; steps_left > 0; --steps_left) {
            if (warp == 0) {
                loader.load_next();
            }
            state.wait(shared.ds_barriers);
            if (wants_dq) {
                add(step, state);
            } else {
                state.release(shared.ds_barriers);
            }
            state.advance();
            step.advance(block);
        }
    }

private:
    using Tile = DqTile<Traits>;
    const Flash_bwd_params &params;
    typename Traits::SharedStorage &shared;
    const ColumnBlock<Traits, kKind> &block;
    const int warp;
    LoaderBwd<Traits, kKind> loader;

    __device__ __forceinline__ void add(const Step &step, const PipelineState<Traits::kStagesdS> &state) const {
        DqOrder<Traits, /*kCopyEngine=*/false> order(params, block, step, warp);
        CUTE_UNROLL
        for (int tile = 0; tile < Traits::kTilesOfDq; ++tile) {
            auto acc = Tile::accumulator();
            Tile::issue(shared, state.stage, tile, acc);
            wait_for<0>(acc);
            if (tile == Traits::kTilesOfDq - 1) {
                state.release(shared.ds_barriers);
            }
            auto *target = reinterpret_cast<float4 *>(Tile::target(params, block, step, tile));
            CUTE_UNROLL
            for (int i = 0; i < Tile::kVectors; ++i) {
                atomicAdd(target + Tile::place(i), Tile::vector(acc, i));
            }
        }
        order.pass();
    }
};

}  // namespace flash::sm90
