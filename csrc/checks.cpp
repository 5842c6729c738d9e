// The checks that checks.h declares, from the shape of the call to what a backend lacks.
#include "checks.h"

#include <ATen/MemoryOverlap.h>

#include <cmath>
#include <limits>
#include <vector>

#include "message.h"

namespace flash {
namespace {

struct Named {
    const char *name;
    const at::Tensor &tensor;
};

void check_rank(const Named &x, const char *shape) {
    FLASH_CHECK_VALUE(x.tensor.dim() == 4, x.name, " has shape ", x.tensor.sizes(), " (", x.tensor.dim(),
                      " dimensions); allowed: 4 dimensions ", shape);
}

void check_dtype(const Named &x, const std::string &backend) {
    const auto dtype = x.tensor.scalar_type();
    const bool is_16bit = dtype == at::kHalf || dtype == at::kBFloat16;
    const bool is_allowed = backend == "cpu"      ? is_16bit || dtype == at::kFloat || dtype == at::kDouble
                            : backend == "triton" ? is_16bit || dtype == at::kFloat
                                                  : is_16bit;
    const char *allowed = backend == "cpu"      ? "float16, bfloat16, float32, float64"
                          : backend == "triton" ? "float16, bfloat16, float32"
                                                : "float16, bfloat16";
    FLASH_CHECK_TYPE(is_allowed, x.name, " has dtype ", dtype, "; allowed on the ", backend, " backend: ", allowed);
}

void check_same_kind(const Named &x, const at::Tensor &q) {
    FLASH_CHECK_TYPE(x.tensor.scalar_type() == q.scalar_type(), x.name, " has dtype ", x.tensor.scalar_type(),
                     "; allowed: that of q, ", q.scalar_type());
    FLASH_CHECK_VALUE(x.tensor.device() == q.device(), x.name, " is on ", x.tensor.device(),
                      "; allowed: the device of q, ", q.device());
}

void check_last_dim_contiguous(const Named &x) {
    FLASH_CHECK_VALUE(x.tensor.stride(-1) == 1 || x.tensor.size(-1) == 1 || x.tensor.numel() == 0, x.name,
                      " has strides ", x.tensor.strides(),
                      "; allowed: a contiguous last dimension (stride 1), for example ", x.name, ".contiguous()");
}

void check_shapes(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v) {
    check_rank({"q", q}, "[batch, seqlen_q, nheads, headdim]");
    check_rank({"k", k}, "[batch, seqlen_k, nheads_k, headdim]");
    check_rank({"v", v}, "[batch, seqlen_k, nheads_k, headdim]");
    const int64_t headdim = q.size(3), nheads = q.size(2), nheads_k = k.size(2);
    FLASH_CHECK_VALUE(headdim >= 1 && headdim <= kMaxHeadDim, "q has headdim ", headdim, " (shape ", q.sizes(),
                      "); allowed: 1 to ", kMaxHeadDim);
    for (const Named &x : {Named{"k", k}, Named{"v", v}}) {
        FLASH_CHECK_VALUE(x.tensor.size(0) == q.size(0), x.name, " has batch ", x.tensor.size(0), " (shape ",
                          x.tensor.sizes(), "); allowed: the batch of q, ", q.size(0));
        FLASH_CHECK_VALUE(x.tensor.size(3) == headdim, x.name, " has headdim ", x.tensor.size(3), " (shape ",
                          x.tensor.sizes(), "); allowed: the headdim of q, ", headdim);
    }
    FLASH_CHECK_VALUE(v.size(1) == k.size(1), "v has seqlen ", v.size(1), " (shape ", v.sizes(),
                      "); allowed: the seqlen of k, ", k.size(1));
    FLASH_CHECK_VALUE(v.size(2) == nheads_k, "v has ", v.size(2), " heads (shape ", v.sizes(),
                      "); allowed: the heads of k, ", nheads_k);
    FLASH_CHECK_VALUE(nheads >= 1, "q has 0 heads (shape ", q.sizes(), "); allowed: at least 1");
    FLASH_CHECK_VALUE(nheads_k >= 1, "k has 0 heads (shape ", k.sizes(), "); allowed: at least 1");
    FLASH_CHECK_VALUE(nheads % nheads_k == 0, "q has ", nheads, " heads and k has ", nheads_k,
                      "; allowed: nheads of q a multiple of nheads of k");
    constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
    for (const Named &x : {Named{"q", q}, Named{"k", k}}) {
        FLASH_CHECK_VALUE(
            x.tensor.size(0) <= kMaxSize && x.tensor.size(1) <= kMaxSize / 2 && x.tensor.size(2) <= kMaxSize, x.name,
            " has shape ", x.tensor.sizes(), "; allowed: seqlen up to ", kMaxSize / 2, ", batch and heads up to ",
            kMaxSize);
    }
}

void check_same_shape(const Named &x, const Named &like) {
    FLASH_CHECK_VALUE(x.tensor.sizes() == like.tensor.sizes(), x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: the shape of ", like.name, ", ", like.tensor.sizes());
}

// A tensor that a kernel writes: like `like`, dtype and device as q.
void check_written(const Named &x, const Named &like, const at::Tensor &q) {
    check_same_kind(x, q);
    check_same_shape(x, like);
    check_last_dim_contiguous(x);
    FLASH_CHECK_VALUE(at::has_internal_overlap(x.tensor) != at::MemOverlap::Yes, x.name, " has strides ",
                      x.tensor.strides(), " (shape ", x.tensor.sizes(),
                      "); allowed: every element in memory of its own");
}

void check_no_overlap(const Named &written, const Named &other) {
    const auto overlap = at::get_overlap_status(written.tensor, other.tensor);
    FLASH_CHECK_VALUE(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial, written.name,
                      " shares memory with ", other.name, "; allowed: memory of its own");
}

// softmax_lse, and the gradient arriving at it.
void check_lse(const Named &x, const at::Tensor &q) {
    FLASH_CHECK_TYPE(x.tensor.scalar_type() == lse_dtype(q), x.name, " has dtype ", x.tensor.scalar_type(),
                     "; allowed: ", lse_dtype(q), " for inputs of ", q.scalar_type());
    FLASH_CHECK_VALUE(x.tensor.device() == q.device(), x.name, " is on ", x.tensor.device(),
                      "; allowed: the device of q, ", q.device());
    const std::vector<int64_t> shape{q.size(0), q.size(2), q.size(1)};
    FLASH_CHECK_VALUE(x.tensor.sizes() == shape, x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: [batch, nheads, seqlen_q] = ", list_of(shape));
}

void check_alibi_slopes(const at::Tensor &slopes, const at::Tensor &q) {
    FLASH_CHECK_TYPE(slopes.scalar_type() == at::kFloat, "alibi_slopes has dtype ", slopes.scalar_type(),
                     "; allowed: float32");
    FLASH_CHECK_VALUE(slopes.device() == q.device(), "alibi_slopes is on ", slopes.device(),
                      "; allowed: the device of q, ", q.device());
    const std::vector<int64_t> per_head{q.size(2)}, per_batch{q.size(0), q.size(2)};
    FLASH_CHECK_VALUE(slopes.sizes() == per_head || slopes.sizes() == per_batch, "alibi_slopes has shape ",
                      slopes.sizes(), "; allowed: [nheads] = [", q.size(2), "] or [batch, nheads] = [", q.size(0), ", ",
                      q.size(2), "]");
    FLASH_CHECK_VALUE(slopes.stride(-1) == 1 || slopes.size(-1) == 1, "alibi_slopes has strides ", slopes.strides(),
                      "; allowed: a contiguous last dimension (stride 1)");
}

void check_scalars(const Fwd_args &args) {
    FLASH_CHECK_VALUE(args.p_dropout >= 0.0 && args.p_dropout < 1.0, "dropout_p is ", args.p_dropout,
                      "; allowed: at least 0 and below 1");
    const double largest_scale = args.q.scalar_type() == at::kDouble ? std::numeric_limits<double>::max() / 2
                                                                     : std::numeric_limits<float>::max() / 2;
    FLASH_CHECK_VALUE(std::abs(args.softmax_scale) <= largest_scale, "softmax_scale is ", args.softmax_scale,
                      "; allowed: a finite number of magnitude up to ", largest_scale, ", or None for 1/sqrt(headdim)");
    FLASH_CHECK_VALUE(args.window_size_left >= -1, "window_size has left ", args.window_size_left,
                      "; allowed: -1 (unbounded) or at least 0 keys");
    FLASH_CHECK_VALUE(args.window_size_right >= -1, "window_size has right ", args.window_size_right,
                      "; allowed: -1 (unbounded) or at least 0 keys");
    FLASH_CHECK_VALUE(std::isfinite(args.softcap) && args.softcap >= 0.0, "softcap is ", args.softcap,
                      "; allowed: 0 (off) or a positive finite number");
    FLASH_CHECK_VALUE(!(args.softcap > 0.0 && args.p_dropout > 0.0), "softcap is ", args.softcap, " and dropout_p is ",
                      args.p_dropout, "; allowed: one of the two, not both");
}

// Later versions shrink this list; `have_it` then names the backends that do.
void check_implemented(const Fwd_args &args, const std::string &backend) {
    const auto lacks = [&](bool asked, const char *feature) {
        FLASH_CHECK_NOT_IMPLEMENTED(!asked, "backend '", backend, "' does not implement ", feature,
                                    " in this version; backends that have it: none");
    };
    lacks(args.p_dropout > 0.0, "dropout (dropout_p > 0)");
    lacks(args.window_size_left >= 0 || (args.window_size_right >= 0 && !args.is_causal),
          "local windows (window_size)");
    lacks(args.softcap > 0.0, "softcap");
    lacks(args.alibi_slopes.has_value(), "ALiBi (alibi_slopes)");
    lacks(args.return_softmax, "returning the dropout mask (return_softmax)");
}

// q, k and v.
void check_inputs(const Fwd_args &args, const std::string &backend) {
    check_dtype({"q", args.q}, backend);
    check_same_kind({"k", args.k}, args.q);
    check_same_kind({"v", args.v}, args.q);
    check_shapes(args.q, args.k, args.v);
    for (const Named &x : {Named{"q", args.q}, Named{"k", args.k}, Named{"v", args.v}}) {
        check_last_dim_contiguous(x);
    }
}

void check_options(const Fwd_args &args, const std::string &backend) {
    if (args.alibi_slopes.has_value()) {
        check_alibi_slopes(*args.alibi_slopes, args.q);
    }
    check_scalars(args);
    check_implemented(args, backend);
}

}  // namespace

at::ScalarType lse_dtype(const at::Tensor &q) {
    return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_fwd(const Fwd_args &args, const std::string &backend) {
    const Named inputs[] = {{"q", args.q}, {"k", args.k}, {"v", args.v}};
    check_inputs(args, backend);
    if (args.out.has_value()) {
        check_written({"out", *args.out}, {"q", args.q}, args.q);
        for (const Named &x : inputs) {
            check_no_overlap({"out", *args.out}, x);
        }
    }
    check_options(args, backend);
}

void check_bwd(const Bwd_args &args, const std::string &backend) {
    const Fwd_args &forward = args.forward;
    const at::Tensor &q = forward.q, &out = *forward.out;
    check_inputs(forward, backend);
    for (const Named &x : {Named{"dout", args.dout}, Named{"out", out}}) {
        check_same_kind(x, q);
        check_same_shape(x, {"q", q});
    }
    check_lse({"softmax_lse", args.softmax_lse}, q);
    if (args.dsoftmax_lse.has_value()) {
        check_lse({"dsoftmax_lse", *args.dsoftmax_lse}, q);
    }
    std::vector<Named> read{{"q", q}, {"k", forward.k}, {"v", forward.v}, {"out", out}, {"dout", args.dout}};
    const auto check_gradient = [&](const Named &x, const Named &like) {
        check_written(x, like, q);
        for (const Named &other : read) {
            check_no_overlap(x, other);
        }
        read.push_back(x);  // the gradients share no memory with each other either
    };
    if (args.dq.has_value()) {
        check_gradient({"dq", *args.dq}, {"q", q});
    }
    if (args.dk.has_value()) {
        check_gradient({"dk", *args.dk}, {"k", forward.k});
    }
    if (args.dv.has_value()) {
        check_gradient({"dv", *args.dv}, {"v", forward.v});
    }
    check_options(forward, backend);
}

}  // namespace flash
