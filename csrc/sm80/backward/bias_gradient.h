// The gradient of attn_bias: dS = P (dP - delta), summed over the pairs of a sequence and a head that share a bias. It
// runs after the backward on every architecture, and computes S and dP once more: dS of all pairs would not fit into
// memory.
//
// A CTA has one tile of queries and keys of one bias. It loops over the pairs of its part, and keeps the sums in
// registers. With one row for all queries, the CTA has a tile of keys and loops over the tiles of queries too.
#pragma once

#include "common/attn_bias.h"
#include "common/block_info.h"
#include "common/dropout.h"
#include "common/key_ranges.h"
#include "common/score_mod.h"
#include "common/softmax.h"
#include "common/trace.h"
#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "sm80/accumulator.h"
#include "sm80/copy.h"
#include "sm80/forward/kernel_traits.h"

namespace flash::sm80 {

// Shared memory for Q, dO, K and V fits into that of every GPU (99 KB). Every warp has 16 queries.
template <int kHeadDim>
struct TileSizesBias : TileFwd<128, 64, 8, 2> {};
template <>
struct TileSizesBias<192> : TileFwd<64, 64, 4, 2> {};
template <>
struct TileSizesBias<256> : TileFwd<64, 32, 4, 2> {};

// Where a CTA works.
struct BiasTileOfCta {
    int part, bidb, bidh;  // bidb, bidh: of the bias
    int m_block, n_block;  // m_block 0 if the bias has one row
};

template <typename Traits>
class BiasGradient {
    using Element = typename Traits::Element;
    using TiledMma = typename Traits::TiledMma;
    using Info = BlockInfo<Traits::kBlockM, Traits::kBlockN, /*Is_local=*/true>;
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
    using TileS = Shape<Int<kBlockM>, Int<kBlockN>>;
    using Accumulator = decltype(partition_fragment_C(TiledMma{}, TileS{}));  // (MMA, MMA_M, MMA_N)

public:
    struct SharedStorage {
        alignas(128) Element q[cosize_v<typename Traits::SmemLayoutQ>];
        alignas(128) Element k[cosize_v<typename Traits::SmemLayoutKV>];
        alignas(128) Element dout[cosize_v<typename Traits::SmemLayoutQ>];
        alignas(128) Element v[cosize_v<typename Traits::SmemLayoutKV>];
    };

    __device__ BiasGradient(const Flash_bias_bwd_params &params, SharedStorage &shared, const BiasTileOfCta &place)
        : params(params), shared(shared), place(place), seq(sequence</*kMayBeVarlen=*/false>(params, 0)) {}

    __device__ __forceinline__ void run() {
        Accumulator acc;
        clear(acc);
        const int pairs = params.b / params.bias_batch * (params.h / params.bias_heads);
        Step next{int(int64_t{pairs} * place.part / params.parts), first_m_block(), true};
        end_pair = int(int64_t{pairs} * (place.part + 1) / params.parts);
        find_visible(next);
        load_q_and_k(next);
        load_dout_and_v(next);
        while (next.pair < end_pair) {
            const Step step = next;
            advance(next);
            find_visible(next);
            add(step, next, acc);
        }
        cp_async_wait<0>();
        if (params.bias_rows == 1) {
            store_sums_of_columns(acc);
        } else {
            store_tile(acc);
        }
    }

private:
    const Flash_bias_bwd_params &params;
    SharedStorage &shared;
    const BiasTileOfCta place;
    const Sequence seq;
    int end_pair;

    // A tile of queries of a pair.
    struct Step {
        int pair, m_block;
        bool is_new_pair;  // K and V are not loaded
    };

    __device__ __forceinline__ int bidb_of(const Step &step) const {
        return params.bias_batch == 1 ? step.pair / (params.h / params.bias_heads) : place.bidb;
    }
    __device__ __forceinline__ int bidh_of(const Step &step) const {
        return params.bias_heads == 1 ? step.pair % params.h : place.bidh;
    }

    // ---- the steps

    __device__ __forceinline__ int first_m_block() const { return params.bias_rows == 1 ? 0 : place.m_block; }
    __device__ __forceinline__ int end_m_block() const {
        return params.bias_rows == 1 ? (seq.seqlen_q + kBlockM - 1) / kBlockM : place.m_block + 1;
    }
    __device__ __forceinline__ void advance(Step &step) const {
        step.is_new_pair = false;
        if (++step.m_block == end_m_block()) {
            step = {step.pair + 1, first_m_block(), true};
        }
    }
    // Moves on to a step in which some query sees some key.
    __device__ __forceinline__ void find_visible(Step &step) const {
        while (step.pair < end_pair && !is_visible(step)) {
            const bool is_new_pair = step.is_new_pair;
            advance(step);
            step.is_new_pair |= is_new_pair;
        }
    }
    __device__ __forceinline__ bool is_visible(const Step &step) const {
        const Info info(params, seq, step.m_block);
        if (place.n_block < info.n_block_min || place.n_block >= info.n_block_max) {
            return false;
        }
        if (!params.key_ranges.is_used()) {
            return true;
        }
        const VisibleBlock keys = RangesOfHead(params, bidb_of(step), bidh_of(step))
                                      .template block<kBlockM>(step.m_block * kBlockM, seq.seqlen_q);
        const int begin = place.n_block * kBlockN, end = begin + kBlockN;
        return (keys.begin0 < end && keys.end0 > begin) || (keys.begin1 < end && keys.end1 > begin);
    }

    // ---- loads. Each call starts one group of copies, which is empty without a step

    template <typename Layout, typename TileShape>
    __device__ __forceinline__ void load(const TensorRef &x, int bidb, int bidh, int seqlen, int block, Layout,
                                         TileShape tile, Element *smem) const {
        typename Traits::GmemTiledCopyQKV copies;
        auto of_thread = copies.get_thread_slice(threadIdx.x);
        Tensor gX = local_tile(head_tensor<Element>(x, bidb, bidh, 0, seqlen, params.d), tile, make_coord(block, 0));
        Tensor coords = of_thread.partition_S(make_identity_tensor(tile));  // (CPY, CPY_M, CPY_K)
        copy_tile_async(
            copies, of_thread.partition_S(gX), of_thread.partition_D(make_tensor(make_smem_ptr(smem), Layout{})),
            coords, [&](int col) { return get<1>(coords(0, 0, col)) < params.d; },
            RowRange<false>{0, seqlen - block * int(size<0>(tile))});
    }
    __device__ __forceinline__ void load_rows(const TensorRef &x, const Step &step, Element *smem) const {
        load(x, bidb_of(step), bidh_of(step), seq.seqlen_q, step.m_block, typename Traits::SmemLayoutQ{},
             Shape<Int<kBlockM>, Int<kHeadDim>>{}, smem);
    }
    __device__ __forceinline__ void load_keys(const TensorRef &x, const Step &step, Element *smem) const {
        if (step.is_new_pair) {
            load(x, bidb_of(step), bidh_of(step) / params.h_h_k_ratio, seq.seqlen_k, place.n_block,
                 typename Traits::SmemLayoutKV{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}, smem);
        }
    }
    __device__ __forceinline__ void load_q_and_k(const Step &step) const {
        if (step.pair < end_pair) {
            load_rows(params.q, step, shared.q);
            load_keys(params.k, step, shared.k);
        }
        cp_async_fence();
    }
    __device__ __forceinline__ void load_dout_and_v(const Step &step) const {
        if (step.pair < end_pair) {
            load_rows(params.dout, step, shared.dout);
            load_keys(params.v, step, shared.v);
        }
        cp_async_fence();
    }

    // ---- a step

    // acc += A B^T.
    __device__ __forceinline__ static void multiply(Element *a, Element *b, Accumulator &acc) {
        Tensor sA = make_tensor(make_smem_ptr(a), typename Traits::SmemLayoutQ{});   // (BLK_M, HD)
        Tensor sB = make_tensor(make_smem_ptr(b), typename Traits::SmemLayoutKV{});  // (BLK_N, HD)
        TiledMma mma;
        auto of_thread = mma.get_thread_slice(threadIdx.x);
        Tensor rA = of_thread.partition_fragment_A(sA);
        Tensor rB = of_thread.partition_fragment_B(sB);
        gemm<0>(acc, rA, rB, sA, sB, mma, make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma),
                make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma), threadIdx.x);
    }

    // (row, col) -> (query, key) in the tile, for the scores of a thread.
    __device__ __forceinline__ static auto coords_of_scores(int thread) {
        Tensor coords = TiledMma{}.get_thread_slice(thread).partition_C(make_identity_tensor(TileS{}));
        return make_tensor(coords.data(), rowcol_layout(coords.layout()));
    }

    // Adds dS of the step, whose copies have been started, and starts those of the next step.
    __device__ __forceinline__ void add(const Step &step, const Step &next, Accumulator &acc) const {
        const int bidb = bidb_of(step), bidh = bidh_of(step);
        const int first_query = step.m_block * kBlockM, first_key = place.n_block * kBlockN;
        Tensor coords = coords_of_scores(thread_index<true>());
        constexpr int kRows = decltype(size<0>(coords))::value;
        float lse[kRows], delta[kRows];
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
            const int query = first_query + get<0>(coords(row, 0)), last = min(query, seq.seqlen_q - 1);
            const float lse_of_row = static_cast<const float *>(
                params.softmax_lse)[bidb * params.lse_batch_stride + bidh * params.lse_head_stride + last];
            // +inf, so that P is 0: rows without a key, and past the end of the sequence.
            lse[row] = query != last || lse_of_row == -INFINITY ? INFINITY : lse_of_row;
            delta[row] = static_cast<const float *>(
                params.dsoftmax_sum)[bidb * params.padded_batch_stride + bidh * params.padded_head_stride + last];
        }
        Accumulator acc_s;
        clear(acc_s);
        cp_async_wait<1>();
        __syncthreads();  // all threads: Q and K have arrived
        multiply(shared.q, shared.k, acc_s);
        __syncthreads();  // all threads are done with them
        load_q_and_k(next);

        Tensor p = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
        if (ScoreMod::is_on(params)) {
            ScoreMod(params, bidb, bidh, seq.seqlen_k - seq.seqlen_q)
                .template apply</*kTransposed=*/false>(p, coords, coords_of_scores(0), first_query, first_key, NoOp{});
        }
        BiasOfHead<Element>(params, bidb, bidh)
            .template add_to</*kTransposed=*/false>(p, coords, params.scale_softmax, first_query, first_key);
        mask(step, bidb, bidh, coords, p);
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
            const float factor = exponent_factor(lse[row]);
            CUTE_UNROLL
            for (int col = 0; col < size<1>(p); ++col) {
                p(row, col) = exp2_approx((p(row, col) - lse[row]) * factor);
            }
        }

        Accumulator acc_dp;
        clear(acc_dp);
        cp_async_wait<1>();
        __syncthreads();  // all threads: dO and V have arrived
        multiply(shared.dout, shared.v, acc_dp);
        __syncthreads();  // all threads are done with them
        load_dout_and_v(next);

        Tensor dp = make_tensor(acc_dp.data(), rowcol_layout(acc_dp.layout()));  // (row, col)
        Tensor sum = make_tensor(acc.data(), rowcol_layout(acc.layout()));       // (row, col)
        if (params.rng_state != nullptr) {
            Accumulator kept_p = acc_s;
            Tensor kept = make_tensor(kept_p.data(), rowcol_layout(kept_p.layout()));
            const DropoutStream stream(params.rng_state, bidb, params.h, bidh);
            drop(kept, coords, stream, params.dropout_threshold, first_query, first_key);
            CUTE_UNROLL
            for (int i = 0; i < size(acc_dp); ++i) {
                acc_dp(i) = kept_p(i) == 0.0f ? 0.0f : acc_dp(i) * params.rp_dropout;
            }
        }
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
            CUTE_UNROLL
            for (int col = 0; col < size<1>(p); ++col) {
                // dP of a row without a key, or of a key that no query sees, may be NaN.
                sum(row, col) += p(row, col) == 0.0f ? 0.0f : p(row, col) * (dp(row, col) - delta[row]);
            }
        }
    }

    template <typename TensorC, typename TensorP>
    __device__ __forceinline__ void mask(const Step &step, int bidb, int bidh, const TensorC &coords,
                                         TensorP &logits) const {
        if (params.key_ranges.is_used()) {
            apply_mask<kBlockM>(logits, coords, RangesOfHead(params, bidb, bidh), seq.seqlen_q, step.m_block,
                                place.n_block * kBlockN);
            return;
        }
        const Info info(params, seq, step.m_block);
        if (info.needs_mask(place.n_block)) {
            apply_mask<kBlockM, kBlockN>(logits, coords, info, step.m_block, place.n_block);
        }
    }

    // ---- stores

    __device__ __forceinline__ int64_t index_of(int row, int key) const {
        const int64_t bias = (int64_t{place.part} * params.bias_batch + place.bidb) * params.bias_heads + place.bidh;
        return (bias * params.bias_rows + row) * seq.seqlen_k + key;
    }
    __device__ __forceinline__ void store(int row, int key, float x) const {
        if (params.is_float32) {
            static_cast<float *>(params.dbias)[index_of(row, key)] = x;
        } else {
            static_cast<Element *>(params.dbias)[index_of(row, key)] = Element(x);
        }
    }

    __device__ __forceinline__ void store_tile(const Accumulator &acc) const {
        Tensor sum = make_tensor(acc.data(), rowcol_layout(acc.layout()));
        Tensor coords = coords_of_scores(threadIdx.x);
        const bool has_pairs = seq.seqlen_k % 2 == 0;  // neighbours are stored together
        CUTE_UNROLL
        for (int i = 0; i < size<0>(sum); ++i) {
            const int row = place.m_block * kBlockM + get<0>(coords(i, 0));
            if (row >= seq.seqlen_q) {
                continue;
            }
            CUTE_UNROLL
            for (int j = 0; j < size<1>(sum); j += 2) {
                const int key = place.n_block * kBlockN + get<1>(coords(i, j));
                if (has_pairs && key < seq.seqlen_k) {
                    if (params.is_float32) {
                        *reinterpret_cast<float2 *>(static_cast<float *>(params.dbias) + index_of(row, key)) = {
                            sum(i, j), sum(i, j + 1)};
                    } else {
                        const cutlass::Array<float, 2> pair{sum(i, j), sum(i, j + 1)};
                        *reinterpret_cast<cutlass::Array<Element, 2> *>(static_cast<Element *>(params.dbias) +
                                                                        index_of(row, key)) =
                            cutlass::NumericArrayConverter<Element, float, 2>::convert(pair);
                    }
                } else {
                    CUTE_UNROLL
                    for (int c = 0; c < 2; ++c) {
                        if (key + c < seq.seqlen_k) {
                            store(row, key + c, sum(i, j + c));
                        }
                    }
                }
            }
        }
    }

    // The sums over all queries: of a thread, of the eight lanes that have the same keys, of all warps.
    __device__ __forceinline__ void store_sums_of_columns(const Accumulator &acc) const {
        static_assert(sizeof(float) * Traits::kNWarps * kBlockN <= sizeof(SharedStorage::q));
        auto *of_warps = reinterpret_cast<float *>(shared.q);  // [warp][key]
        Tensor sum = make_tensor(acc.data(), rowcol_layout(acc.layout()));
        Tensor coords = coords_of_scores(threadIdx.x);
        __syncthreads();  // all threads are done with Q
        CUTE_UNROLL
        for (int j = 0; j < size<1>(sum); ++j) {
            float x = 0.0f;
            CUTE_UNROLL
            for (int i = 0; i < size<0>(sum); ++i) {
                x += sum(i, j);
            }
            CUTE_UNROLL
            for (int lanes = 4; lanes < 32; lanes *= 2) {
                x += __shfl_xor_sync(0xffffffffu, x, lanes);
            }
            if (threadIdx.x % 32 < 4) {
                of_warps[threadIdx.x / 32 * kBlockN + get<1>(coords(0, j))] = x;
            }
        }
        __syncthreads();  // the sums of all warps are there
        const int key = place.n_block * kBlockN + threadIdx.x;
        if (threadIdx.x < kBlockN && key < seq.seqlen_k) {
            float x = 0.0f;
            for (int warp = 0; warp < Traits::kNWarps; ++warp) {
                x += of_warps[warp * kBlockN + threadIdx.x];
            }
            store(0, key, x);
        }
    }
};

// CTAs take the keys of a tile of queries, then the tiles, so that neighbours share Q and dO in L2.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads, Traits::TileSize::kMinBlocksPerSM)
    bias_gradient_kernel(const __grid_constant__ Flash_bias_bwd_params params) {
    extern __shared__ char smem[];
    auto &shared = *reinterpret_cast<typename BiasGradient<Traits>::SharedStorage *>(smem);
    auto next = [index = static_cast<int>(blockIdx.x)](int count) mutable {
        const int result = index % count;
        index /= count;
        return result;
    };
    BiasTileOfCta place;
    place.n_block = next((params.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN);
    place.m_block = next((params.bias_rows + Traits::kBlockM - 1) / Traits::kBlockM);
    place.bidh = next(params.bias_heads);
    place.bidb = next(params.bias_batch);
    place.part = next(params.parts);
    BiasGradient<Traits>(params, shared, place).run();
}

template <DType kDType, int kHeadDim>
void run_bias_gradient(const Flash_bias_bwd_params &params, cudaStream_t stream) {
    using Traits = Flash_fwd_kernel_traits<kDType, kHeadDim, TileSizesBias<kHeadDim>>;
    constexpr int kSmem = sizeof(typename BiasGradient<Traits>::SharedStorage);
    static_assert(kSmem <= 99 * 1024, "more shared memory than a thread block may have on some GPUs");
    const int64_t tiles = int64_t{(params.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN} *
                          ((params.bias_rows + Traits::kBlockM - 1) / Traits::kBlockM);
    const int64_t grid = tiles * params.bias_heads * params.bias_batch * params.parts;
    check_grid(grid, "parts * batch * nheads * tiles of the gradient of attn_bias");
    if (grid == 0) {
        return;
    }
    auto kernel = &bias_gradient_kernel<Traits>;
    reserve_smem(kernel, kSmem);
    if (trace_enabled()) {
        trace("bias_gradient_kernel", "kBlockM=%d kBlockN=%d parts=%d grid=%lld threads=%d smem=%d", Traits::kBlockM,
              Traits::kBlockN, params.parts, static_cast<long long>(grid), Traits::kNThreads, kSmem);
    }
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, kSmem, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching bias_gradient_kernel");
}

}  // namespace flash::sm80
