// The forward kernel: flash_fwd_kernel -> compute_attn. One warpgroup is the producer: its warp 0 loads Q, K and V by
// TMA (Loader), its warp 1 schedules the work tiles. The others are consumers (mainloop_fwd.h).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "dispatch/kind.h"
#include "epilogue_fwd.h"
#include "kernel_traits.h"
#include "mainloop_fwd.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// ---- the producer warpgroup

// The load warp. It loads in the order in which the consumers read: K of a key block before V of the block before it,
// across work tiles too.
template <typename Traits, Kind kKind>
class Loader {
public:
    __device__ Loader(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                      typename Traits::SharedStorage &shared)
        : params(params), copies(copies), shared(shared), tiles{shared.tiles} {}

    __device__ __forceinline__ void load() {
        Source tile = take(), next;
        if (tile.is_end) {
            return;
        }
        load_K(tile, tile.n_block_max - 1);
        load_Q(tile);
        for (;; tile = next) {
            // With two stages, Q of the next work tile is loaded two key blocks ahead; with one, when it is released.
            constexpr bool kLoadsAhead = Traits::kQStages > 1;
            const auto take_next = [&] {
                next = take();
                if (kLoadsAhead && !next.is_end) {
                    load_Q(next);
                }
            };
            const SecondRange &second = tile.second;
            const int last = tile.n_block_max - 1, when = min(second.after(second.after(tile.n_block_min)), last);
            if (last == tile.n_block_min) {
                take_next();
            }
            CUTE_NO_UNROLL
            for (int n_block = last; n_block > tile.n_block_min; n_block = second.before(n_block)) {
                load_K(tile, second.before(n_block));
                load_V(tile, n_block);
                if (n_block == when) {
                    take_next();
                }
            }
            if (!next.is_end) {
                load_K(next, next.n_block_max - 1);
            }
            load_V(tile, tile.n_block_min);
            if (next.is_end) {
                return;
            }
            if (!kLoadsAhead) {
                load_Q(next);
            }
        }
    }

private:
    static constexpr bool kIsGeneral = is_general(kKind);
    const Flash_fwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;
    WorkTileRing<Traits::kConsumers> tiles;
    typename Traits::PipelineStates states;

    // The coordinates of a work tile's blocks, computed once: between the release of a stage and its load, consumers
    // wait.
    struct Source {
        int bidb, bidh, k_bidb, bidh_k, q_begin, k_begin, block;
        int n_block_min, n_block_max;
        bool is_end;
        SecondRange second;
    };

    __device__ __forceinline__ Source take() {
        const int stage = tiles.take();
        const WorkTile tile = tiles[stage];
        const SecondRange second = tiles.second_range(stage, /*consumer=*/0).template to_registers<kKind>();
        tiles.release(stage);
        const bool is_varlen = kIsGeneral && params.cu_seqlens_q != nullptr;
        const int bidb = is_varlen ? 0 : uniform(tile.place.bidb);
        return {bidb,
                uniform(tile.place.bidh),
                kIsGeneral ? uniform(tile.sequence.k_bidb) : bidb,
                uniform(tile.place.bidh / params.h_h_k_ratio),
                kIsGeneral ? uniform(tile.sequence.q_begin) : 0,
                kIsGeneral ? uniform(tile.sequence.k_begin) : 0,
                uniform(tile.place.block),
                uniform(tile.n_block_min),
                uniform(tile.n_block_max),
                uniform(tile.is_end) != 0,
                second};
    }

    // Loads a block of rows of one head, from first_row on, into the next stage of the pipeline. TMA knows where the
    // tensor ends.
    template <typename TMA, typename Tile, typename Layout, typename Element, typename State, typename Barriers>
    __device__ __forceinline__ void load_block(const TMA &tma, Tile tile, Layout, Element *smem, State &state,
                                               Barriers &barriers, int first_row, int bidh, int bidb) {
        Tensor sX = make_tensor(make_smem_ptr(smem), Layout{});  // (block, HD, stage)
        constexpr int kBytes = size(Tile{}) * sizeof(Element);
        state.acquire(barriers);
        if (cute::elect_one_sync()) {
            load_rows(tma, tile, sX, state.stage, state.expect(barriers, kBytes), first_row, bidh, bidb);
        }
        state.advance();
    }

    __device__ __forceinline__ void load_Q(const Source &tile) {
        CUTE_NO_UNROLL
        for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
            load_block(copies.q, typename Traits::TileQ{}, typename Traits::SmemLayoutQ{}, shared.q, states.q,
                       shared.q_barriers, tile.q_begin + (tile.block * Traits::kConsumers + warpgroup) * Traits::kRows,
                       tile.bidh, tile.bidb);
        }
    }

    __device__ __forceinline__ void load_K(const Source &tile, int n_block) {
        load_block(copies.k, typename Traits::TileK{}, typename Traits::SmemLayoutK{}, shared.k, states.k,
                   shared.k_barriers, tile.k_begin + n_block * Traits::kBlockN, tile.bidh_k, tile.k_bidb);
    }
    __device__ __forceinline__ void load_V(const Source &tile, int n_block) {
        load_block(copies.v, typename Traits::TileV{}, typename Traits::SmemLayoutV{}, shared.v, states.v,
                   shared.v_barriers, tile.k_begin + n_block * Traits::kBlockN, tile.bidh_k, tile.k_bidb);
    }
};

// A bias that all queries share: leaves out the key blocks before the first and after the last key that it shows.
// Called by a whole warp.
template <typename Traits>
__device__ __forceinline__ void leave_out_hidden_blocks(const Flash_fwd_params &params, WorkTile &tile) {
    constexpr int kBlockN = Traits::kBlockN, kLoads = 16, kKeys = 32 * kLoads;  // of a lane, of the warp
    const BiasOfHead<typename Traits::Element> bias(params, tile.place.bidb, tile.place.bidh);
    const int begin = tile.n_block_min * kBlockN, end = min(tile.n_block_max * kBlockN, tile.sequence.seqlen_k);
    const int lane = threadIdx.x % 32;
    int first = end, last = begin - 1;  // visible
    CUTE_NO_UNROLL
    for (int from = end - 1 - lane; last < begin && __any_sync(0xffffffffu, from >= begin); from -= kKeys) {
        CUTE_UNROLL
        for (int i = 0; i < kLoads; ++i) {
            const int key = from - 32 * i;
            last = max(last, key >= begin && bias.at(/*query=*/0, key) != -INFINITY ? key : begin - 1);
        }
        last = __reduce_max_sync(0xffffffffu, last);
    }
    CUTE_NO_UNROLL
    for (int from = begin + lane; first == end && __any_sync(0xffffffffu, from <= last); from += kKeys) {
        CUTE_UNROLL
        for (int i = 0; i < kLoads; ++i) {
            const int key = from + 32 * i;
            first = min(first, key <= last && bias.at(/*query=*/0, key) != -INFINITY ? key : end);
        }
        first = __reduce_min_sync(0xffffffffu, first);
    }
    tile.n_block_max = last < begin ? tile.n_block_min : last / kBlockN + 1;
    tile.n_block_min = last < begin ? tile.n_block_min : first / kBlockN;
}

// The scheduler warp. It hands out the work tiles, and passes those whose rows see no key to store_nothing(tile).
template <typename Traits, Kind kKind, typename Scheduler, typename StoreNothing>
__device__ __forceinline__ void schedule_tiles(const Flash_fwd_params &params, typename Traits::SharedStorage &shared,
                                               Scheduler scheduler, const StoreNothing &store_nothing) {
    WorkTileRing<Traits::kConsumers> tiles{shared.tiles};
    for (;;) {
        tiles.acquire();  // before a tile is taken: with varlen, another CTA may have an empty stage earlier
        WorkTile tile;
        for (;;) {
            tile = scheduler.next();
            if (has_bias(kKind) && params.attn_bias.row_stride == 0 && !tile.is_end && tile.has_keys()) {
                leave_out_hidden_blocks<Traits>(params, tile);
            }
            if (tile.is_end || tile.has_keys()) {
                break;
            }
            store_nothing(tile);
        }
        const ScoreMod score_mod(params, tile.place.bidb, tile.place.bidh,
                                 tile.sequence.seqlen_k - tile.sequence.seqlen_q);
        RowMod<float>::prefetch(params, tile.place.bidb, tile.place.bidh);
        if (has_ranges(kKind) && !tile.is_end) {
            RangesOfHead(params, tile.place.bidb, tile.place.bidh)
                .prefetch(tile.place.block * Traits::kBlockM, Traits::kBlockM, tile.sequence.seqlen_q);
        }
        const auto key_blocks_of = [&](int consumer, [[maybe_unused]] SecondRange &second) {
            const int first_row = tile.place.block * Traits::kBlockM + consumer * Traits::kRows;
            KeyBlocks blocks;
            if constexpr (has_ranges(kKind)) {
                blocks = ranged_key_blocks<Traits::kBlockM, Traits::kRows, Traits::kBlockN>(params, tile, first_row,
                                                                                            score_mod, second);
            } else {
                blocks = key_blocks<kKind, Traits::kRows, Traits::kBlockN>(
                    params, tile.sequence, first_row, tile.n_block_min, tile.n_block_max, score_mod);
            }
            blocks.flags |= tile.is_end ? KeyBlocks::is_end : 0;
            return blocks;
        };
        const auto start_logit = [&](int &bits) {
            if (Traits::kTracksLogits) {
                SharedLogit(bits).load(MaxLogit::of_head(params, tile.place.bidb, tile.place.bidh));
            }
        };
        tiles.template push<kKind>(params, tile, score_mod, key_blocks_of, start_logit);
        if (tile.is_end) {
            return;
        }
    }
}

// ---- the kernel

template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_attn(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                             typename Traits::SharedStorage &shared, const WorkTileOrder &order) {
    if (threadIdx.x / 128 == 0) {  // producer
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            Loader<Traits, kKind>(params, copies, shared).load();
        } else if (threadIdx.x / 32 == 1) {
            schedule_tiles<Traits, kKind>(
                params, shared, TileScheduler<kKind, Traits::kBlockM, Traits::kBlockN>(params, order),
                [&](const WorkTile &tile) {
                    store_nothing(params, tile, Output<Traits>(params, tile, /*warpgroup=*/0));
                });
        }
    } else {  // consumer
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kConsumerRegisters>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
        Consumer<Traits, kKind>(params, shared, warpgroup)
            .mma([&](const WorkTile &tile, auto &acc_o, const auto &softmax) {
                store<Traits, kKind>(params, tile, Output<Traits>(params, tile, warpgroup), acc_o, softmax);
            });
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params,
                     const __grid_constant__ typename Traits::Copies copies,
                     const __grid_constant__ WorkTileOrder order) {
    // A consumer skips at most one key block at either end of a work tile. With more it would wait for key blocks that
    // find no empty stage.
    static_assert(Traits::kRows * (Traits::kConsumers - 1) <= Traits::kBlockN);
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4;  // per warpgroup
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        shared.q_barriers.init(kWarps);
        shared.k_barriers.init(kWarps * Traits::kConsumers);
        shared.v_barriers.init(kWarps * Traits::kConsumers);
        shared.tiles.barriers.init(kWarps * Traits::kConsumers + 1, /*writers=*/Traits::kConsumers);  // + 1: load warp
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();  // every thread sees the barriers
    compute_attn<Traits, kKind>(params, copies, shared, order);
}

}  // namespace flash::sm90
