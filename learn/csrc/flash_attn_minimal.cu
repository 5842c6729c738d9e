// The kernel to read first: FlashAttention's forward in plain CUDA, float32, no CuTe, no tensor cores. The algorithm is
// the loop over key tiles in flash_attn_minimal_kernel. flash_attn_tensor_cores.cu runs the same loop with tensor cores
// for the two products, sm80/ also with copies that overlap them. docs/algorithm.md derives the online softmax.
#include "flash_attn_minimal.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flash {
namespace {

// One CTA (thread block) computes kBlockM rows of the output of one head. Each step of its loop takes kBlockN keys.
// Four neighbouring threads share a row: thread t of the four owns the keys t, t + 4, t + 8, ... of a tile and the same
// columns of the output. They are lanes of one warp, so they exchange values with shuffles.
constexpr int kBlockM = 64;                             // queries per CTA
constexpr int kBlockN = 64;                             // keys per step
constexpr int kMaxHeadDim = 128;                        // columns of q, k, v and o
constexpr int kThreadsPerRow = 4;                       // threads that share one row
constexpr int kThreads = kBlockM * kThreadsPerRow;      // 256
constexpr int kMaxHeads = 65535;                        // of all batch entries: the limit of gridDim.y
constexpr int kKeys = kBlockN / kThreadsPerRow;         // scores that a thread holds: 16
constexpr int kColumns = kMaxHeadDim / kThreadsPerRow;  // output columns that a thread holds: 32

// A row of a tile takes `stride` floats of shared memory: headdim + 1 if padded. The extra float avoids bank conflicts:
// a warp reads several rows at once, and with 64 or 128 floats per row they would start in the same one of 32 banks.
// Three tiles: Q, K, V. At head dim 128 they take 97 KB: more than the default limit of 48 KB, less than the 99 KB that
// every GPU since Ampere offers.
constexpr int smem_bytes(int stride) {
    return (kBlockM + 2 * kBlockN) * stride * static_cast<int>(sizeof(float));
}

// Copies rows [first_row, first_row + 64) of a [seqlen, headdim] matrix to shared memory. All threads take part. Rows
// past the end become zeros; they are not read.
__device__ void load_tile(float *tile, const float *matrix, int first_row, int seqlen, int headdim, int stride) {
    static_assert(kBlockM == kBlockN, "load_tile copies tiles of q, k and v");
    for (int i = threadIdx.x; i < kBlockN * headdim; i += kThreads) {
        const int row = i / headdim, col = i % headdim;
        const bool inside = first_row + row < seqlen;
        tile[row * stride + col] = inside ? matrix[static_cast<size_t>(first_row + row) * headdim + col] : 0.f;
    }
}

// Maximum and sum over the four threads of a row: exchange with the neighbour, then with the other pair.
__device__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__global__ void __launch_bounds__(kThreads)
    flash_attn_minimal_kernel(const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ v,
                              float *__restrict__ o, int seqlen_q, int seqlen_k, int headdim, int stride,
                              float softmax_scale, bool causal) {
    extern __shared__ float smem[];
    float *sQ = smem;                   // (kBlockM, headdim)
    float *sK = sQ + kBlockM * stride;  // (kBlockN, headdim)
    float *sV = sK + kBlockN * stride;  // (kBlockN, headdim)

    const int row = threadIdx.x / kThreadsPerRow;  // of this thread in the tile
    const int t = threadIdx.x % kThreadsPerRow;    // number of this thread among the four of its row
    const int first_row = blockIdx.x * kBlockM;    // first query of the tile
    const size_t head = blockIdx.y;                // of all batch entries
    q += head * seqlen_q * headdim;
    k += head * seqlen_k * headdim;
    v += head * seqlen_k * headdim;
    o += head * seqlen_q * headdim;

    // This row sees the keys [0, key_end): up to the end of the sequence or, if causal, up to the diagonal. The last
    // row of the tile sees the most keys, so the loop ends at its last key. With a causal mask that halves the work.
    const int diagonal = seqlen_k - seqlen_q;
    const int last_row = min(first_row + kBlockM, seqlen_q) - 1;
    const int key_end = causal ? min(seqlen_k, first_row + row + diagonal + 1) : seqlen_k;
    const int loop_end = causal ? min(seqlen_k, last_row + diagonal + 1) : seqlen_k;

    // State of the online softmax over the keys so far. The output is acc / sum.
    float max_score = -INFINITY;  // largest score of the row
    float sum = 0.f;              // sum over the keys of exp(score - max_score)
    float acc[kColumns] = {0.f};  // sum over the keys of exp(score - max_score) * v[key], columns of this thread

    load_tile(sQ, q, first_row, seqlen_q, headdim, stride);

    for (int first_key = 0; first_key < loop_end; first_key += kBlockN) {
        __syncthreads();  // all threads are done with the previous sK and sV
        load_tile(sK, k, first_key, seqlen_k, headdim, stride);
        load_tile(sV, v, first_key, seqlen_k, headdim, stride);
        __syncthreads();  // sQ, sK and sV are complete

        // 1. Scores S = Q Kᵀ: the row and the 16 keys of this thread.
        float s[kKeys] = {0.f};
        for (int d = 0; d < headdim; ++d) {
            const float q_d = sQ[row * stride + d];
#pragma unroll
            for (int i = 0; i < kKeys; ++i) s[i] += q_d * sK[(i * kThreadsPerRow + t) * stride + d];
        }

        // 2. Scale and mask: a key that the query does not see gets score -inf, so its exponential is 0.
        float tile_max = -INFINITY;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const int key = first_key + i * kThreadsPerRow + t;
            s[i] = key < key_end ? s[i] * softmax_scale : -INFINITY;
            tile_max = fmaxf(tile_max, s[i]);
        }

        // 3. Online softmax. If the tile raises the maximum, the sums so far are too large by the factor exp(new - old)
        // and are scaled down. The maximum is -inf while a row has seen no key; -inf - -inf would be NaN, so shift is 0
        // then, and the exponentials are 0.
        const float new_max = fmaxf(max_score, row_max(tile_max));
        const float shift = new_max == -INFINITY ? 0.f : new_max;
        const float rescale = expf(max_score - shift);
        float tile_sum = 0.f;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            s[i] = expf(s[i] - shift);  // s holds P from here on
            tile_sum += s[i];
        }
        max_score = new_max;
        sum = sum * rescale + row_sum(tile_sum);

        // 4. Output O = rescale * O + P V. P stays in registers: s[i] of thread `owner` holds key 4 * i + owner, and a
        // shuffle sends it to the four threads of the row.
#pragma unroll
        for (int c = 0; c < kColumns; ++c) acc[c] *= rescale;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            for (int owner = 0; owner < kThreadsPerRow; ++owner) {
                const float p = __shfl_sync(0xffffffff, s[i], owner, kThreadsPerRow);
                const float *v_row = sV + (i * kThreadsPerRow + owner) * stride;
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const int col = c * kThreadsPerRow + t;
                    if (col < headdim) acc[c] += p * v_row[col];
                }
            }
        }
    }

    // A row without a key has sum 0. Its output is 0, even if acc is NaN because of an infinite v.
    if (first_row + row >= seqlen_q) return;
    const bool has_key = sum != 0.f;
    const float inv_sum = 1.f / sum;
    float *o_row = o + static_cast<size_t>(first_row + row) * headdim;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const int col = c * kThreadsPerRow + t;
        if (col < headdim) o_row[col] = has_key ? acc[c] * inv_sum : 0.f;
    }
}

void check(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string("flash_attn_minimal: ") + what + ": " + cudaGetErrorString(status));
    }
}

}  // namespace

void run_flash_attn_minimal(const float *q, const float *k, const float *v, float *o, int heads, int seqlen_q,
                            int seqlen_k, int headdim, float softmax_scale, bool causal, bool padded,
                            cudaStream_t stream) {
    if (headdim < 1 || headdim > kMaxHeadDim) {
        throw std::invalid_argument("flash_attn_minimal: headdim is " + std::to_string(headdim) +
                                    ", must be between 1 and " + std::to_string(kMaxHeadDim));
    }
    if (seqlen_q < 0 || seqlen_k < 0 || heads < 0 || heads > kMaxHeads) {
        throw std::invalid_argument("flash_attn_minimal: " + std::to_string(heads) + " heads of " +
                                    std::to_string(seqlen_q) + " queries and " + std::to_string(seqlen_k) +
                                    " keys, must be 0 to " + std::to_string(kMaxHeads) + " heads, none negative");
    }
    if (seqlen_q == 0 || heads == 0) return;  // CUDA rejects an empty grid
    const int stride = padded ? headdim + 1 : headdim;
    check(cudaFuncSetAttribute(flash_attn_minimal_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               smem_bytes(stride)),
          "shared memory");
    const dim3 grid((seqlen_q - 1) / kBlockM + 1, heads);
    flash_attn_minimal_kernel<<<grid, kThreads, smem_bytes(stride), stream>>>(q, k, v, o, seqlen_q, seqlen_k, headdim,
                                                                              stride, softmax_scale, causal);
    check(cudaGetLastError(), "launch");
}

}  // namespace flash
