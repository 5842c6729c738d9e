// run_mha_bwd_cpu: chooses the kernel for the dtype and the CPU, cuts the keys into blocks, and hands them out.
#include "flash_bwd_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "../trace.h"
#include "col_block.h"
#include "scratch.h"
#include "select_isa.h"

namespace flash {
namespace cpu {
namespace {

BackwardKernel select_kernel(Isa isa, DType dtype) {
    switch (isa) {
#ifdef FLASH_CPU_HAS_AMX
        case Isa::amx:
            return backward_kernel_amx();
#endif
#ifdef FLASH_CPU_HAS_AVX
        case Isa::avx512:
            return backward_kernel_avx512(dtype);
        case Isa::avx2:
            return backward_kernel_avx2(dtype);
#endif
        default:
            return backward_kernel_baseline(dtype);
    }
}

}  // namespace

void wait_for_turn(const std::atomic<int> &done, int turn) {
    while (done.load(std::memory_order_acquire) < turn) std::this_thread::yield();
}

void finish_turn(std::atomic<int> &done) {
    done.fetch_add(1, std::memory_order_release);
}

}  // namespace cpu

void run_mha_bwd_cpu(const Flash_bwd_params &params) {
    const int64_t groups = int64_t(params.b) * params.h_k;
    const int64_t rows = int64_t(params.seqlen_q) * params.h_h_k_ratio;  // of a group
    if (groups == 0 || rows == 0) return;
    const cpu::Isa isa = cpu::select_isa(params.dtype);
    const cpu::BackwardKernel kernel = cpu::select_kernel(isa, params.dtype);

    constexpr int64_t kDotGrain = 1 << 16;  // numbers
    at::parallel_for(0, groups * rows, std::max<int64_t>(1, kDotGrain / params.d),
                     [&](int64_t begin, int64_t end) { kernel.compute_dot_do_o(params, begin, end); });
    const bool want_dq = params.dq.ptr != nullptr;
    if (!want_dq && params.dk.ptr == nullptr && params.dv.ptr == nullptr) return;

    // Key blocks as large as the kernel likes, but enough of them to go round. Their size never changes a result.
    const int64_t threads = at::get_num_threads();
    const int64_t wanted_blocks = threads == 1 ? 1 : (4 * threads + groups - 1) / groups;  // per group
    int64_t block_keys =
        std::min<int64_t>(kernel.max_keys(params), (params.seqlen_k + wanted_blocks - 1) / wanted_blocks);
    block_keys = (block_keys + kernel.step_keys - 1) / kernel.step_keys * kernel.step_keys;
    const int64_t blocks = (params.seqlen_k + block_keys - 1) / block_keys;  // per group

    if (trace_enabled()) {
        trace("run_mha_bwd_cpu", "isa=%s key_block=%lld blocks=%lld threads=%lld", cpu::name_of(isa),
              static_cast<long long>(block_keys), static_cast<long long>(blocks * groups),
              static_cast<long long>(std::min(threads, blocks * groups)));
    }

    const int64_t panels = (rows + kernel.panel_rows - 1) / kernel.panel_rows;  // per group
    const size_t dq_bytes = want_dq ? kernel.dq_accum_bytes(params) : 0;        // per group
    const cpu::ScratchMemory dq_accum = cpu::allocate_scratch(dq_bytes * size_t(groups));
    std::vector<std::atomic<int>> blocks_done(size_t(groups * panels));

    // Threads draw key blocks from one counter, in order within each group: whichever block one waits for is done or in
    // the hands of a thread.
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads, blocks * groups), 1, [&](int64_t begin, int64_t end) {
        (void)begin, (void)end;
        const cpu::ScratchMemory scratch = cpu::allocate_scratch(kernel.scratch_bytes(params, int(block_keys)));
        for (int64_t i = next++; i < blocks * groups; i = next++) {
            const int64_t group = i % groups;
            cpu::ColBlock block;
            block.bidb = group / params.h_k;
            block.bidh_k = group % params.h_k;
            block.n_begin = int(i / groups * block_keys);
            block.block_keys = int(block_keys);
            block.dq_accum = static_cast<char *>(dq_accum.get()) + dq_bytes * size_t(group);
            block.blocks_done = blocks_done.data() + group * panels;
            kernel.compute_dq_dk_dv_1colblock(params, block, scratch.get());
        }
    });
}

}  // namespace flash
