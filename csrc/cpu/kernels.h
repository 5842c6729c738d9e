// The interface between scheduling (flash_fwd_cpu.cpp, flash_bwd_cpu.cpp, flash_bias_bwd_cpu.cpp, kvcache_cpu.cpp) and
// the kernels, which are compiled once per instruction set (isa_*.cpp): blocks of rows and of keys, and the functions
// that compute them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "../common/sequence.h"
#include "../flash.h"
#include "visible_keys.h"

// Instruction sets that this compiler can target in a single file, whatever -march is.

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASH_CPU_HAS_AVX 1
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define FLASH_CPU_HAS_AMX 1
#endif
#endif

namespace flash::cpu {

// ---- blocks of rows

// The state of a row after some of its keys: the output is o / l, the log-sum-exp is softmax_scale * m + log(l).
// Elements are of the kernel's arithmetic: double for DType::float64, else float.
struct PartialRows {
    void *o = nullptr;  // [rows][d_v], not divided by l
    void *m = nullptr;  // [rows]: the largest score; with a score modifier the largest logit, and a scale of 1
    void *l = nullptr;  // [rows]
};

// Query heads that share a key/value head form one group, whose rows are numbered
// row = query * h_h_k_ratio + head_in_group. A row block is consecutive rows of one group of one sequence.
struct RowBlock {
    int64_t bidb = 0;       // sequence
    int64_t bidh_k = 0;     // key/value head; with `heads` the first of them
    int64_t row_begin = 0;  // first row, a multiple of panel_rows
    int64_t rows = 0;       // at most max_rows

    // Split over keys: only the keys [key_begin, key_end) count. With `partial`, the state of the rows goes there and
    // nothing to params.o and softmax_lse.
    int64_t key_begin = 0;
    int64_t key_end = std::numeric_limits<int32_t>::max();
    PartialRows partial;

    int64_t heads = 1;  // key/value heads to compute, each with the same rows; `partial` has their groups in order
};

// The block of one of its heads.
inline RowBlock block_of_head(const Flash_fwd_params &params, RowBlock block, int64_t head) {
    const int64_t rows = head * params.seqlen_q * params.h_h_k_ratio, bytes = params.dtype == DType::float64 ? 8 : 4;
    const auto offset = [&](void *x, int64_t columns) {
        return x == nullptr ? nullptr : static_cast<char *>(x) + rows * columns * bytes;
    };
    block.partial = {offset(block.partial.o, params.d_v), offset(block.partial.m, 1), offset(block.partial.l, 1)};
    block.bidh_k += head;
    block.heads = 1;
    return block;
}

// ---- the kernels

// One dtype's forward, compiled for one instruction set.
struct ForwardKernel {
    int panel_rows = 0;   // queries that the innermost loops handle together; row blocks are multiples of it
    int max_rows = 0;     // rows of the largest block that the caches hold
    int decode_rows = 0;  // blocks of at most this many rows run faster with several heads
    size_t (*scratch_bytes)(const Flash_fwd_params &, int64_t max_rows) = nullptr;
    void (*compute_attn_1rowblock)(const Flash_fwd_params &, const RowBlock &, void *scratch) = nullptr;
};

// Key blocks add to a panel's dq in a fixed order, so that dq is the same in every run. `done` counts the blocks that
// have added to the panel (release); a block waits until all `blocks` before it have (acquire).
void wait_until_done(const std::atomic<int> &done, int blocks);
void add_done(std::atomic<int> &done);

// Consecutive keys of one key/value head of one sequence, against all rows of its group (see RowBlock).
struct ColBlock {
    int64_t bidb = 0;                         // sequence
    int64_t bidh_k = 0;                       // key/value head
    int n_begin = 0;                          // first key, a multiple of block_keys
    int block_keys = 0;                       // keys of every block but the last; a multiple of step_keys
    char *dq_accum = nullptr;                 // the group's sums of dq, dq_accum_bytes
    const PanelKeys *panel_keys = nullptr;    // [panels of the group]; null without key_ranges
    std::atomic<int> *blocks_done = nullptr;  // [panels of the group]; null: this is the only block, with its own sums
};

// One dtype's backward, compiled for one instruction set.
struct BackwardKernel {
    int panel_rows = 0;                                   // rows that the kernel handles together
    int step_keys = 0;                                    // keys that it handles together
    int (*max_keys)(const Flash_bwd_params &) = nullptr;  // keys of the largest block that the caches hold
    size_t (*dq_accum_bytes)(const Flash_bwd_params &, int64_t rows) = nullptr;  // of one group
    size_t (*scratch_bytes)(const Flash_bwd_params &, int block_keys) = nullptr;
    // The keys that the panel from `row` on of a group sees.
    PanelKeys (*panel_keys)(const Flash_bwd_params &, int bidb, int64_t bidh_k, int64_t row) = nullptr;
    // Stores dsoftmax_sum of the queries [begin, end) of a head of a sequence, and dq = 0 for those without a key.
    void (*compute_dot_do_o)(const Flash_bwd_params &, int bidb, int bidh, int64_t begin, int64_t end) = nullptr;
    void (*compute_dq_dk_dv_1colblock)(const Flash_bwd_params &, const ColBlock &, void *scratch) = nullptr;
};

// A tile of the gradient of attn_bias: queries and keys, and the pairs of a sequence and a head that it sums.
struct BiasTile {
    int part = 0, bias_batch = 0, bias_head = 0;  // of Flash_bias_bwd_params::dbias
    int64_t pair_begin = 0, pair_end = 0;         // among the pairs that share the bias
    int row_begin = 0, row_end = 0;               // queries: a panel, or all where bias_rows is 1
    int n_begin = 0;                              // first key, a multiple of step_keys
};

// One dtype's gradient of attn_bias, compiled for one instruction set.
struct BiasBackwardKernel {
    int panel_rows = 0;  // queries of a tile
    int step_keys = 0;   // keys of a tile
    size_t (*scratch_bytes)(const Flash_bias_bwd_params &) = nullptr;
    void (*compute_dbias_1tile)(const Flash_bias_bwd_params &, const BiasTile &, void *scratch) = nullptr;
};

// The kernels of every instruction set. Each namespace is one isa_*.cpp, which includes the same kernel headers.

namespace baseline {
ForwardKernel forward_kernel(DType dtype);
BackwardKernel backward_kernel(DType dtype);
BiasBackwardKernel bias_backward_kernel(DType dtype);
}  // namespace baseline

#ifdef FLASH_CPU_HAS_AVX
namespace avx2 {
ForwardKernel forward_kernel(DType dtype);
BackwardKernel backward_kernel(DType dtype);
BiasBackwardKernel bias_backward_kernel(DType dtype);
}  // namespace avx2

namespace avx512 {
ForwardKernel forward_kernel(DType dtype);
BackwardKernel backward_kernel(DType dtype);
BiasBackwardKernel bias_backward_kernel(DType dtype);
}  // namespace avx512
#endif

#ifdef FLASH_CPU_HAS_AMX
namespace amx {  // bfloat16 only
ForwardKernel forward_kernel(DType);
BackwardKernel backward_kernel(DType);
}  // namespace amx
#endif

}  // namespace flash::cpu
