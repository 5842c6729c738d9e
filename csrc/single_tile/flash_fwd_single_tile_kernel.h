// The forward over short sequences: flash_fwd_single_tile_kernel -> compute_attn_1tile.
#pragma once

#include "common/softmax.h"
#include "tile.h"

namespace flash::single_tile {

template <typename Traits>
struct SharedStorageFwd {
    Rows<typename Traits::Element, Traits::kTile, Traits::kHeadDim> q, k, v;
};

// Scores become probabilities, not normalised. sum and reference: of the thread's rows.
template <typename Traits>
__device__ __forceinline__ void softmax(const Flash_fwd_params &params, const Visible &visible, int row_of_thread,
                                        Scores<Traits> &scores, float (&sum)[2], float (&reference)[2]) {
    constexpr int kN8 = Scores<Traits>::kN8;
    scores.mask(visible, row_of_thread);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
        float maximum = -INFINITY;
        CUTE_UNROLL
        for (int n8 = 0; n8 < kN8; ++n8) {
            CUTE_UNROLL
            for (int j = 2 * i; j < 2 * i + 2; ++j) {
                maximum = fmaxf(maximum, scores.values[n8][j]);
            }
        }
        maximum = quad_allreduce(maximum, [](float a, float b) { return fmaxf(a, b); });
        reference[i] = maximum == -INFINITY ? 0.0f : maximum;
        float of_thread = 0.0f;
        CUTE_UNROLL
        for (int n8 = 0; n8 < kN8; ++n8) {
            CUTE_UNROLL
            for (int j = 2 * i; j < 2 * i + 2; ++j) {
                float &score = scores.values[n8][j];
                score = exp2_approx((score - reference[i]) * params.scale_softmax_log2);
                of_thread += score;
            }
        }
        sum[i] = quad_allreduce(of_thread, [](float a, float b) { return a + b; });
    }
}

template <typename Traits>
__device__ __forceinline__ void compute_attn_1tile(const Flash_fwd_params &params, const Place<Traits> &place,
                                                   SharedStorageFwd<Traits> &shared) {
    using Element = typename Traits::Element;
    const Visible visible(params);
    const int bidh_k = place.head / params.h_h_k_ratio, thread = place.thread();
    load_rows<Traits>(shared.q, head_of<const Element>(params.q, place.bidb, place.head), params.q.row_stride,
                      visible.row_begin, visible.row_end, params.d, thread);
    load_rows<Traits>(shared.k, head_of<const Element>(params.k, place.bidb, bidh_k), params.k.row_stride,
                      visible.key_begin, visible.key_end, params.d, thread);
    kvcache::cp_async_commit();
    load_rows<Traits>(shared.v, head_of<const Element>(params.v, place.bidb, bidh_k), params.v.row_stride,
                      visible.key_begin, visible.key_end, params.d_v, thread);
    kvcache::cp_async_commit();

    kvcache::cp_async_wait_group<1>();
    place.sync();
    Scores<Traits> scores;
    multiply_scores(scores, shared.q, place.first_row(), shared.k, params.d, params.seqlen_k,
                    [](const uint32_t (&)[4], int) {});
    float sum[2], reference[2];
    softmax(params, visible, place.row_of_thread(), scores, sum, reference);

    kvcache::cp_async_wait_group<0>();
    place.sync();
    Result<Traits> o;
    CUTE_UNROLL
    for (int key = 0; key < Traits::kTile; key += 16) {
        if (key < params.seqlen_k) {
            uint32_t p[4];
            scores.to_A(p, key);
            o.add(p, shared.v, key, params.d_v);
        }
    }
    o.clear_rows_without_keys(visible, place.row_of_thread());
    o.store(head_of<Element>(params.o, place.bidb, place.head), params.o.row_stride, place.row_of_thread(),
            params.seqlen_q, params.d_v, [&](int i) { return sum[i] == 0.0f ? 0.0f : __fdividef(1.0f, sum[i]); });
    float *lse = static_cast<float *>(params.softmax_lse) + place.bidb * params.lse_batch_stride +
                 place.head * params.lse_head_stride;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int row = place.row_of_thread() + i * 8;
        if (threadIdx.x % 4 == 0 && row < params.seqlen_q) {
            lse[row] = sum[i] == 0.0f ? -INFINITY : __fmul_rn(reference[i], params.scale_softmax) + __logf(sum[i]);
        }
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNThreads, 4)
    flash_fwd_single_tile_kernel(const __grid_constant__ Flash_fwd_params params) {
    static_assert(sizeof(SharedStorageFwd<Traits>) * Traits::kTiles <= kMaxSmem);
    extern __shared__ __align__(16) char smem[];
    const Place<Traits> place(params, params.h);
    if (place.exists) {
        compute_attn_1tile(params, place, reinterpret_cast<SharedStorageFwd<Traits> *>(smem)[place.tile]);
    }
}

}  // namespace flash::single_tile
