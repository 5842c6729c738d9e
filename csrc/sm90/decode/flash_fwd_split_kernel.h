// The forward kernel with split keys, for a cache: flash_fwd_split_kernel -> compute_attn_split. Consumers and
// scheduler warp are those of the forward; the work tiles are runs of keys. Three warps of the producer load K, V and
// Q.
#pragma once

#include "epilogue_split.h"
#include "kvcache/splitkv_schedule.h"
#include "load_split.h"
#include "sm90/forward/flash_fwd_kernel.h"
#include "sm90/forward/key_blocks.h"
#include "sm90/forward/tile_scheduler.h"

namespace flash::sm90 {

// ---- the work tiles of a CTA whose keys are split: the runs of its piece (kvcache/splitkv_schedule.h).

// CTA i has row tile i % row_tiles and piece i / row_tiles, so that neighbours share the keys in L2.
template <int kBlockM, int kBlockN>
class RunScheduler {
public:
    // Called by a whole warp.
    __device__ RunScheduler(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan)
        : params(params),
          row_tile(blockIdx.x % plan.row_tiles),
          is_writer(threadIdx.x % 32 == 0 && row_tile == 0),
          runs(params, plan, blockIdx.x / plan.row_tiles, 0) {
        if (runs.left <= 0 && is_writer) {
            runs.record_nothing();
        }
    }

    // The next work tile. Called by a whole warp.
    __device__ WorkTile next() {
        WorkTile tile{};
        if (has_run && is_writer) {
            runs.record(run);  // now, because the others wait for no tile
        }
        if (runs.left <= 0) {
            tile.is_end = true;
            return tile;
        }
        tile.sequence = cache_sequence(params, runs.at.bidb);
        run = runs.next(tile.sequence);
        has_run = true;
        tile.place = {run.bidb, run.bidh_k * params.h_h_k_ratio, row_tile};
        const BlockInfo<kBlockM, kBlockN, true> info(params, tile.sequence,
                                                     query_of<Kind::split>(params, row_tile * kBlockM),
                                                     query_of<Kind::split>(params, (row_tile + 1) * kBlockM - 1));
        tile.n_block_min = max(info.n_block_min, run.first_key / kBlockN);
        tile.n_block_max = min(info.n_block_max, (run.end_key + kBlockN - 1) / kBlockN);
        tile.slot = static_cast<int>(run.slot);
        return tile;
    }

private:
    const Flash_fwd_params &params;
    const int row_tile;
    const bool is_writer;
    kvcache::Runs runs;
    kvcache::Runs::Run run{};  // the last
    bool has_run = false;
};

// ---- the kernel

template <typename Traits>
__device__ __forceinline__ void compute_attn_split(const Flash_fwd_params &params, const KeyBoxes &boxes,
                                                   typename Traits::SharedStorage &shared,
                                                   const kvcache::SplitkvPlan &plan) {
    if (threadIdx.x / 128 == 0) {  // producer
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            BoxLoader<Traits>(params, shared, boxes.k, boxes.rows, shared.k, shared.k_barriers).load();
        } else if (threadIdx.x / 32 == 1) {
            schedule_tiles<Traits, Kind::split>(
                params, shared, RunScheduler<Traits::kBlockM, Traits::kBlockN>(params, plan),
                [&](const WorkTile &tile) { SplitOutput<Traits>(params, plan, tile, 0).store_nothing(); });
        } else if (threadIdx.x / 32 == 2) {
            BoxLoader<Traits>(params, shared, boxes.v, boxes.rows, shared.v, shared.v_barriers).load();
        } else {
            QueryLoader<Traits>(params, plan.by_ratio, shared).load();
        }
    } else {  // consumer
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kConsumerRegisters>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
        Consumer<Traits, Kind::split>(params, shared, warpgroup)
            .mma([&](const WorkTile &tile, auto &acc_o, const auto &softmax) {
                SplitOutput<Traits>(params, plan, tile, warpgroup).store(acc_o, softmax);
            });
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_split_kernel(const __grid_constant__ Flash_fwd_params params, const __grid_constant__ KeyBoxes boxes,
                           const __grid_constant__ kvcache::SplitkvPlan plan) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4;  // per warpgroup
        prefetch_tma_descriptor(&boxes.k);
        prefetch_tma_descriptor(&boxes.v);
        shared.q_barriers.init(kWarps, /*writers=*/QueryLoader<Traits>::kArrivals);
        shared.k_barriers.init(kWarps * Traits::kConsumers);
        shared.v_barriers.init(kWarps * Traits::kConsumers);
        shared.tiles.barriers.init(kWarps * Traits::kConsumers + 3, /*writers=*/Traits::kConsumers);  // + 3: load warps
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();                      // every thread sees the barriers
    kvcache::wait_for_previous_kernel();  // it may write lengths, queries, keys and page numbers
    kvcache::launch_dependents();
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what that kernel stored
    compute_attn_split<Traits>(params, boxes, shared, plan);
}

}  // namespace flash::sm90
