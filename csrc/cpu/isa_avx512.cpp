// The CPU kernels compiled for AVX-512, whatever the compiler's -march. Everything after the target pragma may only be
// called where the CPU has it (select_isa.h asks), so headers of other libraries come before it.
#include "../common/philox.h"
#include "col_block.h"
#include "key_range.h"
#include "row_block.h"

#ifdef FLASH_CPU_HAS_AVX

#include <c10/util/Half.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12: its own AVX-512 intrinsics pass undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define FLASH_CPU_ISA 3
#define FLASH_CPU_NAMESPACE avx512
#include "flash_bwd_kernel_fma.h"
#include "flash_fwd_kernel_fma.h"

namespace flash::cpu {
ForwardKernel forward_kernel_avx512(DType dtype) {
    return avx512::select_forward_kernel(dtype);
}
BackwardKernel backward_kernel_avx512(DType dtype) {
    return avx512::select_backward_kernel(dtype);
}
}  // namespace flash::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
