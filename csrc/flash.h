// The contract between host code and kernels: plain structs that every kernel (cpu/, sm80/, sm90/)
// reads and the host (set_params.cpp) fills. No torch, no CUDA, no Python here.
#pragma once

#include <cstdint>

namespace flash {

enum class DType : int8_t { float16, bfloat16, float32, float64 };

// A [batch, seqlen, heads, headdim] tensor whose last dimension is contiguous. Strides count elements.
struct TensorRef {
    void *ptr = nullptr;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

struct Flash_fwd_params {
    TensorRef q;                  // [b, seqlen_q, h, d]
    TensorRef k;                  // [b, seqlen_k, h_k, d]
    TensorRef v;                  // [b, seqlen_k, h_k, d]
    TensorRef o;                  // [b, seqlen_q, h, d]
    void *softmax_lse = nullptr;  // [b, h, seqlen_q] contiguous, natural log; float32 (float64 for DType::float64)

    DType dtype = DType::float16;  // of q, k, v and o
    int b = 0;                     // batch
    int h = 0;                     // query heads, a multiple of h_k
    int h_k = 0;                   // key/value heads
    int h_h_k_ratio = 1;           // h / h_k: query heads that share one key/value head
    int seqlen_q = 0;              // queries per sequence
    int seqlen_k = 0;              // keys per sequence
    int d = 0;                     // head dim, at most 256

    double softmax_scale = 1.0;       // scores = softmax_scale * q.k
    float scale_softmax_log2 = 1.0f;  // softmax_scale * log2(e), for exp2
    float softcap = 0.0f;             // 0 = off, else scores become softcap * tanh(score / softcap)

    // Query i sees key j when  i + seqlen_k - seqlen_q - window_size_left <= j <= i + seqlen_k - seqlen_q +
    // window_size_right; -1 = unbounded. Causal is window_size_right = 0 (bottom-right aligned).
    bool is_causal = false;
    int window_size_left = -1;   // keys
    int window_size_right = -1;  // keys

    int num_sm = 0;  // multiprocessors of the GPU, 0 on the CPU
};

// The backward reads what the forward read and wrote (q, k, v, o, softmax_lse) and writes the gradients whole.
struct Flash_bwd_params : Flash_fwd_params {
    TensorRef dout;                      // [b, seqlen_q, h, d], gradient arriving at o
    const void *dsoftmax_lse = nullptr;  // [b, h, seqlen_q] contiguous, dtype of softmax_lse; null: zeros
    TensorRef dq;                        // [b, seqlen_q, h, d]; null pointer: not wanted
    TensorRef dk;                        // [b, seqlen_k, h / heads_per_dkv, d]; null pointer: not wanted
    TensorRef dv;                        // [b, seqlen_k, h / heads_per_dkv, d]; null pointer: not wanted
    void *dsoftmax_sum = nullptr;  // delta = rowsum(dO * O) - dLSE, [b, h, seqlen_q_rounded], dtype of softmax_lse
    int seqlen_q_rounded = 0;      // seqlen_q up to a multiple of kRowsRounded
    int heads_per_dkv = 1;         // query heads summed into one head of dk and dv; h_h_k_ratio on the CPU
    bool deterministic = false;    // dq bitwise repeatable too; dk and dv always are

    // Scratch of the CUDA kernels.
    float *lse_padded = nullptr;  // [b, h, seqlen_q_rounded]; +inf for rows without a key, and past the end
    int *large_rows = nullptr;    // [b, h, seqlen_q_rounded / 64]: whether one of 64 rows has a large log-sum-exp
    float *dq_accum = nullptr;    // [b, h, seqlen_q_rounded, d_rounded], row blocks in the mma's own order
    int *dq_turn = nullptr;  // [b, h, seqlen_q_rounded / kRowsPerTurn] zeros: key blocks added so far; null: any order
    int *dq_ticket = nullptr;      // [1] zero: thread blocks started so far, where they have to add in order
    int d_rounded = 0;             // head dim of the kernel
    bool has_bulk_reduce = false;  // compute capability 9.0 and later: reductions by the copy engine
    int max_smem = 0;              // bytes of shared memory that a thread block may have

    static constexpr int kRowsRounded = 128;
    static constexpr int kRowsPerTurn = 4;  // at most this many turns: one for each warp of each row block
};

}  // namespace flash
