// K and V of a cache by TMA, in boxes of rows: a whole key block of a contiguous cache, or a part of it that lies in
// one page. Host and device.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/cuda_host_adapter.hpp>

#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "flash.h"

namespace flash::sm90 {

struct KeyBoxes {
    cute::TmaDescriptor k, v;
    int rows;  // of a box; a divisor of the key block and of the page
};

// The descriptor of boxes of `rows` keys. x: k or v of a call that can_split (call_limits.h).
template <typename Traits>
cute::TmaDescriptor describe_boxes(const Flash_fwd_params &params, const TensorRef &x, int rows) {
    using Element = typename Traits::Element;
    constexpr auto kType =
        std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    constexpr auto kSwizzle = Traits::kSmemRow == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    const bool is_paged = params.block_table != nullptr;
    const cuuint64_t sizes[4] = {cuuint64_t(params.d), cuuint64_t(is_paged ? params.page_size : params.seqlen_k),
                                 cuuint64_t(params.h_k),
                                 cuuint64_t(is_paged ? params.num_pages : params.cache.batch_cache)};
    // The stride of a dimension of one element has no meaning, and TMA may not accept it.
    const auto bytes = [](cuuint64_t size, int64_t stride) {
        return size > 1 ? cuuint64_t(stride) * sizeof(Element) : cuuint64_t(16);
    };
    const cuuint64_t strides[3] = {bytes(sizes[1], x.row_stride), bytes(sizes[2], x.head_stride),
                                   bytes(sizes[3], x.batch_stride)};
    const cuuint32_t box[4] = {cuuint32_t(Traits::kSmemRow), cuuint32_t(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
    cute::TmaDescriptor descriptor;
    const CUresult result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &descriptor, kType, 4, const_cast<void *>(x.ptr), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        kSwizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("flash_attn_mini: cuTensorMapEncodeTiled does not accept the cache of this call");
    }
    return descriptor;
}

template <typename Traits>
KeyBoxes make_key_boxes(const Flash_fwd_params &params) {
    const int rows = params.block_table == nullptr ? Traits::kBlockN : std::gcd(params.page_size, Traits::kBlockN);
    return {describe_boxes<Traits>(params, params.k, rows), describe_boxes<Traits>(params, params.v, rows), rows};
}

}  // namespace flash::sm90
