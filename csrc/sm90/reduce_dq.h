// The dQ warpgroup of the backward: dQ = dS K of every step, added to a float32 accumulator in global memory. Its warp
// 0 is also the producer that loads Q and dO (load_bwd.h).
//
// Layout of the accumulator of 64 rows, as flash_bwd_convert_dq reads it: [warp][vector i][lane][4]. Vector i of a lane
// is its registers 4 i to 4 i + 3: columns 8 i + 2 (lane % 4) and the next one, of the rows lane / 4 and lane / 4 + 8.
#pragma once

#include "../common/dq_semaphore.h"
#include "consumer_bwd.h"
#include "load_bwd.h"

namespace flash::sm90 {

// In order, a CTA waits for its semaphore and passes it on once for this many rows.
constexpr int kRowsPerPass = 128;

template <typename Traits, Kind kKind>
class DqWarpgroup {
public:
    __device__ DqWarpgroup(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                           typename Traits::SharedStorage &shared, const ColumnBlock<Traits, kKind> &block)
        : params(params),
          shared(shared),
          block(block),
          warp(uniform(threadIdx.x / 32)),
          loader(params, copies, shared, block) {}

    __device__ __forceinline__ void run() {
        if (warp == 0) {
            loader.load_first();
        }
        int steps_left = block.num_steps();
        if (steps_left == 0) {
            return;
        }
        const bool wants_dq = params.dq_accum != nullptr;
        Step step(block);
        PipelineState<Traits::kDsStages> state;
        shared.k_barrier.wait(0);
        clear_foreign_keys<Traits, kKind>(block, shared.k, Traits::kConsumers);
        for (; steps_left > 0; --steps_left) {
            if (warp == 0) {
                loader.load_next();
            }
            state.wait(shared.ds_barriers);
            if (wants_dq) {
                add(step, state);
            } else {
                state.release(shared.ds_barriers);
            }
            state.advance();
            step.advance(block);
        }
    }

private:
    using Element = typename Traits::Element;
    using TiledMmadQ = typename Traits::TiledMmadQ;
    static constexpr int kColumns = Traits::TileSize::kDqColumns;
    static constexpr int kVectors = Traits::kHeadDim / 8;  // of a lane, in 64 rows
    static constexpr int kRowBlocksPerPass = kRowsPerPass / Traits::kBlockM;

    const Flash_bwd_params &params;
    typename Traits::SharedStorage &shared;
    const ColumnBlock<Traits, kKind> &block;
    const int warp;
    LoaderBwd<Traits, kKind> loader;

    // dQ = dS K for 64 rows and kColumns columns, both operands in shared memory.
    __device__ __forceinline__ auto multiply(int stage, int row, int col) const {
        using TileDS = Shape<_64, Int<Traits::kBlockN>>;
        using TileK = Shape<Int<kColumns>, Int<Traits::kBlockN>>;
        Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::SmemLayoutdS{});  // (BLK_M, BLK_N, stage)
        Tensor sKt = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKt{});   // (HD, BLK_N)
        Tensor sdS_rows = local_tile(sdS(_, _, stage), TileDS{}, make_coord(row, _0{}));
        Tensor sKt_columns = local_tile(sKt, TileK{}, make_coord(col, _0{}));
        auto thr_mma = TiledMmadQ{}.get_slice(int(threadIdx.x % 128));
        Tensor tdQrdS = thr_mma.make_fragment_A(thr_mma.partition_A(sdS_rows));     // (MMA, MMA_M, MMA_K)
        Tensor tdQrKt = thr_mma.make_fragment_B(thr_mma.partition_B(sKt_columns));  // (MMA, MMA_N, MMA_K)
        Tensor acc = partition_fragment_C(TiledMmadQ{}, Shape<_64, Int<kColumns>>{});
        issue<TiledMmadQ>(/*accumulates=*/false, tdQrdS, tdQrKt, acc);
        wait_for<0>(acc);
        return acc;
    }

    // In order: the row blocks come in groups of kRowsPerPass rows. Between its wait for the semaphore of a group and
    // the pass, a CTA adds to those row blocks of the group that see its keys.
    __device__ __forceinline__ void add(const Step &step, const PipelineState<Traits::kDsStages> &state) const {
        const int row = step.padded_row(params, block);
        const int in_group = step.m_block % kRowBlocksPerPass, first = step.m_block - in_group;
        DqSemaphore</*kCopyEngine=*/false> semaphore;
        const bool is_in_order = params.dq_semaphore != nullptr;
        if (is_in_order) {
            // In the place of the group's first row. The last row block of the group sees the last keys, so its order
            // counts all key blocks.
            semaphore = {(row - in_group * Traits::kBlockM) / kRowsPerPass * 4 + warp,
                         block.order_in(first + kRowBlocksPerPass - 1)};
            if (in_group == 0 || step.m_block == block.m_block_min) {
                semaphore.wait(params.dq_semaphore, /*is_known_reached=*/false);
            }
        }
        auto *target = reinterpret_cast<float4 *>(params.dq_accum + int64_t(row) * Traits::kHeadDim) +
                       warp * (kVectors * 32) + threadIdx.x % 32;
        constexpr int kRows = Traits::kBlockM / 64, kCols = Traits::kHeadDim / kColumns;
        CUTE_UNROLL
        for (int slice = 0; slice < kRows * kCols; ++slice) {
            const Tensor acc = multiply(state.stage, slice / kCols, slice % kCols);
            if (slice == kRows * kCols - 1) {
                state.release(shared.ds_barriers);
            }
            CUTE_UNROLL
            for (int i = 0; i < kColumns / 8; ++i) {
                const int vector = slice / kCols * (4 * kVectors) + slice % kCols * (kColumns / 8) + i;
                atomicAdd(target + vector * 32,
                          make_float4(acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3)));
            }
        }
        if (is_in_order && (in_group == kRowBlocksPerPass - 1 || step.m_block + 1 == block.m_block_max)) {
            semaphore.pass(params.dq_semaphore);
        }
    }
};

}  // namespace flash::sm90
