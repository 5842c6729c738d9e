// The CPU kernels for AVX-512. The target pragma holds for every function after it, whatever -march
// is, so headers of other libraries come before it. These functions run only on a CPU that has the instructions
// (select_isa.h).
#include "../common/philox.h"
#include "kernels.h"

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
#include "flash_bias_bwd_kernel_fma.h"
#include "flash_bwd_kernel_fma.h"
#include "flash_fwd_kernel_fma.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
