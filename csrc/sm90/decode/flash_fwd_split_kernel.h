// The forward kernel with split keys, for a cache: flash_fwd_split_kernel -> compute_attn_split. Consumers and
// scheduler warp are those of the forward; the work tiles are runs of keys. Three warps of the producer load K, V and
// Q.
#pragma once

#include <cutlass/fast_math.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/cuda_host_adapter.hpp>

#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "common/block_info.h"
#include "epilogue_split.h"
#include "flash.h"
#include "kvcache/instructions.h"
#include "kvcache/splitkv_schedule.h"
#include "sm90/common/tma_limits.h"
#include "sm90/forward/flash_fwd_kernel.h"
#include "sm90/forward/kernel_traits.h"
#include "sm90/forward/tile_scheduler.h"

namespace flash::sm90 {

// ---- tiles of 192 rows, for calls that need much fewer of them than of 128 rows. Head dims above 128 have none: O
// of three consumers does not fit into registers. The other tiles: TileSizesSplit in kernel_traits.h.

template <int kHeadDim>
struct TileSizesSplitTall;
template <>
struct TileSizesSplitTall<64> : TileFwd<3, 96, 6, 1, false> {};
template <>
struct TileSizesSplitTall<96> : TileFwd<3, 96, 4, 1, false> {};
template <>
struct TileSizesSplitTall<128> : TileFwd<3, 64, 5, 1, false> {};

// The query heads of a group for which tiles of so many consumers are used, at least: queries of one tile are not too
// far apart.
constexpr int min_ratio(int consumers) {
    return consumers == 3 ? 2 : 1;
}

// A tile size whose producer has more registers than in the forward: here the scheduler warp has more to compute, and
// the call waits for its first work tile.
template <typename TileSize>
struct SplitTile : TileSize {
    static constexpr int kConsumers = TileSize::kConsumers;
    static constexpr int kProducerRegisters = kConsumers == 1 ? 128 : 56;
    static constexpr int kConsumerRegisters = kConsumers == 3 ? 152 : kConsumers == 2 ? 224 : 256;

private:
    // With more than what the thread block gets at its start, setmaxnreg would wait forever.
    static constexpr int kAllRegisters = 65536, kWarpgroups = kConsumers + 1;
    static constexpr int kRegistersOfThread = kAllRegisters / (128 * kWarpgroups) / 8 * 8;
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= kWarpgroups * kRegistersOfThread);
};

// ---- K and V of a cache by TMA, in boxes of rows: a whole key block of a contiguous cache, or a part of it that lies
// in one page. Host and device.

struct KeyBoxes {
    cute::TmaDescriptor k, v;
    int rows;  // of a box; a divisor of the key block and of the page
};

// The descriptor of boxes of `rows` keys. x: k or v of a call that can_split (tma_limits.h).
template <typename Traits>
cute::TmaDescriptor describe_boxes(const Flash_fwd_params &params, const TensorRef &x, int rows) {
    using Element = typename Traits::Element;
    constexpr auto kType =
        std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    constexpr auto kSwizzle = Traits::kSmemRow == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    const bool is_paged = params.block_table != nullptr;
    const cuuint64_t sizes[4] = {cuuint64_t(params.d), cuuint64_t(is_paged ? params.page_size : params.seqlen_k),
                                 cuuint64_t(params.h_k),
                                 cuuint64_t(is_paged ? params.num_pages : params.cache.batch_cache)};
    // The stride of a dimension of one element has no meaning, and TMA may not accept it.
    const auto bytes = [](cuuint64_t size, int64_t stride) {
        return size > 1 ? cuuint64_t(stride) * sizeof(Element) : cuuint64_t(16);
    };
    const cuuint64_t strides[3] = {bytes(sizes[1], x.row_stride), bytes(sizes[2], x.head_stride),
                                   bytes(sizes[3], x.batch_stride)};
    const cuuint32_t box[4] = {cuuint32_t(Traits::kSmemRow), cuuint32_t(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
    cute::TmaDescriptor descriptor;
    const CUresult result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &descriptor, kType, 4, const_cast<void *>(x.ptr), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        kSwizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("flash_attn_mini: cuTensorMapEncodeTiled does not accept the cache of this call");
    }
    return descriptor;
}

template <typename Traits>
int rows_of_box(const Flash_fwd_params &params) {
    return params.block_table == nullptr ? Traits::kBlockN : std::gcd(params.page_size, Traits::kBlockN);
}

template <typename Traits>
KeyBoxes make_key_boxes(const Flash_fwd_params &params) {
    const int rows = rows_of_box<Traits>(params);
    return {describe_boxes<Traits>(params, params.k, rows), describe_boxes<Traits>(params, params.v, rows), rows};
}

// ---- the load warps

// The order of the first loads. Q of the first work tile goes ahead of K and V, but for the first key block of K:
// behind the key blocks that fill all stages, the copies of Q, and the machine code that starts them, would take
// microseconds.
struct QueriesFirst {
    int load_warps;  // those of Q, K and, where it is loaded for itself, V
    bool is_pending = true;

    // The warp that loads Q, after each work tile.
    __device__ __forceinline__ void signal() {
        if (is_pending) {
            asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "r"(32 * load_warps) : "memory");
            is_pending = false;
        }
    }
    // The other load warps, before or after each key block.
    __device__ __forceinline__ void wait() {
        if (is_pending) {
            asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "r"(32 * load_warps) : "memory");
            is_pending = false;
        }
    }

private:
    static constexpr int kBarrier = 8;  // pipeline.h has the other named barriers
};

// The warp that loads K, or V, of each work tile from its last key block to its first.
template <typename Traits>
class BoxLoader {
    using Element = typename Traits::Element;
    using State = PipelineState<Traits::kStages>;
    using Barriers = PipelineBarriers<Traits::kStages>;

public:
    // descriptor: boxes of `rows` keys. smem: the stages. load_warps: of QueriesFirst.
    __device__ BoxLoader(const Flash_fwd_params &params, typename Traits::SharedStorage &shared,
                         const cute::TmaDescriptor &descriptor, int rows, Element *smem, Barriers &barriers,
                         int load_warps)
        : params(params),
          descriptor(descriptor),
          rows(rows),
          smem(smem),
          barriers(barriers),
          queries_first{load_warps},
          tiles{shared.tiles} {}

    // kIsFirst: the first key block goes ahead of Q.
    template <bool kIsFirst>
    __device__ __forceinline__ void load() {
        for (;;) {
            const int stage = tiles.take();
            const WorkTile &tile = tiles[stage];
            const bool is_end = uniform(tile.is_end) != 0;
            const int bidb = uniform(tile.place.bidb), bidh_k = uniform(tile.place.bidh / params.h_h_k_ratio);
            const int k_begin = uniform(tile.sequence.k_begin), k_bidb = uniform(tile.sequence.k_bidb);
            const int n_block_min = uniform(tile.n_block_min), n_block_max = uniform(tile.n_block_max);
            tiles.release(stage);
            if (is_end) {
                return;
            }
            CUTE_NO_UNROLL
            for (int n_block = n_block_max - 1; n_block >= n_block_min; --n_block) {
                const int first_key = k_begin + n_block * Traits::kBlockN;
                if (!kIsFirst) {
                    queries_first.wait();
                }
                if (params.block_table == nullptr) {
                    load_block(first_key, bidh_k, k_bidb);
                } else {
                    load_pages(first_key, bidh_k, bidb);
                }
                if (kIsFirst) {
                    queries_first.wait();
                }
            }
        }
    }

private:
    const Flash_fwd_params &params;
    const cute::TmaDescriptor &descriptor;
    const int rows;
    Element *const smem;
    Barriers &barriers;
    QueriesFirst queries_first;
    WorkTileRing<Traits::kConsumers> tiles;
    State state;

    // One thread: starts the copy of the box whose first key is `row` of a batch index or page. It lies `offset` rows
    // behind the first of the stage.
    __device__ __forceinline__ void copy_box(int offset, int row, int bidh_k, int batch) const {
        // Keys are replaced first in L2, so that machine code, lengths and block tables stay.
        constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
        Element *const to = smem + state.stage * Traits::kBlockN * Traits::kHeadDim + offset * Traits::kSmemRow;
        CUTE_UNROLL
        for (int col = 0; col < Traits::kHeadDim; col += Traits::kSmemRow) {
            cute::SM90_TMA_LOAD_4D::copy(&descriptor, reinterpret_cast<uint64_t *>(&barriers.full[state.stage]), kHint,
                                         to + col * Traits::kBlockN, col, row, bidh_k, batch);
        }
    }

    static constexpr int kBytes = Traits::kBlockN * Traits::kHeadDim * int(sizeof(Element));

    // A key block of a contiguous cache is one box.
    __device__ __forceinline__ void load_block(int first_key, int bidh_k, int k_bidb) {
        state.acquire(barriers);
        if (cute::elect_one_sync()) {
            state.expect(barriers, kBytes);
            copy_box(0, first_key, bidh_k, k_bidb);
        }
        state.advance();
    }

    // Lane i computes the page and row of box i. Keys past the end come from an arbitrary page; the consumers mask
    // them.
    __device__ __forceinline__ void load_pages(int first_key, int bidh_k, int bidb) {
        static_assert(Traits::kBlockN / kMinBoxRows <= 32, "more boxes than lanes");
        int row = first_key + static_cast<int>(threadIdx.x % 32) * rows;
        const int index = row / params.page_size;
        row -= index * params.page_size;
        const int number =
            params.block_table[bidb * params.block_table_batch_stride + min(index, params.max_pages - 1)];
        const int page = static_cast<int>(min(unsigned(number), unsigned(params.num_pages - 1)));
        state.acquire(barriers);
        if (cute::elect_one_sync()) {
            state.expect(barriers, kBytes);
        }
#pragma unroll 2
        for (int box = 0; box < Traits::kBlockN / rows; ++box) {
            const int row_of_box = __shfl_sync(0xffffffffu, row, box),
                      page_of_box = __shfl_sync(0xffffffffu, page, box);
            if (cute::elect_one_sync()) {
                copy_box(box * rows, row_of_box, bidh_k, page_of_box);
            }
        }
        state.advance();
    }
};

// The warp that loads Q of each work tile: rows of several heads, which TMA cannot gather for every number of heads.
template <typename Traits>
class QueryLoader {
public:
    static constexpr int kArrivals = 32;  // at the barrier of a stage

    __device__ QueryLoader(const Flash_fwd_params &params, const cutlass::FastDivmod &by_ratio,
                           typename Traits::SharedStorage &shared, int load_warps)
        : params(params), by_ratio(by_ratio), shared(shared), queries_first{load_warps}, tiles{shared.tiles} {}

    __device__ __forceinline__ void load() {
        for (;;) {
            const int stage = tiles.take();
            const WorkTile &tile = tiles[stage];
            const bool is_end = uniform(tile.is_end) != 0;
            const int bidb = uniform(tile.place.bidb), bidh = uniform(tile.place.bidh), block = tile.place.block;
            tiles.release(stage);
            if (is_end) {
                return;
            }
            CUTE_NO_UNROLL
            for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
                states.q.acquire(shared.q_barriers);
                copy_rows(bidb, bidh, (block * Traits::kConsumers + warpgroup) * Traits::kRows);
                // The barrier counts this lane when its copies have arrived.
                const uint32_t barrier = cute::cast_smem_ptr_to_uint(&shared.q_barriers.full[states.q.stage]);
                asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
                states.q.advance();
            }
            queries_first.signal();
        }
    }

private:
    using Element = typename Traits::Element;
    const Flash_fwd_params &params;
    const cutlass::FastDivmod &by_ratio;  // by the query heads that share a key/value head
    typename Traits::SharedStorage &shared;
    QueriesFirst queries_first;
    WorkTileRing<Traits::kConsumers> tiles;
    typename Traits::PipelineStates states;

    // Rows from first_row on, with zeros past the last row and column. In a step the warp copies 8 rows, 64 bytes of
    // each at a time: lane l has row l / 4 and 16 bytes of every 64. The swizzle repeats after 8 rows, so a lane's
    // addresses of different steps differ by constants.
    __device__ __forceinline__ void copy_rows(int bidb, int bidh, int first_row) {
        constexpr int kPiece = 8, kLanes = 4, kColumns = kPiece * kLanes, kStep = 32 / kLanes;  // elements, lanes, rows
        static_assert(Traits::kHeadDim % kColumns == 0 && Traits::kRows % kStep == 0);
        Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});  // (64, HD, stage)
        const int lane = threadIdx.x % 32, row_of_lane = lane / kLanes, column_of_lane = lane % kLanes * kPiece;
        const Element *const q =
            static_cast<const Element *>(params.q.ptr) + bidb * params.q.batch_stride + bidh * params.q.head_stride;
        uint32_t to[Traits::kHeadDim / kColumns];
        CUTE_UNROLL
        for (int i = 0; i < Traits::kHeadDim / kColumns; ++i) {
            to[i] = cute::cast_smem_ptr_to_uint(&sQ(row_of_lane, i * kColumns + column_of_lane, states.q.stage));
        }
#pragma unroll 4
        for (int step = 0; step < Traits::kRows / kStep; ++step) {
            int query, head;
            by_ratio(query, head, first_row + step * kStep + row_of_lane);
            const Element *const row = q + query * params.q.row_stride + head * params.q.head_stride + column_of_lane;
            CUTE_UNROLL
            for (int i = 0; i < Traits::kHeadDim / kColumns; ++i) {
                const bool is_in_range = query < params.seqlen_q && i * kColumns + column_of_lane < params.d;
                const uint32_t offset = step * kStep * Traits::kSmemRow * sizeof(Element);
                kvcache::cp_async_16(to[i] + offset, is_in_range ? row + i * kColumns : q, is_in_range);
            }
        }
    }
};

// ---- the work tiles of a CTA whose keys are split: the runs of its piece (kvcache/splitkv_schedule.h).

// CTA i has row tile i % row_tiles and piece i / row_tiles, so that neighbours share the keys in L2.
template <int kBlockM, int kBlockN>
class RunScheduler {
public:
    // Called by a whole warp.
    __device__ RunScheduler(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan)
        : params(params),
          by_ratio(plan.by_ratio),
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
        const BlockInfo<kBlockM, kBlockN, true> info(params, tile.sequence, query_of(row_tile * kBlockM),
                                                     query_of((row_tile + 1) * kBlockM - 1));
        tile.n_block_min = max(info.n_block_min, run.first_key / kBlockN);
        tile.n_block_max = min(info.n_block_max, (run.end_key + kBlockN - 1) / kBlockN);
        tile.slot = static_cast<int>(run.slot);
        return tile;
    }

private:
    const Flash_fwd_params &params;
    const cutlass::FastDivmod &by_ratio;
    const int row_tile;
    const bool is_writer;
    kvcache::Runs runs;
    kvcache::Runs::Run run{};  // the last
    bool has_run = false;

    __device__ int query_of(int row) const { return by_ratio.div(row); }  // by multiplication
};

// ---- the kernel

// Called by all threads when one has initialized the barriers.
__device__ __forceinline__ void wait_for_inputs() {
    __syncthreads();                      // every thread sees the barriers
    kvcache::wait_for_previous_kernel();  // it may write lengths, queries, keys and page numbers
    kvcache::launch_dependents();
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what that kernel stored
}

template <typename Traits>
__device__ __forceinline__ void compute_attn_split(const Flash_fwd_params &params, const KeyBoxes &boxes,
                                                   typename Traits::SharedStorage &shared,
                                                   const kvcache::SplitkvPlan &plan) {
    constexpr int kLoadWarps = 3;
    if (threadIdx.x / 128 == 0) {  // producer
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            BoxLoader<Traits>(params, shared, boxes.k, boxes.rows, shared.k, shared.k_barriers, kLoadWarps)
                .template load</*kIsFirst=*/true>();
        } else if (threadIdx.x / 32 == 1) {
            schedule_tiles<Traits, Kind::split>(
                params, shared, RunScheduler<Traits::kBlockM, Traits::kBlockN>(params, plan),
                [&](const WorkTile &tile) { SplitOutput<Traits>(params, plan, tile, 0).store_nothing(); });
        } else if (threadIdx.x / 32 == 2) {
            BoxLoader<Traits>(params, shared, boxes.v, boxes.rows, shared.v, shared.v_barriers, kLoadWarps)
                .template load</*kIsFirst=*/false>();
        } else {
            QueryLoader<Traits>(params, plan.by_ratio, shared, kLoadWarps).load();
        }
    } else {  // consumer
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kConsumerRegisters>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
        Consumer<Traits, Kind::split>(params, shared, warpgroup)
            .mma([&](const WorkTile &tile, auto &acc_o, const auto &softmax) {
                SplitOutput<Traits>(params, plan, tile, warpgroup * Traits::kRows + first_row_of_thread())
                    .store(acc_o, softmax);
            });
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_split_kernel(const __grid_constant__ Flash_fwd_params params, const __grid_constant__ KeyBoxes boxes,
                           const __grid_constant__ kvcache::SplitkvPlan plan) {
    // As in the forward, a consumer skips at most one key block at either end of a run.
    static_assert(Traits::kRows * (Traits::kConsumers - 1) <= Traits::kBlockN * min_ratio(Traits::kConsumers));
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
    wait_for_inputs();
    compute_attn_split<Traits>(params, boxes, shared, plan);
}

}  // namespace flash::sm90
