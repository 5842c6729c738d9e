// The plan of a call, with the number of pieces that the keys are cut into, and the launches of its kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "append_kernel.h"
#include "combine_kernel.h"
#include "common/trace.h"
#include "dispatch/launch.h"
#include "splitkv.h"
#include "splitkv_kernel.h"

namespace flash {
namespace kvcache {

// Rows of a tile for `rows` rows in all: as few tiles as possible, of equal size.
inline int tile_rows_for(int64_t rows) {
    constexpr int kMinRows = 64, kMaxRows = kMaxWarps * kWarpRows;
    if (rows <= 2 * kWarpRows) {
        return rows <= kWarpRows ? kWarpRows : 2 * kWarpRows;
    }
    const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows, of_tile = (rows + tiles - 1) / tiles;
    return std::max(static_cast<int>((of_tile + kWarpRows - 1) / kWarpRows * kWarpRows), kMinRows);
}

// True if the host knows the lengths, which are the same for all sequences.
inline bool has_one_length(const Flash_fwd_params &params) {
    return params.cache.seqlens == nullptr && params.cache.leftpad == nullptr;
}

// The most keys that a sequence may have.
inline int64_t most_keys(const Flash_fwd_params &params) {
    const int64_t capacity = params.cache.capacity;
    return has_one_length(params) ? std::min(int64_t{params.cache.seqlen} + params.cache.seqlen_new, capacity)
                                  : capacity;
}

// The most CTAs of a cluster, a power of two, with which the clusters of all heads have an SM for each CTA; at least 1.
inline int largest_cluster(int64_t heads) {
    int cluster = kMaxCluster;
    while (cluster > 1 && cluster * heads > device_properties().sm_count) {
        cluster /= 2;
    }
    return cluster;
}

// Clusters of `cluster` CTAs that the current GPU runs at once; 0 if it has no clusters of this size. Each thread asks
// the driver once per GPU and size.
template <typename Traits>
int clusters_at_once(int cluster) {
    // The key is device, kernel and size: another copy of the library in this process has other kernels.
    static thread_local std::map<std::tuple<int, const void *, int>, int> known;
    auto kernel = &flash_fwd_splitkv_cluster_kernel<Traits>;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "reading the current device");
    const std::tuple<int, const void *, int> key{device, reinterpret_cast<const void *>(kernel), cluster};
    const auto found = known.find(key);
    if (found != known.end()) {
        return found->second;
    }
    constexpr int smem = Traits::smem_size(kWarpRows);
    reserve_smem(kernel, smem);
    raise_attribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, "allowing clusters of 16");
    ProgrammaticLaunch launch(dim3(1, cluster), cluster, Traits::threads(kWarpRows), smem, nullptr);
    launch.config.numAttrs = 1;  // the cluster, without the attributes of a dependent launch
    int active = 0;
    if (cudaOccupancyMaxActiveClusters(&active, kernel, &launch.config) != cudaSuccess) {
        cudaGetLastError();
        active = 0;
    }
    known.emplace(key, active);
    return active;
}

// True if `ctas` CTAs, one on an SM, leave at most an eighth of the SMs idle, on average over the waves.
inline bool fill_gpu(int64_t ctas) {
    const int64_t sms = device_properties().sm_count, waves = (ctas + sms - 1) / sms;
    return ctas * 8 >= waves * sms * 7;
}

// The most keys of a CTA of a cluster with which clusters take less time, also if lengths differ: what they save
// without a schedule and a second kernel is more than the time that they wait for the longest sequence.
// docs/tuning/kvcache.md has the exceptions. Above head dim 128 an SM holds one CTA, so idle SMs count.
constexpr int short_part(int cluster, int headdim, bool fills_gpu) {
    if (cluster > 2) {
        return headdim <= 64 ? 1024 : 256;
    }
    return headdim <= 64 ? 2048 : headdim <= 128 || fills_gpu ? 1024 : 512;
}

// True if a cluster of `cluster` CTAs for each head takes less time than pieces. It needs neither a schedule nor a
// second kernel, but has the same number of CTAs for every head. docs/tuning/kvcache.md has the measurements.
template <int kHeadDim>
bool prefers_clusters(const Flash_fwd_params &params, int cluster) {
    constexpr int kShortCache = 4096;   // keys of one sequence with which idle SMs do not count
    constexpr int kMaxLongCluster = 2;  // larger ones share SMs: the driver does not spread them
    const int64_t heads = int64_t{params.b} * params.h_k, ctas = cluster * heads, keys = most_keys(params);
    const bool fills_gpu = fill_gpu(ctas), is_one_wave = ctas <= device_properties().sm_count;
    if (keys <= int64_t{cluster} * short_part(cluster, kHeadDim, fills_gpu)) {
        return true;
    }
    if (has_one_length(params) && cluster <= kMaxLongCluster && fills_gpu && is_one_wave) {
        return true;
    }
    const bool is_largest = cluster == largest_cluster(heads);
    return !kHasWideForm<kHeadDim> && params.b == 1 && cluster > 1 && is_largest && (fills_gpu || keys <= kShortCache);
}

// True if two CTAs for each head take less time than one: where lengths differ, the longest sequence decides. An SM
// holds two CTAs up to head dim 128.
template <int kHeadDim>
bool prefers_two_ctas(const Flash_fwd_params &params) {
    constexpr int kFewKeys = kHeadDim <= 64 ? 768 : 512;  // between calls that gained and that lost
    const int64_t heads = int64_t{params.b} * params.h_k;
    return kHeadDim <= 128 && params.b > 1 && !has_one_length(params) && most_keys(params) > kFewKeys &&
           heads * 4 <= device_properties().sm_count * 5;
}

// CTAs of a cluster, or 0: no clusters. The cluster of a head may be one CTA.
template <typename Traits>
int cluster_for(const Flash_fwd_params &params, int max_smem) {
    constexpr int kMaxGrid = 65535;  // in y
    const int64_t heads = int64_t{params.b} * params.h_k;
    if (device_properties().major < 9 || heads > kMaxGrid || Traits::smem_size(kWarpRows) > max_smem) {
        return 0;
    }
    for (int cluster = largest_cluster(heads); prefers_clusters<Traits::kHeadDim>(params, cluster); cluster /= 2) {
        if (cluster == 1) {
            return prefers_two_ctas<Traits::kHeadDim>(params) ? 2 : 1;
        }
        const int at_once = clusters_at_once<Traits>(cluster);
        if (at_once >= heads) {
            return cluster;
        }
        if (trace_enabled()) {
            trace("cluster_for", "ctas=%d clusters=%lld at_once=%d", cluster, static_cast<long long>(heads), at_once);
        }
    }
    return 0;
}

// CTAs that fit into an SM.
template <typename Traits>
int ctas_of_sm(int tile_rows, int max_smem) {
    constexpr int kSmemOfSM = 227 * 1024, kReserved = 1024;  // bytes; a CTA takes kReserved more than it asks for
    const int by_smem = std::min(kSmemOfSM, max_smem) / (Traits::smem_size(tile_rows) + kReserved);
    return std::min(std::max(by_smem, 1), Traits::ctas_by_registers(tile_rows));
}

// True if one CTA on each SM takes less time than smaller ones: while a CTA has few heads. Between two heads no other
// CTA of the SM multiplies. docs/tuning/kvcache.md has the measurements.
template <typename WideTraits>
bool prefers_wide(const Flash_fwd_params &params, int max_smem) {
    constexpr int kMaxHeads = 4;  // of a CTA, on average
    const DeviceProperties &gpu = device_properties();
    return gpu.major >= 9 && WideTraits::smem_size(kWarpRows) <= max_smem &&
           int64_t{params.b} * params.h_k <= int64_t{kMaxHeads} * gpu.sm_count;
}

// The form of tiles of `tile_rows` rows, in clusters of `cluster` CTAs if that is not 0.
template <DType kDType, int kHeadDim>
Form form_of(const Flash_fwd_params &params, int tile_rows, int cluster, bool is_fixed, int max_smem) {
    if (tile_rows > kWarpRows) {
        return tile_rows > 2 * kWarpRows ? Form::many_rows : Form::warp_pairs;
    }
    if (cluster > 0) {
        return Form::cluster;
    }
    if constexpr (kHasWideForm<kHeadDim>) {
        // The results of fixed splits do not depend on the batch, so their form does not.
        if (!is_fixed && prefers_wide<SplitkvTraits<kDType, kHeadDim, Form::wide>>(params, max_smem)) {
            return Form::wide;
        }
    }
    return Form::few_rows;
}

template <DType kDType, int kHeadDim>
SplitkvPlan plan_of(const Flash_fwd_params &params, int max_smem) {
    const int64_t rows = int64_t{params.seqlen_q} * params.h_h_k_ratio;
    const bool is_fixed = params.cache.split_keys > 0 || params.cache.num_splits > 0;
    const int64_t heads = int64_t{params.b} * params.h_k, max_heads = is_fixed ? UINT16_MAX : INT32_MAX / 2;
    if (heads > max_heads) {
        throw std::runtime_error("flash_attn_mini: batch * nheads_k is " + std::to_string(heads) +
                                 (is_fixed ? " with num_splits or split_keys" : "") + "; allowed: up to " +
                                 std::to_string(max_heads));
    }
    const auto smem_of = [](Form form, int tile_rows) {
        return call_with_traits<kDType, kHeadDim>(form,
                                                  [&](auto traits) { return decltype(traits)::smem_size(tile_rows); });
    };
    int tile_rows = tile_rows_for(rows), cluster = 0;
    if (rows <= kWarpRows && !is_fixed) {
        cluster = cluster_for<SplitkvTraits<kDType, kHeadDim, Form::cluster>>(params, max_smem);
    }
    if (smem_of(form_of<kDType, kHeadDim>(params, tile_rows, cluster, is_fixed, max_smem), tile_rows) > max_smem) {
        tile_rows = 4 * kWarpRows;  // takes the least shared memory
    }
    const Form form = form_of<kDType, kHeadDim>(params, tile_rows, cluster, is_fixed, max_smem);
    return call_with_traits<kDType, kHeadDim>(form, [&](auto traits) {
        using Traits = decltype(traits);
        SplitkvPlan plan{};
        plan.form = form;
        plan.tile_rows = tile_rows;
        plan.row_tiles = static_cast<int>((rows + tile_rows - 1) / tile_rows);
        plan.cluster = cluster;
        plan.is_aligned = is_aligned(params.k, params.d) && is_aligned(params.v, params.d);
        plan.is_q_aligned = is_aligned(params.q, params.d);
        plan.by_ratio = cutlass::FastDivmod(params.h_h_k_ratio);

        const int64_t capacity = params.cache.capacity, split_keys = params.cache.split_keys;
        while ((1 << plan.log2_unit) < Traits::kUnit || ((capacity >> plan.log2_unit) + 1) * heads > INT32_MAX) {
            ++plan.log2_unit;
        }
        const int64_t units = (capacity + (int64_t{1} << plan.log2_unit) - 1) >> plan.log2_unit;  // of a head, at most
        const int ctas = device_properties().sm_count * ctas_of_sm<Traits>(tile_rows, max_smem);
        const int wanted =
            plan.row_tiles * 8 <= ctas ? ctas / plan.row_tiles : (4 * ctas + plan.row_tiles - 1) / plan.row_tiles;
        if (is_fixed) {
            plan.max_splits = static_cast<int>(split_keys > 0 ? (capacity + split_keys - 1) / split_keys
                                                              : std::min<int64_t>(params.cache.num_splits, units));
            plan.pieces = static_cast<int>(std::clamp<int64_t>(heads * plan.max_splits, 1, wanted));
            if (split_keys > 0) {
                plan.align_units(static_cast<int>(split_keys));
            }
            return plan;
        }
        plan.by_sequence = tile_rows == kWarpRows && is_nearly_all_of(wanted / params.h_k * params.h_k, wanted);
        const int64_t heads_with_units = int64_t{params.b} * plan.heads_with_units(params);
        plan.pieces = static_cast<int>(
            std::clamp<int64_t>(heads_with_units * units / 2, 1, wanted / plan.heads_of_piece(params)));
        plan.align_pieces(aligned_pieces_for(plan.pieces, heads_with_units), heads_with_units);
        return plan;
    });
}

// True if one group of threads combines a head. Only plans of Hopper's kernel with split keys have unit_keys without
// fixed splits: after the split-KV kernel, small CTAs would start before it ends, and make the call up to a fifth
// slower (H200).
inline bool has_few_slots(const Flash_fwd_params &params, const SplitkvPlan &plan) {
    constexpr int kFewSlots = 8;
    return plan.max_splits == 0 && plan.unit_keys > 0 && plan.pieces <= kFewSlots * int64_t{params.b} * params.h_k;
}

// True if several CTAs may work on the keys of a head, so that their results have to be combined by another kernel.
inline bool has_partial_results(const SplitkvPlan &plan) {
    return plan.cluster == 0 && plan.max_splits != 1 && (plan.max_splits > 0 || plan.pieces > 1);
}

// Returns whether the partial results have to be combined.
template <typename Traits>
bool launch_splitkv(const Flash_fwd_params &params, const SplitkvPlan &plan, cudaStream_t stream) {
    const int threads = Traits::threads(plan.tile_rows), smem = Traits::smem_size(plan.tile_rows);
    if (trace_enabled()) {
        trace(
            Traits::kIsCluster ? "flash_fwd_splitkv_cluster_kernel" : "flash_fwd_splitkv_kernel",
            "form=%s rows=%d row_tiles=%d pieces=%d aligned_pieces=%d cluster=%d splits=%s unit=%d threads=%d smem=%d",
            name_of(plan.form), plan.tile_rows, plan.row_tiles, plan.pieces, plan.aligned_pieces, plan.cluster,
            plan.max_splits == 0 ? "by length" : std::to_string(plan.max_splits).c_str(), 1 << plan.log2_unit, threads,
            smem);
    }
    if constexpr (Traits::kIsCluster) {
        auto kernel = &flash_fwd_splitkv_cluster_kernel<Traits>;
        reserve_smem(kernel, smem);
        ProgrammaticLaunch(dim3(1, plan.cluster * params.b * params.h_k), plan.cluster, threads, smem, stream)
            .run(kernel, "launching flash_fwd_splitkv_cluster_kernel", params, plan);
        return false;
    } else {
        auto kernel = &flash_fwd_splitkv_kernel<Traits>;
        reserve_smem(kernel, std::min(Traits::smem_size(Traits::kMaxRows), device_properties().max_smem));
        ProgrammaticLaunch(dim3(plan.row_tiles, static_cast<unsigned>(plan.ctas(params))), 1, threads, smem, stream)
            .run(kernel, "launching flash_fwd_splitkv_kernel", params, plan);
        return has_partial_results(plan);
    }
}

}  // namespace kvcache

template <DType kDType, int kHeadDim>
int64_t splitkv_scratch_floats(const Flash_fwd_params &params, int max_smem) {
    const kvcache::SplitkvPlan plan = kvcache::plan_of<kDType, kHeadDim>(params, max_smem);
    if (!kvcache::has_partial_results(plan)) {
        return 0;
    }
    const int64_t rows = std::min<int64_t>(plan.tile_rows, int64_t{params.seqlen_q} * params.h_h_k_ratio);
    return plan.scratch_floats(params, rows, kHeadDim);
}

template <DType kDType, int kHeadDim>
void run_combine_splits(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan, cudaStream_t stream) {
    using Element = std::conditional_t<kDType == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
    const int rows = std::min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio);
    const int64_t heads = plan.combines_by_cta(params) ? plan.ctas(params) : int64_t{params.b} * params.h_k;
    const auto launch = [&](auto groups) {
        constexpr int kGroups = decltype(groups)::value;
        using Tile = kvcache::CombineTile<kHeadDim, kGroups>;
        const int tiles = (rows + Tile::kRows - 1) / Tile::kRows * Tile::kPartsOfRow * plan.row_tiles;
        // Few CTAs, because often most heads have nothing to combine, and starting the CTAs takes longer than ending.
        constexpr int64_t kCtasOfSM = 8;
        const int64_t max_ctas = (kCtasOfSM * device_properties().sm_count + heads - 1) / heads;  // of a head
        const int ctas = kGroups == 1 ? static_cast<int>(std::min<int64_t>(tiles, max_ctas)) : tiles;
        const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(heads));
        auto kernel = &kvcache::flash_fwd_splitkv_combine_kernel<Element, kHeadDim, kGroups>;
        ProgrammaticLaunch(grid, 1, Tile::kThreads, 0, stream)
            .run(kernel, "launching flash_fwd_splitkv_combine_kernel", params, plan, tiles);
    };
    if constexpr (kHeadDim > 256) {
        constexpr int kManySlots = 32;  // of a head
        if (plan.pieces > kManySlots * int64_t{params.b} * params.h_k) {
            launch(std::integral_constant<int, kvcache::kManyCombineGroups>());
            return;
        }
    }
    if (kvcache::has_few_slots(params, plan)) {
        launch(std::integral_constant<int, 1>());
    } else {
        launch(std::integral_constant<int, kvcache::kCombineGroups>());
    }
}

template <DType kDType, int kHeadDim>
void run_flash_fwd_splitkv(const Flash_fwd_params &params, int max_smem, bool follows_append, cudaStream_t stream) {
    kvcache::SplitkvPlan plan = kvcache::plan_of<kDType, kHeadDim>(params, max_smem);
    plan.follows_append = follows_append;
    const bool is_partial = kvcache::call_with_traits<kDType, kHeadDim>(
        plan.form, [&](auto traits) { return kvcache::launch_splitkv<decltype(traits)>(params, plan, stream); });
    if (is_partial) {
        run_combine_splits<kDType, kHeadDim>(params, plan, stream);
    }
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
    ProgrammaticLaunch(dim3(static_cast<unsigned>(grid)), 1, kvcache::kAppendThreads, 0, stream)
        .run(&kvcache::append_kv_kernel<Element>, "launching append_kv_kernel", params);
}

}  // namespace flash
