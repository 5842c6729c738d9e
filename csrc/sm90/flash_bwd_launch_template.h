// run_flash_bwd: the TMA descriptors, grids and shared memory of the three kernels of a backward, and their launches.
#pragma once

#include <algorithm>

#include "../common/flash_bwd_preprocess_kernel.h"
#include "../common/launch.h"
#include "../device.h"
#include "../trace.h"
#include "flash_bwd.h"
#include "flash_bwd_convert_dq_kernel.h"
#include "flash_bwd_kernel.h"

namespace flash::sm90 {

template <typename Traits>
typename Traits::Copies make_copies_bwd(const Flash_bwd_params &params) {
    using Element = typename Traits::Element;
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_varlen ? params.total_q : params.seqlen_q;
    const int64_t rows_k = is_varlen ? params.total_k : params.seqlen_k;
    const int batch = is_varlen ? 1 : params.b;
    const auto of_Q = [&](const TensorRef &x) {
        return make_tma_load<Element, decltype(take<0, 2>(typename Traits::template SmemLayoutQ<1>{})),
                             typename Traits::TileQ>(x, rows_q, params.d, params.h, batch);
    };
    const auto of_KV = [&](const TensorRef &x) {
        return make_tma_load<Element, decltype(take<0, 2>(typename Traits::SmemLayoutKV{})), typename Traits::TileKV>(
            x, rows_k, params.d, params.h_k, batch);
    };
    return {of_Q(params.q), of_Q(params.dout), of_KV(params.k), of_KV(params.v)};
}

template <typename Traits, Kind kKind>
void launch_flash_bwd_kernel(const Flash_bwd_params &given, const RowBlocks &blocks, cudaStream_t stream) {
    Flash_bwd_params params = given;
    const int sms = device_properties().sm_count, per_sequence = std::max(blocks.per_sequence(), 1);
    const int64_t grid = Traits::kIsPersistent ? std::min<int64_t>(blocks.count(), sms) : blocks.count();
    // The heads whose key blocks are interleaved. In order: as many as run at the same time, so that a CTA starts well
    // after the one that it waits for. Else: as fill two rounds of the SMs, which end together.
    const int rounds = params.dq_semaphore != nullptr ? 1 : 2;
    params.interleaved_heads = clamp_to(rounds * sms / per_sequence, 1, std::max(blocks.all_heads(), 1));
    if (trace_enabled()) {
        trace("flash_bwd_kernel", "kKind=%s kBlockM=%d kBlockN=%d stages=%d,%d grid=%lld threads=%d smem=%d",
              name_of(kKind), Traits::kBlockM, Traits::kBlockN, Traits::kStagesQ, Traits::kStagesdO,
              static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    auto kernel = &flash_bwd_kernel<Traits, kKind>;
    reserve_smem(kernel, Traits::kSmemSize);
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, Traits::kSmemSize, stream>>>(
        params, make_copies_bwd<Traits>(params));
    check_cuda(cudaGetLastError(), "launching flash_bwd_kernel");
}

template <typename Traits, Kind kKind>
bool has_short_tiles(const Flash_bwd_params &params) {
    const int64_t steps = int64_t(params.heads_per_dkv) * ((params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM);
    return steps <= kStepsOfShortTiles * (is_local(kKind) ? 2 : 1);
}

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    using Traits = Flash_bwd_kernel_traits<kDType, kHeadDim>;
    const int64_t preprocess_grid = padded_rows(params) / kPreprocessRows;
    const RowBlocks blocks = key_blocks(params, params.h / params.heads_per_dkv, Traits::kBlockN);
    const int64_t convert_grid = row_blocks(params, kConvertRows).count();
    check_grid(padded_rows(params), "batch * nheads * query rows");
    check_grid(preprocess_grid, "batch * nheads * blocks of query rows");
    check_grid(blocks.count(), "batch * nheads * blocks of keys");
    if (trace_enabled()) {
        trace("flash_bwd_dot_do_o", "rows=%d grid=%lld threads=%d", kPreprocessRows,
              static_cast<long long>(preprocess_grid), kPreprocessThreads);
    }
    flash_bwd_dot_do_o<typename Traits::Element, kHeadDim>
        <<<static_cast<unsigned>(preprocess_grid), kPreprocessThreads, 0, stream>>>(params);
    check_cuda(cudaGetLastError(), "launching flash_bwd_dot_do_o");

    if (has_persistent_bwd(kHeadDim) && has_short_tiles<Traits, kKind>(params)) {
        using PersistentTraits = Flash_bwd_kernel_traits<kDType, kHeadDim, has_persistent_bwd(kHeadDim)>;
        launch_flash_bwd_kernel<PersistentTraits, kKind>(params, blocks, stream);
    } else {
        launch_flash_bwd_kernel<Traits, kKind>(params, blocks, stream);
    }

    if (params.dq.ptr != nullptr) {
        if (trace_enabled()) {
            trace("flash_bwd_convert_dq", "rows=%d grid=%lld threads=%d", kConvertRows,
                  static_cast<long long>(convert_grid), kConvertThreads);
        }
        flash_bwd_convert_dq<Traits, kKind>
            <<<static_cast<unsigned>(convert_grid), kConvertThreads, 0, stream>>>(params);
        check_cuda(cudaGetLastError(), "launching flash_bwd_convert_dq");
    }
}

}  // namespace flash::sm90
