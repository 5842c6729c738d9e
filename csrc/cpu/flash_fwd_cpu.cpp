// run_mha_fwd_cpu: chooses the kernel for the dtype and the CPU, cuts the work into row blocks, and hands them out.
#include "flash_fwd_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <string>

#include "../trace.h"
#include "row_block.h"

#ifdef FLASH_CPU_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flash {
namespace cpu {
namespace {

#ifdef FLASH_CPU_HAS_AMX
// Whether the CPU has AMX for bfloat16 and the operating system lets this process use it: tile data is a permission to
// ask for.
bool enable_amx_bf16() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const bool amx_bf16 = edx >> 22 & 1, amx_tile = edx >> 24 & 1;
    constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
    return amx_bf16 && amx_tile && syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}
#endif

Kernel named(const char *isa, Kernel kernel) {
    kernel.isa = isa;
    return kernel;
}

// torch's own choice of instruction set, so ATEN_CPU_CAPABILITY (avx512, avx2, default) lowers it here too.
Kernel select_kernel(DType dtype) {
#ifdef FLASH_CPU_HAS_AVX
    static const std::string capability = at::get_cpu_capability();
    static const bool has_f16c = __builtin_cpu_supports("f16c");
#ifdef FLASH_CPU_HAS_AMX
    static const bool has_amx = capability == "AVX512" && enable_amx_bf16();
    if (has_amx && dtype == DType::bfloat16) return named("amx", kernel_amx());
#endif
    if (capability == "AVX512" && has_f16c) return named("avx512", kernel_avx512(dtype));
    if (capability == "AVX2" && has_f16c) return named("avx2", kernel_avx2(dtype));
#endif
    return named("baseline", kernel_baseline(dtype));
}

constexpr std::align_val_t kScratchAlignment{64};
struct FreeScratch {
    void operator()(void *p) const { ::operator delete(p, kScratchAlignment); }
};

}  // namespace
}  // namespace cpu

void run_mha_fwd_cpu(const Flash_fwd_params &params) {
    const int64_t groups = int64_t(params.b) * params.h_k;
    const int64_t rows = int64_t(params.seqlen_q) * params.h_h_k_ratio;
    if (groups == 0 || rows == 0) return;
    const cpu::Kernel kernel = cpu::select_kernel(params.dtype);

    // Row blocks as large as the kernel likes, but enough of them to go round. Their size never changes a result: every
    // row meets the keys in the same steps.
    const int64_t threads = at::get_num_threads();
    const int64_t wanted_blocks = threads == 1 ? 1 : (4 * threads + groups - 1) / groups;  // per group
    int64_t block_rows = std::min<int64_t>(kernel.max_rows, (rows + wanted_blocks - 1) / wanted_blocks);
    block_rows = (block_rows + kernel.panel_rows - 1) / kernel.panel_rows * kernel.panel_rows;
    const int64_t blocks = (rows + block_rows - 1) / block_rows;  // per group

    if (trace_enabled()) {
        trace("run_mha_fwd_cpu", "isa=%s row_block=%lld blocks=%lld threads=%lld", kernel.isa,
              static_cast<long long>(block_rows), static_cast<long long>(blocks * groups),
              static_cast<long long>(std::min(threads, blocks * groups)));
    }

    // Threads draw row blocks from one counter, the last of each group first: causal ones are longest there.
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads, blocks * groups), 1, [&](int64_t begin, int64_t end) {
        (void)begin, (void)end;
        const size_t bytes = kernel.scratch_bytes(params, std::min(block_rows, rows));
        const std::unique_ptr<void, cpu::FreeScratch> scratch(::operator new(bytes, cpu::kScratchAlignment));
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
