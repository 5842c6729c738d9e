// Which tensors TMA can read: the sm90 kernels take a call only if it can read all of them. Host code, no CUDA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash.h"

namespace flash::sm90 {

constexpr char kCannotDescribe[] = "TMA cannot describe these strides";

// TMA's limits (CUDA driver API, cuTensorMapEncodeTiled): a 16-byte aligned address, and for every dimension of more
// than one element a stride that is a positive multiple of 16 bytes below 2^40.
inline bool can_describe(const TensorRef &x, int64_t rows, int heads, int batch) {
    constexpr int64_t kBytes = 2, kAlignment = 16, kLimit = int64_t{1} << 40;  // 16-bit types
    const auto is_taken = [](int64_t size, int64_t stride) {
        return size <= 1 || (stride > 0 && stride * kBytes % kAlignment == 0 && stride * kBytes < kLimit);
    };
    return reinterpret_cast<uintptr_t>(x.ptr) % kAlignment == 0 && is_taken(rows, x.row_stride) &&
           is_taken(heads, x.head_stride) && is_taken(batch, x.batch_stride);
}

// Calls f(name, tensor, rows, heads, batch, columns) for each tensor of a call that TMA reads.
template <typename Params, typename F>
void for_each_input(Params &params, const F &f) {
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_varlen ? params.total_q : params.seqlen_q;
    const int64_t rows_k = is_varlen ? params.total_k : params.seqlen_k;
    const int batch_q = is_varlen ? 1 : params.b, batch_k = params.cache.is_used() ? params.cache.batch_cache : batch_q;
    f("q", params.q, rows_q, params.h, batch_q, params.d);
    f("k", params.k, rows_k, params.h_k, batch_k, params.d);
    f("v", params.v, rows_k, params.h_k, batch_k, params.d_v);
    if constexpr (std::is_base_of_v<Flash_bwd_params, Params>) {
        f("dout", params.dout, rows_q, params.h, batch_q, params.d_v);
    }
}

// Why TMA cannot read the tensors of a call as they are; null if it can.
template <typename Params>
const char *reason_against(const Params &params) {
    const char *reason = nullptr;
    for_each_input(params, [&](const char *, const TensorRef &x, int64_t rows, int heads, int batch, int) {
        reason = can_describe(x, rows, heads, batch) ? reason : kCannotDescribe;
    });
    return reason;
}

// True if TMA can read the cache of a call, in pages or not.
inline bool can_describe_cache(const Flash_fwd_params &params) {
    const bool is_paged = params.block_table != nullptr;
    const auto is_described = [&](const TensorRef &x) {
        return can_describe(x, is_paged ? params.page_size : params.seqlen_k, params.h_k,
                            is_paged ? params.num_pages : params.cache.batch_cache);
    };
    return is_described(params.k) && is_described(params.v);
}

// TMA writes boxes of this many rows, or a multiple, where wgmma's swizzle expects them.
constexpr int kMinBoxRows = 8;

// True if the kernel with split keys can read the cache of a call. A page then has whole boxes of keys, and no left
// padding shifts them.
inline bool can_split(const Flash_fwd_params &params) {
    const bool has_boxes =
        params.block_table == nullptr || (params.page_size % kMinBoxRows == 0 && params.cache.leftpad == nullptr);
    return has_boxes && can_describe_cache(params);
}

}  // namespace flash::sm90
