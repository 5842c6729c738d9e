// Fills the params struct that every kernel reads from the tensors and options of a checked call.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/options.h"
#include "flash.h"

namespace flash {

// x: [batch, seqlen, heads, headdim], or [total, heads, headdim] with batch stride 0.
TensorRef tensor_ref(const at::Tensor &x);

DType dtype_of(const at::Tensor &x);

// The tensors of a forward, in memory that the kernels can read and write.
struct FpropTensors {
    const at::Tensor &q;
    const at::Tensor &k;
    const at::Tensor &v;
    const at::Tensor &out;          // like q, with the columns of v
    const at::Tensor &softmax_lse;  // [batch, nheads, seqlen_q], varlen [nheads, total_q]; contiguous
    const at::Tensor &rng_state;    // int64 [2], contiguous; read only with dropout
};

// args: with options that kernels can read (readable). softmax_scale: not 0; together with tensors.q it gives the
// scores of args.
Flash_fwd_params set_params_fprop(const FpropTensors &tensors, const FwdArgs &args, double softmax_scale);

// max_logits: [batch, nheads], varlen [nheads]; contiguous, filled with -inf; undefined: not wanted.
void set_max_logits(Flash_fwd_params &params, const at::Tensor &max_logits);

// The tensors of a call with a KV cache. An undefined one is not used.
struct KvCacheTensors {
    const at::Tensor &q;            // [batch, seqlen_q, nheads, headdim]
    const at::Tensor &q_rotated;    // like q, contiguous: scratch; undefined without rotary
    const at::Tensor &k;            // [batch, seqlen_new, nheads_k, headdim]
    const at::Tensor &v;            // like k, with the columns of v_cache
    const at::Tensor &out;          // like q, with the columns of v
    const at::Tensor &softmax_lse;  // [batch, nheads, seqlen_q], contiguous
    const at::Tensor &rotary_cos;
    const at::Tensor &rotary_sin;
};

// The part of set_params_kvcache that depends only on the arguments: q, caches, sizes, pages and splits.
Flash_fwd_params params_of_cache(const KvCacheArgs &args);

// softmax_scale: as for set_params_fprop. The cache has keys (KvCacheArgs::has_keys).
Flash_fwd_params set_params_kvcache(const KvCacheTensors &tensors, const KvCacheArgs &args, double softmax_scale);

// The tensors of a backward. A gradient that is not wanted is undefined.
struct DgradTensors {
    const at::Tensor &dout;
    const at::Tensor &dsoftmax_lse;  // undefined: zeros
    const at::Tensor &dq;
    const at::Tensor &dk;         // like k, with nheads / heads_per_dkv heads
    const at::Tensor &dv;         // like v, with nheads / heads_per_dkv heads
    const at::Tensor &softmax_d;  // [batch, nheads, seqlen_q_rounded], varlen [nheads, total_q_rounded]
};

Flash_bwd_params set_params_dgrad(const Flash_fwd_params &forward, const DgradTensors &tensors, int heads_per_dkv,
                                  const Options &options);

}  // namespace flash
