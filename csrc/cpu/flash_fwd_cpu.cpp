// run_mha_fwd_cpu: chooses the kernel for the dtype and the CPU, cuts the work into row blocks, and hands them out.
#include "flash_fwd_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "../trace.h"
#include "row_block.h"
#include "scratch.h"
#include "select_isa.h"

namespace flash {
namespace cpu {
namespace {

ForwardKernel select_kernel(Isa isa, DType dtype) {
    switch (isa) {
#ifdef FLASH_CPU_HAS_AMX
        case Isa::amx:
            return forward_kernel_amx();
#endif
#ifdef FLASH_CPU_HAS_AVX
        case Isa::avx512:
            return forward_kernel_avx512(dtype);
        case Isa::avx2:
            return forward_kernel_avx2(dtype);
#endif
        default:
            return forward_kernel_baseline(dtype);
    }
}

}  // namespace
}  // namespace cpu

void run_mha_fwd_cpu(const Flash_fwd_params &params) {
    const int64_t groups = int64_t(params.b) * params.h_k;
    const int64_t rows = int64_t(params.seqlen_q) * params.h_h_k_ratio;
    if (groups == 0 || rows == 0) return;
    const cpu::Isa isa = cpu::select_isa(params.dtype);
    const cpu::ForwardKernel kernel = cpu::select_kernel(isa, params.dtype);

    // Row blocks as large as the kernel likes, but enough of them to go round. Their size never changes a result: every
    // row meets the keys in the same steps.
    const int64_t threads = at::get_num_threads();
    const int64_t wanted_blocks = threads == 1 ? 1 : (4 * threads + groups - 1) / groups;  // per group
    int64_t block_rows = std::min<int64_t>(kernel.max_rows, (rows + wanted_blocks - 1) / wanted_blocks);
    block_rows = (block_rows + kernel.panel_rows - 1) / kernel.panel_rows * kernel.panel_rows;
    const int64_t blocks = (rows + block_rows - 1) / block_rows;  // per group

    if (trace_enabled()) {
        trace("run_mha_fwd_cpu", "isa=%s row_block=%lld blocks=%lld threads=%lld", cpu::name_of(isa),
              static_cast<long long>(block_rows), static_cast<long long>(blocks * groups),
              static_cast<long long>(std::min(threads, blocks * groups)));
    }

    // Threads draw row blocks from one counter, the last of each group first: causal ones are longest there.
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads, blocks * groups), 1, [&](int64_t begin, int64_t end) {
        (void)begin, (void)end;
        const cpu::ScratchMemory scratch =
            cpu::allocate_scratch(kernel.scratch_bytes(params, std::min(block_rows, rows)));
        for (int64_t i = next++; i < blocks * groups; i = next++) {
            const int64_t group = i % groups;
            const int64_t row_begin = (blocks - 1 - i / groups) * block_rows;
            kernel.compute_attn_1rowblock(
                params, {group / params.h_k, group % params.h_k, row_begin, std::min(block_rows, rows - row_begin)},
                scratch.get());
        }
    });
}

}  // namespace flash
