// set_params_fprop and set_params_dgrad: between mha_fwd and mha_bwd, which checked and allocated, and run_mha_fwd and
// run_mha_bwd, which pick the kernel.
#include "set_params.h"

#include <algorithm>
#include <cmath>

#include "message.h"
#include "trace.h"

namespace flash {

TensorRef tensor_ref(const at::Tensor &x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

DType dtype_of(const at::Tensor &x) {
    switch (x.scalar_type()) {
        case at::kHalf:
            return DType::float16;
        case at::kBFloat16:
            return DType::bfloat16;
        case at::kFloat:
            return DType::float32;
        case at::kDouble:
            return DType::float64;
        default:
            FLASH_CHECK_TYPE(false, "dtype ", x.scalar_type(), " has no kernel");
    }
}

Flash_fwd_params set_params_fprop(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const at::Tensor &out,
                                  const at::Tensor &softmax_lse, const Softmax_args &softmax) {
    Flash_fwd_params params;
    params.q = tensor_ref(q);
    params.k = tensor_ref(k);
    params.v = tensor_ref(v);
    params.o = tensor_ref(out);
    params.softmax_lse = softmax_lse.data_ptr();

    params.dtype = dtype_of(q);
    params.b = static_cast<int>(q.size(0));
    params.seqlen_q = static_cast<int>(q.size(1));
    params.h = static_cast<int>(q.size(2));
    params.d = static_cast<int>(q.size(3));
    params.seqlen_k = static_cast<int>(k.size(1));
    params.h_k = static_cast<int>(k.size(2));
    params.h_h_k_ratio = params.h / params.h_k;

    params.softmax_scale = softmax.softmax_scale;
    params.scale_softmax_log2 = static_cast<float>(softmax.softmax_scale * M_LOG2E);
    params.softcap = static_cast<float>(softmax.softcap);

    // A window that reaches over every key is unbounded; beyond that it would only overflow index arithmetic.
    const int64_t all = int64_t{params.seqlen_q} + params.seqlen_k;
    params.is_causal = softmax.is_causal;
    params.window_size_left = softmax.window_size_left >= all ? -1 : static_cast<int>(softmax.window_size_left);
    params.window_size_right = softmax.is_causal                  ? 0
                               : softmax.window_size_right >= all ? -1
                                                                  : static_cast<int>(softmax.window_size_right);
    if (trace_enabled()) {
        trace("set_params_fprop", "b=%d seqlen_q=%d seqlen_k=%d h=%d h_k=%d d=%d scale=%g window=(%d,%d)", params.b,
              params.seqlen_q, params.seqlen_k, params.h, params.h_k, params.d, params.softmax_scale,
              params.window_size_left, params.window_size_right);
    }
    return params;
}

Flash_bwd_params set_params_dgrad(const Flash_fwd_params &forward, const Dgrad_tensors &tensors, int heads_per_dkv,
                                  bool deterministic) {
    const auto wanted = [](const at::Tensor &x) { return x.defined() ? tensor_ref(x) : TensorRef{}; };
    Flash_bwd_params params;
    static_cast<Flash_fwd_params &>(params) = forward;
    params.dout = tensor_ref(tensors.dout);
    params.dsoftmax_lse = tensors.dsoftmax_lse.defined() ? tensors.dsoftmax_lse.data_ptr() : nullptr;
    params.dq = wanted(tensors.dq);
    params.dk = wanted(tensors.dk);
    params.dv = wanted(tensors.dv);
    params.dsoftmax_sum = tensors.softmax_d.data_ptr();
    params.seqlen_q_rounded = static_cast<int>(tensors.softmax_d.size(2));
    params.heads_per_dkv = heads_per_dkv;
    params.deterministic = deterministic;
    if (trace_enabled()) {
        trace("set_params_dgrad", "b=%d seqlen_q=%d seqlen_k=%d h=%d h_k=%d d=%d heads_per_dkv=%d deterministic=%s",
              params.b, params.seqlen_q, params.seqlen_k, params.h, params.h_k, params.d, heads_per_dkv,
              name_of(deterministic));
    }
    return params;
}

}  // namespace flash
