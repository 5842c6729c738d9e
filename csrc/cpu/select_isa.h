// Selects the instruction set of a call, and its kernels. flash_fwd_cpu.cpp and flash_bwd_cpu.cpp share it.
#pragma once

#include <ATen/Version.h>

#include <string>

#include "common/trace.h"
#include "kernels.h"

#ifdef FLASH_CPU_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flash::cpu {

enum class Isa { baseline, avx2, avx512, amx };

inline const char *name_of(Isa isa) {
    constexpr const char *kNames[] = {"baseline", "avx2", "avx512", "amx"};
    return kNames[static_cast<int>(isa)];
}

#ifdef FLASH_CPU_HAS_AMX
// True if the CPU has AMX and AVX-512 for bfloat16 and Linux lets this process use the tile registers: a process has to
// ask for permission.
inline bool enable_amx_bf16() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const bool amx_bf16 = edx >> 22 & 1, amx_tile = edx >> 24 & 1;
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
    const bool avx512_bf16 = eax >> 5 & 1;
    constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
    return amx_bf16 && amx_tile && avx512_bf16 && syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}
#endif

// The instruction set that torch selected, so ATEN_CPU_CAPABILITY (avx512, avx2, default) lowers it here too.
inline Isa select_isa([[maybe_unused]] DType dtype) {
#ifdef FLASH_CPU_HAS_AVX
    static const std::string capability = at::get_cpu_capability();
    static const bool has_f16c = __builtin_cpu_supports("f16c");
#ifdef FLASH_CPU_HAS_AMX
    static const bool has_amx =
        capability == "AVX512" && !is_switched_on("FLASH_ATTN_MINI_NO_AMX") && enable_amx_bf16();
    if (has_amx && dtype == DType::bfloat16) return Isa::amx;
#endif
    if (capability == "AVX512" && has_f16c) return Isa::avx512;
    if (capability == "AVX2" && has_f16c) return Isa::avx2;
#endif
    return Isa::baseline;
}

struct Kernels {
    ForwardKernel (*forward)(DType);
    BackwardKernel (*backward)(DType);
    BiasBackwardKernel (*bias_backward)(DType);
};

inline Kernels kernels_of(Isa isa) {
    switch (isa) {
#ifdef FLASH_CPU_HAS_AMX
        case Isa::amx:
            return {amx::forward_kernel, amx::backward_kernel, avx512::bias_backward_kernel};
#endif
#ifdef FLASH_CPU_HAS_AVX
        case Isa::avx512:
            return {avx512::forward_kernel, avx512::backward_kernel, avx512::bias_backward_kernel};
        case Isa::avx2:
            return {avx2::forward_kernel, avx2::backward_kernel, avx2::bias_backward_kernel};
#endif
        default:
            return {baseline::forward_kernel, baseline::backward_kernel, baseline::bias_backward_kernel};
    }
}

}  // namespace flash::cpu
