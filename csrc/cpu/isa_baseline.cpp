// The CPU kernels for what the compiler assumes: SSE2 on x86-64, NEON on AArch64, and any other machine.
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#define FLASH_CPU_ISA 0
#define FLASH_CPU_NAMESPACE baseline
#include "flash_bwd_kernel_fma.h"
#include "flash_fwd_kernel_fma.h"

namespace flash::cpu {
ForwardKernel forward_kernel_baseline(DType dtype) {
    return baseline::select_forward_kernel(dtype);
}
BackwardKernel backward_kernel_baseline(DType dtype) {
    return baseline::select_backward_kernel(dtype);
}
}  // namespace flash::cpu
