// The CPU kernels for the instructions that every CPU of the target has: SSE2 on x86-64, NEON on AArch64.
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels.h"

#define FLASH_CPU_ISA 0
#define FLASH_CPU_NAMESPACE baseline
#include "flash_bias_bwd_kernel_fma.h"
#include "flash_bwd_kernel_fma.h"
#include "flash_fwd_kernel_fma.h"
