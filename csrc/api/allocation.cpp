// The functions of allocation.h, written with ATen operators.
#include "api/allocation.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/checks.h"
#include "common/sequence.h"
#include "common/trace.h"
#include "dispatch/built.h"
#include "dispatch/run_mha.h"

#ifdef FLASH_WITH_CUDA
#include <ATen/ops/from_blob.h>

#include "api/current_stream.h"
#include "api/set_params.h"
#include "dispatch/device.h"
#include "sm90/common/tma_limits.h"
#endif

namespace flash {
namespace {

constexpr int64_t kVectorBytes = 16;  // one cp.async

// True if every row of x starts on a 16-byte boundary, as the CUDA kernels require. The stride of a dimension of size 1
// does not matter.
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

#ifdef FLASH_WITH_CUDA
int sm_count() {
    return device_properties().sm_count;
}

template <typename Params>
std::vector<at::Tensor> copies_for_tma(Params &params) {
    const c10::Device device(at::kCUDA, current_device());
    const at::ScalarType dtype = params.dtype == DType::float16 ? at::kHalf : at::kBFloat16;
    std::vector<at::Tensor> copies;
    sm90::for_each_input(params, [&](const char *name, TensorRef &x, int64_t rows, int heads, int batch, int columns) {
        if (sm90::can_describe(x, rows, heads, batch)) {
            return;
        }
        if (trace_enabled()) {
            trace("copy_for_tma", "copied %s because %s", name, sm90::kCannotDescribe);
        }
        const at::Tensor given = at::for_blob(x.ptr, {batch, rows, heads, columns})
                                     .strides({x.batch_stride, x.row_stride, x.head_stride, 1})
                                     .options(at::TensorOptions(dtype).device(device))
                                     .target_device(device)
                                     .make_tensor();
        copies.push_back(given.clone(at::MemoryFormat::Contiguous));
        const int64_t batch_stride = x.batch_stride;
        x = tensor_ref(copies.back());
        x.batch_stride = batch > 1 ? x.batch_stride : batch_stride;  // varlen: 0
    });
    return copies;
}
#else
int sm_count() {
    return 0;
}
#endif

// cu_seqlens inside [0, total], each value raised to the largest before it. CTAs of a deterministic backward wait for
// each other key block by key block; if sequences overlapped, they could wait for a key block that does not exist.
at::Tensor never_falling(const at::Tensor &cu_seqlens, int64_t total) {
    return std::get<0>(at::cummax(at::clamp(cu_seqlens, 0, total), 0));
}

// The pointer `bytes` bytes further on; null stays null.
template <typename T>
T *moved(T *pointer, int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return pointer == nullptr ? nullptr : reinterpret_cast<T *>(reinterpret_cast<Byte *>(pointer) + bytes);
}

}  // namespace

at::Tensor empty_contiguous_last(const at::Tensor &like) {
    const at::Tensor x = at::empty_like(like);
    return x.stride(-1) == 1 && x.size(-1) != 1 ? x : at::empty(like.sizes(), like.options());
}

at::Tensor empty_out(const at::Tensor &q, const at::Tensor &v) {
    if (v.size(-1) == q.size(-1)) {
        return empty_contiguous_last(q);
    }
    std::vector<int64_t> sizes = q.sizes().vec();
    sizes.back() = v.size(-1);
    return at::empty(sizes, q.options());
}

at::Tensor without_neg(const at::Tensor &x) {
    return x.is_neg() ? x.clone(at::MemoryFormat::Contiguous) : x;
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
        trace("readable_by_kernel", "copied %s: it is not 16-byte aligned", name);
    }
    return rows.clone(at::MemoryFormat::Contiguous);
}

bool is_writable_by_kernel(const at::Tensor &x) {
    return x.is_cpu() || is_vector_aligned(x);
}

int heads_per_cta(const FwdArgs &args) {
    // Enough CTAs per SM that all SMs finish at about the same time; causal CTAs differ in length and need more. Not
    // more than that: the sum over the parts of a group reads and writes dk and dv once more.
    const int64_t ctas_per_sm = args.options.causal ? 7 : 2;
    const int64_t ctas_wanted = ctas_per_sm * sm_count();
    const Sizes sizes(args);
    const int64_t group = sizes.nheads / sizes.nheads_k;
    const int64_t keys = std::min(args.q.size(-1), args.v.size(-1)) > 128 ? 64 : 128;  // of a CTA in most kernels
    const int64_t blocks_per_head =
        args.is_varlen() ? sizes.rows_k / keys + sizes.batch : (sizes.rows_k + keys - 1) / keys * sizes.batch;
    int64_t heads = group;
    for (int64_t parts = 1; parts <= group; ++parts) {
        if (group % parts == 0) {
            heads = group / parts;
            if (blocks_per_head * sizes.nheads_k * parts >= ctas_wanted) {
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
    result = given.has_value() ? *given : empty_contiguous_last(like);
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

at::Tensor empty_softmax_d(const FwdArgs &args) {
    constexpr int64_t kRows = Flash_bwd_params::kRowsRounded;
    const Sizes sizes(args);
    const at::TensorOptions options = args.q.options().dtype(lse_dtype(args.q));
    if (args.is_varlen()) {
        return at::empty({sizes.nheads, (sizes.rows_q / kRows + sizes.batch) * kRows}, options);
    }
    return at::empty({sizes.batch, sizes.nheads, (sizes.rows_q + kRows - 1) / kRows * kRows}, options);
}

#ifdef FLASH_WITH_CUDA
std::vector<at::Tensor> copy_for_tma(Flash_fwd_params &params) {
    return copies_for_tma(params);
}

std::vector<at::Tensor> copy_for_tma(Flash_bwd_params &params) {
    return copies_for_tma(params);
}
#endif

int sequences_at_once(const Flash_bwd_params &params) {
    constexpr int64_t kMinBytes = 64 << 20;  // of scratch, so that a part of the batch occupies the GPU
    const int64_t of_sequence =
        params.padded_batch_stride * built_headdim_for(std::max(params.d, params.d_v)) * int64_t(sizeof(float));
    const int64_t of_q = int64_t{params.seqlen_q} * params.h * params.d * 2;
    // The bits of dropout depend on the batch index.
    const bool is_one_part = params.cu_seqlens_q != nullptr || params.rng_state != nullptr ||
                             params.key_ranges.is_used() || params.attn_bias.is_used() || params.sink_batch_stride != 0;
    if (is_one_part || params.dq.ptr == nullptr || of_sequence <= 3 * of_q || takes_dq_pass(params)) {
        return params.b;
    }
    return static_cast<int>(
        std::clamp<int64_t>(std::max(of_q * params.b, kMinBytes) / of_sequence, 1, int64_t{params.b}));
}

Flash_bwd_params part_of_batch(const Flash_bwd_params &params, int begin, int count) {
    constexpr int64_t kElement = 2;  // bytes of the dtypes on CUDA
    Flash_bwd_params part = params;
    part.b = count;
    for (TensorRef *x : {&part.q, &part.k, &part.v, &part.o, &part.dout, &part.dq, &part.dk, &part.dv}) {
        x->ptr = moved(x->ptr, begin * x->batch_stride * kElement);
    }
    const int64_t of_lse = begin * params.lse_batch_stride * int64_t(sizeof(float));
    part.softmax_lse = moved(part.softmax_lse, of_lse);
    part.dsoftmax_lse = moved(part.dsoftmax_lse, of_lse);
    part.dsoftmax_sum = moved(part.dsoftmax_sum, begin * params.padded_batch_stride * int64_t(sizeof(float)));
    part.alibi_slopes = moved(part.alibi_slopes, begin * params.alibi_slopes_batch_stride * int64_t(sizeof(float)));
    return part;
}

CudaScratch::CudaScratch(Flash_bwd_params &params, const at::Tensor &q, const Sequences &sequences) {
    constexpr int64_t kAlignment = 256;  // bytes
    const auto aligned = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
    const int64_t rows = padded_rows(params);
    params.d_rounded = built_headdim_for(std::max(params.d, params.d_v));
    const bool is_varlen = sequences.cu_seqlens_q.has_value();
    const bool has_sums = params.dq.ptr != nullptr && !takes_dq_pass(params);  // of dQ, in global memory
    const bool has_semaphores = has_sums && params.deterministic;
    // The counters come first, then the semaphores and their counter: zero_scratch sets them to 0 at once.
    const int64_t heads = params.h / params.heads_per_dkv, semaphores = rows / Flash_bwd_params::kRowsPerSemaphore,
                  count_bytes = aligned((2 * (is_varlen ? 1 : params.b) * heads + 1) * sizeof(int)),
                  semaphore_bytes = has_semaphores ? aligned((semaphores + 1) * sizeof(int)) : 0,
                  lse_bytes = aligned(rows * sizeof(float)),
                  flag_bytes = aligned(rows / Flash_bwd_params::kRowsPerFlag * sizeof(int)),
                  dq_bytes = has_sums ? rows * params.d_rounded * int64_t(sizeof(float)) : 0;
    memory =
        at::empty({count_bytes + semaphore_bytes + lse_bytes + flag_bytes + dq_bytes}, q.options().dtype(at::kByte));
    uint8_t *next = memory.data_ptr<uint8_t>();
    const auto take = [&next](int64_t bytes) { return std::exchange(next, next + bytes); };
    params.work_counts = reinterpret_cast<int *>(take(count_bytes));
    if (has_semaphores) {
        params.dq_semaphore = reinterpret_cast<int *>(take(semaphore_bytes));
        params.dq_tile_counter = params.dq_semaphore + semaphores;
    }
    params.lse_padded = reinterpret_cast<float *>(take(lse_bytes));
    params.large_rows = reinterpret_cast<int *>(take(flag_bytes));
    if (has_sums) {
        params.dq_accum = reinterpret_cast<float *>(take(dq_bytes));
    }
    if (has_semaphores && is_varlen) {
        cu_seqlens_q = never_falling(*sequences.cu_seqlens_q, params.total_q);
        cu_seqlens_k = never_falling(*sequences.cu_seqlens_k, params.total_k);
        params.cu_seqlens_q = cu_seqlens_q.data_ptr<int>();
        params.cu_seqlens_k = cu_seqlens_k.data_ptr<int>();
    }
}

}  // namespace flash
