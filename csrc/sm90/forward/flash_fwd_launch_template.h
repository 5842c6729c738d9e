// run_flash_fwd: the TMA descriptors, grid and shared memory of one kernel, and its launch.
#pragma once

#include <algorithm>

#include "common/trace.h"
#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "flash_fwd_kernel.h"

namespace flash::sm90 {

template <typename Traits>
typename Traits::Copies make_copies(const Flash_fwd_params &params) {
    using Element = typename Traits::Element;
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_varlen ? params.total_q : params.seqlen_q;
    const int64_t rows_k = is_varlen ? params.total_k : params.seqlen_k;
    const int batch_q = is_varlen ? 1 : params.b, batch_k = params.cache.is_used() ? params.cache.batch_cache : batch_q;
    return {make_tma_load<Element, decltype(take<0, 2>(typename Traits::SmemLayoutQ{})), typename Traits::TileQ>(
                params.q, rows_q, params.d, params.h, batch_q),
            make_tma_load<Element, decltype(take<0, 2>(typename Traits::SmemLayoutK{})), typename Traits::TileK>(
                params.k, rows_k, params.d, params.h_k, batch_k),
            make_tma_load<Element, decltype(take<0, 2>(typename Traits::SmemLayoutV{})), typename Traits::TileV>(
                params.v, rows_k, params.d_v, params.h_k, batch_k)};
}

template <typename Traits, Kind kKind>
void launch(const Flash_fwd_params &params, int *tile_counter, cudaStream_t stream) {
    constexpr int kMaxSmem = 227 * 1024;
    static_assert(Traits::kSmemSize <= kMaxSmem, "more shared memory than a thread block may have");
    auto kernel = &flash_fwd_kernel<Traits, kKind>;
    const RowBlocks blocks = row_blocks<is_general(kKind)>(params, Traits::kBlockM);
    const int sms = std::max(device_properties().sm_count - params.reserved_sms, 1);
    check_grid(blocks.count() + sms, "batch * nheads * blocks of query rows");  // CTAs count past the end
    WorkTileOrder order(blocks, params.is_local(), sms, tile_counter);
    if (has_bias(kKind) && params.attn_bias.batch_stride == 0) {
        order.share_among_sequences(params.b);
    }
    const int grid = std::min(order.units, sms);
    reserve_smem(kernel, Traits::kSmemSize);
    if (trace_enabled()) {
        trace("flash_fwd_kernel", "kKind=%s kBlockM=%d kBlockN=%d stages=%d grid=%d units=%d threads=%d smem=%d",
              name_of(kKind), Traits::kBlockM, Traits::kBlockN, Traits::kStages, grid, order.units, Traits::kNThreads,
              Traits::kSmemSize);
    }
    kernel<<<grid, Traits::kNThreads, Traits::kSmemSize, stream>>>(params, make_copies<Traits>(params), order);
    check_cuda(cudaGetLastError(), "launching flash_fwd_kernel");
}

// True if full attention takes less time in the shorter tiles, because the longer ones would leave SMs idle.
template <typename TileSize, typename Short>
bool fills_better_in_short_tiles(const Flash_fwd_params &params) {
    const auto rows_of_busiest = [&, sms = device_properties().sm_count](int kBlockM) {
        const int64_t count = row_blocks</*kMayBeVarlen=*/false>(params, kBlockM).count();
        return (count + sms - 1) / sms * kBlockM;
    };
    return kCostOfShortTiles * rows_of_busiest(Short::kBlockM) < rows_of_busiest(TileSize::kBlockM);
}

// True if return_max_logits is the only option that the general kernel is needed for.
inline bool has_only_max_logits(const Flash_fwd_params &params) {
    return params.max_logits != nullptr && !params.has_score_mod() && params.rng_state == nullptr &&
           params.cu_seqlens_q == nullptr && !params.cache.is_used();
}

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, int *tile_counter, cudaStream_t stream) {
    if constexpr (has_bias(kKind)) {
        launch<Flash_fwd_kernel_traits<kDType, kHeadDim, TileSizesFwdBiased<kHeadDim>>, kKind>(params, tile_counter,
                                                                                               stream);
        return;
    }
    if constexpr (has_latent_fwd(kHeadDim, kKind)) {
        if (params.d_v <= kMaxHeadDimVLatent) {
            launch<Flash_fwd_kernel_traits<kDType, kHeadDim, TileSizesFwdLatent, kMaxHeadDimVLatent>, kKind>(
                params, tile_counter, stream);
            return;
        }
    }
    using TileSize = TileSizesFwd<kHeadDim, is_local(kKind)>;
    if constexpr (kKind == Kind::general) {
        if (has_only_max_logits(params)) {
            launch<TracksLogits<Flash_fwd_kernel_traits<kDType, kHeadDim, TileSize>>, Kind::local>(params, tile_counter,
                                                                                                   stream);
            return;
        }
    }
    using Short = TileSizesFwdShort<kHeadDim>;
    constexpr bool kHasFewerRows = Short::kBlockM != TileSize::kBlockM,
                   kHasFewerKeys = Short::kBlockN != TileSize::kBlockN;
    if constexpr (kKind == Kind::local ? kHasFewerRows || kHasFewerKeys : kKind == Kind::full && kHasFewerRows) {
        const bool is_short = kKind == Kind::local ? params.seqlen_q <= kShortSeqlen
                                                   : fills_better_in_short_tiles<TileSize, Short>(params);
        if (is_short) {  // full attention runs as a window without ends
            launch<Flash_fwd_kernel_traits<kDType, kHeadDim, Short>, Kind::local>(params, tile_counter, stream);
            return;
        }
    }
    if constexpr (!has_bias(kKind)) {
        launch<Flash_fwd_kernel_traits<kDType, kHeadDim, TileSize>, kKind>(params, tile_counter, stream);
    }
}

}  // namespace flash::sm90
