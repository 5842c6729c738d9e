// Which calls of the kinds that have a kernel run on sm80 all the same. Host code, no CUDA.
#pragma once

#include <cstdint>

#include "../flash.h"

namespace flash::sm90 {

// What TMA can describe (CUDA driver API, cuTensorMapEncodeTiled): strides are positive multiples of 16 bytes below
// 2^40, where a dimension has more than one element.
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
    const int batch = is_varlen ? 1 : params.b;
    return can_describe(params.q, rows_q, params.h, batch) && can_describe(params.k, rows_k, params.h_k, batch) &&
           can_describe(params.v, rows_k, params.h_k, batch);
}

// Null: none.
inline const char *reason_against(const Flash_fwd_params &params) {
    return can_describe_inputs(params) ? nullptr : "TMA takes no such strides";
}

}  // namespace flash::sm90
