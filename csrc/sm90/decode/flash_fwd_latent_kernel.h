// The forward with split keys over a cache of latent vectors: flash_fwd_latent_kernel -> compute_attn_latent. K has 576
// columns, and V is the first 512 of them, so that one copy in shared memory serves both products.
//
// A tile has 64 rows: the queries of all heads of a group. O of 64 rows and 512 columns is more than a warpgroup's
// registers hold, so two warpgroups have 256 columns each. The first computes S and the softmax, and hands P to the
// second through shared memory. Scheduler, loaders and the order of the work tiles are those of
// flash_fwd_split_kernel.h.
#pragma once

#include "flash_fwd_latent.h"
#include "flash_fwd_split_kernel.h"
#include "sm90/common/unhoisted.h"

namespace flash::sm90 {

// 64 rows, 64 keys, two stages of K. setmaxnreg: S and the softmax need more registers than a product.
struct TileSizesLatent : TileFwd<1, 64, 2, 1, false> {
    static constexpr int kProducerRegisters = 56, kScoreRegisters = 248, kValueRegisters = 200;
    static_assert(kProducerRegisters + kScoreRegisters + kValueRegisters <= 3 * 168);
};

// kHeadDimV of the base: the columns of O that a warpgroup has.
template <DType kDType>
struct Flash_fwd_latent_traits
    : Flash_fwd_kernel_traits<kDType, kHeadDimLatentCache, TileSizesLatent, kHeadDimVLatentCache / 2> {
    using Base = Flash_fwd_kernel_traits<kDType, kHeadDimLatentCache, TileSizesLatent, kHeadDimVLatentCache / 2>;
    using typename Base::Element;
    static constexpr int kWarpgroups = 2;                      // consumers: each has half of the columns of O
    static constexpr int kNThreads = 128 * (kWarpgroups + 1);  // with the producer

    // K as the transposed operand V (headdim, key, stage), and P of all rows (row, key).
    using SmemLayoutVt =
        decltype(composition(typename Base::SmemLayoutK{},
                             make_layout(Shape<Int<Base::kHeadDim>, Int<Base::kBlockN>, Int<Base::kStages>>{},
                                         Stride<Int<Base::kBlockN>, _1, Int<Base::kBlockN * Base::kHeadDim>>{})));
    using SmemLayoutP =
        decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<Base::kRows>, Int<Base::kBlockN>>{}));
    // O += P V, with P in shared memory.
    using TiledMmaPV = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<Int<Base::kRows>, Int<Base::kHeadDimV>, Int<Base::kBlockN>>,
                             GMMA::Major::K, GMMA::Major::MN>()));

    struct SharedStorage {
        alignas(Base::kAlignment) Element q[cosize_v<typename Base::SmemLayoutQ>];
        alignas(Base::kAlignment) Element k[cosize_v<typename Base::SmemLayoutK>];
        alignas(Base::kAlignment) Element p[cosize_v<SmemLayoutP>];
        float factors[Base::kRows];  // by which the rows of O change before P V of a step, and after the last step
        PipelineBarriers<1> q_barriers;
        PipelineBarriers<Base::kStages> k_barriers;
        PipelineBarriers<1> p_barriers;  // P and factors
        typename WorkTileRing<Base::kConsumers>::SharedStorage tiles;
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);
};

// Issues O (+)= P V of the columns of a warpgroup.
template <typename Traits, typename TensorO>
__device__ __forceinline__ void issue_latent_O(typename Traits::SharedStorage &shared, int stage, int warpgroup,
                                               bool accumulates, TensorO &acc_o) {
    using TiledMma = typename Traits::TiledMmaPV;
    using TileVt = Shape<Int<Traits::kHeadDimV>, Int<Traits::kBlockN>>;
    Tensor sP = make_tensor(make_smem_ptr(shared.p), typename Traits::SmemLayoutP{});    // (row, BLK_N)
    Tensor sVt = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutVt{});  // (HD, BLK_N, stage)
    Tensor sVt_own = local_tile(sVt(_, _, uniform(stage)), TileVt{}, make_coord(warpgroup, _0{}));
    auto thr_mma = TiledMma{}.get_slice(int(threadIdx.x % 128));
    Tensor tOrP = thr_mma.make_fragment_A(thr_mma.partition_A(sP));        // (MMA, MMA_M, MMA_K)
    Tensor tOrVt = thr_mma.make_fragment_B(thr_mma.partition_B(sVt_own));  // (MMA, MMA_N, MMA_K)
    issue<TiledMma>(accumulates, tOrP, tOrVt, acc_o);
}

// The first consumer warpgroup. It computes S, the softmax and the first half of the columns of O.
template <typename Traits>
class ScoreConsumer : Consumer<Traits, Kind::split> {
    using Base = Consumer<Traits, Kind::split>;
    using Base::params, Base::shared, Base::states, Base::tiles;
    using typename Base::Element, typename Base::SoftmaxState, typename Base::Step;
    using Rescale = typename SoftmaxState::Rescale;
    static constexpr int kWarpgroup = 0;
    PipelineState<1> p_state, sent_p;  // of the next P, of the last

public:
    __device__ ScoreConsumer(const Flash_fwd_params &params, typename Traits::SharedStorage &shared)
        : Base(params, shared, kWarpgroup) {}

    // store_statistics(tile, softmax) stores the row statistics of a work tile, and returns the SplitOutput::Factors
    // with which both warpgroups store their columns. store_columns(tile, acc_o, factors) stores those of this one.
    template <typename StoreStatistics, typename StoreColumns>
    __device__ __forceinline__ void mma(const StoreStatistics &store_statistics, const StoreColumns &store_columns) {
        Tensor acc_s = partition_fragment_C(typename Traits::TiledMmaQK{}, typename Traits::TileS{});
        Tensor acc_o = partition_fragment_C(typename Traits::TiledMmaPV{}, typename Traits::TileO{});
        Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));  // (row, col)
        for (;;) {
            Step step = this->take_tile();
            if (step.blocks.has(KeyBlocks::is_end)) {
                return;
            }
            SoftmaxState softmax(params.scale_softmax_log2);
            this->begin_tile(step);
            wait_for_K(step);
            issue_S(acc_s);
            wait_for<0>(acc_s);
            Rescale rescale = this->template softmax_step</*kIsFirst=*/true>(step, acc_s, softmax);
            rescale.is_needed = false;  // there is no O yet
            release_Q_after(step);
            send_P(step, acc_s, rescale);
            bool accumulates = false;
            for (; !step.is_last(); accumulates = true) {
                issue_O(accumulates, acc_o);
                const auto k_of_O = states.k;
                states.k.advance();
                step.advance();
                wait_for_K(step);
                issue_S(acc_s);
                wait_for<1>(acc_o);
                k_of_O.release(shared.k_barriers);  // before S is complete, so that the next key block comes early
                wait_for<0>(acc_s);
                rescale = this->template softmax_step</*kIsFirst=*/false>(step, acc_s, softmax);
                release_Q_after(step);
                send_P(step, acc_s, rescale);
                softmax.apply(rescale, acc_o_rowcol);
            }
            issue_O(accumulates, acc_o);
            wait_for<0>(acc_o);
            this->release_K();
            const auto factors = store_statistics(tiles[step.tile], softmax);
            send_factors(factors.of_row);
            store_columns(tiles[step.tile], acc_o_rowcol, factors);
            tiles.release(step.tile);
        }
    }

private:
    // S = Q K^T. The stages are constants or uniform, so that the descriptors of 36 products are in uniform registers.
    template <typename TensorS>
    __device__ __forceinline__ void issue_S(TensorS &acc_s) const {
        using TiledMma = typename Traits::TiledMmaQK;
        Tensor sQ =
            make_tensor(make_smem_ptr(unhoisted(shared.q)), typename Traits::SmemLayoutQ{})(_, _, _0{});  // (64, HD)
        Tensor sK =
            make_tensor(make_smem_ptr(unhoisted(shared.k)), typename Traits::SmemLayoutK{});  // (BLK_N, HD, stage)
        auto thr_mma = TiledMma{}.get_slice(int(threadIdx.x % 128));
        Tensor tSrQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ));  // (MMA, MMA_M, MMA_K)
        Tensor tSrK =
            thr_mma.make_fragment_B(thr_mma.partition_B(sK(_, _, uniform(states.k.stage))));  // (MMA, MMA_N, MMA_K)
        issue<TiledMma>(/*accumulates=*/false, tSrQ, tSrK, acc_s);
    }

    // P of the step is in shared memory, from all warps of the warpgroup.
    template <typename TensorO>
    __device__ __forceinline__ void issue_O(bool accumulates, TensorO &acc_o) const {
        sent_p.wait(shared.p_barriers);
        issue_latent_O<Traits>(shared, states.k.stage, kWarpgroup, accumulates, acc_o);
    }

    // Keys past the end of the sequence may be NaN, and NaN times 0 is NaN: they become zeros for both products.
    __device__ __forceinline__ void wait_for_K(const Step &step) const {
        states.k.wait(shared.k_barriers);
        if (step.n_block >= step.blocks.n_ragged) {
            Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutK{});  // (BLK_N, HD, stage)
            const int rows = tiles[step.tile].sequence.seqlen_k - step.n_block * Traits::kBlockN;
            clear_rows_from(rows, sK(_, _, states.k.stage), kWarpgroup);
        }
    }

    __device__ __forceinline__ void release_Q_after(const Step &step) {
        if (step.is_last()) {
            states.q.release(shared.q_barriers);
            states.q.advance();
        }
    }

    // Rounded P goes to shared memory, with the factors of the rows of O. A warp writes the 16 rows of P that its part
    // of the own product reads, when that part is complete. It waits for the other warpgroup, which reads them too.
    template <typename TensorS>
    __device__ __forceinline__ void send_P(const Step &step, TensorS &acc_s, const Rescale &rescale) {
        Tensor tOrP = make_tensor<Element>(operand_A_layout(acc_s.layout()));  // (MMA, MMA_M, MMA_K)
        this->round_P(step, acc_s, tOrP);
        p_state.acquire(shared.p_barriers);
        Tensor sP = make_tensor(make_smem_ptr(shared.p), typename Traits::SmemLayoutP{});  // (row, key)
        const auto *words = reinterpret_cast<const uint32_t *>(tOrP.data());
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
        CUTE_UNROLL
        for (int i = 0; i < Traits::kBlockN / 16; ++i) {  // four pieces of 8 x 8: two of the rows, two of the keys
            SM90_U32x4_STSM_N::copy(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3],
                                    reinterpret_cast<uint128_t &>(sP(row, i * 16 + lane / 16 * 8)));
        }
        cutlass::arch::fence_view_async_shared();  // before wgmma reads it
        const float factors[2] = {rescale.is_needed ? rescale.factor[0] : 1.0f,
                                  rescale.is_needed ? rescale.factor[1] : 1.0f};
        store_factors(factors);
    }

    // The factors after the last step.
    __device__ __forceinline__ void send_factors(const float (&factors)[2]) {
        p_state.acquire(shared.p_barriers);
        store_factors(factors);
    }

    __device__ __forceinline__ void store_factors(const float (&factors)[2]) {
        if (threadIdx.x % 4 == 0) {
            shared.factors[first_row_of_thread()] = factors[0];
            shared.factors[first_row_of_thread() + 8] = factors[1];
        }
        __syncwarp();
        if (cute::elect_one_sync()) {
            shared.p_barriers.full[0].arrive();
        }
        sent_p = p_state;
        p_state.advance();
    }
};

// The second consumer warpgroup. It computes the second half of the columns of O.
template <typename Traits>
class ValueConsumer {
    using SoftmaxState = Softmax<typename Traits::Element, 2, /*kMayOffset=*/false>;
    using Factors = typename SplitOutput<Traits, kHeadDimVLatentCache>::Factors;
    static constexpr int kWarpgroup = 1;
    typename Traits::SharedStorage &shared;
    WorkTileRing<Traits::kConsumers> tiles;
    PipelineState<Traits::kStages> k_state;
    PipelineState<1> p_state;

public:
    __device__ explicit ValueConsumer(typename Traits::SharedStorage &shared) : shared(shared), tiles{shared.tiles} {}

    // store(tile, acc_o, factors) stores the columns of a work tile.
    template <typename Store>
    __device__ __forceinline__ void mma(const Store &store) {
        Tensor acc_o = partition_fragment_C(typename Traits::TiledMmaPV{}, typename Traits::TileO{});
        Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));  // (row, col)
        for (;;) {
            const int tile = tiles.take();
            const KeyBlocks blocks = tiles.key_blocks(tile, 0).template to_registers<Kind::split>();
            if (blocks.has(KeyBlocks::is_end)) {
                return;
            }
            CUTE_NO_UNROLL
            for (int n_block = blocks.n_block_max - 1; n_block >= blocks.n_block_min; --n_block) {
                const Factors factors = receive();
                if (n_block < blocks.n_block_max - 1) {
                    SoftmaxState::apply(rescale_by(factors), acc_o_rowcol);
                }
                k_state.wait(shared.k_barriers);
                issue_latent_O<Traits>(shared, k_state.stage, kWarpgroup,
                                       /*accumulates=*/n_block < blocks.n_block_max - 1, acc_o);
                wait_for<0>(acc_o);
                release_P();
                k_state.release(shared.k_barriers);
                k_state.advance();
            }
            const Factors factors = receive();
            release_P();
            store(tiles[tile], acc_o_rowcol, factors);
            tiles.release(tile);
        }
    }

private:
    // Waits for P and the factors.
    __device__ __forceinline__ Factors receive() const {
        p_state.wait(shared.p_barriers);
        return {{shared.factors[first_row_of_thread()], shared.factors[first_row_of_thread() + 8]}};
    }
    __device__ __forceinline__ static typename SoftmaxState::Rescale rescale_by(const Factors &factors) {
        const auto &[first, second] = factors.of_row;
        return {{first, second}, __any_sync(0xffffffffu, first != 1.0f || second != 1.0f) != 0};
    }
    __device__ __forceinline__ void release_P() {
        __syncwarp();  // all lanes have read the factors
        p_state.release(shared.p_barriers);
        p_state.advance();
    }
};

// ---- the kernel

template <typename Traits>
__device__ __forceinline__ void compute_attn_latent(const Flash_fwd_params &params, const KeyBoxes &boxes,
                                                    typename Traits::SharedStorage &shared,
                                                    const kvcache::SplitkvPlan &plan) {
    using Output = SplitOutput<Traits, kHeadDimVLatentCache>;
    constexpr int kLoadWarps = 2;
    if (threadIdx.x / 128 == 0) {  // producer
        cutlass::arch::warpgroup_reg_dealloc<Traits::TileSize::kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            BoxLoader<Traits>(params, shared, boxes.k, boxes.rows, shared.k, shared.k_barriers, kLoadWarps)
                .template load</*kIsFirst=*/true>();
        } else if (threadIdx.x / 32 == 1) {
            schedule_tiles<Traits, Kind::split>(
                params, shared, RunScheduler<Traits::kBlockM, Traits::kBlockN>(params, plan),
                [&](const WorkTile &tile) { Output(params, plan, tile, 0).store_nothing(); });
        } else if (threadIdx.x / 32 == 2) {
            QueryLoader<Traits>(params, plan.by_ratio, shared, kLoadWarps).load();
        }
    } else if (threadIdx.x / 128 == 1) {
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kScoreRegisters>();
        ScoreConsumer<Traits>(params, shared)
            .mma(
                [&](const WorkTile &tile, const auto &softmax) {
                    return Output(params, plan, tile, first_row_of_thread()).store_statistics(softmax);
                },
                [&](const WorkTile &tile, auto &acc_o, const auto &factors) {
                    Output(params, plan, tile, first_row_of_thread()).store_columns(acc_o, factors, /*first_column=*/0);
                });
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::TileSize::kValueRegisters>();
        ValueConsumer<Traits>(shared).mma([&](const WorkTile &tile, auto &acc_o, const auto &factors) {
            Output(params, plan, tile, first_row_of_thread())
                .store_columns(acc_o, factors, /*first_column=*/Traits::kHeadDimV);
        });
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_latent_kernel(const __grid_constant__ Flash_fwd_params params, const __grid_constant__ KeyBoxes boxes,
                            const __grid_constant__ kvcache::SplitkvPlan plan) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4, kOfConsumers = kWarps * Traits::kWarpgroups;
        prefetch_tma_descriptor(&boxes.k);
        shared.q_barriers.init(kWarps, /*writers=*/QueryLoader<Traits>::kArrivals);
        shared.k_barriers.init(kOfConsumers);
        shared.p_barriers.init(kWarps, /*writers=*/kWarps);
        shared.tiles.barriers.init(kOfConsumers + 2, /*writers=*/1);  // + 2: load warps
        cutlass::arch::fence_barrier_init();
    }
    wait_for_inputs();
    compute_attn_latent<Traits>(params, boxes, shared, plan);
}

}  // namespace flash::sm90
