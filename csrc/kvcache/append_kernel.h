// Writes the new keys and values to the cache, and rotates the new keys and the queries (RoPE, Su et al.,
// arXiv:2104.09864). A warp works on one row of one head.
#pragma once

#include <cutlass/numeric_types.h>

#include "../common/sequence.h"
#include "instructions.h"

namespace flash::kvcache {

constexpr int kAppendThreads = 128;

// The rows of a call: new keys, new values, then queries if they are rotated.
struct AppendRows {
    int64_t new_rows, query_rows;  // of each of k and v, of q

    __host__ __device__ explicit AppendRows(const Flash_fwd_params &params)
        : new_rows(int64_t(params.b) * params.cache.seqlen_new * params.h_k),
          query_rows(params.cache.rotary_cos == nullptr ? 0 : int64_t(params.b) * params.seqlen_q * params.h) {}
    __host__ __device__ int64_t count() const { return 2 * new_rows + query_rows; }
};

// Copies a row of d elements. 16 bytes at a time where the addresses allow it.
template <typename Element>
__device__ __forceinline__ void copy_row(const Element *source, Element *target, int begin, int d) {
    const int lane = threadIdx.x % 32;
    const auto bits = [](const void *x) { return reinterpret_cast<uintptr_t>(x); };
    if (((bits(source + begin) | bits(target + begin)) % 16) == 0) {
        const int vectors = (d - begin) / 8;
        for (int i = lane; i < vectors; i += 32) {
            reinterpret_cast<uint4 *>(target + begin)[i] = reinterpret_cast<const uint4 *>(source + begin)[i];
        }
        begin += vectors * 8;
    }
    for (int i = begin + lane; i < d; i += 32) {
        reinterpret_cast<uint16_t *>(target)[i] = reinterpret_cast<const uint16_t *>(source)[i];
    }
}

// Rotates the first rotary_dim elements of a row by the angles of `position` and copies the others. Rounds once.
template <typename Element>
__device__ __forceinline__ void rotate_row(const Flash_fwd_params &params, const Element *source, Element *target,
                                           int position) {
    const KvCache &cache = params.cache;
    const int half = cache.rotary_dim / 2;
    const int64_t angles = int64_t(clamp_to(position, 0, cache.rotary_seqlen - 1)) * half;
    const Element *cos = static_cast<const Element *>(cache.rotary_cos) + angles;
    const Element *sin = static_cast<const Element *>(cache.rotary_sin) + angles;
    for (int i = threadIdx.x % 32; i < half; i += 32) {
        const int first = cache.is_rotary_interleaved ? 2 * i : i;
        const int second = cache.is_rotary_interleaved ? 2 * i + 1 : i + half;
        const float x = static_cast<float>(source[first]), y = static_cast<float>(source[second]);
        const float c = static_cast<float>(cos[i]), s = static_cast<float>(sin[i]);
        target[first] = static_cast<Element>(x * c - y * s);
        target[second] = static_cast<Element>(x * s + y * c);
    }
    copy_row(source, target, cache.rotary_dim, params.d);
}

// The place of a new key in the cache; null if it does not fit, or if its page or cache row does not exist.
template <typename Element>
__device__ __forceinline__ Element *cache_row(const Flash_fwd_params &params, const TensorRef &x, int bidb, int bidh_k,
                                              int64_t position) {
    const KvCache &cache = params.cache;
    if (position >= cache.capacity) {
        return nullptr;
    }
    int64_t batch = cache.batch_idx == nullptr ? bidb : cache.batch_idx[bidb], row = position;
    int64_t batches = cache.batch_cache;
    if (params.block_table != nullptr) {
        const int page = static_cast<int>(position) / params.page_size;
        batch = params.block_table[bidb * params.block_table_batch_stride + page];
        row = position - int64_t(page) * params.page_size;
        batches = params.num_pages;
    }
    if (batch < 0 || batch >= batches) {
        return nullptr;
    }
    return static_cast<Element *>(x.ptr) + batch * x.batch_stride + row * x.row_stride + bidh_k * x.head_stride;
}

template <typename Element>
__global__ void __launch_bounds__(kAppendThreads) append_kv_kernel(const __grid_constant__ Flash_fwd_params params) {
    wait_for_previous_kernel();
    launch_dependents();  // not earlier: the next kernel reads the lengths before it waits for this one
    const KvCache &cache = params.cache;
    const AppendRows rows(params);
    int64_t index = int64_t(blockIdx.x) * (kAppendThreads / 32) + threadIdx.x / 32;
    if (index >= rows.count()) {
        return;
    }
    const auto source_row = [&](const TensorRef &x, int bidb, int row, int bidh) {
        return static_cast<Element *>(x.ptr) + bidb * x.batch_stride + row * x.row_stride + bidh * x.head_stride;
    };
    const bool is_query = index >= 2 * rows.new_rows, is_value = index >= rows.new_rows;
    const int heads = is_query ? params.h : params.h_k, length = is_query ? params.seqlen_q : cache.seqlen_new;
    index -= is_query ? 2 * rows.new_rows : is_value ? rows.new_rows : 0;
    const int bidh = static_cast<int>(index % heads), row = static_cast<int>(index / heads % length),
              bidb = static_cast<int>(index / heads / length);
    const int before = cache_seqlen(cache, bidb);
    if (is_query) {
        rotate_row(params, source_row(cache.q_input, bidb, row, bidh), source_row(params.q, bidb, row, bidh),
                   before + (cache.is_rotary_by_query ? row : 0));
        return;
    }
    Element *target = cache_row<Element>(params, is_value ? params.v : params.k, bidb, bidh, int64_t(before) + row);
    if (target == nullptr) {
        return;
    }
    const Element *source = source_row(is_value ? cache.v_new : cache.k_new, bidb, row, bidh);
    if (is_value || cache.rotary_cos == nullptr) {
        copy_row(source, target, 0, params.d);
    } else {
        rotate_row(params, source, target, before + row);
    }
}

}  // namespace flash::kvcache
