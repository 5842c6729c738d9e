// dQ = dS K in tiles of 64 rows and kDqColumns columns, and their place in the float32 accumulator in global memory.
// producer_bwd.h adds the tiles to it; ConvertDq in row_phases_bwd.h reads and rounds the sums.
//
// The tiles of 64 rows lie one after the other. A tile, as ConvertDq reads it: [warp][vector i][lane][4].
// Vector i of a lane is its registers 4 i to 4 i + 3: columns 8 i + 2 (lane % 4) and the next one, of the rows lane / 4
// and lane / 4 + 8 of the warp.
#pragma once

#include "common/dq_semaphore.h"
#include "sm90/common/mma.h"
#include "sm90/common/unhoisted.h"
#include "steps_bwd.h"

namespace flash::sm90 {

// Rows whose sums a CTA passes on together, where CTAs add in order (DqOrder).
template <bool kCopyEngine>
constexpr int kRowsPerPass = kCopyEngine ? 128 : 64;

// An operand of the products of every step, in shared memory.
template <typename Traits>
__device__ __forceinline__ typename Traits::Element *operand_of_loop(typename Traits::Element *smem) {
    if constexpr (Traits::kHasManyDescriptors) {
        return unhoisted(smem);
    } else {
        return smem;
    }
}

template <typename Traits>
struct DqTile {
    using TiledMma = typename Traits::TiledMmadQ;
    static constexpr int kColumns = Traits::TileSize::kDqColumns;
    static constexpr int kColumnTiles = Traits::kHeadDim / kColumns;
    static constexpr int kVectors = kColumns / 8;  // of a lane

    // DqBy::consumers, with one tile more than consumers: the consumer that computes the last one. It changes from one
    // group of rows of DqOrder to the next.
    __device__ __forceinline__ static int consumer_in_turn(const Step &step) {
        return uniform(step.m_block / (kRowsPerPass<true> / Traits::kBlockM)) % Traits::kConsumers;
    }

    // An accumulator (MMA, MMA_M, MMA_N).
    __device__ __forceinline__ static auto accumulator() {
        return partition_fragment_C(TiledMma{}, Shape<_64, Int<kColumns>>{});
    }

    // Issues tile `tile` of a step. Both operands are in shared memory.
    template <typename TensorDq>
    __device__ __forceinline__ static void issue(typename Traits::SharedStorage &shared, int ds_stage, int tile,
                                                 TensorDq &acc) {
        using TileDS = Shape<_64, Int<Traits::kBlockN>>;
        using TileK = Shape<Int<kColumns>, Int<Traits::kBlockN>>;
        auto *smem_ds = operand_of_loop<Traits>(&shared.ds[0]);
        Tensor sdS = make_tensor(make_smem_ptr(smem_ds), typename Traits::SmemLayoutdS{});  // (BLK_M, BLK_N, stage)
        auto *smem_k = operand_of_loop<Traits>(&shared.k[0]);
        Tensor sKt = make_tensor(make_smem_ptr(smem_k), typename Traits::SmemLayoutKt{});  // (HD, BLK_N)
        Tensor sdS_rows = local_tile(sdS(_, _, ds_stage), TileDS{}, make_coord(tile / kColumnTiles, _0{}));
        Tensor sKt_columns = local_tile(sKt, TileK{}, make_coord(tile % kColumnTiles, _0{}));
        multiply(/*accumulates=*/false, sdS_rows, sKt_columns, acc);
    }

    // A pair of CTAs, each with a tile of a step. Issues its part of 64 keys: first that of the CTA, which overwrites
    // acc, then that of the other one.
    template <typename TensorDq>
    __device__ __forceinline__ static void issue_part(bool of_peer, typename Traits::SharedStorage &shared,
                                                      int ds_stage, int rank, TensorDq &acc) {
        using TileDS = Shape<_64, Int<Traits::kKeysOfCta>>;
        using TileK = Shape<Int<kColumns>, Int<Traits::kKeysOfCta>>;
        static_assert(kColumns == Traits::kColumnsOfCta);
        auto *smem_ds = operand_of_loop<Traits>(&shared.ds[0]);
        Tensor sdS = make_tensor(make_smem_ptr(smem_ds), typename Traits::SmemLayoutdS{});  // (BLK_M, BLK_N, stage)
        Tensor sdS_keys = local_tile(sdS(_, _, ds_stage), TileDS{}, make_coord(_0{}, of_peer ? 1 - rank : rank));
        if (of_peer) {
            auto *smem_k = operand_of_loop<Traits>(&shared.k_of_peer[0]);
            multiply(/*accumulates=*/true, sdS_keys,
                     make_tensor(make_smem_ptr(smem_k), typename Traits::SmemLayoutKtOfPeer{}), acc);
        } else {
            auto *smem_k = operand_of_loop<Traits>(&shared.k[0]);
            Tensor sKt = make_tensor(make_smem_ptr(smem_k), typename Traits::SmemLayoutKt{});  // (HD, BLK_N)
            multiply(/*accumulates=*/false, sdS_keys, local_tile(sKt, TileK{}, make_coord(rank, _0{})), acc);
        }
    }

    // Tile `tile` of a step in the accumulator in global memory.
    template <typename Block>
    __device__ __forceinline__ static float *target(const Flash_bwd_params &params, const Block &block,
                                                    const Step &step, int tile) {
        return params.dq_accum + int64_t(step.padded_row(params, block)) * Traits::kHeadDim + tile * Traits::kTileOfDq;
    }

    // Adds the thread's part of a tile. Where the loop over the tiles is not unrolled, ptxas turns atomicAdd of float4
    // into an operation that returns the old values: twice the traffic.
    //
    // kCyclesPerAdd: a step takes longer when additions follow each other as fast as they can. Presumably the
    // consumers' accesses to shared memory wait behind them.
    template <typename TensorDq>
    __device__ __forceinline__ static void add(float *tile, const TensorDq &acc) {
        constexpr unsigned kCyclesPerAdd = Traits::TileSize::kCyclesPerAdd;
        auto *first = reinterpret_cast<float4 *>(tile) + place(0);
        const unsigned begin = kCyclesPerAdd > 0 ? static_cast<unsigned>(clock()) : 0;
        CUTE_UNROLL
        for (int i = 0; i < kVectors; ++i) {
            while (kCyclesPerAdd > 0 && static_cast<unsigned>(clock()) - begin < i * kCyclesPerAdd) {
            }
            const float4 x = vector(acc, i);
            asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(first + i * 32), "f"(x.x),
                         "f"(x.y), "f"(x.z), "f"(x.w)
                         : "memory");
        }
    }

    // Vector i of this thread, in a tile of float4.
    __device__ __forceinline__ static int place(int i, int thread = threadIdx.x % 128) {
        return (thread / 32 * kVectors + i) * 32 + thread % 32;
    }
    template <typename TensorDq>
    __device__ __forceinline__ static float4 vector(const TensorDq &acc, int i) {
        return make_float4(acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3));
    }

private:
    // acc = dS K, or acc += dS K: dS (row, key) and K^T (column, key) in shared memory.
    template <typename TensorDs, typename TensorKt, typename TensorDq>
    __device__ __forceinline__ static void multiply(bool accumulates, const TensorDs &sdS, const TensorKt &sKt,
                                                    TensorDq &acc) {
        auto thr_mma = TiledMma{}.get_slice(int(threadIdx.x % 128));
        Tensor tdQrdS = thr_mma.make_fragment_A(thr_mma.partition_A(sdS));  // (MMA, MMA_M, MMA_K)
        Tensor tdQrKt = thr_mma.make_fragment_B(thr_mma.partition_B(sKt));  // (MMA, MMA_N, MMA_K)
        sm90::issue<TiledMma>(accumulates, tdQrdS, tdQrKt, acc);
    }
};

// In order: the row blocks come in groups of kRowsPerPass rows. Between its wait for the semaphore of a group and the
// pass, a CTA adds to those row blocks of the group that see its keys. Nothing is kept in registers between the two.
template <typename Traits, bool kCopyEngine, typename Block>
class DqOrder {
    static constexpr int kRowsPerPass = sm90::kRowsPerPass<kCopyEngine>;
    static constexpr int kRowBlocksPerPass = kRowsPerPass / Traits::kBlockM;
    const Flash_bwd_params &params;
    const Block &block;
    const int part;  // counts the warps that add for a CTA

    __device__ __forceinline__ bool is_in_order() const { return params.dq_semaphore != nullptr; }

    // The semaphore has the index of the group's first row.
    __device__ __forceinline__ DqSemaphore<kCopyEngine> semaphore(const Step &step) const {
        const int in_group = step.m_block % kRowBlocksPerPass, first = step.m_block - in_group;
        const int row = step.padded_row(params, block) - in_group * Traits::kBlockM;
        const int index = row / kRowsPerPass * 4 + part;
        if constexpr (Block::kHasRanges) {
            const int order = block.order_in(params, block.bidb, block.bidh + step.head, first * Traits::kBlockM);
            return {order == Block::kDoesNotAdd ? DqSemaphore<kCopyEngine>::kNone : index, order};
        } else {
            // The last row block of the group sees the last keys, so its order counts all key blocks.
            return {index, block.order_in(first + kRowBlocksPerPass - 1)};
        }
    }

public:
    __device__ DqOrder(const Flash_bwd_params &params, const Block &block, int part)
        : params(params), block(block), part(part) {}

    // Call it before the CTA adds dQ of a step.
    __device__ __forceinline__ void wait(const Step &step) const {
        if (is_in_order() && (step.m_block % kRowBlocksPerPass == 0 || step.m_block == block.m_block_min)) {
            semaphore(step).wait(params.dq_semaphore, /*is_known_reached=*/false);
        }
    }
    // Call it after the CTA has added dQ of a step.
    __device__ __forceinline__ void pass(const Step &step) const {
        if (is_in_order() &&
            (step.m_block % kRowBlocksPerPass == kRowBlocksPerPass - 1 || step.m_block + 1 == block.m_block_max)) {
            semaphore(step).pass(params.dq_semaphore);
        }
    }
};

}  // namespace flash::sm90
