// run_flash_bwd: the TMA descriptors, grid and shared memory of the backward kernel, and its launch.
#pragma once

#include <algorithm>

#include "common/trace.h"
#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "flash_bwd_kernel.h"

namespace flash::sm90 {

template <typename Traits>
typename Traits::Copies make_copies_bwd(const Flash_bwd_params &params) {
    using Element = typename Traits::Element;
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_varlen ? params.total_q : params.seqlen_q;
    const int64_t rows_k = is_varlen ? params.total_k : params.seqlen_k;
    const int batch = is_varlen ? 1 : params.b;
    // TMA fills the columns of a tile past those of the tensor with zeros.
    const auto of_Q = [&](auto tiles, const TensorRef &x, int columns) {
        using Tiles = decltype(tiles);
        return make_tma_load<Element, decltype(take<0, 2>(typename Tiles::template SmemLayoutQ<1>{})),
                             typename Tiles::TileQ, typename Tiles::TmaOpQ>(x, rows_q, columns, params.h, batch);
    };
    const auto of_KV = [&](auto tiles, const TensorRef &x, int columns) {
        using Tiles = decltype(tiles);
        return make_tma_load<Element, decltype(take<0, 2>(typename Tiles::SmemLayoutKV{})), typename Tiles::TileKV>(
            x, rows_k, columns, params.h_k, batch);
    };
    const typename Traits::TilesQK of_d;
    const typename Traits::TilesdOV of_d_v;
    return {of_Q(of_d, params.q, params.d), of_Q(of_d_v, params.dout, params.d_v), of_KV(of_d, params.k, params.d),
            of_KV(of_d_v, params.v, params.d_v)};
}

// True if the rows of Q, K, V, O, dO and dQ's accumulator that `ctas` work with fit into the L2 cache. The estimate
// assumes as many queries as keys, and one query head for each key head.
template <typename Traits>
bool fits_into_l2(int ctas) {
    int device = 0, bytes = 0;
    check_cuda(cudaGetDevice(&device), "reading the current device");
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "reading the size of the L2 cache");
    constexpr int kBytesOfRow = Traits::kHeadDim * (5 * sizeof(typename Traits::Element) + sizeof(float));
    return int64_t{ctas} * Traits::kBlockN * kBytesOfRow <= bytes;
}

// The heads whose work tiles come together.
template <typename Traits, Kind kKind>
int interleaved_heads(const Flash_bwd_params &params, const RowBlocks &key_blocks, int group_size) {
    const bool is_in_order = params.dq_semaphore != nullptr;
    const int per_head =
        is_in_order ? key_blocks.per_sequence() : KeyBlockGroups(key_blocks.per_head, group_size).count;
    const int sms = device_properties().sm_count / Traits::kCtas;  // for clusters
    int ctas;                                                      // of the heads, in phase compute; or clusters
    if (is_in_order) {
        // As many as run at the same time: a CTA starts well after the one of the same sequence that it waits for.
        // Where the producer adds dQ and passes the order on a step later: twice as many for long sequences. Then half
        // of a head's key blocks run at the same time, and the last one waits for half as many before it. If the rows
        // of so many do not fit into L2: 3 / 2 as many in kind full, as many as run at the same time in others.
        const bool is_halved = !Traits::kConsumersComputeDq && per_head >= (is_local(kKind) ? 32 : 16);
        if (is_halved && fits_into_l2<Traits>(2 * sms)) {
            ctas = 2 * sms;
        } else if (is_halved && !is_local(kKind)) {
            ctas = (3 * sms / per_head + 1) / 2 * per_head;  // rounded to whole heads
        } else {
            ctas = sms;
        }
    } else if (per_head <= 8) {
        // Short sequences: so few that what one phase leaves for the next is still in L2. Where CTAs take longer, fewer
        // of them would wait for each other: with many query heads each, or where the producer adds dQ.
        const bool is_short = Traits::kConsumersComputeDq && per_head * params.heads_per_dkv <= 16;
        ctas = is_short ? sms / 2 : sms;
    } else {
        // Kind full, and groups of key blocks: CTAs that fill the SMs once. Other kinds, whose key blocks may differ in
        // work: twice, long ones first, so that all end together. With key_ranges they may differ more: the key blocks
        // of a shared prefix are the longest, and come first in each head.
        ctas = has_ranges(kKind) ? 8 * sms : is_local(kKind) && group_size == 1 ? 2 * sms : sms;
    }
    return clamp_to(ctas / std::max(per_head, 1), 1, std::max(key_blocks.all_heads(), 1));
}

// The key blocks of a CTA: two where they have few steps, if there are enough CTAs. In order (dq_semaphore) a CTA has
// one, because its second one might wait for a CTA that waits for its first.
template <typename Traits, Kind kKind>
int key_blocks_of_cta(const Flash_bwd_params &params, const RowBlocks &key_blocks) {
    constexpr int kFewSteps = 64, kRounds = 4;  // rounds: CTAs of each SM
    if (!may_group_key_blocks<Traits, kKind>() || params.dq_semaphore != nullptr) {
        return 1;
    }
    const bool has_window = params.window_size_left >= 0 && params.window_size_right >= 0;
    const int64_t in_window = int64_t{params.window_size_left} + params.window_size_right + Traits::kBlockN;
    const int64_t rows = has_window ? std::min<int64_t>(params.seqlen_q, in_window) : params.seqlen_q;
    const bool has_few_steps = rows * params.heads_per_dkv <= kFewSteps * Traits::kBlockM;
    return has_few_steps && key_blocks.count() >= int64_t{2 * kRounds} * device_properties().sm_count ? 2 : 1;
}

template <typename Traits, Kind kKind>
void launch_flash_bwd(const Flash_bwd_params &given, cudaStream_t stream) {
    Flash_bwd_params params = given;
    const RowBlocks blocks = key_blocks(params, params.h / params.heads_per_dkv, Traits::kBlockN);
    const int group_size = key_blocks_of_cta<Traits, kKind>(params, blocks);
    params.interleaved_heads = interleaved_heads<Traits, kKind>(params, blocks, group_size);
    check_grid(padded_rows(params), "batch * nheads * query rows");
    constexpr int kRowsPerTile = Traits::kCtas * Traits::kRowsPerTile;
    const int ctas = device_properties().sm_count / Traits::kCtas;
    const int64_t grid = Traits::kCtas * WorkOrder::count(params, blocks, kRowsPerTile, group_size, ctas);
    check_grid(grid, "batch * nheads * (blocks of keys + blocks of query rows)");
    if (trace_enabled()) {
        trace("flash_bwd_kernel",
              "kKind=%s kBlockM=%d kBlockN=%d stages=%d,%d key_blocks_of_cta=%d grid=%lld threads=%d smem=%d",
              name_of(kKind), Traits::kBlockM, Traits::kBlockN, Traits::kStagesQ, Traits::kStagesdO, group_size,
              static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    auto kernel = &flash_bwd_kernel<Traits, kKind>;
    reserve_smem(kernel, Traits::kSmemSize);
    const WorkOrder order(params, blocks, kRowsPerTile, is_local(kKind), group_size, ctas);
    ClusterLaunch(dim3(static_cast<unsigned>(grid)), dim3(Traits::kCtas), Traits::kNThreads, Traits::kSmemSize, stream)
        .run(kernel, "launching flash_bwd_kernel", params, make_copies_bwd<Traits>(params), order);
}

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    if constexpr (has_latent_bwd(kHeadDim, kKind)) {
        if (params.d_v <= kMaxHeadDimVLatent) {
            launch_flash_bwd<
                Flash_bwd_kernel_traits<kDType, kHeadDim, Factors::none, kMaxHeadDimVLatent, TileSizesBwdLatent>,
                kKind>(params, stream);
            return;
        }
    }
    if constexpr (has_cta_pair_bwd(kHeadDim, kKind)) {
        if (params.dq_accum != nullptr && params.dq_semaphore == nullptr) {
            launch_flash_bwd<Flash_bwd_kernel_traits<kDType, kHeadDim, Factors::none, kHeadDim, TileSizesBwdPair>,
                             kKind>(params, stream);
            return;
        }
    }
    const auto launch = [&](auto factors) {
        launch_flash_bwd<Flash_bwd_kernel_traits<kDType, kHeadDim, factors.value>, kKind>(params, stream);
    };
    if constexpr (has_bias(kKind)) {
        if (has_kernel_per_factors(kHeadDim) && params.rng_state == nullptr && params.cap_scale == 0.0f) {
            launch(
                constant<Factors, has_kernel_per_factors(kHeadDim) ? Factors::bias : Factors::bias_cap_or_dropout>{});
        } else {
            launch(constant<Factors, Factors::bias_cap_or_dropout>{});
        }
    } else if constexpr (!is_general(kKind)) {
        launch(constant<Factors, Factors::none>{});
    } else if constexpr (!has_kernel_per_factors(kHeadDim)) {
        launch(constant<Factors, Factors::cap_or_dropout>{});
    } else if (params.rng_state != nullptr) {
        launch(constant<Factors, Factors::dropout>{});
    } else if (params.cap_scale != 0.0f) {
        launch(constant<Factors, Factors::cap>{});
    } else {
        launch(constant<Factors, Factors::none>{});
    }
}

}  // namespace flash::sm90
