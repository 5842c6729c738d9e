// The loads of the backward: TMA copies K and V of a work tile once, and Q and dO of every step, into shared memory.
// The row statistics come with them.
#pragma once

#include "kernel_traits_bwd.h"
#include "steps_bwd.h"
#include "work_counts.h"

namespace flash::sm90 {

// Warp 0 of the producer warpgroup.
template <typename Traits, Kind kKind>
class LoaderBwd {
public:
    __device__ LoaderBwd(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                         typename Traits::SharedStorage &shared, const ColumnBlock<Traits, kKind> &block)
        : params(params), copies(copies), shared(shared), block(block), step(block), steps_left(block.num_steps()) {
        bidb_q = params.cu_seqlens_q != nullptr && may_be_varlen(kKind) ? 0 : block.bidb;
    }

    // K and V, and the steps that the stages have room for. S is multiplied first, so K and Q come first. The row
    // statistics of the first step come last: wait_for_statistics() returns when preprocess has written them.
    template <typename Wait>
    __device__ __forceinline__ void load_first(const Wait &wait_for_statistics) {
        if (steps_left == 0) {  // nobody would wait for the copies, and a CTA must not end before they do
            return;
        }
        load_KV(copies.k, shared.k, shared.k_barriers);
        copy_tile(q_state, copies.q, shared.q, shared.q_barriers);
        load_KV(copies.v, shared.v, shared.v_barriers);
        copy_tile(dout_state, copies.dout, shared.dout, shared.dout_barriers);
        wait_for_statistics();
        copy_lse();
        copy_delta();
        advance();
        CUTE_NO_UNROLL
        for (int i = 1; i < cute::min(Traits::kStagesQ, Traits::kStagesdO) - 1; ++i) {
            load_next();
        }
    }

    // One more step, if any is left. Waits for its stages.
    __device__ __forceinline__ void load_next() {
        if (steps_left > 0) {
            q_state.acquire(shared.q_barriers);
            copy_tile(q_state, copies.q, shared.q, shared.q_barriers);
            copy_lse();
            dout_state.acquire(shared.dout_barriers);
            copy_tile(dout_state, copies.dout, shared.dout, shared.dout_barriers);
            copy_delta();
            advance();
        }
    }

    __device__ __forceinline__ void load_rest() {
        while (steps_left > 0) {
            load_next();
        }
    }

private:
    using Element = typename Traits::Element;
    static constexpr int kBytesOfTile = Traits::kBlockM * Traits::kHeadDim * sizeof(Element);
    static constexpr int kBytesOfRows = Traits::kBlockM * sizeof(float);
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;
    const ColumnBlock<Traits, kKind> &block;
    Step step;
    int steps_left, bidb_q;
    PipelineState<Traits::kStagesQ> q_state;
    PipelineState<Traits::kStagesdO> dout_state;

    __device__ __forceinline__ void advance() {
        step.advance(block);
        q_state.advance();
        dout_state.advance();
        --steps_left;
    }

    __device__ __forceinline__ void load_KV(const typename Traits::TmaKV &tma, Element *smem,
                                            PipelineBarriers<1> &barriers) {
        constexpr int kBytes = Traits::kBlockN * Traits::kHeadDim * sizeof(Element);
        if (cute::elect_one_sync()) {
            uint64_t &barrier = PipelineState<1>().expect(barriers, kBytes);
            load_rows(tma, typename Traits::TileKV{}, make_tensor(make_smem_ptr(smem), typename Traits::SmemLayoutKV{}),
                      0, barrier, block.k_begin + block.first_key(), block.bidh / params.h_h_k_ratio,
                      may_be_varlen(kKind) ? block.k_bidb : block.bidb);
        }
    }

    template <int kStages>
    __device__ __forceinline__ static uint64_t &full_barrier(const PipelineState<kStages> &state,
                                                             PipelineBarriers<kStages> &barriers) {
        return *reinterpret_cast<uint64_t *>(&barriers.full[state.stage]);
    }

    // A tile of Q or dO. copy_rows() announces its bytes: the stage is full when it has done so and all have come.
    template <int kStages>
    __device__ __forceinline__ void copy_tile(const PipelineState<kStages> &state, const typename Traits::TmaQ &tma,
                                              Element *smem, PipelineBarriers<kStages> &barriers) {
        if (cute::elect_one_sync()) {
            load_rows(tma, typename Traits::TileQ{},
                      make_tensor(make_smem_ptr(smem), typename Traits::template SmemLayoutQ<kStages>{}), state.stage,
                      full_barrier(state, barriers), block.q_begin + step.m_block * Traits::kBlockM,
                      block.bidh + step.head, bidb_q);
        }
    }

    // The row statistic of the tile.
    template <int kStages>
    __device__ __forceinline__ void copy_rows(const PipelineState<kStages> &state, const float *statistic,
                                              float (&smem_statistic)[kStages][Traits::kBlockM],
                                              PipelineBarriers<kStages> &barriers) {
        if (cute::elect_one_sync()) {
            uint64_t &barrier = state.expect(barriers, kBytesOfTile + kBytesOfRows);
            SM90_BULK_COPY_G2S::copy(statistic + step.padded_row(params, block), &barrier, smem_statistic[state.stage],
                                     kBytesOfRows);
        }
    }
    __device__ __forceinline__ void copy_lse() { copy_rows(q_state, params.lse_padded, shared.lse, shared.q_barriers); }
    __device__ __forceinline__ void copy_delta() {
        copy_rows(dout_state, static_cast<const float *>(params.dsoftmax_sum), shared.delta, shared.dout_barriers);
    }
};

}  // namespace flash::sm90
