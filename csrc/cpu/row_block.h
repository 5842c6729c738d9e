// The interface between flash_fwd_cpu.cpp (scheduling) and the forward kernels, which are compiled once per instruction
// set (isa_*.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "../flash.h"

namespace flash::cpu {

// The state of a row after some of its keys: the output is o / l, the log-sum-exp is softmax_scale * m + log(l).
// Elements are of the kernel's arithmetic: double for DType::float64, else float.
struct PartialRows {
    void *o = nullptr;  // [rows][d], not divided by l
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
    const auto behind = [&](void *x, int64_t columns) {
        return x == nullptr ? nullptr : static_cast<char *>(x) + rows * columns * bytes;
    };
    block.partial = {behind(block.partial.o, params.d), behind(block.partial.m, 1), behind(block.partial.l, 1)};
    block.bidh_k += head;
    block.heads = 1;
    return block;
}

// One dtype's forward, compiled for one instruction set.
struct ForwardKernel {
    int panel_rows = 0;  // queries that the innermost loops handle together; row blocks are multiples of it
    int max_rows = 0;    // rows of the largest block that the caches hold
    int few_rows = 0;    // blocks of at most this many rows run faster with several heads
    size_t (*scratch_bytes)(const Flash_fwd_params &, int64_t max_rows) = nullptr;
    void (*compute_attn_1rowblock)(const Flash_fwd_params &, const RowBlock &, void *scratch) = nullptr;
};

}  // namespace flash::cpu
