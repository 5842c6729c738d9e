// The gradient of what joins each row (row_mod.h): the sum of -exp(logit - lse) * delta over the rows of a head. A CTA
// sums a head of all sequences, or of one where each sequence has its own logits, always in the same order.
#include <cuda_bf16.h>

#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "row_mod.h"
#include "sequence.h"

namespace flash {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, offset);
    }
    return x;
}

__device__ __forceinline__ void store(void *to, int64_t index, DType dtype, float x) {
    if (dtype == DType::float32) {
        static_cast<float *>(to)[index] = x;
    } else if (dtype == DType::float16) {
        static_cast<__half *>(to)[index] = __float2half_rn(x);
    } else {
        static_cast<__nv_bfloat16 *>(to)[index] = __float2bfloat16_rn(x);
    }
}

// The rows of a block that exist, of one sequence.
struct Rows {
    int64_t first, first_padded;  // in softmax_lse and in dsoftmax_sum
    int count;
};

// index: of a block of kRowsRounded padded rows among those of a head, in the sequences from `first_bidb` on.
__device__ __forceinline__ Rows rows_of_block(const Flash_bwd_params &params, int index, int first_bidb, int bidh) {
    constexpr int kBlock = Flash_bwd_params::kRowsRounded;
    const int *cu_seqlens = params.cu_seqlens_q;
    const int64_t padded = bidh * params.padded_head_stride, head = bidh * params.lse_head_stride;
    if (cu_seqlens == nullptr) {
        const int per_sequence = static_cast<int>(params.padded_head_stride / kBlock);
        const int64_t bidb = first_bidb + index / per_sequence;
        const int row = index % per_sequence * kBlock;
        return {bidb * params.lse_batch_stride + head + row, bidb * params.padded_batch_stride + padded + row,
                min(kBlock, params.seqlen_q - row)};
    }
    const auto [bidb, block] = find_block(cu_seqlens, params.b, params.total_q, kBlock, index);
    const int begin = load_cu_seqlen(cu_seqlens, bidb, params.total_q) + block * kBlock,
              end = load_cu_seqlen(cu_seqlens, bidb + 1, params.total_q);
    return {head + begin, padded + int64_t{index} * kBlock, min(kBlock, end - begin)};
}

__global__ void __launch_bounds__(kThreads)
    row_mod_gradient_kernel(const __grid_constant__ Flash_bwd_params params, void *gradient) {
    constexpr int kBlock = Flash_bwd_params::kRowsRounded, kRowsOfLane = kBlock / 32;
    const int lane = threadIdx.x % 32;
    const int first_bidb = blockIdx.x / params.h, bidh = blockIdx.x % params.h;
    // Varlen: padded_head_stride counts the rows of all sequences, of which there may be none.
    const bool is_varlen = params.cu_seqlens_q != nullptr, is_of_all = params.sink_batch_stride == 0;
    const int sequences = is_varlen || !is_of_all ? min(params.b, 1) : params.b;
    const int blocks = static_cast<int>(params.padded_head_stride / kBlock) * sequences;
    const float logit = RowMod<float>(params, first_bidb, bidh).logit();
    const auto *lse = static_cast<const float *>(params.softmax_lse),
               *delta = static_cast<const float *>(params.dsoftmax_sum),
               *dlse = static_cast<const float *>(params.dsoftmax_lse);
    float sum = 0.0f;
    for (int index = threadIdx.x / 32; index < blocks; index += kWarps) {
        const Rows rows = rows_of_block(params, index, first_bidb, bidh);
        if (rows.count <= 0) {
            continue;
        }
        // There are no branches between the loads, so that all wait together: rows past the end load the last one.
        float lse_of[kRowsOfLane], delta_of[kRowsOfLane];
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
            const int row = min(lane + i * 32, rows.count - 1);
            lse_of[i] = lse[rows.first + row];
            delta_of[i] = delta[rows.first_padded + row];
        }
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
            const int row = lane + i * 32;
            if (row < rows.count) {
                const bool is_all = lse_of[i] == logit;  // as in a row without keys: delta does not have dLSE there
                const float delta_of_row = is_all && dlse != nullptr ? -dlse[rows.first + row] : delta_of[i];
                sum -= (is_all ? 1.0f : expf(logit - lse_of[i])) * delta_of_row;
            }
        }
    }
    __shared__ float of_warps[kWarps];
    sum = warp_sum(sum);
    if (lane == 0) {
        of_warps[threadIdx.x / 32] = sum;
    }
    __syncthreads();  // the sums of all warps are there
    if (threadIdx.x < 32) {
        sum = warp_sum(of_warps[threadIdx.x]);
        if (threadIdx.x == 0) {
            store(gradient, blockIdx.x, params.sink_dtype, sum);
        }
    }
}

}  // namespace

void run_row_mod_gradient(const Flash_bwd_params &params, void *gradient, cudaStream_t stream) {
    const int64_t grid = int64_t{params.h} * (params.sink_batch_stride == 0 ? 1 : params.b);
    check_grid(grid, "batch * nheads");
    row_mod_gradient_kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(params, gradient);
    check_cuda(cudaGetLastError(), "launching row_mod_gradient_kernel");
}

}  // namespace flash
