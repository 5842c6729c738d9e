// The kernels of every instruction set. Each namespace is one isa_*.cpp, which includes the same kernel headers.
#pragma once

#include "col_block.h"
#include "isa.h"
#include "row_block.h"

namespace flash::cpu {

namespace baseline {
ForwardKernel forward_kernel(DType dtype);
BackwardKernel backward_kernel(DType dtype);
}  // namespace baseline

#ifdef FLASH_CPU_HAS_AVX
namespace avx2 {
ForwardKernel forward_kernel(DType dtype);
BackwardKernel backward_kernel(DType dtype);
}  // namespace avx2

namespace avx512 {
ForwardKernel forward_kernel(DType dtype);
BackwardKernel backward_kernel(DType dtype);
}  // namespace avx512
#endif

#ifdef FLASH_CPU_HAS_AMX
namespace amx {  // bfloat16 only
ForwardKernel forward_kernel(DType);
BackwardKernel backward_kernel(DType);
}  // namespace amx
#endif

}  // namespace flash::cpu
