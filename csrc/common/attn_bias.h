// attn_bias in the CUDA kernels: what is added to the scaled and capped scores.
//
// With a bias the kernels hold logits, score * scale_softmax + bias, where other kinds hold scores that the softmax
// scales: a bias divided by the scale could overflow. The forward and the backward round the sum in the same way.
#pragma once

#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../flash.h"

namespace flash {

using namespace cute;

// The bias of one head of one sequence.
template <typename Element>
struct BiasOfHead {
    const char *base;                // of query 0 and key 0
    int64_t row_stride, key_stride;  // elements
    int seqlen_q, seqlen_k;
    AttnBias::Type type;

    __device__ __forceinline__ BiasOfHead(const Flash_fwd_params &params, int bidb, int bidh)
        : row_stride(params.attn_bias.row_stride),
          key_stride(params.attn_bias.key_stride),
          seqlen_q(params.seqlen_q),
          seqlen_k(params.seqlen_k),
          type(params.attn_bias.type) {
        const AttnBias &bias = params.attn_bias;
        base = static_cast<const char *>(bias.ptr) +
               (bidb * bias.batch_stride + bidh * bias.head_stride) * bytes_of_element();
    }

    __device__ __forceinline__ int bytes_of_element() const {
        return type == AttnBias::Type::float32 ? 4 : type == AttnBias::Type::boolean ? 1 : int(sizeof(Element));
    }

    // The first key of a row. Rows past the end of the sequence read the last one.
    template <typename T>
    __device__ __forceinline__ const T *row(int query) const {
        return reinterpret_cast<const T *>(base) + min(query, seqlen_q - 1) * row_stride;
    }

    // True if the adjacent keys of a row can be loaded as vectors of `bytes` bytes.
    __device__ __forceinline__ bool has_vectors(int bytes) const {
        return key_stride == 1 && (reinterpret_cast<uintptr_t>(base) | uint64_t(row_stride * bytes_of_element())) %
                                          static_cast<unsigned>(bytes) ==
                                      0;
    }

    // scores (row, col) become scores * scale + bias. coords: the same layout, holding (row, col) in a tile that begins
    // at first_query and first_key. kTransposed: rows are keys. Past the ends the value is that of the last query or
    // key.
    template <bool kTransposed, typename TensorS, typename TensorC>
    __device__ __forceinline__ void add_to(TensorS &scores, const TensorC &coords, float scale, int first_query,
                                           int first_key) const {
        if (type == AttnBias::Type::boolean) {
            add<kTransposed, uint8_t>(scores, coords, scale, first_query, first_key,
                                      [](uint8_t x) { return x != 0 ? 0.0f : -INFINITY; });
        } else if (type == AttnBias::Type::float32) {
            add<kTransposed, float>(scores, coords, scale, first_query, first_key, [](float x) { return x; });
        } else if (!kTransposed && seqlen_k % 2 == 0 && has_vectors(4)) {
            add_pairs(scores, coords, scale, first_query, first_key);
        } else {
            add<kTransposed, Element>(scores, coords, scale, first_query, first_key,
                                      [](const Element &x) { return float(x); });
        }
    }

    // The same for type float32. The stride is hidden from the compiler, which would compute multiples of it before the
    // loops around, and keep them.
    template <typename TensorS, typename TensorC>
    __device__ __forceinline__ void add_float32_to(TensorS &scores, const TensorC &coords, float scale, int first_query,
                                                   int first_key) const {
        BiasOfHead bias = *this;
        asm volatile("" : "+l"(bias.key_stride));
        bias.template add</*kTransposed=*/false, float>(scores, coords, scale, first_query, first_key,
                                                        [](float x) { return x; });
    }

    // One value. Past the ends it is that of the last query or key.
    __device__ __forceinline__ float at(int query, int key) const {
        const int64_t offset = min(key, seqlen_k - 1) * key_stride;
        if (type == AttnBias::Type::boolean) {
            return row<uint8_t>(query)[offset] != 0 ? 0.0f : -INFINITY;
        }
        return type == AttnBias::Type::float32 ? row<float>(query)[offset] : float(row<Element>(query)[offset]);
    }

    // Two values of 16 bits.
    __device__ __forceinline__ static float2 unpack(uint32_t pair) {
        if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
            const uint32_t first = pair << 16, second = pair & 0xffff0000u;
            return {reinterpret_cast<const float &>(first), reinterpret_cast<const float &>(second)};
        } else {
            return __half22float2(reinterpret_cast<const __half2 &>(pair));
        }
    }

private:
    template <bool kTransposed, typename T, typename TensorS, typename TensorC, typename ToFloat>
    __device__ __forceinline__ void add(TensorS &scores, const TensorC &coords, float scale, int first_query,
                                        int first_key, const ToFloat &to_float) const {
        constexpr int kQuery = kTransposed ? 1 : 0, kKey = kTransposed ? 0 : 1;
        CUTE_UNROLL
        for (int i = 0; i < size<kQuery>(scores); ++i) {
            const auto place = [&](int key) { return kTransposed ? make_coord(key, i) : make_coord(i, key); };
            const T *of_query = row<T>(first_query + get<kQuery>(coords(place(0))));
            CUTE_UNROLL
            for (int j = 0; j < size<kKey>(scores); ++j) {
                const int key = min(first_key + get<kKey>(coords(place(j))), seqlen_k - 1);
                float &x = scores(place(j));
                x = __fmaf_rn(x, scale, to_float(of_query[key * key_stride]));
            }
        }
    }

    template <typename TensorS, typename TensorC>
    __device__ __forceinline__ void add_pairs(TensorS &scores, const TensorC &coords, float scale, int first_query,
                                              int first_key) const {
        CUTE_UNROLL
        for (int i = 0; i < size<0>(scores); ++i) {
            const Element *of_query = row<Element>(first_query + get<0>(coords(i, 0)));
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); j += 2) {
                const int key = min(first_key + get<1>(coords(i, j)), seqlen_k - 2);
                const float2 pair = unpack(*reinterpret_cast<const uint32_t *>(of_query + key));
                scores(i, j) = __fmaf_rn(scores(i, j), scale, pair.x);
                scores(i, j + 1) = __fmaf_rn(scores(i, j + 1), scale, pair.y);
            }
        }
    }
};

// ---- rows whose largest logit is so low that float32 cannot hold it plus the logarithm of the sum, such as rows of
// finfo.min: their keys have equal weights, and the backward has to know how many there are. Their log-sum-exp is
// stored as largest * (1 - log2(sum) * kLowestUnit), and the exponents of the backward have another factor.

constexpr float kLowest = -0x1p26f, kLowestUnit = 0x1p-15f;

// The log-sum-exp of a row with a bias, whose sum of exponentials is sum * exp(reference).
__device__ __forceinline__ float lse_with_bias(float reference, float sum) {
    return reference < kLowest ? reference * (1.0f - log2f(sum) * kLowestUnit) : reference + logf(sum);
}

// The factor of logit - lse that gives the exponent in base 2. On Hopper it is within 2 ulp: the product by a power of
// 2 is exact, and __fdividef has no slow path, which would be a function call.
__device__ __forceinline__ float exponent_factor(float lse) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return lse < kLowest ? __fdividef(1.0f, -lse * kLowestUnit) : float(kLog2e);
#elif defined(__CUDA_ARCH__)
    return lse < kLowest ? __fdiv_rn(1.0f / kLowestUnit, -lse) : float(kLog2e);
#else
    return lse < kLowest ? 1.0f / kLowestUnit / -lse : float(kLog2e);
#endif
}

}  // namespace flash
