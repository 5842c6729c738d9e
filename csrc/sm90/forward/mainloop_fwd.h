// The consumer's side of the forward: Q K^T, softmax and P V of 64 query rows, over the key blocks of each work tile.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <type_traits>

#include "common/dropout.h"
#include "common/score_mod.h"
#include "dispatch/kind.h"
#include "kernel_traits.h"
#include "largest_logit.h"
#include "mask_of_keys.h"
#include "sm90/common/accumulator.h"
#include "sm90/common/mma.h"
#include "sm90/common/pipeline.h"
#include "softmax.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// A consumer warpgroup.
template <typename Traits, Kind kKind>
class Consumer {
protected:
    using Element = typename Traits::Element;
    using TiledMmaQK = typename Traits::TiledMmaQK;
    using TiledMmaPV = typename Traits::TiledMmaPV;
    static constexpr int kBlockN = Traits::kBlockN, kRows = Traits::kRows;
    static constexpr bool kIsGeneral = is_general(kKind), kIsSplit = kKind == Kind::split;
    static constexpr int kMinSeqlenOfLimits = 4096;
    using SoftmaxState = Softmax<Element, 2, /*kMayOffset=*/!kIsSplit>;

    // One key block of one work tile.
    struct Step {
        int tile;  // stage of the work tile in the ring
        KeyBlocks blocks;
        SecondRange second;
        int n_block;

        __device__ __forceinline__ bool is_last() const { return n_block == blocks.n_block_min; }
        __device__ __forceinline__ void advance() { n_block = second.before(n_block); }
        __device__ __forceinline__ Step next() const {
            Step step = *this;
            step.advance();
            return step;
        }
        __device__ __forceinline__ bool needs_mask() const {
            return blocks.needs_mask(n_block) && !(has_ranges(kKind) && second.is_full(n_block));
        }
    };

public:
    __device__ Consumer(const Flash_fwd_params &params, typename Traits::SharedStorage &shared, int warpgroup)
        : params(params), shared(shared), warpgroup(warpgroup), tiles{shared.tiles}, ping_pong(warpgroup) {
        states.q.stage = warpgroup;
    }

    // All work tiles, each from its last key block to its first. S of a key block and O of the block before it are
    // multiplied together, and the softmax of S overlaps with the product of O; from tile to tile as within a tile.
    // store(tile, acc_o, softmax) receives a tile's unnormalised output and its row statistics.
    template <typename Store>
    __device__ __forceinline__ void mma(const Store &store) {
        Tensor acc_s = partition_fragment_C(TiledMmaQK{}, typename Traits::TileS{});     // (MMA, MMA_M, MMA_N)
        Tensor acc_o = partition_fragment_C(TiledMmaPV{}, typename Traits::TileO{});     // (MMA, MMA_M, MMA_K)
        Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));  // (row, col)
        Tensor tOrP = make_tensor<Element>(operand_A_layout(acc_s.layout()));            // (MMA, MMA_M, MMA_K)

        Step step = take_tile();
        if (step.blocks.has(KeyBlocks::is_end)) {
            return;
        }
        SoftmaxState softmax(holds_logits<kKind>(params) ? float(kLog2e) : params.scale_softmax_log2);

        // The first step of all has no product for O.
        begin_tile(step);
        start_bias(step);
        wait_for_K();
        ping_pong.wait();
        issue_S(acc_s);
        ping_pong.signal_next();
        wait_for<0>(acc_s);
        softmax_step</*kIsFirst=*/true>(step, acc_s, softmax);
        start_next_bias(step);
        release_after_S(step);
        skip_V(step.blocks.has(KeyBlocks::skips_first));
        round_P(step, acc_s, tOrP);

        for (bool accumulates = false;; accumulates = false) {
            // Steady state: S of the next key block, O of this one.
            while (!step.is_last()) {
                issue_S_and_O(step, accumulates, acc_s, tOrP, acc_o);
                step.advance();
                accumulates = true;
                wait_for<1>(acc_s);
                const auto rescale = softmax_step</*kIsFirst=*/false>(step, acc_s, softmax);
                start_next_bias(step);
                release_after_S(step);
                wait_for<0>(acc_o);
                release_V();
                softmax.apply(rescale, acc_o_rowcol);
                round_P(step, acc_s, tOrP);
            }

            // Tile change: S of the next tile's first key block, O of this tile's last one.
            const Step next = take_tile();
            skip_K(step.blocks.has(KeyBlocks::skips_last));
            if (next.blocks.has(KeyBlocks::is_end)) {
                issue_O(step, accumulates, tOrP, acc_o);
                wait_for<0>(acc_o);
                release_V();
                skip_V(step.blocks.has(KeyBlocks::skips_last));
                store(tiles[step.tile], acc_o_rowcol, softmax);
                return;
            }
            begin_tile(next);
            start_bias(next);
            issue_S_and_O(step, accumulates, acc_s, tOrP, acc_o);
            const SoftmaxState finished = softmax;
            softmax = SoftmaxState(softmax.scale_log2);
            wait_for<1>(acc_s);
            softmax_step</*kIsFirst=*/true>(next, acc_s, softmax);
            start_next_bias(next);
            release_after_S(next);
            wait_for<0>(acc_o);
            release_V();
            skip_V(step.blocks.has(KeyBlocks::skips_last));
            skip_V(next.blocks.has(KeyBlocks::skips_first));
            store(tiles[step.tile], acc_o_rowcol, finished);
            tiles.release(step.tile);
            step = next;
            if (kIsGeneral) {  // keeps the compiler from rounding P, and spilling it, before O is stored
                warpgroup_fence_operand(acc_s);
            }
            round_P(step, acc_s, tOrP);
        }
    }

protected:
    const Flash_fwd_params &params;
    typename Traits::SharedStorage &shared;
    const int warpgroup;
    WorkTileRing<Traits::kConsumers> tiles;
    const PingPong<Traits::kConsumers, Traits::TileSize::kPingPong> ping_pong;
    typename Traits::PipelineStates states;
    MaxLogit max_logit;  // of the work tile; general kernels
    std::conditional_t<Traits::kTracksLogits, LargestLogit<2, /*kParts=*/4>, NoLargestLogit> largest_logit;
    MaskOfKeys<kBlockN> mask_of_keys;  // of the step, where all queries share a boolean attn_bias

    // ---- work tiles -------------------------------------------------------------------------------------------------

    __device__ __forceinline__ Step take_tile() {
        const int tile = tiles.take();
        const KeyBlocks blocks = tiles.key_blocks(tile, warpgroup).template to_registers<kKind>();
        const SecondRange second = tiles.second_range(tile, warpgroup).template to_registers<kKind>();
        return {tile, blocks, second, blocks.n_block_max - 1};
    }

    // Waits for Q and passes over a first key block that this consumer skips.
    __device__ __forceinline__ void begin_tile(const Step &step) {
        states.q.wait(shared.q_barriers);
        if (kIsSplit) {
            cutlass::arch::fence_view_async_shared();  // cp.async wrote Q, wgmma reads it
        } else if (kIsGeneral) {
            // Rows past the end of the sequence belong to the next one. The softmax votes across the warp, so they
            // would change this sequence's last bits: they become zeros.
            const int rows = uniform(tiles[step.tile].sequence.seqlen_q - first_row(step.tile));
            if (rows < kRows) {
                Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});  // (64, HD, stage)
                clear_rows_from(rows, sQ(_, _, states.q.stage), warpgroup);
            }
        }
        skip_K(step.blocks.has(KeyBlocks::skips_first));
    }

    __device__ __forceinline__ int first_row(int tile) const {
        return (tiles[tile].place.block * Traits::kConsumers + warpgroup) * kRows;
    }

    // ---- products ---------------------------------------------------------------------------------------------------

    template <typename TensorS, typename TensorP, typename TensorO>
    __device__ __forceinline__ void issue_S_and_O(const Step &step_of_O, bool accumulates, TensorS &acc_s,
                                                  TensorP &tOrP, TensorO &acc_o) {
        wait_for_K();
        ping_pong.wait();
        issue_S(acc_s);
        issue_O(step_of_O, accumulates, tOrP, acc_o);
        ping_pong.signal_next();
    }

    // S = Q K^T, both operands in shared memory.
    template <typename TensorS>
    __device__ __forceinline__ void issue_S(TensorS &acc_s) const {
        Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});  // (64, HD, stage)
        Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutK{});  // (BLK_N, HD, stage)
        auto thr_mma = TiledMmaQK{}.get_slice(int(threadIdx.x % 128));
        Tensor tSrQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ))(_, _, _, states.q.stage);  // (MMA, MMA_M, MMA_K)
        Tensor tSrK = thr_mma.make_fragment_B(thr_mma.partition_B(sK))(_, _, _, states.k.stage);  // (MMA, MMA_N, MMA_K)
        issue<TiledMmaQK>(/*accumulates=*/false, tSrQ, tSrK, acc_s);
    }

    // O (+)= P V, with P in registers.
    template <typename TensorP, typename TensorO>
    __device__ __forceinline__ void issue_O(const Step &step, bool accumulates, TensorP &tOrP, TensorO &acc_o) const {
        Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});  // (HD, BLK_N, stage)
        auto thr_mma = TiledMmaPV{}.get_slice(int(threadIdx.x % 128));
        Tensor tOrVt =
            thr_mma.make_fragment_B(thr_mma.partition_B(sVt))(_, _, _, states.v.stage);  // (MMA, MMA_N, MMA_K)
        states.v.wait(shared.v_barriers);
        if (kIsGeneral && step.n_block >= step.blocks.n_ragged) {  // another sequence's NaN or infinity times 0 is NaN
            Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutV{});  // (BLK_N, HD, stage)
            const int rows = tiles[step.tile].sequence.seqlen_k - step.n_block * kBlockN;
            clear_rows_from(rows, sV(_, _, states.v.stage), warpgroup);
        }
        warpgroup_fence_operand(tOrP);
        issue<TiledMmaPV>(accumulates, tOrP, tOrVt, acc_o);
    }

    // ---- pipeline ---------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void wait_for_K() { states.k.wait(shared.k_barriers); }

    __device__ __forceinline__ void release_K() {
        states.k.release(shared.k_barriers);
        states.k.advance();
    }
    __device__ __forceinline__ void release_V() {
        states.v.release(shared.v_barriers);
        states.v.advance();
    }
    // K is no longer needed, after the last key block Q neither.
    __device__ __forceinline__ void release_after_S(const Step &step) {
        release_K();
        if (step.is_last()) {
            states.q.release(shared.q_barriers);
            states.q.advance(Traits::kConsumers);
        }
    }

    // A key block that only the rows of other consumers see is waited for and released unread.
    __device__ __forceinline__ void skip_K(bool is_skipped) {
        if (is_local(kKind) && is_skipped) {
            wait_for_K();
            release_K();
            ping_pong.wait();
            ping_pong.signal_next();
        }
    }
    __device__ __forceinline__ void skip_V(bool is_skipped) {
        if (is_local(kKind) && is_skipped) {
            states.v.wait(shared.v_barriers);
            release_V();
        }
    }

    // ---- scores and probabilities -----------------------------------------------------------------------------------

    // Scores become probabilities. Returns the factors for O.
    template <bool kIsFirst, typename TensorS>
    __device__ __forceinline__ auto softmax_step(const Step &step, TensorS &acc_s, SoftmaxState &softmax) {
        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
        const bool needs_mask = step.needs_mask();
        modify(step, scores);
        mask(needs_mask, step, scores);
        track_maximum(step, scores);
        const bool may_see_few =
            kIsFirst && (has_bias(kKind) || (needs_mask && step.blocks.has(KeyBlocks::may_see_few)));
        const bool may_rise = kIsGeneral && !kIsSplit && step.blocks.has(KeyBlocks::has_alibi) &&
                              (kIsFirst || step.n_block >= step.blocks.n_rising_begin);
        const Head head{*this, step};
        if constexpr (decltype(largest_logit)::kIsTracked) {
            largest_logit.add_step(scores, softmax.scale_log2, head);
        }
        const auto recompute = [&](auto &scores) {
            recompute_S(scores);
            modify(step, scores);
            mask(needs_mask, step, scores);
        };
        return softmax.template step<kIsFirst>(scores, may_see_few || may_rise, recompute, largest_logit, head);
    }

    // Score modifiers. With a bias scores become logits.
    template <typename TensorS>
    __device__ __forceinline__ void modify(const Step &step, TensorS &scores) const {
        if (kIsGeneral && step.blocks.has(KeyBlocks::has_score_mod)) {
            tiles.score_mod(step.tile).template apply</*kTransposed=*/false>(
                scores, coords_of_scores(threadIdx.x % 128), coords_of_scores(0), first_row(step.tile),
                step.n_block * kBlockN, [](int, int, float) {});
        }
        if constexpr (has_bias(kKind)) {
            if (params.attn_bias.type == AttnBias::Type::float32) {
                bias_of_head(step.tile).add_float32_to(scores, coords_of_scores(threadIdx.x % 128),
                                                       params.scale_softmax, first_row(step.tile),
                                                       step.n_block * kBlockN);
            } else if (is_mask_of_keys(params.attn_bias)) {
                mask_of_keys.apply(scores);
            } else {
                add_bias(scores);
            }
        }
    }

    // ---- attn_bias --------------------------------------------------------------------------------------------------

    __device__ __forceinline__ auto bias_tile() const {
        return typename Traits::BiasTile{shared.bias[threadIdx.x / 32 - 4]};  // without the producer's four warps
    }
    __device__ __forceinline__ auto bias_of_head(int tile) const {
        return BiasOfHead<Element>(params, tiles[tile].place.bidb, tiles[tile].place.bidh);
    }

    // The warp starts to load the bias of a step.
    __device__ __forceinline__ void start_bias(const Step &step) {
        if constexpr (has_bias(kKind)) {
            if (is_mask_of_keys(params.attn_bias)) {
                mask_of_keys.start(bias_of_head(step.tile), step.n_block * kBlockN);
                return;
            }
            bias_tile().start(bias_of_head(step.tile), first_row(step.tile) + threadIdx.x % 128 / 32 * 16,
                              step.n_block * kBlockN);
        }
    }
    // The same for the step after this one in the work tile, when the scores of this one are done.
    __device__ __forceinline__ void start_next_bias(const Step &step) {
        if constexpr (has_bias(kKind)) {
            __syncwarp();  // all lanes have read
            if (!step.is_last()) {
                start_bias(step.next());
            }
        }
    }

    // scores (row, col) become logits, with the bias that start_bias has loaded. A row of zeros, as where no key is
    // padding, is only looked at.
    template <typename TensorS>
    __device__ __forceinline__ void add_bias(TensorS &scores) const {
        const auto tile = bias_tile();
        const int lane = threadIdx.x % 32;
        const bool has_one_row = params.attn_bias.row_stride == 0;
        tile.wait();
        if (has_one_row && has_zeros_in_first_row(tile)) {
            CUTE_UNROLL
            for (int i = 0; i < size(scores); ++i) {
                scores(i) *= params.scale_softmax;
            }
            return;
        }
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            const int query = has_one_row ? 0 : lane / 4 + 8 * row;
            CUTE_UNROLL
            for (int i = 0; i < kBlockN / 8; ++i) {  // two neighbouring keys in a word
                const float2 pair =
                    BiasOfHead<Element>::unpack(reinterpret_cast<const uint32_t *>(tile.at(query, i))[lane % 4]);
                scores(row, 2 * i) = __fmaf_rn(scores(row, 2 * i), params.scale_softmax, pair.x);
                scores(row, 2 * i + 1) = __fmaf_rn(scores(row, 2 * i + 1), params.scale_softmax, pair.y);
            }
        }
    }

    // True in every lane if the values of a bias with one row are 0.
    template <typename Tile>
    __device__ __forceinline__ static bool has_zeros_in_first_row(const Tile &tile) {
        constexpr int kValues = 4;  // of a lane
        const int first = threadIdx.x % 32 * kValues;
        uint2 words = {0, 0};
        if (first < kBlockN) {
            words = *reinterpret_cast<const uint2 *>(tile.at(0, first / 8) + first % 8);
        }
        return __all_sync(0xffffffffu, (words.x | words.y) == 0);
    }

    template <typename TensorS>
    __device__ __forceinline__ void mask_ranges(const Step &step, TensorS &scores) const {
        const WorkTile &tile = tiles[step.tile];
        const RangesOfHead ranges(params, tile.place.bidb, tile.place.bidh);
        apply_ranges(scores, step.n_block * kBlockN, [&](int row) {
            const int query = first_row(step.tile) + first_row_of_thread() + row * 8;
            return ranges.row(min(query, tile.sequence.seqlen_q - 1));
        });
    }

    template <typename TensorS>
    __device__ __forceinline__ void mask(bool needs_mask, const Step &step, TensorS &scores) const {
        if constexpr (has_ranges(kKind)) {
            if (needs_mask) {
                mask_ranges(step, scores);
            }
        } else if (has_bias(kKind) && params.key_ranges.is_used()) {
            mask_ranges(step, scores);
        } else if (needs_mask) {
            const Sequence &sequence = tiles[step.tile].sequence;
            const KeyRange<is_local(kKind)> range(params, sequence.seqlen_q, sequence.seqlen_k);
            const int first_key = step.n_block * kBlockN;
            const auto query = [&](int row) {
                return query_of<kKind>(params, first_row(step.tile) + first_row_of_thread() + row * 8);
            };
            apply_mask(
                scores, [&](int row) { return range.begin_key(query(row)) - first_key; },
                [&](int row) { return range.end_key(query(row)) - first_key; });
        }
    }

    // The option return_max_logits in the general kernels.
    template <typename TensorS>
    __device__ __forceinline__ void track_maximum(const Step &step, const TensorS &scores) {
        if (kIsGeneral && !kIsSplit && MaxLogit::is_on(params)) {
            const WorkTile &tile = tiles[step.tile];
            const int queries = tile.sequence.seqlen_q - first_row(step.tile) - first_row_of_thread();
            max_logit.add(scores, [&](int row) { return row * 8 < queries; });
            if (step.is_last()) {
                max_logit.store(params, tile.place.bidb, tile.place.bidh,
                                holds_logits<kKind>(params) ? 1.0f : params.scale_softmax);
            }
        }
    }

    // The head of a step, for the kernels with TracksLogits.
    struct Head {
        const Consumer &consumer;
        const Step &step;

        // In short sequences few steps would know a large logit.
        __device__ __forceinline__ bool compares_scores() const {
            return consumer.params.seqlen_k < kMinSeqlenOfLimits;
        }
        __device__ __forceinline__ float known() const { return shared_logit().value(); }
        __device__ __forceinline__ float raise(float logit) const {
            const auto &place = consumer.tiles[step.tile].place;
            return shared_logit().raise(logit, MaxLogit::of_head(consumer.params, place.bidb, place.bidh));
        }
        __device__ __forceinline__ SharedLogit shared_logit() const {
            return SharedLogit(consumer.tiles.largest_logit(step.tile));
        }
        __device__ __forceinline__ bool is_query(int row) const {
            const int query = consumer.first_row(step.tile) + first_row_of_thread() + row * 8;
            return query < consumer.tiles[step.tile].sequence.seqlen_q;
        }
    };

    // Recomputes S for the softmax. The other warps take no part, and a wgmma for O is in flight.
    template <typename TensorS>
    __device__ __forceinline__ void recompute_S(TensorS &scores) const {
        Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});  // (64, HD, stage)
        Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutK{});  // (BLK_N, HD, stage)
        multiply_by_mma_sync<Traits>(sQ(_, _, states.q.stage), sK(_, _, states.k.stage), scores);
    }

    template <typename TensorS>
    __device__ __forceinline__ void apply_dropout(const Step &step, TensorS &acc_s) const {
        if (kIsGeneral && !kIsSplit && step.blocks.has(KeyBlocks::has_dropout)) {
            Tensor p = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
            DropoutStream stream = tiles.dropout(step.tile);
            stream.key0 = uniform(stream.key0);  // in uniform registers, and so the keys of all rounds
            stream.key1 = uniform(stream.key1);
            drop(p, coords_of_scores(threadIdx.x % 128), stream, params.dropout_threshold, first_row(step.tile),
                 step.n_block * kBlockN);
        }
    }

    // P in registers as the A operand of P V: the registers of S in their order. Dropout comes last, when the registers
    // of the previous operand are free.
    template <typename TensorS, typename TensorP>
    __device__ __forceinline__ void round_P(const Step &step, TensorS &acc_s, TensorP &tOrP) const {
        apply_dropout(step, acc_s);
        constexpr int kCount = decltype(size(acc_s))::value;
        using Rounded = cutlass::Array<Element, kCount>;
        *reinterpret_cast<Rounded *>(tOrP.data()) = cutlass::NumericArrayConverter<Element, float, kCount>::convert(
            *reinterpret_cast<const cutlass::Array<float, kCount> *>(acc_s.data()));
    }

    // (row, col) -> (row, key) in the tile of S, for the elements that a thread holds.
    __device__ __forceinline__ static auto coords_of_scores(int thread) {
        auto thr_mma = TiledMmaQK{}.get_slice(thread);
        Tensor tScS = thr_mma.partition_C(make_identity_tensor(typename Traits::TileS{}));  // (MMA, MMA_M, MMA_N)
        return make_tensor(tScS.data(), rowcol_layout(tScS.layout()));
    }
};

}  // namespace flash::sm90
