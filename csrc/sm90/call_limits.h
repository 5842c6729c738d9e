// Calls that have an sm90 kernel but cannot use it, because TMA cannot describe their tensors. Host code, no CUDA.
#pragma once

#include <cstdint>

#include "../flash.h"

namespace flash::sm90 {

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

inline bool can_describe_inputs(const Flash_fwd_params &params) {
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_varlen ? params.total_q : params.seqlen_q;
    const int64_t rows_k = is_varlen ? params.total_k : params.seqlen_k;
    const int batch_q = is_varlen ? 1 : params.b, batch_k = params.cache.is_used() ? params.cache.batch_cache : batch_q;
    return can_describe(params.q, rows_q, params.h, batch_q) && can_describe(params.k, rows_k, params.h_k, batch_k) &&
           can_describe(params.v, rows_k, params.h_k, batch_k);
}

// Why a call cannot run on the sm90 kernels; null if it can.
inline const char *reason_against(const Flash_fwd_params &params) {
    return can_describe_inputs(params) ? nullptr : "TMA cannot describe these strides";
}

inline const char *reason_against(const Flash_bwd_params &params) {
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const bool can_describe_dout =
        can_describe(params.dout, is_varlen ? params.total_q : params.seqlen_q, params.h, is_varlen ? 1 : params.b);
    return can_describe_dout ? reason_against(static_cast<const Flash_fwd_params &>(params))
                             : "TMA cannot describe these strides";
}

}  // namespace flash::sm90
