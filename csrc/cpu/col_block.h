// What flash_bwd_cpu.cpp (scheduling) and the backward kernels compiled per instruction set (isa_*.cpp) agree on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../flash.h"
#include "isa.h"

namespace flash::cpu {

// The order in which key blocks add to a panel's dq, so that it is the same in every run: a block waits until `turn`
// others are done with the panel.
void wait_for_turn(const std::atomic<int> &done, int turn);
void finish_turn(std::atomic<int> &done);

// A run of keys of one key/value head of one sequence, against all rows of its group (see RowBlock).
struct ColBlock {
    int64_t bidb = 0;                         // sequence
    int64_t bidh_k = 0;                       // key/value head
    int n_begin = 0;                          // first key, a multiple of block_keys
    int block_keys = 0;                       // keys of every block but the last; a multiple of step_keys
    char *dq_accum = nullptr;                 // the group's sums of dq so far, dq_accum_bytes
    std::atomic<int> *blocks_done = nullptr;  // of each of the group's panels of rows; null: this is the only block,
                                              // and keeps sums to itself
};

// One dtype's backward, compiled for one instruction set.
struct BackwardKernel {
    int panel_rows = 0;                                   // rows that the kernel handles together
    int step_keys = 0;                                    // keys that it handles together
    int (*max_keys)(const Flash_bwd_params &) = nullptr;  // largest sensible block
    size_t (*dq_accum_bytes)(const Flash_bwd_params &, int64_t rows) = nullptr;  // of one group
    size_t (*scratch_bytes)(const Flash_bwd_params &, int block_keys) = nullptr;
    // dsoftmax_sum of the queries [begin, end) of a head of a sequence; dq = 0 where they see no key.
    void (*compute_dot_do_o)(const Flash_bwd_params &, int bidb, int bidh, int64_t begin, int64_t end) = nullptr;
    void (*compute_dq_dk_dv_1colblock)(const Flash_bwd_params &, const ColBlock &, void *scratch) = nullptr;
};

BackwardKernel backward_kernel_baseline(DType dtype);
BackwardKernel backward_kernel_avx2(DType dtype);
BackwardKernel backward_kernel_avx512(DType dtype);
BackwardKernel backward_kernel_amx();  // bfloat16 only

}  // namespace flash::cpu
