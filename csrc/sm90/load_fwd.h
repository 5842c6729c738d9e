// The producer's side of the mainloop: which tiles of Q, K and V TMA loads, and when.
#pragma once

#include "kernel_traits.h"
#include "key_blocks.h"
#include "../kind.h"
#include "work_tile_ring.h"

namespace flash::sm90 {

// The producer's warp that has TMA load the tiles, in the order in which the consumers need them: K of a block before V
// of the block before it, which may be the last of another tile.
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
            // With two rooms, Q of the next tile is loaded two blocks before it is needed; with one, when that gets
            // free.
            constexpr bool kHasRoom = Traits::kQStages > 1;
            const auto take_next = [&] {
                next = take();
                if (kHasRoom && !next.is_end) {
                    load_Q(next);
                }
            };
            const int last = tile.n_block_max - 1, when = min(tile.n_block_min + 2, last);
            if (last == tile.n_block_min) {
                take_next();
            }
            CUTE_NO_UNROLL
            for (int n_block = last; n_block > tile.n_block_min; --n_block) {
                load_K(tile, n_block - 1);
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
            if (!kHasRoom) {
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
    typename Traits::Rings rings;

    // Where a tile's blocks lie: what costs time is found once, as consumers wait between a room's release and its
    // load.
    struct Source {
        int bidb, bidh, bidh_k, q_begin, k_begin, block;
        int n_block_min, n_block_max;
        bool is_end;
    };

    __device__ __forceinline__ Source take() {
        const int stage = tiles.take();
        const WorkTile tile = tiles[stage];
        tiles.release(stage);
        const bool is_varlen = kIsGeneral && params.cu_seqlens_q != nullptr;
        return {is_varlen ? 0 : uniform(tile.place.bidb),
                uniform(tile.place.bidh),
                uniform(tile.place.bidh / params.h_h_k_ratio),
                kIsGeneral ? uniform(tile.sequence.q_begin) : 0,
                kIsGeneral ? uniform(tile.sequence.k_begin) : 0,
                uniform(tile.place.block),
                uniform(tile.n_block_min),
                uniform(tile.n_block_max),
                uniform(tile.is_end) != 0};
    }

    // Rows from first_row on of a head into the ring. gX (block, HD) holds coordinates: where the tensor ends, TMA
    // knows.
    template <typename TMA, typename Block, typename Layout, typename Element, typename RingX, typename BarriersX>
    __device__ __forceinline__ void load_block(const TMA &tma, Block block, Layout, Element *smem, RingX &ring,
                                               BarriersX &barriers, int first_row, int bidh, int bidb) {
        Tensor tensor = tma.get_tma_tensor(append<4>(block, _1{}));
        Tensor gX = domain_offset(make_coord(first_row, 0, bidh, bidb), tensor)(_, _, 0, 0);
        Tensor sX = make_tensor(make_smem_ptr(smem), Layout{});         // (block, HD, stage)
        const auto of_X = tma_partition(tma, _0{}, cute::Layout<_1>{},  // pairs of (TMA), (TMA, stage)
                                        group_modes<0, 2>(sX), group_modes<0, 2>(gX));
        constexpr int kBytes = size(Block{}) * sizeof(Element);
        ring.acquire(barriers);
        if (cute::elect_one_sync()) {
            copy(tma.with(ring.expect(barriers, kBytes)), get<0>(of_X), get<1>(of_X)(_, ring.stage));
        }
        ring.advance();
    }

    __device__ __forceinline__ void load_Q(const Source &tile) {
        CUTE_NO_UNROLL
        for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
            load_block(copies.q, typename Traits::TileQ{}, typename Traits::SmemLayoutQ{}, shared.q, rings.q,
                       shared.q_barriers, tile.q_begin + (tile.block * Traits::kConsumers + warpgroup) * Traits::kRows,
                       tile.bidh, tile.bidb);
        }
    }

    template <typename Element>
    __device__ __forceinline__ void load_KV(const typename Traits::TMA_KV &tma, Element *smem,
                                            Ring<Traits::kStages> &ring, Barriers<Traits::kStages> &barriers,
                                            const Source &tile, int n_block) {
        load_block(tma, typename Traits::TileKV{}, typename Traits::SmemLayoutKV{}, smem, ring, barriers,
                   tile.k_begin + n_block * Traits::kBlockN, tile.bidh_k, tile.bidb);
    }
    __device__ __forceinline__ void load_K(const Source &tile, int n_block) {
        load_KV(copies.k, shared.k, rings.k, shared.k_barriers, tile, n_block);
    }
    __device__ __forceinline__ void load_V(const Source &tile, int n_block) {
        load_KV(copies.v, shared.v, rings.v, shared.v_barriers, tile, n_block);
    }
};

}  // namespace flash::sm90
