// The backward kernel. A CTA, or a cluster, has one work tile (work_tiles_bwd.h). In the compute phase:
// flash_bwd_kernel -> compute_dq_dk_dv -> compute_dk_dv_1colblock. One warpgroup is the producer, which loads and adds
// dQ (producer_bwd.h). Two are consumers, which compute (mainloop_bwd.h). With dropout, a fourth draws (dropout_bwd.h).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/store_rows.h"
#include "dispatch/kind.h"
#include "kvcache/instructions.h"
#include "mainloop_bwd.h"
#include "producer_bwd.h"
#include "row_phases_bwd.h"
#include "sm90/common/accumulator.h"
#include "sm90/common/find_block.h"
#include "sm90/common/unhoisted.h"
#include "steps_bwd.h"

namespace flash::sm90 {

// ---- the epilogue: dK and dV of a consumer warpgroup go from registers to global memory, scaled and rounded

// The destination of 64 keys of one head, which begin at key_offset in the key block.
template <typename Traits, Kind kKind>
struct TargetOfKeys {
    using Element = typename Traits::Element;
    Element *base;  // null: the gradient is not wanted
    int64_t stride;
    int keys;  // of the sequence, from the first one on
    int columns;

    __device__ __forceinline__ TargetOfKeys(const Flash_bwd_params &params, const ColumnBlock<Traits, kKind> &block,
                                            const TensorRef &target, int columns, int key_offset)
        : stride(target.row_stride), keys(block.seqlen_k - block.first_key() - key_offset), columns(columns) {
        const int bidh_dkv = block.heads == 1 ? block.bidh : block.bidh / block.heads;
        base = static_cast<Element *>(target.ptr);
        if (base != nullptr) {
            base += block.bidb * target.batch_stride + bidh_dkv * target.head_stride +
                    int64_t(block.k_begin + block.first_key() + key_offset) * stride;
        }
    }

    __device__ __forceinline__ void store(int key, int col, const uint4 &vector) const {
        if (key < keys && col < columns) {
            *reinterpret_cast<uint4 *>(base + key * stride + col) = vector;
        }
    }
};

// BwdSplit::keys. Stores kVectors vectors of acc (MMA, MMA_M, MMA_N) times `factor`, from kFirst on. The rows of a warp
// pass through shared memory, and a loop stores whole rows from there: fewer instructions than shuffles among lanes.
//
// They lie in the rows of V that have their keys, which no other warp reads or writes. TMA writes V of another key
// block only when V is released.
template <int kFirst, int kVectors, typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_vectors(typename Traits::SharedStorage &shared,
                                              const TargetOfKeys<Traits, kKind> &target, const TensorKV &acc,
                                              float factor, int key_offset) {
    using Element = typename Traits::Element;
    constexpr int kPart = Traits::kSmemRow, kChunks = kPart / 8;  // elements and vectors of a row of 128 or 64 bytes
    constexpr int kRows = 16;                                     // of a warp
    static_assert(kVectors * 8 <= Traits::kHeadDimV);
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * kRows;
    Element *own = shared.v + (key_offset + first) * kPart;
    const auto place = [&](int row, int vector) {  // permuted, so that there are no bank conflicts
        const int chunk = vector % kChunks ^ (kChunks == 8 ? row % 8 : row / 2 % 4);
        return own + vector / kChunks * (Traits::kBlockN * kPart) + row * kPart + chunk * 8;
    };
    Tensor rows = make_tensor(acc.data(), rowcol_layout(acc.layout()));  // (row, col)
    CUTE_UNROLL
    for (int vector = 0; vector < kVectors; vector += 2) {
        // Four pieces of 8 x 8: the upper and the lower rows, for two vectors. Lane l has the address of a row of piece
        // l / 8.
        uint32_t words[4];
        CUTE_UNROLL
        for (int piece = 0; piece < 4; ++piece) {
            const int col = (kFirst + vector + piece / 2) * 2;
            words[piece] = kvcache::pack<Element>(rows(piece % 2, col) * factor, rows(piece % 2, col + 1) * factor);
        }
        SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3],
                                *reinterpret_cast<uint128_t *>(place(lane / 8 % 2 * 8 + lane % 8, vector + lane / 16)));
    }
    __syncwarp();
    constexpr int kSteps = kRows * kVectors / 32;
    CUTE_NO_UNROLL
    for (int step = 0; step < kSteps; step += 2) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
            const int index = (step + i) * 32 + lane, row = index / kVectors, vector = index % kVectors;
            target.store(first + row, (kFirst + vector) * 8, *reinterpret_cast<const uint4 *>(place(row, vector)));
        }
    }
    __syncwarp();  // all lanes have read
}

// BwdSplit::keys. Stores acc times `factor`, as many columns at once as V has.
template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_keys(typename Traits::SharedStorage &shared,
                                           const TargetOfKeys<Traits, kKind> &target, const TensorKV &acc, float factor,
                                           int key_offset) {
    constexpr int kVectors = decltype(size(acc))::value / 4, kAtOnce = cute::min(kVectors, Traits::kHeadDimV / 8);
    if (target.base == nullptr) {
        return;
    }
    store_vectors<0, kAtOnce>(shared, target, acc, factor, key_offset);
    if constexpr (kAtOnce < kVectors) {
        store_vectors<kAtOnce, kVectors - kAtOnce>(shared, target, acc, factor, key_offset);
    }
}

// BwdSplit::products. The CTA's 64 keys, from registers.
template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_product(const TargetOfKeys<Traits, kKind> &target, const TensorKV &acc,
                                              float factor) {
    if (target.base == nullptr) {
        return;
    }
    Tensor rows = make_tensor(acc.data(), rowcol_layout(acc.layout()));  // (row, col)
    CUTE_UNROLL
    for (int i = 0; i < size<0>(rows); ++i) {
        store_row<typename Traits::Element, uint4>(rows, i, factor, [&](int col, const uint4 &vector) {
            target.store(first_row_of_thread() + i * 8, col, vector);
        });
    }
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dkv(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                          const ColumnBlock<Traits, kKind> &block, const TensorRef &gradient,
                                          int columns, const TensorKV &acc, float factor, int key_offset) {
    const TargetOfKeys<Traits, kKind> target(params, block, gradient, columns, key_offset);
    if constexpr (Traits::kSplitsKeys) {
        store_keys(shared, target, acc, factor, key_offset);
    } else {
        store_product(target, acc, factor);
    }
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dk(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                         const ColumnBlock<Traits, kKind> &block, const TensorKV &acc, int key_offset) {
    store_dkv(params, shared, block, params.dk, params.d, acc, params.qk_scale, key_offset);
}

template <typename Traits, Kind kKind, typename TensorKV>
__device__ __forceinline__ void store_dv(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                                         const ColumnBlock<Traits, kKind> &block, const TensorKV &acc, int key_offset) {
    store_dkv(params, shared, block, params.dv, params.d_v, acc, is_general(kKind) ? params.rp_dropout : 1.0f,
              key_offset);
}

// ---- the kernel

template <typename Traits, Kind kKind>
using ProducerOf =
    std::conditional_t<Traits::kConsumersComputeDq, CopyProducer<Traits, kKind>,
                       std::conditional_t<(Traits::kCtas > 1), PairProducer<Traits, kKind>, DqProducer<Traits, kKind>>>;

// The part of a consumer in one block of keys of one head of dK and dV.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_dk_dv_1colblock(const Flash_bwd_params &params,
                                                        typename Traits::SharedStorage &shared,
                                                        const ColumnBlock<Traits, kKind> &block, int warpgroup,
                                                        const DoneBefore &done) {
    const auto accumulator = [](auto tiles) {  // (MMA, MMA_M, MMA_N)
        using Tiles = decltype(tiles);
        return partition_fragment_C(typename Tiles::TiledMmadKV{}, typename Tiles::TiledKV{});
    };
    using AccumulatorK = decltype(accumulator(typename Traits::TilesQK{}));
    using AccumulatorV = decltype(accumulator(typename Traits::TilesdOV{}));
    if constexpr (Traits::kSplitsKeys) {
        AccumulatorK acc_dk;
        AccumulatorV acc_dv;
        KeyConsumer<Traits, kKind> consumer(params, shared, block, warpgroup, done);
        consumer.run(acc_dk, acc_dv);
        store_dk(params, shared, block, acc_dk, first_key_of_consumer<Traits>(warpgroup));
        store_dv(params, shared, block, acc_dv, first_key_of_consumer<Traits>(warpgroup));
        consumer.release_V();
    } else if (warpgroup == 0) {
        AccumulatorV acc_dv;
        ProductConsumer<Traits, kKind>(params, shared, block, warpgroup, done).run_dv(acc_dv);
        store_dv(params, shared, block, acc_dv, first_key_of_consumer<Traits>(warpgroup));
    } else {
        AccumulatorK acc_dk;
        ProductConsumer<Traits, kKind>(params, shared, block, warpgroup, done).run_dk(acc_dk);
        store_dk(params, shared, block, acc_dk, first_key_of_consumer<Traits>(warpgroup));
    }
}

template <typename Traits, Kind kKind>
__device__ __forceinline__ void init_barriers(typename Traits::SharedStorage &shared) {
    constexpr int kWarps = 4, kOfConsumers = kWarps * Traits::kConsumers;  // per warpgroup, of the consumers
    constexpr int kOfDq = Traits::kConsumersComputeDq ? 0 : kWarps;        // that read dS only for dQ
    constexpr int kOfProduct = Traits::kSplitsKeys ? kOfConsumers : kWarps;
    shared.k_barriers.init(kOfConsumers);
    shared.v_barriers.init(kOfConsumers);
    constexpr int kOfRows = kOfConsumers * (multicasts<Traits, kKind>() ? Traits::kCtas : 1);
    shared.q_barriers.init(kOfRows);
    shared.dout_barriers.init(kOfRows);
    if constexpr (may_be_varlen(kKind)) {
        shared.oob_copy_barrier.init(/*arrive_count=*/2);  // for Q with lse, and for dO with delta
    }
    shared.ds_barriers.init(/*warps=*/kWarps * Traits::kCtas, /*writers=*/kOfProduct);
    if constexpr (Traits::kCtas > 1) {
        shared.k_of_peer_barriers.init(/*warps=*/kWarps);
        for (auto &full : shared.ds_of_peer_full) {
            full.init(/*arrive_count=*/1);
        }
    }
    shared.p_barriers.init(/*warps=*/kWarps, /*writers=*/kWarps);
    for (auto &full : shared.dropout_bits_full) {
        full.init(kWarps);
    }
    for (auto &barriers : shared.dq_barriers) {
        barriers.init(/*warps=*/1, /*writers=*/kWarps);
    }
    cutlass::arch::fence_barrier_init();
}

// Variable lengths: the key block with this index among those of a head. is_sorted: those with the most keys behind
// them come first. Under a causal mask they have the most steps.
template <typename Traits>
__device__ __forceinline__ FoundBlock key_block_with(const Flash_bwd_params &params, int index, bool is_sorted) {
    if (!is_sorted) {
        return find_block_by_warp</*kOfKeys=*/true>(params, Traits::kBlockN, index);
    }
    const SequenceBlock from_end =
        find_block_by_length<Traits::kBlockN>(params.cu_seqlens_k, params.b, params.total_k, index);
    const Sequence seq = sequence(params, from_end.bidb);
    const int blocks = (seq.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN;
    return {{from_end.bidb, from_end.block < blocks ? blocks - 1 - from_end.block : blocks}, seq};
}

// The compute phase.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_dq_dk_dv(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                                                 typename Traits::SharedStorage &shared, const WorkCounts &counts,
                                                 const WorkOrder &order, const WorkTile &tile) {
    using Producer = ProducerOf<Traits, kKind>;
    using Block = ColumnBlock<Traits, kKind>;
    constexpr bool kMayGroup = may_group_key_blocks<Traits, kKind>();
    const int key_blocks = kMayGroup ? uniform(tile.is_one ? 1 : order.key_block_groups.size) : 1;
    // The key blocks of the work tile. Every role of the CTA walks them. A function call would serialize all products
    // of the kernel (C7510).
    const auto for_each_key_block = [&](const auto &work_on) __attribute__((always_inline)) {
        CUTE_NO_UNROLL
        for (int i = 0; i < key_blocks; ++i) {
            int bidb, bidh_dkv, n_block = kMayGroup ? order.key_block_groups.at(tile.index, i) : tile.index;
            order.by_sequence(bidb, bidh_dkv, tile.head);
            if (params.dq_semaphore != nullptr && is_local(kKind)) {
                // In order and local: the last key blocks add first (ColumnBlockInfo::order_in), so they start first.
                n_block = order.compute() - 1 - n_block;
            }
            Sequence seq;
            if (may_be_varlen(kKind) && params.cu_seqlens_k != nullptr) {
                // The last heads: fewer SMs are idle while the last CTAs run.
                const bool is_causal = params.is_local() && params.window_size_left < 0;
                const bool is_sorted = is_causal && params.dq_semaphore == nullptr && params.b <= kMaxSortedSequences &&
                                       order.is_one_of_last(tile.head);
                const FoundBlock found = key_block_with<Traits>(params, n_block, is_sorted);
                bidb = found.bidb;
                n_block = found.block;
                seq = found.sequence;
            } else {
                seq = sequence</*kMayBeVarlen=*/false>(params, bidb);
            }
            if (n_block * Traits::kBlockN < seq.seqlen_k) {  // else unused
                Block block(params, seq, bidb, bidh_dkv, n_block);
                if (!may_be_varlen(kKind)) {
                    block.make_uniform();
                }
                work_on(block);
            }
        }
    };
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        int *computed = params.dq_accum == nullptr ? nullptr : counts.computed(tile.head);
        const auto wait_for_statistics = [&] {
            if (threadIdx.x % 32 == 0) {
                counts.wait(counts.preprocessed(tile.head), order.preprocess() * Traits::kCtas);
            }
            __syncwarp();
            fence_copies_from_global();
        };
        const auto done = [&] {
            if (computed != nullptr) {
                counts.add(computed);
            }
        };
        Producer(params, copies, shared).run(for_each_key_block, wait_for_statistics, done);
    } else if (role <= Traits::kConsumers) {
        cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        DoneBefore done{0, 0};
        const auto consume = [&](const Block &block) __attribute__((always_inline)) {
            if constexpr (kMayGroup) {
                // unhoisted: addresses that all key blocks have in common would stay in registers over the steps.
                compute_dk_dv_1colblock(params, *unhoisted(&shared), block, role - 1,
                                        {uniform(done.key_blocks), uniform(done.steps)});
                ++done.key_blocks;
                done.steps += block.num_steps();
            } else {
                compute_dk_dv_1colblock(params, shared, block, role - 1, done);
            }
        };
        if constexpr (inlines_consumers<Traits, kKind>()) {
            for_each_key_block(consume);
        } else {
            for_each_key_block([&](const Block &block) { consume(block); });
        }
    } else if constexpr (Traits::kHasDropoutWarpgroup) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        for_each_key_block([&](const Block &block) { DropoutWarpgroup<Traits, kKind>(params, shared, block).run(); });
    }
}

// CTAs, or clusters, take the numbers of their work tiles when they start. A work tile waits only for smaller numbers,
// and their CTAs have started: in whichever order the GPU starts CTAs, none waits for one that cannot start (deadlock).
// Nothing but the number passes between CTAs here, so the atomic is relaxed.
template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_bwd_kernel(const __grid_constant__ Flash_bwd_params params,
                     const __grid_constant__ typename Traits::Copies copies, const __grid_constant__ WorkOrder order) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    const WorkCounts counts{params.work_counts, order.heads()};
    if (threadIdx.x == Traits::kNThreads - 32) {  // for phase compute
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.dout.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        init_barriers<Traits, kKind>(shared);
    }
    if (threadIdx.x == 0 && rank_in_cluster<Traits>() == 0) {
        shared.number = atomicAdd(counts.taken(), 1);
    }
    sync_ctas<Traits>();                                              // every thread sees the barriers and the number
    WorkTile tile = order.at<may_group_key_blocks<Traits, kKind>()>(  // the same in all lanes
        of_first_cta<Traits>(shared.number));
    const Phase phase = static_cast<Phase>(uniform(static_cast<int>(tile.phase)));
    if (may_be_varlen(kKind)) {  // the load warp's registers are few
        tile.head = uniform(tile.head);
        tile.index = uniform(tile.index);
    }
    if (phase == Phase::preprocess) {
        using Preprocess = PreprocessBwd<Traits, kKind>;
        Preprocess(params, order, tile)
            .run(reinterpret_cast<typename Preprocess::SharedStorage &>(smem), counts, tile.head);
    } else if (phase == Phase::convert) {
        using Convert = ConvertDq<Traits, kKind>;
        Convert(params, order, tile)
            .run(reinterpret_cast<typename Convert::SharedStorage &>(smem), counts, tile.head,
                 (may_group_key_blocks<Traits, kKind>() ? order.compute_of(tile.head) : order.compute()) *
                     ProducerOf<Traits, kKind>::kWarpsThatAdd * Traits::kCtas);
    } else {
        compute_dq_dk_dv<Traits, kKind>(params, copies, shared, counts, order, tile);
    }
    if constexpr (Traits::kCtas > 1) {
        sync_ctas<Traits>();  // shared memory outlives the accesses of the other CTA
    }
}

}  // namespace flash::sm90
