// What kernel_memory.h declares, in ATen alone.
#include "kernel_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "run_mha.h"
#include "static_switch.h"
#include "trace.h"

namespace flash {
namespace {

constexpr int64_t kVectorBytes = 16;  // what one cp.async moves

// Whether every row of x starts on a 16-byte boundary, as the CUDA kernels need; strides of single-element dimensions
// are never walked.
bool is_vector_aligned(const at::Tensor &x) {
    if (reinterpret_cast<uintptr_t>(x.data_ptr()) % kVectorBytes != 0) {
        return false;
    }
    for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
        if (x.size(dim) > 1 && x.stride(dim) * x.element_size() % kVectorBytes != 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

at::Tensor without_neg(const at::Tensor &x) {
    return x.is_neg() ? x.resolve_neg() : x;
}

at::Tensor readable_by_kernel(const at::Tensor &x, const char *name) {
    if (!x.defined()) {
        return x;
    }
    const at::Tensor resolved = without_neg(x);
    const at::Tensor rows = resolved.stride(-1) == 1 ? resolved : resolved.contiguous();
    if (is_writable_by_kernel(rows)) {
        return rows;
    }
    if (trace_enabled()) {
        trace("readable_by_kernel", "%s is not 16-byte aligned: copied", name);
    }
    return rows.clone(at::MemoryFormat::Contiguous);
}

bool is_writable_by_kernel(const at::Tensor &x) {
    return x.is_cpu() || is_vector_aligned(x);
}

int heads_per_thread_block(const FwdArgs &args) {
    constexpr int64_t kKeysPerBlock = 128;                 // the usual tile
    const int64_t blocks_per_sm = args.is_causal ? 8 : 2;  // enough for the last ones to balance, of unequal ones more
    const Sizes sizes(args);
    const int64_t group = sizes.nheads / sizes.nheads_k;
    const int64_t blocks_per_head = args.varlen != nullptr
                                        ? sizes.rows_k / kKeysPerBlock + sizes.batch
                                        : (sizes.rows_k + kKeysPerBlock - 1) / kKeysPerBlock * sizes.batch;
    int64_t heads = group;
    for (int64_t parts = 1; parts <= group; ++parts) {
        if (group % parts == 0) {
            heads = group / parts;
            if (blocks_per_head * sizes.nheads_k * parts >= blocks_per_sm * multiprocessor_count()) {
                break;
            }
        }
    }
    return static_cast<int>(heads);
}

Gradient::Gradient(bool is_wanted, const std::optional<at::Tensor> &given, const at::Tensor &like, int64_t heads) {
    if (!is_wanted) {
        return;
    }
    result = given.has_value() ? *given : at::empty_like(like);
    const bool is_in_place = heads == like.size(-2) && is_writable_by_kernel(result);
    std::vector<int64_t> sizes = like.sizes().vec();
    sizes[sizes.size() - 2] = heads;
    written = is_in_place ? result : at::empty(sizes, like.options());
}

void Gradient::zero() {
    if (result.defined()) {
        written.zero_();
    }
}

void Gradient::store() {
    if (!result.defined() || written.is_same(result)) {
        return;
    }
    const int64_t heads = result.size(-2);
    if (written.size(-2) == heads) {
        result.copy_(written);
    } else {
        at::sum_out(result, written.unflatten(-2, {heads, written.size(-2) / heads}), -2);
    }
}

at::Tensor Gradient::returned(const at::Tensor &like) const {
    return result.defined() ? result : at::empty({0}, like.options());
}

at::Tensor empty_softmax_d(const FwdArgs &args) {
    constexpr int64_t kRows = Flash_bwd_params::kRowsRounded;
    const Sizes sizes(args);
    const at::TensorOptions options = args.q.options().dtype(lse_dtype(args.q));
    if (args.varlen != nullptr) {
        return at::empty({sizes.nheads, (sizes.rows_q / kRows + sizes.batch) * kRows}, options);
    }
    return at::empty({sizes.batch, sizes.nheads, (sizes.rows_q + kRows - 1) / kRows * kRows}, options);
}

CudaScratch::CudaScratch(Flash_bwd_params &params, const at::Tensor &softmax_d) {
    const int64_t rows = softmax_d.numel();
    params.d_rounded = built_headdim_for(params.d);
    lse_padded = at::empty({rows}, softmax_d.options().dtype(at::kFloat));
    params.lse_padded = lse_padded.data_ptr<float>();
    large_rows = at::empty({rows / Flash_bwd_params::kRowsPerFlag}, softmax_d.options().dtype(at::kInt));
    params.large_rows = large_rows.data_ptr<int>();
    if (params.dq.ptr == nullptr) {
        return;
    }
    dq_accum = at::empty({rows, params.d_rounded}, softmax_d.options().dtype(at::kFloat));
    params.dq_accum = dq_accum.data_ptr<float>();
    if (params.deterministic) {
        const int64_t turns = rows / Flash_bwd_params::kRowsPerSemaphore;
        dq_semaphore = at::zeros({turns + 1}, softmax_d.options().dtype(at::kInt));
        params.dq_semaphore = dq_semaphore.data_ptr<int>();
        params.dq_tile_counter = params.dq_semaphore + turns;
    }
}

}  // namespace flash
