// Divides the sequences of a call into tasks, and runs the tasks on all threads. flash_fwd_cpu.cpp and
// flash_bwd_cpu.cpp share it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"

namespace flash::cpu {

// ---- scratch memory of one thread, which Scratch (rows.h) divides into arrays

constexpr size_t kScratchAlignment = 64;

struct FreeScratch {
    void operator()(void *p) const { ::operator delete(p, std::align_val_t{kScratchAlignment}); }
};
using ScratchMemory = std::unique_ptr<void, FreeScratch>;

inline ScratchMemory allocate_scratch(size_t bytes) {
    return ScratchMemory(::operator new(bytes, std::align_val_t{kScratchAlignment}));
}

// ---- tasks

// The work of one head for the queries [begin, end): pairs of a query and a key that it sees. Where heads see different
// keys, the queries take turns to stand for the heads.
inline int64_t visible_pairs(const Flash_fwd_params &params, int bidb, int64_t begin, int64_t end) {
    const Sequence seq = sequence(params, bidb);
    int64_t pairs = 0;
    for (int64_t query = begin; query < end; ++query)
        pairs += keys_of_row(params, seq, bidb, [&] { return query % params.h; }, query).size();
    return pairs;
}

// Number of tasks for one head of each sequence, in proportion to its work; about four per thread in all. No result
// depends on it.
class TaskCount {
public:
    TaskCount(const Flash_fwd_params &params, int64_t threads) : wanted_(threads == 1 ? 0 : 4 * threads) {
        for (int bidb = 0; bidb < params.b; ++bidb) {
            pairs_.push_back(visible_pairs(params, bidb, 0, sequence(params, bidb).seqlen_q));
            all_pairs_ += pairs_.back() * params.h_k;
        }
    }
    int64_t of_sequence(int bidb) const {
        return all_pairs_ == 0 ? 1 : std::max<int64_t>(1, (wanted_ * pairs_[bidb] + all_pairs_ - 1) / all_pairs_);
    }

private:
    const int64_t wanted_;
    int64_t all_pairs_ = 0;
    std::vector<int64_t> pairs_;  // [sequence]: of one key/value head
};

// Rows of each block if `rows` rows are cut into about `wanted` blocks. Their size changes no result: every row visits
// the keys in the same steps.
inline int64_t rows_of_block(const ForwardKernel &kernel, int64_t rows, int64_t wanted) {
    const int64_t block_rows = std::min<int64_t>(kernel.max_rows, (rows + wanted - 1) / wanted);
    return (block_rows + kernel.panel_rows - 1) / kernel.panel_rows * kernel.panel_rows;
}

// Key/value heads that one call of the kernel computes together. units: row blocks of all heads. No result depends on
// it.
inline int64_t heads_of_call(const ForwardKernel &kernel, int64_t block_rows, int64_t heads, int64_t units,
                             int64_t threads) {
    if (block_rows > kernel.decode_rows) return 1;
    return threads == 1 ? heads : std::clamp<int64_t>(units / (4 * threads), 1, heads);
}

// Calls compute(task, key/value head, scratch) for every task and head, in the order of the tasks, all heads of a task
// before the next one. Threads take the calls from one counter. Each thread has its own scratch memory.
template <typename Task, typename Compute>
void run_tasks(const std::vector<Task> &tasks, int64_t heads, int64_t threads, size_t scratch_bytes,
               const Compute &compute) {
    const int64_t count = int64_t(tasks.size()) * heads;
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads, count), 1, [&](int64_t begin, int64_t end) {
        (void)begin, (void)end;
        const ScratchMemory scratch = allocate_scratch(scratch_bytes);
        for (int64_t i = next++; i < count; i = next++) compute(tasks[size_t(i / heads)], i % heads, scratch.get());
    });
}

}  // namespace flash::cpu
