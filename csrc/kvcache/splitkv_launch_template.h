// The plan of a call and the launches of its kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "../common/launch.h"
#include "../device.h"
#include "../trace.h"
#include "append_kernel.h"
#include "combine_kernel.h"
#include "splitkv.h"
#include "splitkv_kernel.h"

namespace flash {
namespace kvcache {

// Launches a kernel. is_programmatic: it may be scheduled before the kernel ahead of it in the stream has ended, and
// waits for it itself (Hopper and later).
template <typename... Parameters, typename... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int smem, bool is_programmatic, cudaStream_t stream,
            const char *what, const Args &...args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = is_programmatic && device_properties().major >= 9 ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
}

// True if every address of x is a multiple of 16 bytes.
inline bool is_aligned(const TensorRef &x) {
    return reinterpret_cast<uintptr_t>(x.ptr) % 16 == 0 && (x.batch_stride | x.row_stride | x.head_stride) % 8 == 0;
}

// Rows of a tile for `rows` rows in all: as few tiles as possible, of equal size.
inline int tile_rows_for(int64_t rows) {
    constexpr int kLeast = 64, kMost = kMaxWarps * kWarpRows;
    if (rows <= kWarpRows) {
        return kWarpRows;
    }
    const int64_t tiles = (rows + kMost - 1) / kMost, of_tile = (rows + tiles - 1) / tiles;
    return std::max(static_cast<int>((of_tile + kWarpRows - 1) / kWarpRows * kWarpRows), kLeast);
}

template <DType kDType, int kHeadDim>
SplitkvPlan plan_of(const Flash_fwd_params &params) {
    const int64_t rows = int64_t{params.seqlen_q} * params.h_h_k_ratio;
    const DeviceProperties &gpu = device_properties();
    const auto smem_of = [](int tile_rows) {
        return call_with_traits<kDType, kHeadDim>(tile_rows,
                                                  [&](auto traits) { return decltype(traits)::smem_size(tile_rows); });
    };
    int tile_rows = tile_rows_for(rows);
    if (smem_of(tile_rows) > gpu.max_smem) {
        tile_rows = 4 * kWarpRows;  // takes the least shared memory
    }
    return call_with_traits<kDType, kHeadDim>(tile_rows, [&](auto traits) {
        using Traits = decltype(traits);
        constexpr int kSmemOfSM = 227 * 1024, kReserved = 1024;  // bytes; a CTA takes kReserved more than it asks for
        const int row_tiles = static_cast<int>((rows + tile_rows - 1) / tile_rows);
        const int by_smem = std::max(std::min(kSmemOfSM, gpu.max_smem) / (smem_of(tile_rows) + kReserved), 1);
        const int ctas = gpu.sm_count * std::min(by_smem, Traits::ctas_by_registers(tile_rows));
        const int64_t capacity = params.cache.capacity, split_keys = params.cache.split_keys;
        int log2_unit = 0;
        while ((1 << log2_unit) < Traits::kUnit || ((capacity >> log2_unit) + 1) * params.b * params.h_k > INT32_MAX) {
            ++log2_unit;
        }
        const int64_t units = (capacity + (int64_t{1} << log2_unit) - 1) >> log2_unit;  // of a head, at most
        const int64_t max_splits = split_keys > 0 ? (capacity + split_keys - 1) / split_keys
                                                  : std::min<int64_t>(params.cache.num_splits, units);
        const int wanted = row_tiles * 8 <= ctas ? ctas / row_tiles : (4 * ctas + row_tiles - 1) / row_tiles;
        const int64_t heads = int64_t{params.b} * params.h_k,
                      most = max_splits > 0 ? heads * max_splits : heads * units / 2;
        const int pieces = static_cast<int>(std::clamp<int64_t>(most, 1, wanted));
        return SplitkvPlan{tile_rows,
                           row_tiles,
                           pieces,
                           static_cast<int>(max_splits),
                           log2_unit,
                           params.d % 8 == 0 && is_aligned(params.k) && is_aligned(params.v),
                           cutlass::FastDivmod(params.h_h_k_ratio)};
    });
}

template <typename Traits>
void launch_splitkv(const Flash_fwd_params &params, const SplitkvPlan &plan, bool follows_append, cudaStream_t stream) {
    auto kernel = &flash_fwd_splitkv_kernel<Traits>;
    const int threads = Traits::threads(plan.tile_rows), smem = Traits::smem_size(plan.tile_rows);
    const dim3 grid(plan.row_tiles, plan.pieces);
    if (trace_enabled()) {
        trace("flash_fwd_splitkv_kernel", "rows=%d row_tiles=%d pieces=%d splits=%s unit=%d threads=%d smem=%d",
              plan.tile_rows, plan.row_tiles, plan.pieces,
              plan.max_splits == 0 ? "by length" : std::to_string(plan.max_splits).c_str(), 1 << plan.log2_unit,
              threads, smem);
    }
    reserve_smem(kernel, std::min(Traits::smem_size(kMaxWarps * kWarpRows), device_properties().max_smem));
    launch(kernel, grid, threads, smem, follows_append, stream, "launching flash_fwd_splitkv_kernel", params, plan);
    if (plan.max_splits == 1) {
        return;
    }
    constexpr int kRows = kCombineRows<Traits::kHeadDim>;
    const int64_t heads = int64_t{params.b} * params.h_k;
    if (plan.max_splits > 0 && heads > UINT16_MAX) {
        throw std::runtime_error("flash_attn_mini: batch * nheads_k is " + std::to_string(heads) +
                                 " with num_splits or split_keys; allowed: up to 65535");
    }
    const int rows = std::min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio);
    const dim3 combine_grid((rows + kRows - 1) / kRows * plan.row_tiles, plan.max_splits > 0 ? heads : plan.pieces);
    launch(&flash_fwd_splitkv_combine_kernel<typename Traits::Element, Traits::kHeadDim>, combine_grid, kCombineThreads,
           0, true, stream, "launching flash_fwd_splitkv_combine_kernel", params, plan);
}

}  // namespace kvcache

template <DType kDType, int kHeadDim>
int64_t splitkv_scratch_floats(const Flash_fwd_params &params) {
    if (params.seqlen_q == 0) {
        return 0;
    }
    const kvcache::SplitkvPlan plan = kvcache::plan_of<kDType, kHeadDim>(params);
    const int64_t rows = std::min<int64_t>(plan.tile_rows, int64_t{params.seqlen_q} * params.h_h_k_ratio);
    return plan.slots(params) * plan.row_tiles * rows * (kHeadDim + 2);
}

template <DType kDType, int kHeadDim>
void run_flash_fwd_splitkv(const Flash_fwd_params &params, bool follows_append, cudaStream_t stream) {
    const kvcache::SplitkvPlan plan = kvcache::plan_of<kDType, kHeadDim>(params);
    kvcache::call_with_traits<kDType, kHeadDim>(plan.tile_rows, [&](auto traits) {
        kvcache::launch_splitkv<decltype(traits)>(params, plan, follows_append, stream);
    });
}

template <DType kDType>
void run_append_kv(const Flash_fwd_params &params, cudaStream_t stream) {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    constexpr int kRowsOfCta = kvcache::kAppendThreads / 32;
    const int64_t grid = (kvcache::AppendRows(params).count() + kRowsOfCta - 1) / kRowsOfCta;
    check_grid(grid, "batch * new keys * heads");
    if (grid == 0) {
        return;
    }
    if (trace_enabled()) {
        trace("append_kv_kernel", "grid=%lld threads=%d rotary_dim=%d", static_cast<long long>(grid),
              kvcache::kAppendThreads, params.cache.rotary_dim);
    }
    kvcache::launch(&kvcache::append_kv_kernel<Element>, dim3(static_cast<unsigned>(grid)), kvcache::kAppendThreads, 0,
                    false, stream, "launching append_kv_kernel", params);
}

}  // namespace flash
