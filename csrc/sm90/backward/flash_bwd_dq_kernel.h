// dQ in a pass of its own: flash_bwd_dq_kernel -> compute_dq_1rowblock. A CTA has 128 query rows of a head and walks
// their key blocks as the forward does: S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta), dQ += dS K. dQ
// stays in registers, so it needs no float32 sums in global memory, and is bitwise repeatable.
//
// flash_bwd_kernel runs before it without dQ, and leaves lse and delta of the rows. flash_bwd_dq.h says which calls
// take two passes.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>

#include "common/block_info.h"
#include "common/softmax.h"
#include "common/store_rows.h"
#include "dispatch/kind.h"
#include "sm90/common/accumulator.h"
#include "sm90/common/find_block.h"
#include "sm90/common/mma.h"
#include "sm90/common/tma.h"
#include "sm90/common/unhoisted.h"

namespace flash::sm90 {

using namespace cute;

// ---- tile sizes and types

// kBlockN: keys of a step. kStagesK, kStagesV: stages of the pipelines.
template <int kHeadDim>
struct TileSizesBwdDq;
template <>
struct TileSizesBwdDq<192> {
    static constexpr int kBlockN = 80, kStagesK = 2, kStagesV = 2;
};
template <>
struct TileSizesBwdDq<256> {
    static constexpr int kBlockN = 64, kStagesK = 2, kStagesV = 1;
};

template <DType kDType, int kHeadDim_>
struct Flash_bwd_dq_traits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    using TileSize = TileSizesBwdDq<kHeadDim_>;
    static constexpr int kHeadDim = kHeadDim_, kBlockN = TileSize::kBlockN;
    static constexpr int kStagesK = TileSize::kStagesK, kStagesV = TileSize::kStagesV;
    static constexpr int kConsumers = 2, kRows = 64;  // warpgroups, and the rows of each: the m64 of wgmma
    static constexpr int kBlockM = kConsumers * kRows, kNThreads = 128 * (kConsumers + 1);
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

    // S and dP: both operands in shared memory. dQ: dS in registers, K transposed by wgmma.
    using TileQ = Shape<Int<kRows>, Int<kHeadDim>>;
    using TileK = Shape<Int<kBlockN>, Int<kHeadDim>>;
    using TileS = Shape<Int<kRows>, Int<kBlockN>>;
    using TiledMmaS = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kBlockN>, Int<kHeadDim>>>()));
    using TiledMmadQ = decltype(make_tiled_mma(
        GMMA::rs_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kHeadDim>, Int<kBlockN>>, GMMA::Major::K,
                             GMMA::Major::MN>()));

    using SmemLayoutAtom = GMMA::Layout_K_SW128_Atom<Element>;
    using SmemLayoutQ = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kRows>, Int<kHeadDim>, Int<kConsumers>>{}));
    template <int kStages>
    using SmemLayoutK = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
    using SmemLayoutKt =
        decltype(composition(SmemLayoutK<kStagesK>{},
                             make_layout(Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStagesK>>{},
                                         Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDim>>{})));  // (HD, key, stage)
    using TmaQ = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutQ{})), TileQ>;
    using TmaK = TmaLoad<Element, decltype(take<0, 2>(SmemLayoutK<1>{})), TileK>;
    struct Copies {
        TmaQ q, dout;
        TmaK k, v;
    };

    static constexpr int kAlignment = 1024;  // bytes: of the swizzled layouts
    struct SharedStorage {
        alignas(kAlignment) Element q[cosize_v<SmemLayoutQ>];
        alignas(kAlignment) Element dout[cosize_v<SmemLayoutQ>];
        alignas(kAlignment) Element k[cosize_v<SmemLayoutK<kStagesK>>];
        alignas(kAlignment) Element v[cosize_v<SmemLayoutK<kStagesV>>];
        PipelineBarriers<kConsumers> q_barriers, dout_barriers;  // a stage for each consumer, filled once
        PipelineBarriers<kStagesK> k_barriers;
        PipelineBarriers<kStagesV> v_barriers;
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);
    static_assert(kSmemSize <= 227 * 1024, "more shared memory than a thread block may have");
};

// ---- the rows of a CTA

template <typename Traits, Kind kKind>
struct RowBlock {
    static constexpr bool kIsVarlen = may_be_varlen(kKind), kIsLocal = is_local(kKind);
    int bidb, bidh, m_block;
    Sequence sequence;

    // index: of the CTA. Under a mask the last blocks of a head come first, because they are the longest ones of causal
    // attention. Called by whole warps.
    __device__ RowBlock(const Flash_bwd_params &params, int index) {
        const RowBlocks blocks = row_blocks<kIsVarlen>(params, Traits::kBlockM);
        if (kIsVarlen && params.cu_seqlens_q != nullptr) {
            bidh = index / blocks.per_head;
            const FoundBlock found =
                find_block_by_warp</*kOfKeys=*/false>(params, Traits::kBlockM, index - bidh * blocks.per_head);
            bidb = found.bidb;
            m_block = found.block;
            sequence = found.sequence;
        } else {
            const RowBlocks::Place place = blocks.place(index, /*is_reversed=*/kIsLocal);
            bidb = place.bidb;
            bidh = place.bidh;
            m_block = place.block;
            sequence = flash::sequence</*kMayBeVarlen=*/false>(params, bidb);
        }
    }

    __device__ __forceinline__ bool exists() const { return m_block * Traits::kBlockM < sequence.seqlen_q; }

    // Of both consumers, and of one.
    using Info = BlockInfo<Traits::kBlockM, Traits::kBlockN, kIsLocal>;
    using InfoOfConsumer = BlockInfo<Traits::kRows, Traits::kBlockN, kIsLocal>;
    __device__ __forceinline__ Info info(const Flash_bwd_params &params) const { return {params, sequence, m_block}; }
    __device__ __forceinline__ InfoOfConsumer info(const Flash_bwd_params &params, int consumer) const {
        return {params, sequence, m_block * Traits::kConsumers + consumer};
    }
};

// ---- the producer

// Called by one warp. It loads what S needs before what dP needs, from the last key block to the first.
template <typename Traits, Kind kKind>
class LoaderBwdDq {
    using Element = typename Traits::Element;
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;
    const RowBlock<Traits, kKind> &block;
    PipelineState<Traits::kStagesK> k_state;
    PipelineState<Traits::kStagesV> v_state;

public:
    __device__ LoaderBwdDq(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                           typename Traits::SharedStorage &shared, const RowBlock<Traits, kKind> &block)
        : params(params), copies(copies), shared(shared), block(block) {}

    __device__ __forceinline__ void load() {
        const auto info = block.info(params);
        bool is_first = true;
        CUTE_NO_UNROLL
        for (int n_block = info.n_block_max - 1; n_block >= info.n_block_min; --n_block, is_first = false) {
            if (is_first) {
                load_rows_of_block(copies.q, shared.q, shared.q_barriers);
            }
            load_keys(copies.k, shared.k, shared.k_barriers, k_state, n_block);
            if (is_first) {
                load_rows_of_block(copies.dout, shared.dout, shared.dout_barriers);
            }
            load_keys(copies.v, shared.v, shared.v_barriers, v_state, n_block);
        }
    }

private:
    static constexpr bool kIsVarlen = may_be_varlen(kKind);
    __device__ __forceinline__ int batch() const {
        return kIsVarlen && params.cu_seqlens_q != nullptr ? 0 : block.bidb;
    }

    __device__ __forceinline__ void load_rows_of_block(const typename Traits::TmaQ &tma, Element *smem,
                                                       PipelineBarriers<Traits::kConsumers> &barriers) const {
        if (cute::elect_one_sync()) {
            Tensor sQ = make_tensor(make_smem_ptr(smem), typename Traits::SmemLayoutQ{});  // (64, HD, consumer)
            CUTE_NO_UNROLL
            for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
                uint64_t &barrier = PipelineState<Traits::kConsumers>{consumer}.expect(
                    barriers, size(typename Traits::TileQ{}) * sizeof(Element));
                load_rows(tma, typename Traits::TileQ{}, sQ, consumer, barrier,
                          block.sequence.q_begin + block.m_block * Traits::kBlockM + consumer * Traits::kRows,
                          block.bidh, batch());
            }
        }
    }

    template <int kStages>
    __device__ __forceinline__ void load_keys(const typename Traits::TmaK &tma, Element *smem,
                                              PipelineBarriers<kStages> &barriers, PipelineState<kStages> &state,
                                              int n_block) const {
        state.acquire(barriers);
        if (cute::elect_one_sync()) {
            Tensor sK = make_tensor(make_smem_ptr(smem), typename Traits::template SmemLayoutK<kStages>{});
            load_rows(tma, typename Traits::TileK{}, sK, state.stage,
                      state.expect(barriers, size(typename Traits::TileK{}) * sizeof(Element)),
                      block.sequence.k_begin + n_block * Traits::kBlockN, block.bidh / params.h_h_k_ratio, batch());
        }
        state.advance();
    }
};

// ---- the consumers

// A consumer warpgroup: 64 rows.
template <typename Traits, Kind kKind>
class ConsumerBwdDq {
    using Element = typename Traits::Element;
    static constexpr int kBlockN = Traits::kBlockN, kRowsOfThread = 2;
    const Flash_bwd_params &params;
    typename Traits::SharedStorage &shared;
    const RowBlock<Traits, kKind> &block;
    const int warpgroup;  // of the consumers
    PipelineState<Traits::kStagesK> k_state;
    PipelineState<Traits::kStagesV> v_state;
    float lse[kRowsOfThread], delta[kRowsOfThread];  // +inf and 0 for rows without a key, and past the end
    bool has_large_rows;                             // the same in all lanes: some log-sum-exp is large

public:
    __device__ ConsumerBwdDq(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                             const RowBlock<Traits, kKind> &block, int warpgroup)
        : params(params), shared(shared), block(block), warpgroup(warpgroup) {
        const int64_t padded_row = block.bidb * params.padded_batch_stride + block.bidh * params.padded_head_stride +
                                   padded_begin<may_be_varlen(kKind)>(params, block.bidb, block.sequence.q_begin) +
                                   first_row();
        bool is_large = false;
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfThread; ++i) {
            lse[i] = params.lse_padded[padded_row + i * 8];
            delta[i] = static_cast<const float *>(params.dsoftmax_sum)[padded_row + i * 8];
            is_large |= fabsf(lse[i]) > kLargeExponent && lse[i] != INFINITY;
        }
        has_large_rows = __any_sync(0xffffffffu, is_large) != 0;
    }

    // S and dP of a key block are multiplied together with dQ of the block before it.
    __device__ __forceinline__ void run() {
        Tensor acc_dq = partition_fragment_C(typename Traits::TiledMmadQ{}, typename Traits::TileQ{});
        const auto all = block.info(params);
        const auto own = block.info(params, warpgroup);
        int n_block = min(own.n_block_max, all.n_block_max) - 1;
        const int last = max(own.n_block_min, all.n_block_min);
        if (n_block < last) {  // no row of this consumer sees a key
            skip(all.n_block_max - all.n_block_min);
            clear(acc_dq);
            store(acc_dq);
            return;
        }
        skip(all.n_block_max - 1 - n_block);
        Tensor acc_s = partition_fragment_C(typename Traits::TiledMmaS{}, typename Traits::TileS{});
        Tensor acc_dp = partition_fragment_C(typename Traits::TiledMmaS{}, typename Traits::TileS{});
        Tensor rdS = make_tensor<Element>(operand_A_layout(acc_s.layout()));  // (MMA, MMA_M, MMA_K)
        PipelineState<Traits::kConsumers>{warpgroup}.wait(shared.q_barriers);
        wait_for_keys(shared.k, shared.k_barriers, k_state, n_block);
        issue_scores(shared.q, shared.k, k_state, acc_s);
        PipelineState<Traits::kConsumers>{warpgroup}.wait(shared.dout_barriers);
        wait_for_keys(shared.v, shared.v_barriers, v_state, n_block);
        issue_scores(shared.dout, shared.v, v_state, acc_dp);
        wait_for<1>(acc_s);
        exponentiate(own, n_block, acc_s);
        wait_for<0>(acc_dp);
        release(shared.v_barriers, v_state);
        round_ds(acc_s, acc_dp, rdS);
        bool accumulates = false;
        for (; n_block > last; accumulates = true) {
            --n_block;
            auto k_of_dq = k_state;
            k_state.advance();
            issue_dq(accumulates, k_of_dq, rdS, acc_dq);
            wait_for_keys(shared.k, shared.k_barriers, k_state, n_block);
            issue_scores(shared.q, shared.k, k_state, acc_s);
            wait_for_keys(shared.v, shared.v_barriers, v_state, n_block);
            issue_scores(shared.dout, shared.v, v_state, acc_dp);
            wait_for<2>(acc_dq);
            k_of_dq.release(shared.k_barriers);
            wait_for<1>(acc_s);
            exponentiate(own, n_block, acc_s);
            wait_for<0>(acc_dp);
            release(shared.v_barriers, v_state);
            round_ds(acc_s, acc_dp, rdS);
        }
        issue_dq(accumulates, k_state, rdS, acc_dq);
        wait_for<0>(acc_dq);
        release(shared.k_barriers, k_state);
        skip(last - all.n_block_min);
        store(acc_dq);
    }

private:
    // In the sequence: of the rows that this thread holds.
    __device__ __forceinline__ int first_row() const {
        return block.m_block * Traits::kBlockM + warpgroup * Traits::kRows + first_row_of_thread();
    }

    template <int kStages>
    __device__ __forceinline__ static void release(PipelineBarriers<kStages> &barriers, PipelineState<kStages> &state) {
        state.release(barriers);
        state.advance();
    }

    // Key blocks that only rows of the other consumer see are waited for and released unread.
    __device__ __forceinline__ void skip(int count) {
        CUTE_NO_UNROLL
        for (; count > 0; --count) {
            k_state.wait(shared.k_barriers);
            release(shared.k_barriers, k_state);
            v_state.wait(shared.v_barriers);
            release(shared.v_barriers, v_state);
        }
    }

    // Rows past the end of the sequence belong to the next one: they become zeros, because NaN times 0 is NaN.
    template <int kStages>
    __device__ __forceinline__ void wait_for_keys(Element *smem, PipelineBarriers<kStages> &barriers,
                                                  const PipelineState<kStages> &state, int n_block) const {
        state.wait(barriers);
        const int rows = block.sequence.seqlen_k - n_block * kBlockN;
        if (may_be_varlen(kKind) && rows < kBlockN) {
            Tensor sK = make_tensor(make_smem_ptr(smem), typename Traits::template SmemLayoutK<kStages>{});
            clear_rows_from(rows, sK(_, _, state.stage), warpgroup);
        }
    }

    // S = Q K^T, or dP = dO V^T.
    template <int kStages, typename TensorS>
    __device__ __forceinline__ void issue_scores(Element *smem_q, Element *smem_k, const PipelineState<kStages> &state,
                                                 TensorS &acc) const {
        using TiledMma = typename Traits::TiledMmaS;
        Tensor sQ =
            make_tensor(make_smem_ptr(unhoisted(smem_q)), typename Traits::SmemLayoutQ{});  // (64, HD, consumer)
        Tensor sK = make_tensor(make_smem_ptr(unhoisted(smem_k)), typename Traits::template SmemLayoutK<kStages>{});
        auto thr_mma = TiledMma{}.get_slice(int(threadIdx.x % 128));
        Tensor tSrQ =
            thr_mma.make_fragment_A(thr_mma.partition_A(sQ(_, _, uniform(warpgroup))));  // (MMA, MMA_M, MMA_K)
        Tensor tSrK =
            thr_mma.make_fragment_B(thr_mma.partition_B(sK(_, _, uniform(state.stage))));  // (MMA, MMA_N, MMA_K)
        issue<TiledMma>(/*accumulates=*/false, tSrQ, tSrK, acc);
    }

    // dQ (+)= dS K.
    template <typename TensorD, typename TensorDq>
    __device__ __forceinline__ void issue_dq(bool accumulates, const PipelineState<Traits::kStagesK> &state,
                                             TensorD &rdS, TensorDq &acc) const {
        using TiledMma = typename Traits::TiledMmadQ;
        Tensor sKt =
            make_tensor(make_smem_ptr(unhoisted(&shared.k[0])), typename Traits::SmemLayoutKt{});  // (HD, BLK_N, stage)
        auto thr_mma = TiledMma{}.get_slice(int(threadIdx.x % 128));
        Tensor tdQrKt =
            thr_mma.make_fragment_B(thr_mma.partition_B(sKt(_, _, uniform(state.stage))));  // (MMA, MMA_N, MMA_K)
        warpgroup_fence_operand(rdS);
        issue<TiledMma>(accumulates, rdS, tdQrKt, acc);
    }

    // S becomes P = exp(S * softmax_scale - lse).
    template <typename TensorS>
    __device__ __forceinline__ void exponentiate(const typename RowBlock<Traits, kKind>::InfoOfConsumer &own,
                                                 int n_block, TensorS &acc_s) const {
        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
        if (own.needs_mask(n_block)) {
            exponentiate</*kIsMasked=*/true>(own, n_block * kBlockN, scores);
        } else {
            exponentiate</*kIsMasked=*/false>(own, n_block * kBlockN, scores);
        }
    }

    // Where the log-sum-exp is large, the product of score and scale is rounded as in the forward.
    template <bool kIsMasked, typename TensorS>
    __device__ __forceinline__ void exponentiate(const typename RowBlock<Traits, kKind>::InfoOfConsumer &own,
                                                 int first_key, TensorS &scores) const {
        static_assert(decltype(size<1>(scores))::value <= 32, "one bit per column");
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            uint32_t visible = 0;
            if (kIsMasked) {
                const int query = first_row() + row * 8;
                visible = bits_between(columns_before(own.begin_key(query) - first_key),
                                       columns_before(own.end_key(query) - first_key));
            }
            const float lse_in_base_2 = lse[row] * float(kLog2e);
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                float &x = scores(row, col);
                x = has_large_rows ? (__fmul_rn(x, params.scale_softmax) - lse[row]) * float(kLog2e)
                                   : __fmaf_rn(x, params.scale_softmax_log2, -lse_in_base_2);
                x = exp2_approx(!kIsMasked || (visible & (1u << col)) ? x : -INFINITY);
            }
        }
    }

    // dS = P (dP - delta), rounded to the A operand of dQ: the registers of S in their order.
    template <typename TensorS, typename TensorD>
    __device__ __forceinline__ void round_ds(TensorS &acc_p, const TensorS &acc_dp, TensorD &rdS) const {
        Tensor p = make_tensor(acc_p.data(), rowcol_layout(acc_p.layout()));  // (row, col)
        Tensor dp = make_tensor(acc_dp.data(), rowcol_layout(acc_dp.layout()));
        CUTE_UNROLL
        for (int row = 0; row < size<0>(p); ++row) {
            CUTE_UNROLL
            for (int col = 0; col < size<1>(p); ++col) {
                p(row, col) *= dp(row, col) - delta[row];
            }
        }
        constexpr int kCount = decltype(size(acc_p))::value;
        using Rounded = cutlass::Array<Element, kCount>;
        *reinterpret_cast<Rounded *>(rdS.data()) = cutlass::NumericArrayConverter<Element, float, kCount>::convert(
            *reinterpret_cast<const cutlass::Array<float, kCount> *>(acc_p.data()));
    }

    // dQ times the scale of the scores. Rows without a key get zeros: an infinite key makes their sums NaN.
    template <typename TensorDq>
    __device__ __forceinline__ void store(const TensorDq &acc_dq) const {
        Tensor rows = make_tensor(acc_dq.data(), rowcol_layout(acc_dq.layout()));  // (row, col)
        const Sequence &sequence = block.sequence;
        const KeyRange<is_local(kKind)> range(params, sequence.seqlen_q, sequence.seqlen_k);
        Element *const dq = static_cast<Element *>(params.dq.ptr) + block.bidb * params.dq.batch_stride +
                            block.bidh * params.dq.head_stride;
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfThread; ++i) {
            const int row = first_row() + i * 8;
            const bool has_keys = row >= range.begin_row() && row < range.end_row();
            Element *const to = dq + (sequence.q_begin + row) * params.dq.row_stride;
            store_row<Element, uint4>(rows, i, params.qk_scale, [&](int col, const uint4 &vector) {
                if (row < sequence.seqlen_q && col < params.d) {
                    *reinterpret_cast<uint4 *>(to + col) = has_keys ? vector : uint4{};
                }
            });
        }
    }
};

// ---- the kernel

template <typename Traits, Kind kKind>
__device__ __forceinline__ void compute_dq_1rowblock(const Flash_bwd_params &params,
                                                     const typename Traits::Copies &copies,
                                                     typename Traits::SharedStorage &shared,
                                                     const RowBlock<Traits, kKind> &block) {
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            LoaderBwdDq<Traits, kKind>(params, copies, shared, block).load();
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        ConsumerBwdDq<Traits, kKind>(params, shared, block, role - 1).run();
    }
}

template <typename Traits, Kind kKind>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_bwd_dq_kernel(const __grid_constant__ Flash_bwd_params params,
                        const __grid_constant__ typename Traits::Copies copies) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4;  // per warpgroup
        prefetch_tma_descriptor(copies.q.get_tma_descriptor());
        prefetch_tma_descriptor(copies.dout.get_tma_descriptor());
        prefetch_tma_descriptor(copies.k.get_tma_descriptor());
        prefetch_tma_descriptor(copies.v.get_tma_descriptor());
        shared.q_barriers.init(kWarps);
        shared.dout_barriers.init(kWarps);
        shared.k_barriers.init(kWarps * Traits::kConsumers);
        shared.v_barriers.init(kWarps * Traits::kConsumers);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();  // every thread sees the barriers
    const RowBlock<Traits, kKind> block(params, blockIdx.x);
    if (block.exists()) {
        compute_dq_1rowblock(params, copies, shared, block);
    }
}

}  // namespace flash::sm90
