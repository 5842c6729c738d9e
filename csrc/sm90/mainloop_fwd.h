// What the two kinds of warpgroup do for one tile: the producer has TMA load Q, K and V (load), the consumers multiply,
// and take the softmax of one key block while the tensor cores work on another (Consumer::mma).
#pragma once

#include <cutlass/numeric_conversion.h>

#include "../common/block_info.h"
#include "kernel_traits.h"
#include "kind.h"
#include "layout.h"
#include "named_barriers.h"
#include "softmax.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

template <typename Traits>
struct Rings {
    Ring<Traits::kConsumers * Traits::kQ_rooms> q;
    Ring<Traits::kStages> k, v;
};

// The producer's warp: the loads of one tile, in the order in which the consumers need them.
template <typename Traits, Kind kKind>
__device__ __forceinline__ void load(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                     const Tile &tile, typename Traits::SharedStorage &shared, Rings<Traits> &rings) {
    using TileQ = typename Traits::TileQ;
    using TileKV = typename Traits::TileKV;
    constexpr bool kVarlen = may_be_varlen(kKind);
    const int bidb = tile.place.bidb, bidh = tile.place.bidh, bidh_k = bidh / params.h_h_k_ratio;

    // Tensors: as TMA knows them (m), in tiles (g), in shared memory (s). Varlen: sequences are rows of one batch.
    const auto head_of = [&](const auto &copy, int rows, int heads, int bidh, int begin) {
        Tensor mX = copy.get_tma_tensor(make_shape(rows, params.d, heads, kVarlen ? 1 : params.b));
        return domain_offset(make_coord(begin, 0), mX(_, _, bidh, kVarlen ? 0 : bidb));  // (seqlen, d)
    };
    const int rows_q = kVarlen ? int(params.total_q) : params.seqlen_q;
    const int rows_k = kVarlen ? int(params.total_k) : params.seqlen_k;
    Tensor mQ = head_of(copies.q, rows_q, params.h, bidh, tile.sequence.q_begin);
    Tensor mK = head_of(copies.k, rows_k, params.h_k, bidh_k, tile.sequence.k_begin);
    Tensor mV = head_of(copies.v, rows_k, params.h_k, bidh_k, tile.sequence.k_begin);
    Tensor gQ = local_tile(mQ, TileQ{}, make_coord(_, 0));                              // (64, HD, m)
    Tensor gK = local_tile(mK, TileKV{}, make_coord(_, 0));                             // (BLK_N, HD, n)
    Tensor gV = local_tile(mV, TileKV{}, make_coord(_, 0));                             // (BLK_N, HD, n)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});   // (64, HD, room)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});  // (BLK_N, HD, stage)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutKV{});  // (BLK_N, HD, stage)
    const auto partition = [](const auto &copy, const auto &gX, const auto &sX) {       // pairs of (TMA, tile)
        return tma_partition(copy, _0{}, Layout<_1>{}, group_modes<0, 2>(sX), group_modes<0, 2>(gX));
    };
    const auto of_Q = partition(copies.q, gQ, sQ);
    const auto of_K = partition(copies.k, gK, sK);
    const auto of_V = partition(copies.v, gV, sV);

    const auto load_tile = [](const auto &tma, auto &ring, auto &barriers, int bytes, const auto &of_X, int tile) {
        ring.acquire(barriers);
        if (threadIdx.x == 0) {
            copy(tma.with(ring.expect(barriers, bytes)), get<0>(of_X)(_, tile), get<1>(of_X)(_, ring.stage));
        }
        ring.advance();
    };
    const auto load_Q = [&](int warpgroup) {
        load_tile(copies.q, rings.q, shared.q_barriers, Traits::kBytesQ, of_Q,
                  tile.place.block * Traits::kConsumers + warpgroup);
    };
    const auto load_K = [&](int n_block) {
        load_tile(copies.k, rings.k, shared.k_barriers, Traits::kBytesKV, of_K, n_block);
    };
    const auto load_V = [&](int n_block) {
        load_tile(copies.v, rings.v, shared.v_barriers, Traits::kBytesKV, of_V, n_block);
    };

    int n_block = tile.n_block_max - 1;
    load_Q(0);
    load_K(n_block);
    CUTE_NO_UNROLL
    for (int warpgroup = 1; warpgroup < Traits::kConsumers; ++warpgroup) {
        load_Q(warpgroup);
    }
    CUTE_NO_UNROLL
    for (; n_block > tile.n_block_min; --n_block) {
        load_K(n_block - 1);
        load_V(n_block);
    }
    load_V(n_block);
}

// acc (+)= A B, issued and not waited for.
template <typename TiledMma, typename TensorA, typename TensorB, typename TensorC>
__device__ __forceinline__ void issue(bool adds, const TensorA &A, const TensorB &B, TensorC &acc) {
    TiledMma tiled_mma;
    tiled_mma.accumulate_ = adds ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(A); ++k) {
        cute::gemm(tiled_mma, A(_, _, k), B(_, _, k), acc);
        tiled_mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
}

// Waits until at most kIn_flight products are under way, among which `acc` is not.
template <int kIn_flight, typename TensorC>
__device__ __forceinline__ void wait_for(TensorC &acc) {
    warpgroup_wait<kIn_flight>();
    warpgroup_fence_operand(acc);
}

// Writes zeros over the rows of sV from `rows` on: those of another sequence, whose NaN or infinity times a probability
// of 0 would not be 0. Every consumer does it for itself, so that none waits for another.
template <typename Traits, typename TensorV>
__device__ __forceinline__ void clear_rows_from(int rows, TensorV &&sV, int warpgroup) {
    using Vector = cute::uint128_t;
    constexpr int kVector = sizeof(Vector) / sizeof(typename Traits::Element), kVectors = Traits::kHeadDim / kVector;
    for (int i = threadIdx.x % 128; i < (Traits::kBlockN - rows) * kVectors; i += 128) {
        *reinterpret_cast<Vector *>(&sV(rows + i / kVectors, i % kVectors * kVector)) = Vector{0, 0};
    }
    cutlass::arch::fence_view_async_shared();  // wgmma reads it
    sync(Barrier::warpgroup, warpgroup, 128);
}

// A consumer warpgroup: it computes 64 query rows of each tile.
template <typename Traits, Kind kKind>
class Consumer {
    using Element = typename Traits::Element;
    using TiledMmaQK = typename Traits::TiledMmaQK;
    using TiledMmaPV = typename Traits::TiledMmaPV;
    static constexpr int kBlockN = Traits::kBlockN, kRows = Traits::kRows;

public:
    __device__ Consumer(const Flash_fwd_params &params, typename Traits::SharedStorage &shared, int warpgroup)
        : params(params), shared(shared), warpgroup(warpgroup), turns(warpgroup) {
        rings.q.stage = warpgroup;
    }

    // All tiles, each from its last key block to its first. In the step from one tile to the next, the products and the
    // softmax overlap as within a tile. next_tile(tile) says whether there is another, and where in the ring;
    // store(tile, acc_o, softmax) gets a tile's unnormalised output and its statistics.
    template <typename NextTile, typename Store>
    __device__ __forceinline__ void mma(const Tile_ring &tiles, const NextTile &next_tile, const Store &store) {
        Tensor acc_s = partition_fragment_C(TiledMmaQK{}, typename Traits::TileS{});     // (MMA, MMA_M, MMA_N)
        Tensor acc_o = partition_fragment_C(TiledMmaPV{}, typename Traits::TileQ{});     // (MMA, MMA_M, MMA_K)
        Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));  // (row, col)
        Tensor tOrP = make_tensor<Element>(operand_A_layout(acc_s.layout()));            // (MMA, MMA_M, MMA_K)

        int tile, next;
        if (!next_tile(tile)) {
            return;
        }
        Key_blocks blocks(params, tiles[tile], warpgroup);
        Softmax<Element, 2> softmax(params.scale_softmax_log2);

        // The first key block of all has no product of another beside it.
        rings.q.wait(shared.q_barriers);
        skip_K(blocks);
        rings.k.wait(shared.k_barriers);
        turns.await();
        issue_S(acc_s);
        turns.pass();
        wait_for<0>(acc_s);
        softmax_step</*Is_first=*/true>(tiles[tile], blocks, acc_s, softmax);
        release_after_S(blocks.is_at_end());
        skip_V(blocks);
        round_P(acc_s, tOrP);

        for (bool adds = false;; adds = false) {
            // Per step: S of the next block and O of this one are issued together; the softmax runs beside the second.
            while (!blocks.is_at_end()) {
                rings.k.wait(shared.k_barriers);
                turns.await();
                issue_S(acc_s);
                issue_O(adds, tiles[tile], blocks, tOrP, acc_o);
                turns.pass();
                --blocks.n_block;
                adds = true;
                wait_for<1>(acc_s);
                const auto rescale = softmax_step</*Is_first=*/false>(tiles[tile], blocks, acc_s, softmax);
                release_after_S(blocks.is_at_end());
                wait_for<0>(acc_o);
                release_V();
                softmax.apply(rescale, acc_o_rowcol);
                round_P(acc_s, tOrP);
            }

            // Likewise from the tile's last block to the first of the next tile.
            if (!next_tile(next)) {
                issue_O(adds, tiles[tile], blocks, tOrP, acc_o);
                wait_for<0>(acc_o);
                release_V();
                store(tile, acc_o_rowcol, softmax);
                return;
            }
            const Key_blocks next_blocks(params, tiles[next], warpgroup);
            rings.q.wait(shared.q_barriers);
            skip_K(next_blocks);
            rings.k.wait(shared.k_barriers);
            turns.await();
            issue_S(acc_s);
            issue_O(adds, tiles[tile], blocks, tOrP, acc_o);
            turns.pass();
            const auto ended = softmax;
            softmax = Softmax<Element, 2>(params.scale_softmax_log2);
            blocks = next_blocks;
            wait_for<1>(acc_s);
            softmax_step</*Is_first=*/true>(tiles[next], blocks, acc_s, softmax);
            release_after_S(blocks.is_at_end());
            wait_for<0>(acc_o);
            release_V();
            skip_V(blocks);
            store(tile, acc_o_rowcol, ended);
            tile = next;
            round_P(acc_s, tOrP);
        }
    }

private:
    // What the loop over a tile's key blocks needs, in uniform registers. The last of them, which is the first to come,
    // may be one that only other consumers' rows see.
    struct Key_blocks {
        int n_block, n_block_min, n_full_begin, n_full_end;
        int skipped;  // key blocks

        __device__ Key_blocks(const Flash_fwd_params &params, const Tile &tile, int warpgroup)
            : n_block_min(uniform(tile.n_block_min)) {
            const int n_block_max = uniform(tile.n_block_max);
            if (is_local(kKind)) {
                const int m_block = tile.place.block * Traits::kConsumers + warpgroup;  // of kRows rows
                const BlockInfo<kRows, kBlockN, is_local(kKind)> own(params, tile.sequence, m_block);
                n_block = uniform(min(max(own.n_block_max, tile.n_block_min + 1), tile.n_block_max)) - 1;
                n_full_begin = uniform(own.n_full_begin);
                n_full_end = uniform(own.n_full_end);
            } else {
                n_block = n_block_max - 1;
                n_full_end = uniform(tile.sequence.seqlen_k) / kBlockN;
            }
            skipped = n_block_max - 1 - n_block;
        }

        __device__ bool is_at_end() const { return n_block == n_block_min; }
        __device__ bool needs_mask() const {
            return n_block >= n_full_end || (is_local(kKind) && n_block < n_full_begin);
        }
    };

    const Flash_fwd_params &params;
    typename Traits::SharedStorage &shared;
    const int warpgroup;
    const Turns<Traits::kConsumers, Traits::Tile_size::kTakes_turns> turns;
    Rings<Traits> rings;

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
    __device__ __forceinline__ void issue_O(bool adds, const Tile &tile, const Key_blocks &blocks, TensorP &tOrP,
                                            TensorO &acc_o) const {
        Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});  // (HD, BLK_N, stage)
        auto thr_mma = TiledMmaPV{}.get_slice(int(threadIdx.x % 128));
        Tensor tOrVt =
            thr_mma.make_fragment_B(thr_mma.partition_B(sVt))(_, _, _, rings.v.stage);  // (MMA, MMA_N, MMA_K)
        rings.v.wait(shared.v_barriers);
        if (may_be_varlen(kKind)) {
            const int rows = uniform(tile.sequence.seqlen_k) - blocks.n_block * kBlockN;
            if (rows < kBlockN) {
                Tensor sV =
                    make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutKV{});  // (BLK_N, HD, stage)
                clear_rows_from<Traits>(rows, sV(_, _, rings.v.stage), warpgroup);
            }
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

    // Key blocks that are for other consumers go by.
    __device__ __forceinline__ void skip_K(const Key_blocks &blocks) {
        for (int i = 0; is_local(kKind) && i < blocks.skipped; ++i) {
            rings.k.wait(shared.k_barriers);
            rings.k.release(shared.k_barriers);
            rings.k.advance();
            turns.await();
            turns.pass();
        }
    }
    __device__ __forceinline__ void skip_V(const Key_blocks &blocks) {
        for (int i = 0; is_local(kKind) && i < blocks.skipped; ++i) {
            rings.v.wait(shared.v_barriers);
            release_V();
        }
    }

    // Scores become probabilities; returns what O has to be multiplied by.
    template <bool Is_first, typename TensorS, typename SoftmaxState>
    __device__ __forceinline__ auto softmax_step(const Tile &tile, const Key_blocks &blocks, TensorS &acc_s,
                                                 SoftmaxState &softmax) const {
        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
        mask(tile, blocks, scores);
        return softmax.template step<Is_first>(scores, blocks.needs_mask(), [&](auto &scores) {
            recompute(scores);
            mask(tile, blocks, scores);
        });
    }

    // (row, col) -> (row, key) in the tile of S.
    __device__ __forceinline__ static auto coords_of_scores() {
        auto thr_mma = TiledMmaQK{}.get_slice(int(threadIdx.x % 128));
        Tensor tScS = thr_mma.partition_C(make_identity_tensor(typename Traits::TileS{}));  // (MMA, MMA_M, MMA_N)
        return make_tensor(tScS.data(), rowcol_layout(tScS.layout()));
    }

    template <typename TensorS>
    __device__ __forceinline__ void mask(const Tile &tile, const Key_blocks &blocks, TensorS &scores) const {
        if (blocks.needs_mask()) {
            const Key_range<is_local(kKind)> range(params, tile.sequence.seqlen_q, tile.sequence.seqlen_k);
            const int first_row = (tile.place.block * Traits::kConsumers + warpgroup) * kRows;
            const int first_key = blocks.n_block * kBlockN;
            const auto coords = coords_of_scores();
            CUTE_UNROLL
            for (int row = 0; row < size<0>(scores); ++row) {
                const int end = range.end_key(first_row + get<0>(coords(row, 0))) - first_key;
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) = get<1>(coords(row, col)) < end ? scores(row, col) : -INFINITY;
                }
            }
            if (!is_local(kKind) || params.window_size_left < 0) {
                return;  // all rows' keys begin with the first
            }
            CUTE_UNROLL
            for (int row = 0; row < size<0>(scores); ++row) {
                const int begin = range.begin_key(first_row + get<0>(coords(row, 0))) - first_key;
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) = get<1>(coords(row, col)) >= begin ? scores(row, col) : -INFINITY;
                }
            }
        }
    }

    // The scores once more, by ordinary instructions and slowly, as the tensor cores may be at work for O: a
    // probability overflows only where a score exceeds all before it by a factor of 2^128.
    template <typename TensorS>
    __device__ __forceinline__ void recompute(TensorS &scores) const {
        Tensor sQ =
            make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{})(_, _, rings.q.stage);  // (64, HD)
        Tensor sK =
            make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{})(_, _, rings.k.stage);  // (BLK_N, HD)
        const auto coords = coords_of_scores();
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

    // The registers of S in their order are those of the operand.
    template <typename TensorS, typename TensorP>
    __device__ __forceinline__ static void round_P(const TensorS &acc_s, TensorP &tOrP) {
        constexpr int kCount = decltype(size(acc_s))::value;
        using Rounded = cutlass::Array<Element, kCount>;
        *reinterpret_cast<Rounded *>(tOrP.data()) = cutlass::NumericArrayConverter<Element, float, kCount>::convert(
            *reinterpret_cast<const cutlass::Array<float, kCount> *>(acc_s.data()));
    }
};

}  // namespace flash::sm90
