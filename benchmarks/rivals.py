"""The implementations that benchmarks compare, forward and backward: this library's backends, PyTorch's kernels and the
official packages.

A rival binds [batch, seqlen, heads, headdim] tensors to a call without arguments. A backward rival runs its forward in
`bind`: the call is only the backward op, with every kernel that it launches (delta, zeroing, the main kernel,
conversion, sums over heads) and without autograd. Views and the choice of PyTorch's kernel are outside the call too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn_mini.backends.cuda import ARCH_VARIABLE

Call = partial[Any]  # a forward's first arguments are q, k and v as the implementation takes them
aten = torch.ops.aten


def upstream_gradient(q: Tensor, v: Tensor | None = None) -> Tensor:
    """dO: random normal, the same for every rival; laid out like q, contiguous where v has another head dim."""
    is_square = v is None or v.shape[-1] == q.shape[-1]
    dout = torch.empty_like(q) if is_square else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return dout.normal_(generator=torch.Generator(q.device).manual_seed(0))


@dataclass(frozen=True)
class Feature:
    """The options of a call besides causal."""

    name: str
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = field(default=(), repr=False)  # tokens of each sequence; empty: every row is a token
    is_packed: bool = False  # varlen: only the tokens; otherwise a batch padded to the longest

    def slopes(self, q: Tensor) -> Tensor | None:
        """The slopes of the ALiBi paper (Press et al., arXiv 2108.12409): 2^(-8 i / nheads)."""
        if not self.alibi:
            return None
        nheads = q.shape[-2]
        steps = torch.arange(1, nheads + 1, device=q.device, dtype=torch.float32)
        return torch.exp2(-8.0 * steps / nheads)

    def valid_rows(self, x: Tensor) -> Tensor:
        """True for the rows of a padded batch that are tokens, [batch, seqlen]."""
        lengths = torch.tensor(self.lengths, device=x.device)
        return torch.arange(x.shape[1], device=x.device) < lengths[:, None]

    def packed(self, x: Tensor) -> Tensor:
        """Varlen: the tokens of a padded batch, one sequence after the other; otherwise the batch itself."""
        return x[self.valid_rows(x)] if self.is_packed else x

    def sequences(self, device: torch.device) -> dict[str, Any]:
        """The arguments of a varlen call that say where sequences begin; {} for a batch."""
        if not self.is_packed:
            return {}
        cu_seqlens = torch.tensor([0, *self.lengths], device=device).cumsum(0, dtype=torch.int32)
        longest = max(self.lengths)
        return {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }


PLAIN = Feature("plain")


def first_line(error: BaseException) -> str:
    """Of its message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Rival:
    """One implementation of one direction. `name` is its name in tables."""

    name: str
    baseline: str | None = None  # the contender that it is compared with; None: with PyTorch's
    failures: tuple[type[Exception], ...] = (RuntimeError, NotImplementedError, ImportError)  # of what it cannot run

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        """A call that computes attention or its gradients, to be called within `active()`."""
        raise NotImplementedError

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The state that the call needs: no autograd, and for PyTorch the chosen kernel."""
        with torch.no_grad():
            yield

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        """The results of a call as tensors [batch, seqlen, heads, headdim]."""
        return (result,)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
        """Why it cannot run on these tensors, from an attempt; None when it can."""
        try:
            with self.active():
                self.bind(q, k, v, causal)()
        except self.failures as error:
            return first_line(error)
        return None


class ForwardOrBoth(Rival):
    """A forward, or a forward with its backward through autograd. forward(q, k, v) returns out; the tensors of
    `others` that take gradients count among the inputs of the backward."""

    def __init__(
        self, name: str, forward: Callable[..., Tensor], backward: bool, others: Sequence[Tensor] = ()
    ) -> None:
        self.name = f"{name}, {'forward and backward' if backward else 'forward'}"
        self.forward = forward
        self.backward = backward
        self.others = [x for x in others if x.requires_grad]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.backward else torch.no_grad():
            yield

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Call:
        if not self.backward:
            return partial(self.forward, q, k, v)
        leaves, dout = [x.detach().requires_grad_() for x in (q, k, v)], upstream_gradient(q)
        return partial(lambda: torch.autograd.grad(self.forward(*leaves), [*leaves, *self.others], dout))

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return tuple(result) if self.backward else (result,)


@contextlib.contextmanager
def kernels_of(arch: int | None) -> Iterator[None]:
    """FLASH_ATTN_MINI_ARCH set to an architecture, or unset."""
    before = os.environ.pop(ARCH_VARIABLE, None)
    if arch is not None:
        os.environ[ARCH_VARIABLE] = str(arch)
    try:
        yield
    finally:
        os.environ.pop(ARCH_VARIABLE, None)
        if before is not None:
            os.environ[ARCH_VARIABLE] = before


class Mini(Rival):
    """flash_attn_mini with one of its backends: a forward as users call it, or the backward op.

    `arch` restricts the cuda backend to the kernels of that architecture.
    """

    def __init__(
        self,
        backend: str,
        feature: Feature = PLAIN,
        *,
        arch: int | None = None,
        backward: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.name = " ".join([backend, *[f"sm{arch}"] * (arch is not None), *["deterministic"] * deterministic])
        self.baseline = backend if deterministic else None
        self.backend = backend
        self.feature = feature
        self.arch = arch
        self.backward = backward
        self.deterministic = deterministic

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        return (self.bind_backward if self.backward else self.bind_forward)(q, k, v, causal)

    def bind_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

        feature = self.feature
        options: dict[str, Any] = {
            "dropout_p": feature.dropout_p,
            "causal": causal,
            "window_size": feature.window_size,
            "softcap": feature.softcap,
            "alibi_slopes": feature.slopes(q),
            "backend": self.backend,
        }
        inputs = [feature.packed(x) for x in (q, k, v)]
        function = flash_attn_varlen_func if feature.is_packed else flash_attn_func
        return partial(function, *inputs, **feature.sequences(q.device), **options)

    def bind_backward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from flash_attn_mini.ops import EQUAL_LENGTHS
        from flash_attn_mini.options import Options, Sequences

        feature = self.feature
        dout = upstream_gradient(q, v)
        if feature.lengths:  # padding gets no gradient
            dout.mul_(feature.valid_rows(q)[..., None, None])
        dout, q, k, v = (feature.packed(x) for x in (dout, q, k, v))
        left, right = feature.window_size
        lengths = Sequences(**feature.sequences(q.device)) if feature.is_packed else EQUAL_LENGTHS
        options = Options(
            dropout_p=feature.dropout_p,
            softmax_scale=q.shape[-1] ** -0.5,
            causal=causal,
            window_size_left=left,
            window_size_right=0 if causal else right,
            softcap=feature.softcap,
            alibi_slopes=feature.slopes(q),
            deterministic=self.deterministic,
            backend=self.backend,
        )
        ops = torch.ops.flash_attn_mini
        with torch.no_grad():
            out, lse, rng_state, _ = ops.fwd.default(q, k, v, *lengths, *options, None)
        tensors = (dout, q, k, v, out, lse, None)
        return partial(ops.bwd.default, *tensors, *lengths, *options, rng_state, [True, True, True])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.no_grad(), kernels_of(self.arch):
            yield

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return tuple(result[:3]) if self.backward else (result,)


def as_sdpa_takes_them(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [batch, heads, seqlen, headdim] views. Raises NotImplementedError where PyTorch means another mask."""
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError("PyTorch aligns causal to the top left: only equal lengths compare")
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Sdpa(Rival):
    """torch.nn.functional.scaled_dot_product_attention with one of its kernels, or with PyTorch's choice."""

    def __init__(self, name: str, kernel: SDPBackend | None) -> None:
        self.name = name
        self.kernel = kernel

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        q, k, v = as_sdpa_takes_them(q, k, v, causal)
        grouped = q.shape[1] != k.shape[1]
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=grouped)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.no_grad(), sdpa_kernel(self.kernel) if self.kernel is not None else contextlib.nullcontext():
            yield

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return (result.transpose(1, 2),)


class AtenBackward(Rival):
    """One of PyTorch's backward ops, on [batch, heads, seqlen, headdim] views."""

    name: str

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        inputs = as_sdpa_takes_them(q, k, v, causal)
        with torch.no_grad():
            return self.bind_op(upstream_gradient(q, v).transpose(1, 2), *inputs, causal)

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        """The backward op with the results of its forward op."""
        raise NotImplementedError

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return tuple(gradient.transpose(1, 2) for gradient in result)


class FlashAttention(AtenBackward):
    """PyTorch's build of FlashAttention-2."""

    name = "FLASH_ATTENTION"

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        out, lse, cum_q, cum_k, max_q, max_k, *rng, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        lengths = (cum_q, cum_k, max_q, max_k)
        backward = aten._scaled_dot_product_flash_attention_backward.default
        return partial(backward, dout, q, k, v, out, lse, *lengths, 0.0, causal, *rng)


class CuDnn(AtenBackward):
    """cuDNN's kernels as PyTorch calls them."""

    name = "cuDNN"

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        results = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        out, lse, cum_q, cum_k, max_q, max_k, *rng, _ = results
        lengths = (cum_q, cum_k, max_q, max_k)
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        return partial(backward, dout, q, k, v, out, lse, *rng, None, *lengths, 0.0, causal)


class CpuSdpa(AtenBackward):
    """The op that scaled_dot_product_attention's autograd runs on CPU tensors."""

    name = "SDPA"

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("PyTorch's CPU kernel takes as many key heads as query heads")
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return partial(backward, dout, q, k, v, out, lse, 0.0, causal)


class Flex(Rival):
    """torch.nn.attention.flex_attention, compiled; it skips the blocks that a causal mask hides."""

    name = "FlexAttention"
    failures = (Exception,)  # torch.compile raises many kinds

    def __init__(self, *, backward: bool = False) -> None:
        self.backward = backward

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        if not self.backward:
            return self.bind_forward(q, k, v, causal)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = self.bind_forward(*leaves, causal)()
        dout = upstream_gradient(q, v).transpose(1, 2)
        return partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)

    def bind_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = as_sdpa_takes_them(q, k, v, causal)
        mask = None
        if causal:
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=q.device.type
            )
        torch._dynamo.reset()  # each shape is compiled for itself; too many would end in uncompiled code
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return partial(compiled, q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return tuple(result) if self.backward else (result.transpose(1, 2),)


class Official(Rival):
    """flash_attn_func of one of the official packages, forward or backward.

    `modules` are the names under which releases of the package have the function. The backward is called as autograd
    calls it, with the results of a forward.
    """

    failures = (Exception,)  # kernels that are compiled in Python raise many kinds

    def __init__(self, name: str, modules: tuple[str, ...], *, backward: bool = False) -> None:
        self.name = name
        self.modules = modules
        self.backward = backward

    def function(self, name: str = "flash_attn_func") -> Any:
        """A function of the package. ImportError where no release is installed or it does not load."""
        reasons = []
        for module in self.modules:
            try:
                return getattr(importlib.import_module(module), name)
            except (ImportError, OSError, AttributeError) as error:  # OSError: built for another torch
                reasons.append(str(error).splitlines()[0])
        raise ImportError("; ".join(dict.fromkeys(reasons)))

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        forward = partial(self.function(), q, k, v, causal=causal)
        return self.bind_backward(forward) if self.backward else forward

    def bind_backward(self, forward: Call) -> Call:
        inputs = [x.detach().requires_grad_() for x in forward.args]
        with torch.enable_grad():
            results = forward.func(*inputs, **forward.keywords)
        out, *others = results if isinstance(results, tuple) else (results,)
        context = out.grad_fn  # the node of a Python autograd function is the context of its backward
        if not hasattr(context, "_forward_cls"):
            raise NotImplementedError(f"{self.name}: the backward of flash_attn_func is no Python autograd function")
        dout = upstream_gradient(inputs[0].detach(), inputs[2])
        return partial(self.call_backward, out, dout, *[None for _ in others])

    @staticmethod
    def call_backward(out: Tensor, *gradients: Tensor | None) -> Any:
        """The backward of out's node. Up to PyTorch 2.11 the saved tensors are freed when out is."""
        context: Any = out.grad_fn
        return context._forward_cls.backward(context, *gradients)

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        if self.backward:
            return tuple(result[:3])
        return (result[0] if isinstance(result, tuple) else result,)


FA3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "flash_attn_3")
FA4 = ("flash_attn.cute",)


def _by_name(*rivals: Rival) -> dict[str, Rival]:
    return {rival.name: rival for rival in rivals}


RIVALS = _by_name(
    Mini("cuda"),
    Mini("cuda", arch=80),
    Mini("triton"),
    Mini("cpu"),
    Sdpa("FLASH_ATTENTION", SDPBackend.FLASH_ATTENTION),
    Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION),
    Sdpa("MATH", SDPBackend.MATH),
    Sdpa("SDPA", None),
    Flex(),
    Official("FA3", FA3),
    Official("FA4", FA4),
)
BACKWARD_RIVALS = _by_name(
    Mini("cuda", backward=True),
    Mini("cuda", backward=True, deterministic=True),
    Mini("triton", backward=True),
    Mini("cpu", backward=True),
    FlashAttention(),
    CuDnn(),
    CpuSdpa(),
    Flex(backward=True),
    Official("FA3", FA3, backward=True),
    Official("FA4", FA4, backward=True),
)


def select(names: list[str], known: Mapping[str, Rival] = RIVALS) -> list[Rival]:
    """The rivals of these names; an unknown name is an error that lists the known ones."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown implementation {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names]
