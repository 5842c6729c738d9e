// Memory that the kernels use: new outputs and gradients, copies of tensors that a kernel cannot read or write in
// place, and the scratch memory of the CUDA backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "api/options.h"
#include "flash.h"

namespace flash {

// Unset memory for an output or a gradient. The last dimension is contiguous, as the kernels require. The strides are
// those of at::empty_like where these have that, else those of a contiguous tensor. A head dim of 1 gives a contiguous
// tensor too: at::empty_like and its fake implementation do not agree there. flash_attn_mini/allocation.py has the same
// rule.
at::Tensor empty_contiguous_last(const at::Tensor &like);

// Unset memory for out: empty_contiguous_last(q), contiguous where v has another head dim.
at::Tensor empty_out(const at::Tensor &q, const at::Tensor &v);

// x, or a contiguous copy if x is a lazily negated view: kernels read memory as it is.
at::Tensor without_neg(const at::Tensor &x);

// x, or a copy if the kernels cannot read x: a lazily negated view, rows that are not contiguous, on CUDA rows that are
// not 16-byte aligned. An undefined x is returned as it is.
at::Tensor readable_by_kernel(const at::Tensor &x, const char *name);

// True if the kernels can write x in place.
bool is_writable_by_kernel(const at::Tensor &x);

// Query heads of a group that one CTA of the CUDA backward sums in registers: the whole group, or a part of it if CTAs
// for whole groups would leave SMs idle. With parts, dk and dv get several heads per group, which are summed
// afterwards.
int heads_per_cta(const FwdArgs &args);

// A gradient and the memory that the kernel writes: the gradient itself, or a temporary that is copied to it.
struct Gradient {
    at::Tensor result;   // undefined: not wanted
    at::Tensor written;  // like result; with more heads, the sum over the heads of a group is the result

    // like: the tensor that the gradient belongs to. heads: heads that the kernel writes, a multiple of like's.
    Gradient(bool is_wanted, const std::optional<at::Tensor> &given, const at::Tensor &like, int64_t heads);

    // Sets `written` to 0.
    void zero();
    // Copies or sums `written` into `result`.
    void store();
};

// delta of every row, padded (Flash_bwd_params): [batch, nheads, seqlen_q_rounded], varlen [nheads, total_q_rounded].
at::Tensor empty_softmax_d(const FwdArgs &args);

#ifdef FLASH_WITH_CUDA
// Copies each tensor that the kernels of sm90/ read and TMA cannot describe (sm90/common/tma_limits.h), and points
// params to the copies. They must live until the kernels are launched.
std::vector<at::Tensor> copy_for_tma(Flash_fwd_params &params);
std::vector<at::Tensor> copy_for_tma(Flash_bwd_params &params);
#endif

// The CUDA backward of short sequences would need many times their memory as scratch, because they are padded to
// kRowsRounded rows. Parts of the batch then run one after the other and share the scratch. Returns the number of
// sequences in a part.
int sequences_at_once(const Flash_bwd_params &params);

// The call for `count` sequences of the batch, from `begin` on.
Flash_bwd_params part_of_batch(const Flash_bwd_params &params, int begin, int count);

// Scratch memory of the CUDA backward in one allocation. It must live until the kernels are launched; the caching
// allocator then keeps it for the stream. run_mha_bwd sets the counters and semaphores to 0.
struct CudaScratch {
    at::Tensor memory;
    at::Tensor cu_seqlens_q, cu_seqlens_k;  // deterministic varlen: copies whose values never fall

    // Allocates the memory on the device of q and sets its pointers in params.
    CudaScratch(Flash_bwd_params &params, const at::Tensor &q, const Sequences &sequences);
};

}  // namespace flash
