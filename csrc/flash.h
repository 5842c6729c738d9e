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

// A batch has b sequences. Of equal length, they are the first dimension of the tensors. Of variable length (varlen),
// they lie one after the other in tensors [total, heads, headdim], whose batch strides are 0, and cu_seqlens says where
// each begins. common/sequence.h finds a sequence either way.
struct Flash_fwd_params {
    TensorRef q;                   // [b, seqlen_q, h, d]; varlen [total_q, h, d]
    TensorRef k;                   // [b, seqlen_k, h_k, d]; varlen [total_k, h_k, d]; paged [pages, page_size, h_k, d]
    TensorRef v;                   // like k
    TensorRef o;                   // like q
    void *softmax_lse = nullptr;   // [b, h, seqlen_q], varlen [h, total_q]; contiguous, natural log; float32 (float64
                                   // for DType::float64)
    int64_t lse_batch_stride = 0;  // elements; varlen 0
    int64_t lse_head_stride = 0;   // elements: seqlen_q, varlen total_q

    DType dtype = DType::float16;  // of q, k, v and o
    int b = 0;                     // batch: sequences
    int h = 0;                     // query heads, a multiple of h_k
    int h_k = 0;                   // key/value heads
    int h_h_k_ratio = 1;           // h / h_k: query heads that share one key/value head
    int seqlen_q = 0;              // queries per sequence; varlen: of the longest
    int seqlen_k = 0;              // keys per sequence; varlen: of the longest
    int d = 0;                     // head dim, at most 256

    const int *cu_seqlens_q = nullptr;     // varlen: [b + 1] rows of q before each sequence; null: equal lengths
    const int *cu_seqlens_k = nullptr;     // varlen: [b + 1] likewise for k and v; paged: its differences are lengths
    int64_t total_q = 0;                   // varlen: rows of q
    int64_t total_k = 0;                   // varlen: rows of k and v; 0 when paged
    const int *block_table = nullptr;      // [b, pages of the longest]: the pages of each sequence; null: not paged
    int64_t block_table_batch_stride = 0;  // elements
    int page_size = 0;                     // keys of a page

    double softmax_scale = 1.0;       // scores = softmax_scale * q.k
    float scale_softmax_log2 = 1.0f;  // softmax_scale * log2(e), for exp2
    double softcap = 0.0;             // 0 = off, else scores become softcap * tanh(score / softcap)

    const float *alibi_slopes = nullptr;    // [b, h]: scores get -slope * |i + seqlen_k - seqlen_q - j|; null: off
    int64_t alibi_slopes_batch_stride = 0;  // elements; 0 when all sequences have the same slopes

    double p_dropout = 0.0;              // a probability is dropped, 0 = off; others are divided by 1 - p_dropout
    unsigned dropout_threshold = 0;      // round(p_dropout * 2^16): dropped are those whose 16 random bits are below
    const int64_t *rng_state = nullptr;  // [2] seed and offset of common/philox.h, where the tensors are

    // Query i sees key j when  i + seqlen_k - seqlen_q - window_size_left <= j <= i + seqlen_k - seqlen_q +
    // window_size_right, with the lengths of its own sequence; -1 = unbounded. Causal is window_size_right = 0
    // (bottom-right aligned).
    bool is_causal = false;
    int window_size_left = -1;   // keys
    int window_size_right = -1;  // keys

    // Whether the keys that a query sees depend on the query.
    bool is_local() const { return window_size_left >= 0 || window_size_right >= 0; }
};

// The backward reads what the forward read and wrote (q, k, v, o, softmax_lse) and writes the gradients whole.
struct Flash_bwd_params : Flash_fwd_params {
    TensorRef dout;                      // like q, gradient arriving at o
    const void *dsoftmax_lse = nullptr;  // like softmax_lse; null: zeros
    TensorRef dq;                        // like q; null pointer: not wanted
    TensorRef dk;                        // like k, of h / heads_per_dkv heads; null pointer: not wanted
    TensorRef dv;                        // like k, of h / heads_per_dkv heads; null pointer: not wanted
    // Per-row statistics are padded: a sequence begins at a multiple of kRowsRounded rows. [b, h, seqlen_q_rounded];
    // varlen [h, total_q_rounded], where sequence i begins at (cu_seqlens_q[i] / kRowsRounded + i) * kRowsRounded.
    void *dsoftmax_sum = nullptr;     // delta = rowsum(dO * O) - dLSE, padded, dtype of softmax_lse
    int64_t padded_batch_stride = 0;  // rows; varlen 0
    int64_t padded_head_stride = 0;   // rows: seqlen_q_rounded, varlen total_q_rounded
    int heads_per_dkv = 1;            // query heads summed into one head of dk and dv; h_h_k_ratio on the CPU
    bool deterministic = false;       // dq bitwise repeatable too; dk and dv always are

    // Scratch of the CUDA kernels.
    float *lse_padded = nullptr;   // padded rows; +inf for rows without a key, and past the end
    int *large_rows = nullptr;     // padded rows / kRowsPerFlag: whether one of them has a large log-sum-exp
    float *dq_accum = nullptr;     // padded rows, of d_rounded; row blocks in the mma's own order
    int *dq_turn = nullptr;        // padded rows / kRowsPerTurn zeros: key blocks added so far; null: any order
    int *dq_ticket = nullptr;      // [1] zero: thread blocks started so far, where they have to add in order
    int d_rounded = 0;             // head dim of the kernel
    bool has_bulk_reduce = false;  // compute capability 9.0 and later: reductions by the copy engine
    int max_smem = 0;              // bytes of shared memory that a thread block may have

    static constexpr int kRowsRounded = 128;
    static constexpr int kRowsPerFlag = 64;
    static constexpr int kRowsPerTurn = 4;  // at most this many turns: one for each warp of each row block
};

}  // namespace flash
