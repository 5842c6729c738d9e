// The consumers' side of the mainloop: a warpgroup multiplies, and takes the softmax of one key block while the tensor
// cores work on another.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "../common/dropout.h"
#include "../common/score_mod.h"
#include "kernel_traits.h"
#include "key_blocks.h"
#include "../kind.h"
#include "layout.h"
#include "mask.h"
#include "named_barriers.h"
#include "softmax.h"
#include "work_tile_ring.h"
#include "wgmma.h"

namespace flash::sm90 {

// A consumer warpgroup: it computes 64 query rows of each tile.
template <typename Traits, Kind kKind>
class Consumer {
    using Element = typename Traits::Element;
    using TiledMmaQK = typename Traits::TiledMmaQK;
    using TiledMmaPV = typename Traits::TiledMmaPV;
    static constexpr int kBlockN = Traits::kBlockN, kRows = Traits::kRows;
    static constexpr bool kIsGeneral = is_general(kKind);

public:
    __device__ Consumer(const Flash_fwd_params &params, typename Traits::SharedStorage &shared, int warpgroup)
        : params(params), shared(shared), warpgroup(warpgroup), tiles{shared.tiles}, turns(warpgroup) {
        rings.q.stage = warpgroup;
    }

    // All tiles, each from its last key block to its first. In the step from one tile to the next, the products and the
    // softmax overlap as within a tile. store(tile, acc_o, softmax) gets a tile's unnormalised output and its
    // statistics.
    template <typename Store>
    __device__ __forceinline__ void mma(const Store &store) {
        Tensor acc_s = partition_fragment_C(TiledMmaQK{}, typename Traits::TileS{});     // (MMA, MMA_M, MMA_N)
        Tensor acc_o = partition_fragment_C(TiledMmaPV{}, typename Traits::TileQ{});     // (MMA, MMA_M, MMA_K)
        Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));  // (row, col)
        Tensor tOrP = make_tensor<Element>(operand_A_layout(acc_s.layout()));            // (MMA, MMA_M, MMA_K)

        int tile = tiles.take();
        KeyBlocks blocks = key_blocks_of(tile);
        if (blocks.has(KeyBlocks::is_end)) {
            return;
        }
        int n_block = blocks.n_block_max - 1;
        Softmax<Element, 2> softmax(params.scale_softmax_log2);

        // The first key block of all has no product of another beside it.
        wait_for_Q(tile);
        skip_K(blocks.has(KeyBlocks::skips_first));
        rings.k.wait(shared.k_barriers);
        turns.await();
        issue_S(acc_s);
        turns.pass();
        wait_for<0>(acc_s);
        softmax_step</*kIsFirst=*/true>(tile, blocks, n_block, acc_s, softmax);
        release_after_S(n_block == blocks.n_block_min);
        skip_V(blocks.has(KeyBlocks::skips_first));
        round_P(tile, blocks, n_block, acc_s, tOrP);

        for (bool adds = false;; adds = false) {
            // Per step: S of the next block and O of this one are issued together; the softmax runs beside the second.
            while (n_block > blocks.n_block_min) {
                rings.k.wait(shared.k_barriers);
                turns.await();
                issue_S(acc_s);
                issue_O(adds, tile, blocks, n_block, tOrP, acc_o);
                turns.pass();
                --n_block;
                adds = true;
                wait_for<1>(acc_s);
                const auto rescale = softmax_step</*kIsFirst=*/false>(tile, blocks, n_block, acc_s, softmax);
                release_after_S(n_block == blocks.n_block_min);
                wait_for<0>(acc_o);
                release_V();
                softmax.apply(rescale, acc_o_rowcol);
                round_P(tile, blocks, n_block, acc_s, tOrP);
            }

            // Likewise from the tile's last block to the first of the next tile.
            const int next = tiles.take();
            const KeyBlocks next_blocks = key_blocks_of(next);
            skip_K(blocks.has(KeyBlocks::skips_last));
            if (next_blocks.has(KeyBlocks::is_end)) {
                issue_O(adds, tile, blocks, n_block, tOrP, acc_o);
                wait_for<0>(acc_o);
                release_V();
                skip_V(blocks.has(KeyBlocks::skips_last));
                store(tiles[tile], acc_o_rowcol, softmax);
                return;
            }
            wait_for_Q(next);
            skip_K(next_blocks.has(KeyBlocks::skips_first));
            rings.k.wait(shared.k_barriers);
            turns.await();
            issue_S(acc_s);
            issue_O(adds, tile, blocks, n_block, tOrP, acc_o);
            turns.pass();
            const auto ended = softmax;
            softmax = Softmax<Element, 2>(softmax.scale_log2);
            n_block = next_blocks.n_block_max - 1;
            wait_for<1>(acc_s);
            softmax_step</*kIsFirst=*/true>(next, next_blocks, n_block, acc_s, softmax);
            release_after_S(n_block == next_blocks.n_block_min);
            wait_for<0>(acc_o);
            release_V();
            skip_V(blocks.has(KeyBlocks::skips_last));
            skip_V(next_blocks.has(KeyBlocks::skips_first));
            store(tiles[tile], acc_o_rowcol, ended);
            tiles.release(tile);
            tile = next;
            blocks = next_blocks;
            if (kIsGeneral) {  // P is not rounded, and spilled, before O is stored
                warpgroup_fence_operand(acc_s);
            }
            round_P(tile, blocks, n_block, acc_s, tOrP);
        }
    }

private:
    const Flash_fwd_params &params;
    typename Traits::SharedStorage &shared;
    const int warpgroup;
    WorkTileRing<Traits::kConsumers> tiles;
    const PingPong<Traits::kConsumers, Traits::TileSize::kPingPong> turns;
    typename Traits::Rings rings;

    __device__ __forceinline__ KeyBlocks key_blocks_of(int tile) const {
        return tiles.key_blocks(tile, warpgroup).template to_registers<kKind>();
    }

    __device__ __forceinline__ int first_row(int tile) const {
        return (tiles[tile].place.block * Traits::kConsumers + warpgroup) * kRows;
    }

    // Rows of another sequence would take part in what the softmax decides for a whole warp.
    __device__ __forceinline__ void wait_for_Q(int tile) {
        rings.q.wait(shared.q_barriers);
        if (kIsGeneral) {
            const int rows = uniform(tiles[tile].sequence.seqlen_q - first_row(tile));
            if (rows < kRows) {
                Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});  // (64, HD, room)
                clear_rows_from<Traits>(rows, sQ(_, _, rings.q.stage), warpgroup);
            }
        }
    }

    // What wgmma takes for shared memory: descriptors.
    template <typename TensorS>
    __device__ __forceinline__ void issue_S(TensorS &acc_s) const {
        Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});   // (64, HD, room)
        Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});  // (BLK_N, HD, stage)
        auto thr_mma = TiledMmaQK{}.get_slice(int(threadIdx.x % 128));
        Tensor tSrQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ))(_, _, _, rings.q.stage);  // (MMA, MMA_M, MMA_K)
        Tensor tSrK = thr_mma.make_fragment_B(thr_mma.partition_B(sK))(_, _, _, rings.k.stage);  // (MMA, MMA_N, MMA_K)
        issue<TiledMmaQK>(/*adds=*/false, tSrQ, tSrK, acc_s);
    }

    template <typename TensorP, typename TensorO>
    __device__ __forceinline__ void issue_O(bool adds, int tile, const KeyBlocks &blocks, int n_block, TensorP &tOrP,
                                            TensorO &acc_o) const {
        Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});  // (HD, BLK_N, stage)
        auto thr_mma = TiledMmaPV{}.get_slice(int(threadIdx.x % 128));
        Tensor tOrVt =
            thr_mma.make_fragment_B(thr_mma.partition_B(sVt))(_, _, _, rings.v.stage);  // (MMA, MMA_N, MMA_K)
        rings.v.wait(shared.v_barriers);
        if (kIsGeneral && n_block >= blocks.n_ragged) {  // another sequence's NaN or infinity times 0 would not be 0
            Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutKV{});  // (BLK_N, HD, stage)
            const int rows = tiles[tile].sequence.seqlen_k - n_block * kBlockN;
            clear_rows_from<Traits>(rows, sV(_, _, rings.v.stage), warpgroup);
        }
        warpgroup_fence_operand(tOrP);
        issue<TiledMmaPV>(adds, tOrP, tOrVt, acc_o);
    }

    __device__ __forceinline__ void release_after_S(bool is_last_of_tile) {
        rings.k.release(shared.k_barriers);
        rings.k.advance();
        if (is_last_of_tile) {
            rings.q.release(shared.q_barriers);
            rings.q.advance(Traits::kConsumers);
        }
    }
    __device__ __forceinline__ void release_V() {
        rings.v.release(shared.v_barriers);
        rings.v.advance();
    }

    // A key block that only other consumers' rows see.
    __device__ __forceinline__ void skip_K(bool goes_by) {
        if (is_local(kKind) && goes_by) {
            rings.k.wait(shared.k_barriers);
            rings.k.release(shared.k_barriers);
            rings.k.advance();
            turns.await();
            turns.pass();
        }
    }
    __device__ __forceinline__ void skip_V(bool goes_by) {
        if (is_local(kKind) && goes_by) {
            rings.v.wait(shared.v_barriers);
            release_V();
        }
    }

    // Scores become probabilities; returns what O has to be multiplied by.
    template <bool kIsFirst, typename TensorS, typename SoftmaxState>
    __device__ __forceinline__ auto softmax_step(int tile, const KeyBlocks &blocks, int n_block, TensorS &acc_s,
                                                 SoftmaxState &softmax) const {
        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
        const bool needs_mask = blocks.needs_mask(n_block);
        modify(tile, blocks, n_block, scores);
        mask(needs_mask, tile, n_block, scores);
        const bool may_see_few = kIsFirst && needs_mask && blocks.has(KeyBlocks::may_see_few);
        const bool may_rise =
            kIsGeneral && blocks.has(KeyBlocks::has_alibi) && (kIsFirst || n_block >= blocks.n_rising_begin);
        return softmax.template step<kIsFirst>(scores, may_see_few || may_rise, [&](auto &scores) {
            recompute(scores);
            modify(tile, blocks, n_block, scores);
            mask(needs_mask, tile, n_block, scores);
        });
    }

    // Softcap and ALiBi.
    template <typename TensorS>
    __device__ __forceinline__ void modify(int tile, const KeyBlocks &blocks, int n_block, TensorS &scores) const {
        if (kIsGeneral && blocks.has(KeyBlocks::has_score_mod)) {
            tiles.score_mod(tile).template apply</*kTransposed=*/false>(scores, coords_of_scores(threadIdx.x % 128),
                                                                        coords_of_scores(0), first_row(tile),
                                                                        n_block * kBlockN, [](int, int, float) {});
        }
    }

    // Dropout.
    template <typename TensorS>
    __device__ __forceinline__ void drop_some(int tile, const KeyBlocks &blocks, int n_block, TensorS &acc_s) const {
        if (kIsGeneral && blocks.has(KeyBlocks::has_dropout)) {
            Tensor p = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
            DropoutStream stream = tiles.dropout(tile);
            stream.key0 = uniform(stream.key0);  // each round's keys follow from these, in uniform registers
            stream.key1 = uniform(stream.key1);
            drop(p, coords_of_scores(threadIdx.x % 128), stream, params.dropout_threshold, first_row(tile),
                 n_block * kBlockN);
        }
    }

    // (row, col) -> (row, key) in the tile of S, of those that a thread holds.
    __device__ __forceinline__ static auto coords_of_scores(int thread) {
        auto thr_mma = TiledMmaQK{}.get_slice(thread);
        Tensor tScS = thr_mma.partition_C(make_identity_tensor(typename Traits::TileS{}));  // (MMA, MMA_M, MMA_N)
        return make_tensor(tScS.data(), rowcol_layout(tScS.layout()));
    }

    template <typename TensorS>
    __device__ __forceinline__ void mask(bool needs_mask, int tile, int n_block, TensorS &scores) const {
        if (needs_mask) {
            const KeyRange<is_local(kKind)> range(params, tiles[tile].sequence.seqlen_q,
                                                   tiles[tile].sequence.seqlen_k);
            const int first_key = n_block * kBlockN;
            const auto query = [&](int row) { return first_row(tile) + first_row_of_thread() + row * 8; };
            apply_mask(
                scores, [&](int row) { return range.begin_key(query(row)) - first_key; },
                [&](int row) { return range.end_key(query(row)) - first_key; });
        }
    }

    // The scores once more, by ordinary instructions and slowly, as the tensor cores may be at work for O: it
    // takes a score whose probability exceeds 2^100, or in a tile's first step one below 2^-80.
    template <typename TensorS>
    __device__ __forceinline__ void recompute(TensorS &scores) const {
        Tensor sQ =
            make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{})(_, _, rings.q.stage);  // (64, HD)
        Tensor sK =
            make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{})(_, _, rings.k.stage);  // (BLK_N, HD)
        const auto coords = coords_of_scores(threadIdx.x % 128);
        clear(scores);
        CUTE_NO_UNROLL
        for (int i = 0; i < Traits::kHeadDim; ++i) {
            CUTE_UNROLL
            for (int row = 0; row < size<0>(scores); ++row) {
                const float q = static_cast<float>(sQ(get<0>(coords(row, 0)), i));
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) += q * static_cast<float>(sK(get<1>(coords(row, col)), i));
                }
            }
        }
    }

    // The registers of S in their order are those of the operand. Dropout comes last, when those of the operand before
    // are free.
    template <typename TensorS, typename TensorP>
    __device__ __forceinline__ void round_P(int tile, const KeyBlocks &blocks, int n_block, TensorS &acc_s,
                                            TensorP &tOrP) const {
        drop_some(tile, blocks, n_block, acc_s);
        constexpr int kCount = decltype(size(acc_s))::value;
        using Rounded = cutlass::Array<Element, kCount>;
        *reinterpret_cast<Rounded *>(tOrP.data()) = cutlass::NumericArrayConverter<Element, float, kCount>::convert(
            *reinterpret_cast<const cutlass::Array<float, kCount> *>(acc_s.data()));
    }
};

}  // namespace flash::sm90
