// The backward over short sequences: flash_bwd_single_tile_kernel -> TileBwd. A warp has 16 queries in S, dP and dQ,
// and 16 keys in dK and dV. P and dS go from the ones to the others through shared memory.
#pragma once

#include <algorithm>

#include "common/softmax.h"
#include "tile.h"

namespace flash::single_tile {

template <typename Traits>
struct SharedStorageBwd {
    using Element = typename Traits::Element;
    static constexpr int kTile = Traits::kTile;
    Rows<Element, kTile, Traits::kHeadDim> q, k, v, dout;
    Rows<Element, kTile, std::max(Traits::kHeadDim, kTile)> o_and_p;  // row i of P replaces row i of O
    Rows<Element, kTile, kTile> ds;
};

// a * b summed over the elements of two A operands that lie in row i of the thread.
template <typename Element>
__device__ __forceinline__ float dot_of_row(const uint32_t (&a)[4], const uint32_t (&b)[4], int i) {
    using Pair = cutlass::Array<Element, 2>;
    const cutlass::NumericArrayConverter<float, Element, 2> convert;
    float result = 0.0f;
    CUTE_UNROLL
    for (int j = i; j < 4; j += 2) {
        const auto x = convert(reinterpret_cast<const Pair &>(a[j])), y = convert(reinterpret_cast<const Pair &>(b[j]));
        result = __fmaf_rn(x[0], y[0], __fmaf_rn(x[1], y[1], result));
    }
    return result;
}

// Writes delta of the thread's rows, and zeros in the padding behind the sequence.
template <typename Traits>
__device__ __forceinline__ void store_delta(const Flash_bwd_params &params, const Place<Traits> &place, int bidh,
                                            const float (&delta)[2]) {
    float *to = static_cast<float *>(params.dsoftmax_sum) + place.bidb * params.padded_batch_stride +
                bidh * params.padded_head_stride;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
        if (threadIdx.x % 4 == 0) {
            to[place.row_of_thread() + i * 8] = delta[i];
        }
    }
    for (int row = Traits::kTile + place.thread(); row < params.padded_head_stride; row += Traits::kThreadsOfTile) {
        to[row] = 0.0f;
    }
}

// The warps of a tile. It computes dQ of a query head, or of those that are summed into one head of dK and dV.
template <typename Traits>
class TileBwd {
    using Element = typename Traits::Element;
    static constexpr int kTile = Traits::kTile, kN8 = Scores<Traits>::kN8;
    const Flash_bwd_params &params;
    const Place<Traits> &place;
    SharedStorageBwd<Traits> &shared;
    const Visible visible;

public:
    __device__ __forceinline__ TileBwd(const Flash_bwd_params &params, const Place<Traits> &place,
                                       SharedStorageBwd<Traits> &shared)
        : params(params), place(place), shared(shared), visible(params) {}

    // One query head.
    __device__ __forceinline__ void run() {
        const int bidh = place.head;
        load(bidh, /*with_keys=*/true);
        queries(bidh);
        if (params.dv.ptr != nullptr) {
            Result<Traits> dv;
            add_queries(dv, shared.o_and_p, shared.dout, params.d_v);
            store_keys(params.dv, dv, params.d_v, 1.0f);
        }
        if (params.dk.ptr != nullptr) {
            Result<Traits> dk;
            add_queries(dk, shared.ds, shared.q, params.d);
            store_keys(params.dk, dk, params.d, params.qk_scale);
        }
    }

    // heads_per_dkv query heads.
    __device__ __forceinline__ void run_group() {
        Result<Traits> dk, dv;
        CUTE_NO_UNROLL
        for (int i = 0; i < params.heads_per_dkv; ++i) {
            const int bidh = place.head * params.heads_per_dkv + i;
            load(bidh, /*with_keys=*/i == 0);
            queries(bidh);
            add_queries(dv, shared.o_and_p, shared.dout, params.d_v);
            add_queries(dk, shared.ds, shared.q, params.d);
            place.sync();  // all warps have read the rows of this head
        }
        if (params.dv.ptr != nullptr) {
            store_keys(params.dv, dv, params.d_v, 1.0f);
        }
        if (params.dk.ptr != nullptr) {
            store_keys(params.dk, dk, params.d, params.qk_scale);
        }
    }

private:
    // Starts the loads in two groups: what S needs, and the rest.
    __device__ __forceinline__ void load(int bidh, bool with_keys) {
        const int bidh_k = bidh / params.h_h_k_ratio;
        load_queries(shared.q, params.q, params.d, bidh);
        if (with_keys) {
            load_keys(shared.k, params.k, params.d, bidh_k);
        }
        kvcache::cp_async_commit();
        load_queries(shared.dout, params.dout, params.d_v, bidh);
        if (with_keys) {
            load_keys(shared.v, params.v, params.d_v, bidh_k);
        }
        load_queries(shared.o_and_p, params.o, params.d_v, bidh);
        kvcache::cp_async_commit();
    }
    template <typename RowsOfTile>
    __device__ __forceinline__ void load_queries(RowsOfTile &rows, const TensorRef &x, int d, int bidh) const {
        load_rows<Traits>(rows, head_of<const Element>(x, place.bidb, bidh), x.row_stride, visible.row_begin,
                          visible.row_end, d, place.thread());
    }
    template <typename RowsOfTile>
    __device__ __forceinline__ void load_keys(RowsOfTile &rows, const TensorRef &x, int d, int bidh_k) const {
        load_rows<Traits>(rows, head_of<const Element>(x, place.bidb, bidh_k), x.row_stride, visible.key_begin,
                          visible.key_end, d, place.thread());
    }

    // Computes dQ of the warp's rows, and leaves P and dS of all warps in shared memory.
    __device__ __forceinline__ void queries(int bidh) {
        const int64_t lse_head = place.bidb * params.lse_batch_stride + bidh * params.lse_head_stride;
        float lse[2], delta[2];  // +inf and 0 for rows without a key, and past the end
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
            const int row = place.row_of_thread() + i * 8;
            const bool has_keys = visible.has_keys(row);
            lse[i] = has_keys ? static_cast<const float *>(params.softmax_lse)[lse_head + row] : INFINITY;
            lse[i] = lse[i] == -INFINITY ? INFINITY : lse[i];
            delta[i] = has_keys && params.dsoftmax_lse != nullptr
                           ? -static_cast<const float *>(params.dsoftmax_lse)[lse_head + row]
                           : 0.0f;
        }

        // P = exp(S - lse). The product of score and scale is rounded as in the forward.
        kvcache::cp_async_wait_group<1>();
        place.sync();
        Scores<Traits> p, ds;
        multiply_scores(p, shared.q, place.first_row(), shared.k, params.d, params.seqlen_k,
                        [](const uint32_t (&)[4], int) {});
        CUTE_UNROLL
        for (int n8 = 0; n8 < kN8; ++n8) {
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                p.values[n8][i] = (__fmul_rn(p.values[n8][i], params.scale_softmax) - lse[i / 2]) * float(kLog2e);
            }
        }
        p.mask(visible, place.row_of_thread());
        CUTE_UNROLL
        for (int n8 = 0; n8 < kN8; ++n8) {
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                p.values[n8][i] = exp2_approx(p.values[n8][i]);
            }
        }

        // dP = dO V^T, delta = rowsum(dO O) - dLSE, dS = P (dP - delta).
        kvcache::cp_async_wait_group<0>();
        place.sync();
        float dots[2] = {};
        multiply_scores(ds, shared.dout, place.first_row(), shared.v, params.d_v, params.seqlen_k,
                        [&](const uint32_t (&dout)[4], int column) {
                            uint32_t o[4];
                            load_A(o, shared.o_and_p, place.first_row(), column);
                            dots[0] += dot_of_row<Element>(dout, o, 0);
                            dots[1] += dot_of_row<Element>(dout, o, 1);
                        });
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
            delta[i] += quad_allreduce(dots[i], [](float a, float b) { return a + b; });
        }
        store_delta(params, place, bidh, delta);
        CUTE_UNROLL
        for (int n8 = 0; n8 < kN8; ++n8) {
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                const float dp = ds.values[n8][i], probability = p.values[n8][i];
                ds.values[n8][i] = probability == 0.0f ? 0.0f : probability * (dp - delta[i / 2]);
            }
        }
        __syncwarp();  // all lanes have read O
        p.store(shared.o_and_p, place.row_of_thread());
        ds.store(shared.ds, place.row_of_thread());
        if (params.dq.ptr != nullptr) {
            store_dq(bidh, ds);
        }
        place.sync();
    }

    __device__ __forceinline__ void store_dq(int bidh, const Scores<Traits> &ds) const {
        Result<Traits> dq;
        CUTE_UNROLL
        for (int key = 0; key < kTile; key += 16) {
            if (key < params.seqlen_k) {
                uint32_t a[4];
                ds.to_A(a, key);
                dq.add(a, shared.k, key, params.d);
            }
        }
        dq.clear_rows_without_keys(visible, place.row_of_thread());
        dq.store(head_of<Element>(params.dq, place.bidb, bidh), params.dq.row_stride, place.row_of_thread(),
                 params.seqlen_q, params.d, [&](int) { return params.qk_scale; });
    }

    // result += W^T X for the 16 keys of the warp: W is P or dS, X is dO or Q.
    template <typename RowsOfW, typename RowsOfX>
    __device__ __forceinline__ void add_queries(Result<Traits> &result, const RowsOfW &w, const RowsOfX &x,
                                                int d) const {
        CUTE_UNROLL
        for (int query = 0; query < kTile; query += 16) {
            if (query < params.seqlen_q) {
                uint32_t a[4];
                load_A_transposed(a, w, query, place.first_row());
                result.add(a, x, query, d);
            }
        }
    }

    __device__ __forceinline__ void store_keys(const TensorRef &to, const Result<Traits> &result, int d,
                                               float factor) const {
        result.store(head_of<Element>(to, place.bidb, place.head), to.row_stride, place.row_of_thread(),
                     params.seqlen_k, d, [&](int) { return factor; });
    }
};

// CTAs on an SM, as many as shared memory holds, up to `most`.
template <typename Traits>
constexpr int ctas_bwd(int most) {
    constexpr int kSmem = 227 * 1024, kReserved = 1024;
    return std::clamp<int>(kSmem / (sizeof(SharedStorageBwd<Traits>) * Traits::kTiles + kReserved), 1, most);
}

// kIsGroup: dK and dV are sums over heads_per_dkv query heads.
template <typename Traits, bool kIsGroup>
__global__ void __launch_bounds__(Traits::kNThreads, ctas_bwd<Traits>(kIsGroup ? 2 : 4))
    flash_bwd_single_tile_kernel(const __grid_constant__ Flash_bwd_params params) {
    static_assert(sizeof(SharedStorageBwd<Traits>) * Traits::kTiles <= kMaxSmem);
    extern __shared__ __align__(16) char smem[];
    const Place<Traits> place(params, kIsGroup ? params.h / params.heads_per_dkv : params.h);
    if (place.exists) {
        TileBwd<Traits> tile(params, place, reinterpret_cast<SharedStorageBwd<Traits> *>(smem)[place.tile]);
        if constexpr (kIsGroup) {
            tile.run_group();
        } else {
            tile.run();
        }
    }
}

}  // namespace flash::single_tile
