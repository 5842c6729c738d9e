// The forward with split keys over a cache of latent vectors, for at most 16 rows: flash_fwd_latent_narrow_kernel ->
// compute_attn_latent_narrow. The wgmma of flash_fwd_latent_kernel.h multiplies 64 rows, and its Q of 64 rows leaves
// shared memory for two key blocks. Here mma.sync multiplies 16 rows. Q lies in registers, and five key blocks of 32
// keys keep the memory busy.
//
// The four warps of the consumer warpgroup have 8 keys each of S, and 128 columns each of O. They hand P to each other
// through shared memory. Scheduler, loaders and the order of the work tiles are those of flash_fwd_split_kernel.h.
#pragma once

#include "flash_fwd_latent.h"
#include "flash_fwd_split_kernel.h"
#include "sm90/common/mma.h"

namespace flash::sm90 {

template <DType kDType>
struct Flash_fwd_latent_narrow_traits {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kHeadDim = kHeadDimLatentCache, kHeadDimV = kHeadDimVLatentCache;
    static constexpr int kRows = 16, kBlockM = kRows;  // the m16 of mma.sync
    static constexpr int kBlockN = 32, kStages = 5;
    static constexpr int kConsumers = 1, kQStages = 1, kWarps = 4;
    static constexpr bool kTracksLogits = false;
    static constexpr int kNThreads = 128 * (kConsumers + 1);  // with the producer
    static constexpr int kKeysOfWarp = kBlockN / kWarps, kColumnsOfWarp = kHeadDimV / kWarps;
    static_assert(kKeysOfWarp == 8, "the n8 of mma.sync");

    static constexpr int kSmemRow = 64, kAlignment = 1024;
    using SmemLayoutAtom = GMMA::Layout_K_SW128_Atom<Element>;
    using SmemLayoutQ = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kRows>, Int<kHeadDim>, Int<kQStages>>{}));
    using SmemLayoutK = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));

    struct SharedStorage {
        alignas(kAlignment) Element q[cosize_v<SmemLayoutQ>];
        alignas(kAlignment) Element k[cosize_v<SmemLayoutK>];
        // P as the A operands of O, for each 16 keys and lane. Two of them, so that one barrier a step is enough.
        alignas(16) uint32_t p[2][kBlockN / 16][32][4];
        float of_warps[kWarps][kRows];  // maxima, or sums, that the warps exchange
        PipelineBarriers<kQStages> q_barriers;
        PipelineBarriers<kStages> k_barriers;
        typename WorkTileRing<kConsumers>::SharedStorage tiles;
    };
    static constexpr int kSmemSize = sizeof(SharedStorage);

    struct PipelineStates {
        PipelineState<kQStages> q;
        PipelineState<kStages> k;
    };
};

// The consumer warpgroup. A thread holds columns of two rows: lane / 4 and the one 8 further on.
template <typename Traits>
class NarrowConsumer {
    using Element = typename Traits::Element;
    using SoftmaxState = Softmax<Element, 2, /*kMayOffset=*/false>;
    static constexpr int kRowsOfThread = 2, kBlockN = Traits::kBlockN, kKeysOfWarp = Traits::kKeysOfWarp;
    static constexpr int kRowBytes = Traits::kSmemRow * sizeof(Element);  // of a piece of 64 columns
    static constexpr int kPieceBytes = kBlockN * kRowBytes, kStageBytes = kBlockN * Traits::kHeadDim * sizeof(Element);
    static constexpr int kVectors = 8;  // of 16 bytes in a row of a piece
    static constexpr float kRescaleThreshold = SoftmaxState::kRescaleThreshold;

public:
    __device__ NarrowConsumer(const Flash_fwd_params &params, typename Traits::SharedStorage &shared)
        : params(params), shared(shared), tiles{shared.tiles}, warp(uniform(threadIdx.x % 128 / 32)) {}

    // All work tiles, each from its last key block to its first. store(tile, acc_o, softmax, first column) receives the
    // columns of O of a warp, (row, col), and the row statistics.
    template <typename Store>
    __device__ __forceinline__ void mma(const Store &store) {
        for (;;) {
            const int tile = tiles.take();
            const KeyBlocks blocks = tiles.key_blocks(tile, 0).template to_registers<Kind::split>();
            if (blocks.has(KeyBlocks::is_end)) {
                return;
            }
            load_Q();
            begin_rows();
            CUTE_NO_UNROLL
            for (int n_block = blocks.n_block_max - 1; n_block >= blocks.n_block_min; --n_block) {
                wait_for_K(tile, n_block, n_block >= blocks.n_ragged);
                float scores[kRowsOfThread * 2];  // (row, col): two neighbouring keys of each row
                multiply_Q_K(scores);
                modify_and_mask(tile, blocks, n_block, scores);
                softmax_step(scores);
                multiply_P_V();
                states.k.release(shared.k_barriers);
                states.k.advance();
            }
            Tensor acc_o_rowcol =
                make_tensor(&acc_o[0][0], make_layout(make_shape(_2{}, make_shape(_2{}, Int<kTilesOfO>{})),
                                                      make_stride(_2{}, make_stride(_1{}, _4{}))));
            store(tiles[tile], acc_o_rowcol, statistics(), warp * Traits::kColumnsOfWarp);
            tiles.release(tile);
        }
    }

private:
    static constexpr int kTilesOfO = Traits::kColumnsOfWarp / 8, kStepsOfS = Traits::kHeadDim / 16;
    const Flash_fwd_params &params;
    typename Traits::SharedStorage &shared;
    WorkTileRing<Traits::kConsumers> tiles;
    typename Traits::PipelineStates states;
    const int warp;
    int parity = 0;                // of the step: which of the two P
    uint32_t q[kStepsOfS][4];      // A operands
    float acc_o[kTilesOfO][4];     // not normalised
    float row_max[kRowsOfThread];  // reference of each row, unscaled, the same in all warps; -inf before the first key
    float row_sum[kRowsOfThread];  // this thread's share

    __device__ __forceinline__ void sync_warps() const { sync(Barrier::warpgroup, 0, 128); }
    // The same. True if x is in some thread.
    __device__ __forceinline__ static bool sync_warps_or(bool x) {
        uint32_t any;
        asm volatile(
            "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
            : "=r"(any)
            : "r"(uint32_t(x)), "r"(int(Barrier::warpgroup))
            : "memory");
        return any != 0;
    }

    __device__ __forceinline__ void load_Q() {
        states.q.wait(shared.q_barriers);
        Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});  // (16, HD, stage)
        const int lane = threadIdx.x % 32;
        CUTE_UNROLL
        for (int step = 0; step < kStepsOfS; ++step) {
            kvcache::ldmatrix_x4(q[step], cast_smem_ptr_to_uint(&sQ(lane % 16, step * 16 + lane / 16 * 8, _0{})));
        }
        states.q.release(shared.q_barriers);
        states.q.advance();
    }

    __device__ __forceinline__ void begin_rows() {
        CUTE_UNROLL
        for (int i = 0; i < kTilesOfO; ++i) {
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
                acc_o[i][j] = 0.0f;
            }
        }
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            row_max[row] = -INFINITY;
            row_sum[row] = 0.0f;
        }
    }

    // Keys past the end of the sequence may be NaN, and NaN times 0 is NaN: they become zeros.
    __device__ __forceinline__ void wait_for_K(int tile, int n_block, bool is_ragged) const {
        states.k.wait(shared.k_barriers);
        if (is_ragged) {
            Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutK{});  // (BLK_N, HD, stage)
            clear_rows_from(tiles[tile].sequence.seqlen_k - n_block * kBlockN, sK(_, _, states.k.stage), 0);
        }
    }

    // The address of 16 bytes of a stage, from a row and a vector of 8 columns. The swizzle exchanges the vectors of a
    // piece of 64 columns by the last three bits of the row.
    __device__ __forceinline__ uint32_t address_of(int row, int piece, int vector) const {
        return cast_smem_ptr_to_uint(shared.k) + states.k.stage * kStageBytes + piece * kPieceBytes + row * kRowBytes +
               (vector ^ row % kVectors) * 16;
    }

    // scores = Q K^T for the keys of the warp, in four sums so that few products wait for each other.
    __device__ __forceinline__ void multiply_Q_K(float (&scores)[4]) const {
        constexpr int kSums = 4, kStepsOfPiece = Traits::kSmemRow / 32;
        const int lane = threadIdx.x % 32, row = warp * kKeysOfWarp + lane % 8;
        uint32_t address[kStepsOfPiece];  // a step of two products has four vectors of a row
        CUTE_UNROLL
        for (int i = 0; i < kStepsOfPiece; ++i) {
            address[i] = address_of(row, 0, i * 4 + lane / 8);
        }
        float sums[kSums][4] = {};
        CUTE_UNROLL
        for (int step = 0; step < kStepsOfS / 2; ++step) {
            uint32_t k[4];
            kvcache::ldmatrix_x4(k, address[step % kStepsOfPiece] + step / kStepsOfPiece * kPieceBytes);
            kvcache::mma_m16n8k16<Element>(sums[2 * step % kSums], q[2 * step], k[0], k[1]);
            kvcache::mma_m16n8k16<Element>(sums[(2 * step + 1) % kSums], q[2 * step + 1], k[2], k[3]);
        }
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
            scores[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
        }
    }

    __device__ __forceinline__ void modify_and_mask(int tile, const KeyBlocks &blocks, int n_block,
                                                    float (&values)[4]) const {
        Tensor scores = make_tensor(&values[0], make_layout(make_shape(_2{}, _2{}), make_stride(_2{}, _1{})));
        const int first_key = n_block * kBlockN + warp * kKeysOfWarp, first_row = threadIdx.x % 32 / 4;
        if (blocks.has(KeyBlocks::has_score_mod)) {
            const auto coords = [](int row, int col) {
                return make_tensor(make_inttuple_iter(make_coord(row, col)),
                                   make_layout(make_shape(_2{}, _2{}), make_stride(ScaledBasis<_8, 0>{}, E<1>{})));
            };
            const int block_row = tiles[tile].place.block * Traits::kBlockM;
            tiles.score_mod(tile).template apply</*kTransposed=*/false>(scores, coords(first_row, threadIdx.x % 4 * 2),
                                                                        coords(0, 0), block_row, first_key,
                                                                        [](int, int, float) {});
        }
        if (blocks.needs_mask(n_block)) {
            const Sequence &sequence = tiles[tile].sequence;
            const KeyRange<true> range(params, sequence.seqlen_q, sequence.seqlen_k);
            const auto query = [&](int row) {
                return query_of<Kind::split>(params, tiles[tile].place.block * Traits::kBlockM + first_row + row * 8);
            };
            apply_mask(
                scores, [&](int row) { return range.begin_key(query(row)) - first_key; },
                [&](int row) { return range.end_key(query(row)) - first_key; });
        }
    }

    // P of the step is in shared memory, from all warps, relative to row_max. The reference moves when some score
    // exceeds it by more than kRescaleThreshold (powers of 2), or is the first of its row.
    __device__ __forceinline__ void softmax_step(const float (&scores)[4]) {
        parity ^= 1;
        float maximum[kRowsOfThread], sums[kRowsOfThread];
        bool must_move = false;
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            maximum[row] = quad_allreduce(fmaxf(scores[2 * row], scores[2 * row + 1]),
                                          [](float a, float b) { return fmaxf(a, b); });
            must_move |= (maximum[row] - row_max[row]) * params.scale_softmax_log2 > kRescaleThreshold ||
                         (row_max[row] == -INFINITY && maximum[row] != -INFINITY);
        }
        send_P(scores, sums);
        if (sync_warps_or(must_move)) {
            move_reference(maximum);
            send_P(scores, sums);
            sync_warps();
        }
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            row_sum[row] += sums[row];
        }
    }

    // The probabilities of the keys of the warp, as half of the A operand of the 16 keys that two warps share.
    __device__ __forceinline__ void send_P(const float (&scores)[4], float (&sums)[kRowsOfThread]) {
        uint32_t words[kRowsOfThread];
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            const float reference = row_max[row] == -INFINITY ? 0.0f : row_max[row];
            const auto exponentiate = [&](float score) {  // subtracts before it scales, so that large scores are exact
                return exp2_approx(__fmaf_rn(score - reference, params.scale_softmax_log2, -SoftmaxState::kHeadroom));
            };
            const float first = exponentiate(scores[2 * row]), second = exponentiate(scores[2 * row + 1]);
            sums[row] = first + second;
            words[row] = kvcache::pack<Element>(first, second);
        }
        *reinterpret_cast<uint2 *>(&shared.p[parity][warp / 2][threadIdx.x % 32][warp % 2 * 2]) = {words[0], words[1]};
    }

    // The reference becomes the maximum of the rows, of all warps.
    __device__ __forceinline__ void move_reference(const float (&maximum)[kRowsOfThread]) {
        const int row_of_lane = threadIdx.x % 32 / 4;
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            if (threadIdx.x % 4 == 0) {
                shared.of_warps[warp][row_of_lane + row * 8] = maximum[row];
            }
        }
        sync_warps();
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            float reference = row_max[row];
            CUTE_UNROLL
            for (int i = 0; i < Traits::kWarps; ++i) {
                reference = fmaxf(reference, shared.of_warps[i][row_of_lane + row * 8]);
            }
            // -inf - -inf would be NaN: a row that has seen no key keeps factor 1 (its sum and output are 0).
            const float factor =
                reference == -INFINITY ? 1.0f : exp2_approx((row_max[row] - reference) * params.scale_softmax_log2);
            row_max[row] = reference;
            row_sum[row] *= factor;
            CUTE_UNROLL
            for (int i = 0; i < kTilesOfO; ++i) {
                acc_o[i][2 * row] *= factor;
                acc_o[i][2 * row + 1] *= factor;
            }
        }
    }

    // O += P V for the columns of the warp.
    __device__ __forceinline__ void multiply_P_V() {
        constexpr int kPairsOfPiece = Traits::kSmemRow / 16, kPieces = Traits::kColumnsOfWarp / Traits::kSmemRow;
        const int lane = threadIdx.x % 32, row = lane % 16;
        uint32_t address[kPairsOfPiece];  // a pair of products has two vectors of a row
        CUTE_UNROLL
        for (int i = 0; i < kPairsOfPiece; ++i) {
            address[i] = address_of(row, warp * kPieces, i * 2 + lane / 16);
        }
        CUTE_UNROLL
        for (int step = 0; step < kBlockN / 16; ++step) {
            const uint4 words = *reinterpret_cast<const uint4 *>(shared.p[parity][step][lane]);
            const uint32_t p[4] = {words.x, words.y, words.z, words.w};
            CUTE_UNROLL
            for (int pair = 0; pair < kTilesOfO / 2; ++pair) {
                uint32_t v[4];
                kvcache::ldmatrix_x4_transposed(
                    v, address[pair % kPairsOfPiece] + pair / kPairsOfPiece * kPieceBytes + step * 16 * kRowBytes);
                kvcache::mma_m16n8k16<Element>(acc_o[2 * pair], p, v[0], v[1]);
                kvcache::mma_m16n8k16<Element>(acc_o[2 * pair + 1], p, v[2], v[3]);
            }
        }
    }

    // The row statistics of a work tile, with the sums of all warps.
    __device__ __forceinline__ SoftmaxState statistics() const {
        SoftmaxState softmax(params.scale_softmax_log2);
        const int row_of_lane = threadIdx.x % 32 / 4;
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            const float sum = quad_allreduce(row_sum[row], [](float a, float b) { return a + b; });
            if (threadIdx.x % 4 == 0) {
                shared.of_warps[warp][row_of_lane + row * 8] = sum;
            }
        }
        sync_warps();
        CUTE_UNROLL
        for (int row = 0; row < kRowsOfThread; ++row) {
            softmax.row_max[row] = row_max[row];
            CUTE_UNROLL
            for (int i = 0; i < Traits::kWarps; ++i) {  // a thread's share: one lane of four has all
                softmax.row_sum[row] += threadIdx.x % 4 == 0 ? shared.of_warps[i][row_of_lane + row * 8] : 0.0f;
            }
        }
        return softmax;
    }
};

// ---- the kernel

template <typename Traits>
__device__ __forceinline__ void compute_attn_latent_narrow(const Flash_fwd_params &params, const KeyBoxes &boxes,
                                                           typename Traits::SharedStorage &shared,
                                                           const kvcache::SplitkvPlan &plan) {
    using Output = SplitOutput<Traits>;
    constexpr int kLoadWarps = 2;
    if (threadIdx.x / 128 == 0) {  // producer
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
    } else {
        NarrowConsumer<Traits>(params, shared)
            .mma([&](const WorkTile &tile, auto &acc_o, const auto &softmax, int first_column) {
                // Every warp has the rows 0 to 15.
                const Output output(params, plan, tile, /*first_row=*/threadIdx.x % 32 / 4);
                output.store_columns(acc_o, output.store_statistics(softmax), first_column);
            });
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    flash_fwd_latent_narrow_kernel(const __grid_constant__ Flash_fwd_params params,
                                   const __grid_constant__ KeyBoxes boxes,
                                   const __grid_constant__ kvcache::SplitkvPlan plan) {
    extern __shared__ __align__(1024) char smem[];
    static_assert(Traits::kAlignment == 1024);
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    if (threadIdx.x == 0) {
        prefetch_tma_descriptor(&boxes.k);
        shared.q_barriers.init(Traits::kWarps, /*writers=*/QueryLoader<Traits>::kArrivals);
        shared.k_barriers.init(Traits::kWarps);
        shared.tiles.barriers.init(Traits::kWarps + 2, /*writers=*/1);  // + 2: load warps
        cutlass::arch::fence_barrier_init();
    }
    wait_for_inputs();
    compute_attn_latent_narrow<Traits>(params, boxes, shared, plan);
}

}  // namespace flash::sm90
