// run_mha_bwd_cpu: selects the kernel for the dtype and the CPU, and runs it over blocks of keys on all threads.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "common/trace.h"
#include "dispatch/run_flash.h"
#include "schedule.h"
#include "select_isa.h"

namespace flash {
namespace cpu {
namespace {

// Stores dsoftmax_sum of every query, and dq = 0 for queries without a key.
void compute_dot_do_o(const Flash_bwd_params &params, const BackwardKernel &kernel) {
    constexpr int64_t kGrain = 1 << 16;  // numbers of dout
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t queries = is_varlen ? params.total_q : int64_t(params.b) * params.seqlen_q;
    // Index of a row: sequence by sequence, in each sequence head by head.
    at::parallel_for(0, queries * params.h, std::max<int64_t>(1, kGrain / params.d_v), [&](int64_t begin, int64_t end) {
        int64_t first = 0;  // of the sequence
        for (int bidb = 0; bidb < params.b && first < end; ++bidb) {
            const int64_t seqlen_q = sequence(params, bidb).seqlen_q, last = first + seqlen_q * params.h;
            for (int64_t i = std::max(begin, first); i < std::min(end, last);) {
                const int64_t bidh = (i - first) / seqlen_q, query = (i - first) % seqlen_q;
                const int64_t count = std::min(seqlen_q - query, end - i);
                kernel.compute_dot_do_o(params, bidb, int(bidh), query, query + count);
                i += count;
            }
            first = last;
        }
    });
}

// Sets the rows of dsoftmax_sum that pad each sequence to 0.
void clear_padding(const Flash_bwd_params &params) {
    constexpr int64_t kRows = Flash_bwd_params::kRowsRounded;
    const size_t row_bytes = params.dtype == DType::float64 ? 8 : 4;
    for (int bidb = 0; bidb < params.b; ++bidb) {
        const Sequence seq = sequence(params, bidb);
        const int64_t begin = bidb * params.padded_batch_stride + padded_begin(params, bidb);
        const int64_t rows = params.cu_seqlens_q == nullptr
                                 ? (seq.seqlen_q + kRows - 1) / kRows * kRows
                                 : padded_begin(params, bidb + 1) - padded_begin(params, bidb);
        for (int64_t bidh = 0; bidh < params.h; ++bidh) {
            const int64_t unused = begin + bidh * params.padded_head_stride + seq.seqlen_q;
            std::memset(static_cast<char *>(params.dsoftmax_sum) + size_t(unused) * row_bytes, 0,
                        size_t(rows - seq.seqlen_q) * row_bytes);
        }
    }
}

struct Task {
    ColBlock block;      // of every key/value head
    int64_t pairs_left;  // visible pairs of a query and a key in this block and in those after it in the sequence
};

// With key_ranges: what each panel of each group sees. Group (bidb, bidh_k) has number bidb * h_k + bidh_k.
class PanelTable {
public:
    PanelTable(const Flash_bwd_params &params, const BackwardKernel &kernel) : h_k_(params.h_k) {
        if (!params.key_ranges.is_used()) return;
        of_group_.resize(size_t(params.b) * size_t(params.h_k));
        at::parallel_for(0, int64_t(of_group_.size()), 1, [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) {
                const int bidb = int(group / params.h_k);
                const int64_t rows = int64_t(sequence(params, bidb).seqlen_q) * params.h_h_k_ratio;
                for (int64_t row = 0; row < rows; row += kernel.panel_rows)
                    of_group_[size_t(group)].push_back(kernel.panel_keys(params, bidb, group % params.h_k, row));
            }
        });
    }

    const PanelKeys *of_group(int64_t bidb, int64_t bidh_k) const {
        return of_group_.empty() ? nullptr : of_group_[size_t(bidb * h_k_ + bidh_k)].data();
    }

    // Calls add(block, pairs) with about the visible pairs of a query and a key in each block of block_keys keys of the
    // sequence, in several parts that together count all heads.
    template <typename Add>
    void count_pairs(int64_t bidb, int64_t panel_rows, int64_t block_keys, const Add &add) const {
        for (int64_t head = 0; head < h_k_; ++head) {
            for (const PanelKeys &keys : of_group_[size_t(bidb * h_k_ + head)]) {
                for (const PanelKeys::Hull &hull : {keys.first, keys.second}) {
                    for (int64_t key = hull.lo; key < hull.hi;) {
                        const int64_t end = std::min<int64_t>((key / block_keys + 1) * block_keys, hull.hi);
                        add(key / block_keys, (end - key) * panel_rows);
                        key = end;
                    }
                }
            }
        }
    }

private:
    const int64_t h_k_;
    std::vector<std::vector<PanelKeys>> of_group_;
};

// Key blocks of at most max_keys keys, several for each thread; their size changes no result. The blocks with the most
// work left in their sequence come first. So the blocks of a sequence stay in order, and none waits (wait_until_done)
// for a block that no thread has started.
std::vector<Task> cut_keys(const Flash_bwd_params &params, const BackwardKernel &kernel, const PanelTable &table,
                           int64_t threads) {
    const TaskCount count(params, threads);
    const bool has_ranges = params.key_ranges.is_used();
    std::vector<Task> tasks;
    for (int bidb = 0; bidb < params.b; ++bidb) {
        const Sequence seq = sequence(params, bidb);
        const int64_t wanted = count.of_sequence(bidb);
        int64_t block_keys = std::min<int64_t>(kernel.max_keys(params), (seq.seqlen_k + wanted - 1) / wanted);
        block_keys = (block_keys + kernel.step_keys - 1) / kernel.step_keys * kernel.step_keys;
        const size_t first = tasks.size();
        for (int64_t begin = 0; begin < seq.seqlen_k; begin += block_keys) {
            const int64_t end = std::min<int64_t>(begin + block_keys, seq.seqlen_k);
            Task task;
            task.block.bidb = bidb;
            task.block.n_begin = int(begin);
            task.block.block_keys = int(block_keys);
            task.pairs_left = has_ranges ? 0 : QueryRange(params, seq, begin, end).size() * (end - begin);
            tasks.push_back(task);
        }
        if (has_ranges) {
            table.count_pairs(bidb, kernel.panel_rows, block_keys,
                              [&](int64_t block, int64_t pairs) { tasks[first + size_t(block)].pairs_left += pairs; });
        }
        for (size_t i = tasks.size(); i-- > first + 1;) tasks[i - 1].pairs_left += tasks[i].pairs_left;
    }
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const Task &a, const Task &b) { return a.pairs_left > b.pairs_left; });
    return tasks;
}

// The sums of dq of each group whose sequence has several key blocks.
class SharedDq {
public:
    SharedDq(const Flash_bwd_params &params, const BackwardKernel &kernel, const std::vector<Task> &tasks)
        : of_sequence_(size_t(params.b)) {
        if (params.dq.ptr == nullptr) return;
        size_t bytes = 0, panels = 0;
        for (const Task &task : tasks) {
            Share &share = of_sequence_[size_t(task.block.bidb)];
            if (task.block.n_begin == 0 || share.panels > 0) continue;
            const int64_t rows = int64_t(sequence(params, int(task.block.bidb)).seqlen_q) * params.h_h_k_ratio;
            share = {bytes, kernel.dq_accum_bytes(params, rows), panels,
                     size_t((rows + kernel.panel_rows - 1) / kernel.panel_rows)};
            bytes += share.bytes * size_t(params.h_k);
            panels += share.panels * size_t(params.h_k);
        }
        dq_accum_ = allocate_scratch(bytes);
        blocks_done_ = std::vector<std::atomic<int>>(panels);
    }

    void give(ColBlock &block) {
        const Share &share = of_sequence_[size_t(block.bidb)];
        if (share.panels == 0) return;
        block.dq_accum = static_cast<char *>(dq_accum_.get()) + share.first_byte + share.bytes * size_t(block.bidh_k);
        block.blocks_done = blocks_done_.data() + share.first_panel + share.panels * size_t(block.bidh_k);
    }

private:
    struct Share {  // of the first key/value head; the shares of the other heads follow it
        size_t first_byte = 0, bytes = 0, first_panel = 0, panels = 0;
    };
    std::vector<Share> of_sequence_;
    ScratchMemory dq_accum_;
    std::vector<std::atomic<int>> blocks_done_;
};

}  // namespace

void wait_until_done(const std::atomic<int> &done, int blocks) {
    while (done.load(std::memory_order_acquire) < blocks) std::this_thread::yield();
}

void add_done(std::atomic<int> &done) {
    done.fetch_add(1, std::memory_order_release);
}

}  // namespace cpu

void run_mha_bwd_cpu(const Flash_bwd_params &params) {
    const cpu::Isa isa = cpu::select_isa(params.dtype);
    const cpu::BackwardKernel kernel = cpu::kernels_of(isa).backward(params.dtype);
    cpu::compute_dot_do_o(params, kernel);
    cpu::clear_padding(params);
    if (params.dq.ptr == nullptr && params.dk.ptr == nullptr && params.dv.ptr == nullptr) return;

    const int64_t threads = at::get_num_threads();
    const cpu::PanelTable table(params, kernel);
    const std::vector<cpu::Task> tasks = cpu::cut_keys(params, kernel, table, threads);
    int block_keys = 0;  // of the largest block
    for (const cpu::Task &task : tasks) block_keys = std::max(block_keys, task.block.block_keys);
    if (trace_enabled()) {
        const int64_t blocks = int64_t(tasks.size()) * params.h_k;
        trace("run_mha_bwd_cpu", "isa=%s key_block=%d blocks=%lld threads=%lld", cpu::name_of(isa), block_keys,
              static_cast<long long>(blocks), static_cast<long long>(std::min(threads, blocks)));
    }
    if (tasks.empty()) return;
    cpu::SharedDq shared(params, kernel, tasks);
    cpu::run_tasks(tasks, params.h_k, threads, kernel.scratch_bytes(params, block_keys),
                   [&](const cpu::Task &task, int64_t bidh_k, void *scratch) {
                       cpu::ColBlock block = task.block;
                       block.bidh_k = bidh_k;
                       block.panel_keys = table.of_group(block.bidb, bidh_k);
                       shared.give(block);
                       kernel.compute_dq_dk_dv_1colblock(params, block, scratch);
                   });
}

}  // namespace flash
