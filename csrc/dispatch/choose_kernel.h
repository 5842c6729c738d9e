// Which kernel a CUDA call takes: its kind, whether it is of csrc/sm90 or of csrc/sm80, and for a KV cache which of
// three attends. Only run_mha.cpp uses it.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "built.h"
#include "common/message.h"
#include "device.h"
#include "flash.h"
#include "kind.h"
#include "kvcache/splitkv.h"
#include "run_mha.h"
#include "single_tile/single_tile.h"
#include "sm90/common/tma_limits.h"
#include "sm90/decode/flash_fwd_latent.h"

namespace flash {

// The kernel of a call has at least this head dim. d and d_v differ only in calls of sm90 (takes_own_headdim_v).
inline int largest_headdim(const Flash_fwd_params &params) {
    return std::max(params.d, params.d_v);
}

// The kernel that a call needs.
inline Kind kind_of(const Flash_fwd_params &params) {
    if (params.block_table != nullptr) {
        return Kind::paged;
    }
    if (params.attn_bias.is_used()) {
        return Kind::biased;
    }
    if (params.key_ranges.is_used()) {
        return Kind::ranged;
    }
    if (params.has_score_mod() || params.rng_state != nullptr || params.max_logits != nullptr) {
        return Kind::general;
    }
    const bool may_differ = params.cu_seqlens_q != nullptr || params.cache.is_used();  // the lengths of sequences
    return may_differ ? Kind::varlen : params.is_local() ? Kind::local : Kind::full;
}

// The number in an environment variable that may be `first` or `second`; 0 where it is not set. ValueError for others.
inline int requested_number(const char *variable, int first, int second) {
    const char *value = std::getenv(variable);
    const std::string text = value == nullptr ? "" : value;
    FLASH_CHECK_VALUE(text.empty() || text == std::to_string(first) || text == std::to_string(second), variable,
                      " is '", text, "'; allowed: ", first, ", ", second);
    return text.empty() ? 0 : std::stoi(text);
}

// The architecture whose kernels run, to compare them. 0: the best one.
inline int requested_arch() {
    return requested_number("FLASH_ATTN_MINI_ARCH", 80, 90);
}

// The passes of the backward of head dims 192 and 256 on Hopper, to compare them. 0: what takes less time.
inline int requested_passes() {
    return requested_number("FLASH_ATTN_MINI_BACKWARD_PASSES", 1, 2);
}

// True if the backward takes less time in two passes. They multiply seven products instead of five, and spare the
// additions to dQ in global memory, which wait for each other where they have an order, and for which short sequences
// clear and convert memory. At head dim 256 one pass runs in pairs of CTAs, which add half as much.
// docs/tuning/sm90_backward.md has the times.
inline bool prefers_dq_pass(const Flash_bwd_params &params) {
    struct Lengths {
        int full, local;
    };
    constexpr Lengths kLongest192{2048, INT_MAX}, kLongest256{384, 1024};  // sequences with two passes, in keys
    const Lengths longest = built_headdim_for(largest_headdim(params)) > 192 ? kLongest256 : kLongest192;
    return params.deterministic || params.seqlen_k <= (params.is_local() ? longest.local : longest.full);
}

// The kernel that a backward needs. Hopper's kernels of kind local assume that every query sees a key. Otherwise they
// would have to write zeros over such rows in each step, because NaN times 0 is NaN. Calls without any key start no
// kernel.
inline Kind kind_of(const Flash_bwd_params &params) {
    const Kind kind = kind_of(static_cast<const Flash_fwd_params &>(params));
    const int64_t right = params.window_size_right;
    const bool has_rows_without_key = right >= 0 && params.seqlen_q > params.seqlen_k + right;
    if (kind != Kind::local || !has_rows_without_key) {
        return kind;
    }
    return device_properties().major == 9 && requested_arch() != 80 ? Kind::varlen : kind;
}

// True if the kernels of a single tile run. FLASH_ATTN_MINI_ARCH asks for the other ones.
template <typename Params>
bool takes_single_tile(const Params &params) {
    const int headdim = built_headdim_for(largest_headdim(params));
    return headdim != 0 && has_single_tile(headdim) && is_single_tile(params) && requested_arch() == 0;
}

// True if the call has an sm90 kernel, and its sm80 kernel is not compiled for this GPU. has_sm90: the build has one.
inline bool has_only_sm90(bool has_sm90) {
    return has_sm90 && !kHasSm80OnHopper && device_properties().major == 9;
}

// RuntimeError if FLASH_ATTN_MINI_ARCH asks for an sm80 kernel that the build lacks.
inline void check_requested_arch(bool has_sm90) {
    if (requested_arch() == 80 && has_only_sm90(has_sm90)) {
        const DeviceProperties &gpu = device_properties();
        FLASH_CHECK(false, "FLASH_ATTN_MINI_ARCH is 80, but ", sm80_unavailable_reason(gpu.major, gpu.minor));
    }
}

// Null if the call runs on an sm90 kernel; else why it runs on an sm80 kernel.
template <typename Params>
const char *reason_against_sm90(const Params &params, bool has_sm90) {
    check_requested_arch(has_sm90);
    if (requested_arch() == 80) {
        return "FLASH_ATTN_MINI_ARCH is 80";
    }
    if (device_properties().major != 9) {
        return "the GPU is not a Hopper";
    }
    if (!has_sm90) {
        return "this build has no sm90 kernel for this call";
    }
    // Otherwise copy_for_tma makes copies.
    return kHasSm80OnHopper && params.d_v == params.d ? sm90::reason_against(params) : nullptr;
}

// ---- which kernel attends over a KV cache; the numbers were measured on an H200: docs/tuning/kvcache.md

// True if the kernels of the forward can read the cache: 16 bytes at a time.
inline bool is_readable_by_forward(const Flash_fwd_params &params) {
    return is_aligned(params.q, params.d) && is_aligned(params.k, params.d) && is_aligned(params.v, params.d) &&
           is_aligned(params.o, params.d);
}

// The kernels that may attend over a cache.
enum class CacheKernel {
    splitkv,     // kvcache/: any call, any GPU
    split_sm90,  // Hopper: many rows of a group of heads
    forward,     // those of the forward
};

constexpr int kRowsOfTile = 128;  // of the forward, at most head dims, and of split_sm90 without its tiles of 192 rows

// Queries of all heads that share a key/value head: the rows that a tile of splitkv and split_sm90 holds.
inline int64_t packed_rows(const Flash_fwd_params &params) {
    return int64_t{params.seqlen_q} * params.h_h_k_ratio;
}

// Work tiles of the forward, `rows` queries each.
inline int64_t forward_tiles(const Flash_fwd_params &params, int rows = kRowsOfTile) {
    return int64_t{params.b} * params.h * ((params.seqlen_q + rows - 1) / rows);
}

// True if the kernels of the forward take less time than splitkv: the query tiles fill the GPU without split keys, and
// most of the rows of a tile are queries. They multiply faster, but do not share keys among heads and do not split
// keys.
inline bool prefers_forward(const Flash_fwd_params &params) {
    constexpr int kSpeedup = 4;  // over splitkv
    const int64_t tiles = forward_tiles(params), rows = packed_rows(params) * params.b * params.h_k;
    const bool fills_gpu = tiles * 4 >= device_properties().sm_count * 3;
    return params.block_table == nullptr && fills_gpu && packed_rows(params) > 64 &&
           tiles * kRowsOfTile < kSpeedup * rows;
}

// True if the kernels whose tiles have the rows of a group of heads take the queries of a call.
inline bool can_pack_rows(const Flash_fwd_params &params) {
    return !params.has_alibi() && packed_rows(params) <= INT32_MAX - kRowsOfTile;
}

// True if the build and the GPU have split_sm90, and it takes the call.
inline bool runs_split_sm90(const Flash_fwd_params &params) {
    return device_properties().major == 9 && requested_arch() != 80 &&
           has_sm90_fwd(built_headdim_for(params.d), Kind::split) && can_pack_rows(params) && sm90::can_split(params);
}

// A cache of latent vectors: K of 576 columns, V of 512. On CUDA the calls of a cache have no other head dims above
// kMaxHeadDimCuda (reason_against_latent).
inline bool is_latent_cache(const Flash_fwd_params &params) {
    return params.cache.is_used() && params.d == kHeadDimLatentCache && params.d_v == kHeadDimVLatentCache;
}

// True if split_sm90 takes less time than the kernels of the forward. It splits keys, so that all SMs end at once; they
// take whole tiles, and need no second kernel.
inline bool prefers_split_sm90(const Flash_fwd_params &params) {
    const bool is_d64 = built_headdim_for(params.d) == 64;
    const double cost = packed_rows(params) <= 64 ? 0.6 : is_d64 ? 1.0 : 1.06;  // of its tile, in tiles of the forward
    const int rows_of_forward = is_d64 ? 192 : kRowsOfTile;
    const int64_t sms = device_properties().sm_count;
    const int64_t rounds = (forward_tiles(params, rows_of_forward) + sms - 1) / sms;
    const int64_t row_tiles = (packed_rows(params) + kRowsOfTile - 1) / kRowsOfTile;
    return params.block_table != nullptr || cost * double(row_tiles * params.b * params.h_k) < double(rounds * sms);
}

// num_splits = 1 must match the varlen forward bitwise, so its kernels run. A cache is never copied: splitkv reads the
// caches that the other kernels cannot read.
inline CacheKernel cache_kernel(const Flash_fwd_params &params) {
    const int min_rows = built_headdim_for(params.d) == 64 ? 33 : 17;  // of split_sm90
    const bool is_chosen = params.cache.num_splits == 0 && params.cache.split_keys == 0;
    if (!is_readable_by_forward(params)) {
        return CacheKernel::splitkv;
    }
    if (is_chosen && packed_rows(params) >= min_rows && runs_split_sm90(params)) {
        return prefers_split_sm90(params) ? CacheKernel::split_sm90 : CacheKernel::forward;
    }
    if (params.cache.num_splits != 1 && !(is_chosen && prefers_forward(params))) {
        return CacheKernel::splitkv;
    }
    const bool has_sm90 = has_sm90_fwd(built_headdim_for(params.d), kind_of(params));
    check_requested_arch(has_sm90);  // before anything is appended
    return has_only_sm90(has_sm90) && !sm90::can_describe_cache(params) ? CacheKernel::splitkv : CacheKernel::forward;
}

}  // namespace flash
