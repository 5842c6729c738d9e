// The contract between host code and kernels: plain structs that every kernel (cpu/, sm80/, sm90/)
// reads and the host (set_params.cpp) fills. No torch, no CUDA, no Python here.
#pragma once

#include <cstdint>

namespace flash {

enum class DType : int8_t { float16, bfloat16, float32, float64 };

constexpr int kMaxHeadDim = 512;
constexpr int kMaxHeadDimOfCache = 576;  // of q and k in a call with a KV cache
constexpr int kMaxHeadDimCuda = 256;     // of the CUDA kernels; those of csrc/sm80 and csrc/kvcache need d_v == d
constexpr double kLog2e = 1.4426950408889634074;

// A [batch, seqlen, heads, headdim] tensor whose last dimension is contiguous. Strides count elements.
struct TensorRef {
    void *ptr = nullptr;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

// A call of flash_attn_with_kvcache: k and v of Flash_fwd_params are the caches, [batch_cache, capacity, h_k, d] or
// pages. Lengths, batch indices and left paddings lie in GPU memory; common/sequence.h clamps them where it loads them.
// Sequence b has the keys [leftpad, seqlens + seqlen_new) of its cache row, the new ones included.
struct KvCache {
    int capacity = 0;                // keys of a cache row; paged: of max_pages pages; 0: the call has no cache
    int batch_cache = 0;             // cache rows; paged: b
    const int *seqlens = nullptr;    // [b]: keys in the cache before the call, left padding included; null: seqlen
    int seqlen = 0;                  // the same for every sequence
    const int *leftpad = nullptr;    // [b]: the first valid key; null: 0
    const int *batch_idx = nullptr;  // [b]: the cache row of each sequence; null: its own number
    TensorRef k_new;                 // [b, seqlen_new, h_k, d], written to the cache; null pointer: nothing is appended
    TensorRef v_new;                 // like k_new, with d_v columns
    int seqlen_new = 0;
    const void *rotary_cos = nullptr;   // [rotary_seqlen, rotary_dim / 2], contiguous, dtype of q; null: no rotation
    const void *rotary_sin = nullptr;   // like rotary_cos
    int rotary_seqlen = 0;              // positions
    int rotary_dim = 0;                 // columns that are rotated, a multiple of 16
    bool is_rotary_interleaved = true;  // columns 2i and 2i + 1 are a pair; else i and i + rotary_dim / 2
    bool is_rotary_by_query = false;    // causal or windowed: query i has the position of new key i; else of key 0
    TensorRef q_input;         // with rotary: q as given; Flash_fwd_params::q is then scratch for the rotated q
    int num_splits = 0;        // most splits of a sequence; 0: chosen by the kernel
    int split_keys = 0;        // keys of every split but the last; 0: chosen by the kernel
    float *scratch = nullptr;  // CUDA: partial results of splits (kvcache/splitkv_results.h)

    constexpr bool is_used() const { return capacity > 0; }
};

// The keys that each query sees by key_ranges: the ranges [begin, end), in any order, as far as the mask and the
// lengths let it see them. Values may be anything: common/key_ranges.cu and cpu/visible_keys.h clamp them.
struct KeyRanges {
    const int *ptr = nullptr;  // [b, h, seqlen_q, count, 2], varlen [h, total_q, count, 2]; null: the call has none
    int64_t batch_stride = 0;  // elements; 0: all sequences have the same, and varlen
    int64_t head_stride = 0;   // elements; 0: all heads have the same
    int64_t row_stride = 0;    // elements; `count` pairs lie one after the other
    int count = 0;             // ranges of a query: 1 or 2

    // Scratch of the CUDA kernels (common/key_ranges.h), for each batch and head whose ranges differ. Each sequence
    // begins at a multiple of kRowsRounded padded rows, as in Flash_bwd_params. A column has kKeysPerColumn keys. No
    // two sequences share a column.
    int *rows = nullptr;               // [padded rows, 4]
    int *blocks = nullptr;             // [padded rows / kRowsPerBlock, 8]
    int *columns = nullptr;            // [columns, 2]; backward: zeros before the kernel that writes them; else null
    int64_t rows_batch_stride = 0;     // padded rows; 0 if batch_stride is 0
    int64_t rows_head_stride = 0;      // padded rows; 0 if head_stride is 0
    int64_t columns_batch_stride = 0;  // columns; 0 if batch_stride is 0
    int64_t columns_head_stride = 0;   // columns; 0 if head_stride is 0
    bool has_wide_columns = false;     // deterministic backward: all rows of a group of kRowsRounded visit every column
                                       // between the first and the last key that one of them sees
    int64_t columns_bytes = 0;         // of all columns
    static constexpr int kRowsPerBlock = 32;
    static constexpr int kKeysPerColumn = 64;

    constexpr bool is_used() const { return ptr != nullptr; }
};

// What is added to the score of query i and key j after the scale and the softcap; of type boolean: whether query i
// sees key j. Equal lengths only.
struct AttnBias {
    enum class Type : int8_t { dtype_of_q, float32, boolean };
    const void *ptr = nullptr;  // [b, h, seqlen_q, seqlen_k]; null: the call has none
    int64_t batch_stride = 0;   // elements; 0: all sequences have the same
    int64_t head_stride = 0;    // elements; 0: all heads have the same
    int64_t row_stride = 0;     // elements; 0: all queries have the same
    int64_t key_stride = 0;     // elements; 0: all keys have the same
    Type type = Type::dtype_of_q;

    constexpr bool is_used() const { return ptr != nullptr; }
};

// A batch holds b sequences. Equal lengths: q is [b, seqlen_q, h, d]. Variable lengths (varlen): the sequences are
// concatenated in tensors [total, heads, headdim] with batch stride 0, and cu_seqlens holds the first row of each.
// common/sequence.h returns the rows of a sequence in both cases.
struct Flash_fwd_params {
    TensorRef q;                   // [b, seqlen_q, h, d]; varlen [total_q, h, d]
    TensorRef k;                   // [b, seqlen_k, h_k, d]; varlen [total_k, h_k, d]; paged [pages, page_size, h_k, d]
    TensorRef v;                   // like k, with d_v columns
    TensorRef o;                   // like q, with d_v columns
    void *softmax_lse = nullptr;   // [b, h, seqlen_q], varlen [h, total_q]; contiguous, natural log; float32 (float64
                                   // for DType::float64)
    int64_t lse_batch_stride = 0;  // elements; varlen 0
    int64_t lse_head_stride = 0;   // elements: seqlen_q, varlen total_q

    DType dtype = DType::float16;       // of q, k, v and o
    DType sink_dtype = DType::float32;  // of sink
    int b = 0;                          // batch: sequences
    int h = 0;                          // query heads, a multiple of h_k
    int h_k = 0;                        // key/value heads
    int h_h_k_ratio = 1;                // h / h_k: query heads that share one key/value head
    int seqlen_q = 0;                   // queries per sequence; varlen: of the longest
    int seqlen_k = 0;                   // keys per sequence; varlen: of the longest
    int d = 0;                          // head dim of q and k, at most kMaxHeadDim, with a cache kMaxHeadDimOfCache
    int d_v = 0;                        // head dim of v and o, at most kMaxHeadDim

    const int *cu_seqlens_q = nullptr;     // varlen: [b + 1] rows of q before each sequence; null: equal lengths
    const int *cu_seqlens_k = nullptr;     // varlen: [b + 1] the same for k and v; paged: only its differences count
    int64_t total_q = 0;                   // varlen: rows of q
    int64_t total_k = 0;                   // varlen: rows of k and v; paged: keys in max_pages pages
    const int *block_table = nullptr;      // [b, max_pages]: the pages of each sequence; null: not paged
    int64_t block_table_batch_stride = 0;  // elements
    int max_pages = 0;                     // columns of block_table
    int num_pages = 0;                     // pages in k and v
    int page_size = 0;                     // keys per page

    KvCache cache;

    double softmax_scale = 1.0;  // scores = softmax_scale * q.k
    double softcap = 0.0;        // 0 = off, else scores become softcap * tanh(score / softcap)

    // The factors of the CUDA kernels, computed once on the host (set_params.cpp) from the doubles above. With a
    // softcap the kernels hold tanh(cap_scale * q.k) as the score, and the softmax multiplies it by softcap.
    float qk_scale = 1.0f;            // softmax_scale: factor of dq and dk
    float cap_scale = 0.0f;           // softmax_scale / softcap; 0 without a softcap
    float scale_softmax = 1.0f;       // what the softmax multiplies a score by: softcap if > 0, else softmax_scale
    float scale_softmax_log2 = 1.0f;  // scale_softmax * log2(e), for exp2

    const float *alibi_slopes = nullptr;    // [b, h]: scores get -slope * |i + seqlen_k - seqlen_q - j|; null: off
    int64_t alibi_slopes_batch_stride = 0;  // elements; 0 when all sequences have the same slopes

    const void *sink = nullptr;     // [b, h]: a logit that joins each row's softmax without a value
                                    // (common/row_mod.h); null: off
    int64_t sink_batch_stride = 0;  // elements; 0 when all sequences have the same sinks

    double p_dropout = 0.0;              // probability of dropping an attention probability; 0 = off
    float rp_dropout = 1.0f;             // 1 / (1 - p_dropout): factor of the probabilities that are kept
    unsigned dropout_threshold = 0;      // round(p_dropout * 2^16): a pair is dropped if its 16 random bits are below
    const int64_t *rng_state = nullptr;  // [2] seed and offset of common/philox.h, on the device of q; null: no dropout

    // Query i sees key j when  i + seqlen_k - seqlen_q - window_size_left <= j <= i + seqlen_k - seqlen_q +
    // window_size_right, with the lengths of its own sequence; -1 = unbounded. Causal is window_size_right = 0
    // (bottom-right aligned).
    bool is_causal = false;
    int window_size_left = -1;   // keys
    int window_size_right = -1;  // keys

    KeyRanges key_ranges;
    AttnBias attn_bias;

    void *max_logits = nullptr;           // [b, h], varlen [h]; -inf before the kernel: gets the largest score of each
                                          // head that a query sees; dtype of softmax_lse; null: not wanted
    int64_t max_logits_batch_stride = 0;  // elements; varlen 0

    int reserved_sms = 0;  // SMs that the persistent grid of the sm90 forward leaves to kernels of other streams

    constexpr bool has_alibi() const { return alibi_slopes != nullptr; }
    // True if scores are modified between Q K^T and the softmax.
    constexpr bool has_score_mod() const { return softcap > 0.0 || alibi_slopes != nullptr; }
    // True if the keys that a query sees depend on the query.
    constexpr bool is_local() const { return window_size_left >= 0 || window_size_right >= 0; }
};

// The backward reads the tensors of the forward (q, k, v, o, softmax_lse) and overwrites the gradients.
struct Flash_bwd_params : Flash_fwd_params {
    TensorRef dout;                      // like o: gradient of o
    const void *dsoftmax_lse = nullptr;  // like softmax_lse: gradient of softmax_lse; null: zeros
    TensorRef dq;                        // like q; null pointer: not wanted
    TensorRef dk;                        // like k, with h / heads_per_dkv heads; null pointer: not wanted
    TensorRef dv;                        // like v, with h / heads_per_dkv heads; null pointer: not wanted
    // Row statistics are padded: each sequence begins at a multiple of kRowsRounded rows. [b, h, seqlen_q_rounded];
    // varlen [h, total_q_rounded], where sequence i begins at (cu_seqlens_q[i] / kRowsRounded + i) * kRowsRounded.
    void *dsoftmax_sum = nullptr;     // delta = rowsum(dO * O) - dLSE, padded, dtype of softmax_lse
    int64_t padded_batch_stride = 0;  // rows; varlen 0
    int64_t padded_head_stride = 0;   // rows: seqlen_q_rounded, varlen total_q_rounded
    int heads_per_dkv = 1;            // query heads summed into one head of dk and dv; h_h_k_ratio on the CPU
    bool deterministic = false;       // dq is bitwise repeatable too; dk and dv always are

    // Scratch of the CUDA kernels.
    float *lse_padded = nullptr;     // padded rows; +inf for rows without a key, and past the end. Some kernels of
                                     // sm90: times log2(e), except where large_rows is 1
    int *large_rows = nullptr;       // padded rows / kRowsPerFlag (sm90: / rows of a step): 1 if one of the rows has a
                                     // large log-sum-exp
    float *dq_accum = nullptr;       // padded rows x d_rounded; each row block in the order of the mma's registers
    int *dq_semaphore = nullptr;     // padded rows / kRowsPerSemaphore zeros: key blocks added so far; null: any order
    int *dq_tile_counter = nullptr;  // [1] zero: key blocks that CTAs have taken so far; null: in a fixed order
    int interleaved_heads = 1;       // heads of dk and dv in a group; sm80, with dq_semaphore: interleaved
    int d_rounded = 0;               // head dim of the kernel
    bool has_bulk_reduce = false;    // compute capability 9.0 and later: cp.reduce.async.bulk
    int max_smem = 0;                // bytes of shared memory that a CTA may have
    int *work_counts = nullptr;      // sm90: 2 * heads of dk and dv (* b) + 1 zeros: work tiles done, and taken

    static constexpr int kRowsRounded = 128;
    static constexpr int kRowsPerFlag = 64;
    static constexpr int kRowsPerSemaphore = 4;  // at most one semaphore per warp of a row block
};

// The gradient of attn_bias reads what the backward has read, and the row statistics that it has written
// (dsoftmax_sum). The pairs of a sequence and a head that share a bias are divided into `parts` of consecutive pairs
// (pair = bidb * h + bidh, among those that share it), and the sums of each part are stored: the caller adds the parts.
// Every sum has a fixed order.
struct Flash_bias_bwd_params : Flash_bwd_params {
    void *dbias = nullptr;    // [parts, bias_batch, bias_heads, bias_rows, seqlen_k], contiguous
    int parts = 1;            // at most the number of pairs that share a bias
    int bias_batch = 1;       // 1 or b
    int bias_heads = 1;       // 1 or h
    int bias_rows = 1;        // 1 or seqlen_q: 1 sums over the queries
    bool is_float32 = false;  // dbias is float32; else it has the dtype of q. float64 calls: float64
};

}  // namespace flash
