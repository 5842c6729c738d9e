// run_flash_bwd: the TMA descriptors, grid and shared memory of the backward kernel, and its launch.
#pragma once

#include <algorithm>

#include "../common/launch.h"
#include "../device.h"
#include "../trace.h"
#include "flash_bwd.h"
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

// The heads whose work tiles come together.
template <typename Traits, Kind kKind>
int interleaved_heads(const Flash_bwd_params &params, const RowBlocks &key_blocks) {
    const bool is_in_order = params.dq_semaphore != nullptr;
    const int per_head = is_in_order ? key_blocks.per_sequence() : key_blocks.per_head;
    const int sms = device_properties().sm_count;
    int ctas;  // of the heads, in phase compute
    if (is_in_order) {
        // As many as run at the same time: a CTA starts well after the one of the same sequence that it waits for.
        // Where the producer adds dQ and passes the order on a step later: twice as many for long sequences. Then half
        // of a head's key blocks run at the same time, and the last one waits for half as many before it.
        const bool is_halved = !Traits::kConsumersComputeDq && per_head >= (is_local(kKind) ? 32 : 16);
        ctas = is_halved ? 2 * sms : sms;
    } else if (per_head <= 8) {
        // Short sequences: so few that what one phase leaves for the next is still in L2. Where CTAs take longer, fewer
        // of them would wait for each other: with many query heads each, or where the producer adds dQ.
        const bool is_soon_done = Traits::kConsumersComputeDq && per_head * params.heads_per_dkv <= 16;
        ctas = is_soon_done ? sms / 2 : sms;
    } else {
        // Kind full: CTAs that fill the SMs once. Other kinds, whose key blocks may differ in work: twice, long ones
        // first, so that all end together.
        ctas = is_local(kKind) ? 2 * sms : sms;
    }
    return clamp_to(ctas / std::max(per_head, 1), 1, std::max(key_blocks.all_heads(), 1));
}

template <typename Traits, Kind kKind>
void launch_flash_bwd(const Flash_bwd_params &given, cudaStream_t stream) {
    Flash_bwd_params params = given;
    const RowBlocks blocks = key_blocks(params, params.h / params.heads_per_dkv, Traits::kBlockN);
    params.interleaved_heads = interleaved_heads<Traits, kKind>(params, blocks);
    check_grid(padded_rows(params), "batch * nheads * query rows");
    const int64_t grid = WorkOrder::count(params, blocks);
    check_grid(grid, "batch * nheads * (blocks of keys + blocks of query rows)");
    if (trace_enabled()) {
        trace("flash_bwd_kernel", "kKind=%s kBlockM=%d kBlockN=%d stages=%d,%d grid=%lld threads=%d smem=%d",
              name_of(kKind), Traits::kBlockM, Traits::kBlockN, Traits::kStagesQ, Traits::kStagesdO,
              static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    auto kernel = &flash_bwd_kernel<Traits, kKind>;
    reserve_smem(kernel, Traits::kSmemSize);
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, Traits::kSmemSize, stream>>>(
        params, make_copies_bwd<Traits>(params), WorkOrder(params, blocks, is_local(kKind)));
    check_cuda(cudaGetLastError(), "launching flash_bwd_kernel");
}

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream) {
    using WithFactors = Flash_bwd_kernel_traits<kDType, kHeadDim, is_general(kKind)>;
    using WithoutFactors =
        Flash_bwd_kernel_traits<kDType, kHeadDim, is_general(kKind) && !has_kernel_without_factors(kHeadDim)>;
    const bool has_factors = params.cap_scale != 0.0f || params.rng_state != nullptr;
    if (has_factors) {
        launch_flash_bwd<WithFactors, kKind>(params, stream);
    } else {
        launch_flash_bwd<WithoutFactors, kKind>(params, stream);
    }
}

}  // namespace flash::sm90
