// The interface between flash_bwd_cpu.cpp (scheduling) and the backward kernels, which are compiled once per
// instruction set (isa_*.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../flash.h"

namespace flash::cpu {

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
    std::atomic<int> *blocks_done = nullptr;  // [panels of the group]; null: this is the only block, with its own sums
};

// One dtype's backward, compiled for one instruction set.
struct BackwardKernel {
    int panel_rows = 0;                                   // rows that the kernel handles together
    int step_keys = 0;                                    // keys that it handles together
    int (*max_keys)(const Flash_bwd_params &) = nullptr;  // keys of the largest block that the caches hold
    size_t (*dq_accum_bytes)(const Flash_bwd_params &, int64_t rows) = nullptr;  // of one group
    size_t (*scratch_bytes)(const Flash_bwd_params &, int block_keys) = nullptr;
    // Stores dsoftmax_sum of the queries [begin, end) of a head of a sequence, and dq = 0 for those without a key.
    void (*compute_dot_do_o)(const Flash_bwd_params &, int bidb, int bidh, int64_t begin, int64_t end) = nullptr;
    void (*compute_dq_dk_dv_1colblock)(const Flash_bwd_params &, const ColBlock &, void *scratch) = nullptr;
};

}  // namespace flash::cpu
