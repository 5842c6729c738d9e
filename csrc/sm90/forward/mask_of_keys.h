// A boolean attn_bias that all queries share, such as a padding mask. Scores stay scores, and hidden ones become -inf:
// a key block without a hidden key costs a load of its bytes and a vote.
#pragma once

#include <cstdint>

#include "common/attn_bias.h"
#include "dispatch/kind.h"
#include "flash.h"

namespace flash::sm90 {

__device__ __forceinline__ bool is_mask_of_keys(const AttnBias &bias) {
    return bias.type == AttnBias::Type::boolean && bias.row_stride == 0;
}

// True if scores become logits (common/attn_bias.h) before the softmax.
template <Kind kKind>
__device__ __forceinline__ bool holds_logits(const Flash_fwd_params &params) {
    return has_bias(kKind) && !is_mask_of_keys(params.attn_bias);
}

// The mask of a step, of kKeys keys. A lane holds 4 of them, as bytes: 0 hides a key.
template <int kKeys>
class MaskOfKeys {
    static_assert(kKeys <= 128 && kKeys % 8 == 0);

public:
    // Starts to load the mask from first_key on; keys past the end are hidden. Called by a whole warp.
    template <typename Element>
    __device__ __forceinline__ void start(const BiasOfHead<Element> &bias, int first_key) {
        const int key = first_key + static_cast<int>(threadIdx.x % 32) * 4;
        const uint8_t *const row = bias.template row<uint8_t>(0);
        bytes = 0;
        if (key + 4 <= bias.seqlen_k && bias.has_vectors(4)) {
            bytes = *reinterpret_cast<const uint32_t *>(row + key);
        } else {
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                const bool is_visible = key + i < bias.seqlen_k && row[(key + i) * bias.key_stride] != 0;
                bytes |= (is_visible ? 1u : 0u) << 8 * i;
            }
        }
    }

    // scores (row, col): those of hidden keys become -inf. Called by a whole warp.
    template <typename TensorS>
    __device__ __forceinline__ void apply(TensorS &scores) const {
        const uint32_t hidden = __vcmpeq4(bytes, 0);
        const int lane = threadIdx.x % 32;
        if (!__any_sync(0xffffffffu, hidden != 0 && lane < kKeys / 4)) {
            return;
        }
        uint32_t visible = 0;  // a bit for each of this thread's columns: keys 2 q and 2 q + 1 of every 8, as in a mask
        CUTE_UNROLL
        for (int i = 0; i < kKeys / 8; ++i) {
            const uint32_t four = __shfl_sync(0xffffffffu, hidden, 2 * i + lane % 4 / 2) >> lane % 2 * 16;
            visible |= ((four & 0xff) == 0 ? 1u : 0u) << 2 * i | ((four & 0xff00) == 0 ? 2u : 0u) << 2 * i;
        }
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                scores(row, col) = visible & (1u << col) ? scores(row, col) : -INFINITY;
            }
        }
    }

private:
    uint32_t bytes = 0;
};

}  // namespace flash::sm90
