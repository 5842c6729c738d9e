// run_mha_fwd_cpu: selects the kernel for the dtype and the CPU, and runs it over row blocks on all threads.
#include <algorithm>
#include <vector>

#include "common/trace.h"
#include "dispatch/run_flash.h"
#include "schedule.h"
#include "select_isa.h"

namespace flash {
namespace cpu {
namespace {

struct Task {
    RowBlock block;  // of every key/value head
    int64_t pairs;   // visible pairs of a query and a key: the work
};

// Row blocks of at most max_rows rows, several for each thread; those with most work first.
std::vector<Task> cut_rows(const Flash_fwd_params &params, const ForwardKernel &kernel, int64_t threads) {
    const TaskCount count(params, threads);
    std::vector<Task> tasks;
    for (int bidb = 0; bidb < params.b; ++bidb) {
        const Sequence seq = sequence(params, bidb);
        const int64_t ratio = params.h_h_k_ratio, rows = seq.seqlen_q * ratio, wanted = count.of_sequence(bidb);
        const int64_t block_rows = rows_of_block(kernel, rows, wanted);
        for (int64_t begin = 0; begin < rows; begin += block_rows) {
            const int64_t end = std::min(begin + block_rows, rows);
            const int64_t pairs = visible_pairs(params, bidb, begin / ratio, (end + ratio - 1) / ratio);
            tasks.push_back({{bidb, 0, begin, end - begin}, pairs});
        }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task &a, const Task &b) { return a.pairs > b.pairs; });
    return tasks;
}

}  // namespace
}  // namespace cpu

void run_mha_fwd_cpu(const Flash_fwd_params &params) {
    const cpu::Isa isa = cpu::select_isa(params.dtype);
    const cpu::ForwardKernel kernel = cpu::kernels_of(isa).forward(params.dtype);
    const int64_t threads = at::get_num_threads();
    const std::vector<cpu::Task> tasks = cpu::cut_rows(params, kernel, threads);

    int64_t block_rows = 0;  // of the largest block
    for (const cpu::Task &task : tasks) block_rows = std::max(block_rows, task.block.rows);
    const int64_t units = int64_t(tasks.size()) * params.h_k;
    const int64_t heads = cpu::heads_of_call(kernel, block_rows, params.h_k, units, threads);
    block_rows = (block_rows + kernel.panel_rows - 1) / kernel.panel_rows * kernel.panel_rows;
    if (trace_enabled()) {
        trace("run_mha_fwd_cpu", "isa=%s row_block=%lld blocks=%lld threads=%lld", cpu::name_of(isa),
              static_cast<long long>(block_rows), static_cast<long long>(units),
              static_cast<long long>(std::min(threads, units)));
    }
    if (tasks.empty()) return;
    cpu::run_tasks(tasks, (params.h_k + heads - 1) / heads, threads, kernel.scratch_bytes(params, block_rows),
                   [&](const cpu::Task &task, int64_t part, void *scratch) {
                       cpu::RowBlock block = task.block;
                       block.bidh_k = part * heads;
                       block.heads = std::min(heads, params.h_k - block.bidh_k);
                       kernel.compute_attn_1rowblock(params, block, scratch);
                   });
}

}  // namespace flash
