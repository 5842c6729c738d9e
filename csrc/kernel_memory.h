// Memory between the tensors of a call and what kernels can read and write: copies of tensors that are not aligned,
// gradients that are stored elsewhere first, scratch of the CUDA backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "checks.h"
#include "flash.h"

namespace flash {

// x, or a copy of a view that negates when it is read, which kernels do not do.
at::Tensor without_neg(const at::Tensor &x);

// x itself where the kernels can read it, else a copy: of a view that negates, of rows that are not contiguous, on
// CUDA of rows that are not 16-byte aligned. Undefined stays so.
at::Tensor readable_by_kernel(const at::Tensor &x, const char *name);

// Whether the kernels can write x itself.
bool is_writable_by_kernel(const at::Tensor &x);

// How many query heads of a group one thread block of the CUDA backward sums up in registers: the whole group, unless
// that leaves multiprocessors idle. Where it does, dk and dv get several heads per group, which are summed afterwards.
int heads_per_thread_block(const FwdArgs &args);

// A gradient of the call and the memory that the kernel writes: the same, or a temporary that is stored afterwards.
struct Gradient {
    at::Tensor result;   // undefined: not wanted
    at::Tensor written;  // like result; dk and dv of the CUDA kernels may have more heads, whose groups add up

    // `like` is the tensor whose gradient it is; the kernel writes `heads` heads, a multiple of like's.
    Gradient(bool is_wanted, const std::optional<at::Tensor> &given, const at::Tensor &like, int64_t heads);

    // Zeros what the kernel writes.
    void zero();
    // Puts what the kernel wrote into `result`.
    void store();
    // `result`, or an empty tensor.
    at::Tensor returned(const at::Tensor &like) const;
};

// delta of every row, padded (Flash_bwd_params): [batch, nheads, seqlen_q_rounded], varlen [nheads, total_q_rounded].
at::Tensor empty_softmax_d(const FwdArgs &args);

// Scratch of the CUDA kernels; it has to live until they are launched (the caching allocator keeps it for the stream).
struct CudaScratch {
    at::Tensor lse_padded, large_rows, dq_accum, dq_semaphore;

    CudaScratch(Flash_bwd_params &params, const at::Tensor &softmax_d);
};

}  // namespace flash
