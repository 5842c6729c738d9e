"""Calls of torch.nn.functional.scaled_dot_product_attention: the list that every test of sdpa.py draws from."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .bounds import FLOOR, TIMES_PYTORCH, TIMES_PYTORCH_GRADIENT, Accuracy, accuracy, refuse
from .versions import TORCH

BATCH = 2
CPU_HAS_GROUPED_HEADS = TORCH >= (2, 11)  # older versions of PyTorch select math on the CPU
Results = tuple[Tensor, ...]  # out, dq, dk, dv


@dataclass(frozen=True)
class SdpaCase:
    """One call; `make` draws its tensors."""

    name: str
    seqlen_q: int = 37
    seqlen_k: int = 37
    nheads: int = 4
    nheads_k: int = 4
    headdim: int = 32
    headdim_v: int = 0  # 0: that of q
    is_causal: bool = False
    scale: float | None = None
    mask: str = ""  # bool, hidden (rows without a key), float, broadcast, keys (one row), minus_inf
    layout: str = "bhsd"  # bhsd, bshd, packed, expanded, last (strided last dimension)
    rank: int = 4
    is_ours: bool = True  # on every device where PyTorch selects a fused op
    is_ours_on_cpu: bool = False  # the same on a CPU

    def make(self, device: str, dtype: torch.dtype, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and a gradient of out."""
        headdim_v = self.headdim_v or self.headdim

        def tensor(nheads: int, seqlen: int, headdim: int, layout: str = "bhsd") -> Tensor:
            x = torch.randn(BATCH, nheads, seqlen, headdim, generator=draw).to(device, dtype)
            if layout == "bshd":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            elif layout == "packed":
                x = x.new_zeros(BATCH, seqlen, 3, nheads, headdim).transpose(1, 3)[:, :, 1].copy_(x)
            elif layout == "expanded":
                x = x[:, :1].expand(x.shape)
            elif layout == "last":
                x = x.mT.contiguous().mT
            return x if self.rank == 4 else x[0]

        q = tensor(self.nheads, self.seqlen_q, self.headdim, self.layout)
        k = tensor(self.nheads_k, self.seqlen_k, self.headdim, self.layout)
        v = tensor(self.nheads_k, self.seqlen_k, headdim_v, self.layout)
        return q, k, v, tensor(self.nheads, self.seqlen_q, headdim_v)

    def options(self, device: str, dtype: torch.dtype, draw: torch.Generator) -> dict[str, Any]:
        """The keyword arguments of the call."""
        options: dict[str, Any] = {"is_causal": self.is_causal}
        if self.scale is not None:
            options["scale"] = self.scale
        if self.nheads != self.nheads_k:
            options["enable_gqa"] = True
        if self.mask:
            options["attn_mask"] = self.make_mask(draw, dtype).to(device)
        return options

    def make_mask(self, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
        shapes = {"broadcast": (self.seqlen_q, self.seqlen_k), "keys": (BATCH, 1, 1, self.seqlen_k)}
        mask = torch.randn(shapes.get(self.mask, (BATCH, 1, self.seqlen_q, self.seqlen_k)), generator=draw)
        visible = mask > -0.5
        if self.mask in ("hidden", "minus_inf"):
            visible[..., ::4, :] = False
        if self.mask == "minus_inf":
            return mask.masked_fill(~visible, -math.inf).to(dtype)
        return visible if self.mask in ("bool", "hidden", "keys") else mask.to(dtype)


CASES = [
    SdpaCase("plain"),
    SdpaCase("causal", is_causal=True),
    SdpaCase("causal, more queries than keys", 50, 21, is_causal=True),
    SdpaCase("causal, more keys than queries", 21, 50, is_causal=True),
    SdpaCase("causal, one query", 1, 40, is_causal=True),
    SdpaCase("causal, one key", 40, 1, is_causal=True),
    SdpaCase("cross-attention", 64, 77, headdim=40),
    SdpaCase("one query", 1, 40),
    SdpaCase("long", 300, 260, headdim=64),
    SdpaCase("scale", scale=0.3),
    SdpaCase("negative scale", scale=-0.3, is_causal=True),
    SdpaCase("scale 0", scale=0.0),
    SdpaCase("grouped heads", nheads=6, nheads_k=2),
    SdpaCase("grouped heads, causal", 33, 33, nheads=4, nheads_k=1, is_causal=True),
    SdpaCase("odd head dim", headdim=13),
    SdpaCase("head dim 256", 20, 20, headdim=256),
    SdpaCase("rows before heads", layout="bshd", is_causal=True),
    SdpaCase("rows before heads, more keys than queries", 21, 50, layout="bshd", is_causal=True),
    SdpaCase("packed", layout="packed"),
    SdpaCase("expanded", layout="expanded"),
    SdpaCase("expanded, causal, more keys than queries", 21, 50, layout="expanded", is_causal=True),
    SdpaCase("strided last dimension", layout="last", is_ours=False),  # PyTorch selects math
    SdpaCase("three dimensions", rank=3, is_ours=False),  # math on the CPU
    SdpaCase("bool mask", mask="bool"),
    SdpaCase("bool mask, rows without keys", 50, 64, mask="hidden"),
    SdpaCase("bool mask of keys, one query", 1, 40, mask="keys"),
    SdpaCase("bool mask of keys, grouped heads", 33, 70, nheads=6, nheads_k=2, mask="keys"),
    SdpaCase("float mask", mask="float"),
    SdpaCase("float mask, rows without keys", 40, 33, mask="minus_inf"),
    SdpaCase("mask for all heads and samples", mask="broadcast"),
    SdpaCase("mask, scale 0", mask="float", scale=0.0),
    SdpaCase("mask, rows before heads", mask="float", layout="bshd"),
    SdpaCase("mask, head dim 264", 20, 20, headdim=264, mask="float", is_ours=False, is_ours_on_cpu=True),
    SdpaCase("head dim 264", 20, 20, headdim=264, is_ours=False, is_ours_on_cpu=True),
    SdpaCase("head dim 512, causal", 40, 40, headdim=512, is_causal=True, is_ours=False, is_ours_on_cpu=True),
    SdpaCase("head dim 520", 20, 20, headdim=520, is_ours=False),
    SdpaCase("other head dim of v", headdim_v=16, is_ours=False),
    SdpaCase("scale NaN", scale=math.nan, is_ours=False),
]


def differentiated(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], grad_out: Tensor, **options: Any
) -> Results:
    """out, dq, dk and dv of ``function(q, k, v, **options)``."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    return out, *torch.autograd.grad(out, leaves, grad_out)


@contextlib.contextmanager
def math_backend() -> Iterator[None]:
    """SDPA's math backend with every intermediate result in the dtype of its inputs."""
    switch = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    was_allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    switch(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        switch(was_allowed)


def by_math(tensors: tuple[Tensor, ...], grad_out: Tensor, **options: Any) -> Results:
    """The results of SDPA's math backend."""
    with math_backend():
        return differentiated(torch.nn.functional.scaled_dot_product_attention, tensors, grad_out, **options)


def exact(tensors: tuple[Tensor, ...], grad_out: Tensor, **options: Any) -> Results:
    """The results of SDPA's math backend in float64."""
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options = options | {"attn_mask": options["attn_mask"].double()}
    return by_math(tuple(x.double() for x in tensors), grad_out.double(), **options)


def without_rounding_of_out(
    got: Results,
    tensors: tuple[Tensor, ...],
    grad_out: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Results:
    """``got`` less what the rounding of its out adds to dq and dk, because a flash backward computes delta from out.

    That is computed in float64, so the bound holds for every other error, also for those of out that are larger than a
    rounding. Where one key has most of the probability, that rounding can exceed three times the error of the math
    backend.
    """
    q, k, v, dout = (x.double() for x in (*tensors, grad_out))
    groups = (k.shape[-3], q.shape[-3] // k.shape[-3] if enable_gqa else 1)
    k_of_q, v_of_q = (x.repeat_interleave(groups[1], dim=-3) for x in (k, v))
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k_of_q.mT * factor
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    p = scores.softmax(-1).nan_to_num()
    out = p @ v_of_q
    half_ulp = out.abs() * (torch.finfo(got[0].dtype).eps / 2)  # at least
    rounding = (out - got[0].double()).clamp(-half_ulp, half_ulp)
    ds = p * (dout * rounding).sum(-1, keepdim=True) * factor
    dq, dk = ds @ k_of_q, (ds.mT @ q).unflatten(-3, groups).sum(-3)
    return got[0], (got[1].double() - dq).to(got[1].dtype), (got[2].double() - dk).to(got[2].dtype), got[3]


def assert_accurate(
    case: str,
    got: Results,
    tensors: tuple[Tensor, ...],
    grad_out: Tensor,
    *,
    is_flash: bool = False,
    **options: Any,
) -> None:
    """Fail unless the results are about as accurate as the math backend's in the same dtype.

    is_flash: the backward computed delta from out, whose rounding the bound does not count.
    """
    expected, pytorch = exact(tensors, grad_out, **options), by_math(tensors, grad_out, **options)
    if is_flash:
        got = without_rounding_of_out(got, tensors, grad_out, **options)
    assert_as_accurate(case, got, expected, pytorch, tensors[0].dtype)


def assert_as_accurate(case: str, got: Results, expected: Results, pytorch: Results, dtype: torch.dtype) -> None:
    """Fail unless the errors of ``got`` are within a small factor of PyTorch's."""
    found: list[Accuracy] = []
    for name, x, true, theirs in zip(("out", "dq", "dk", "dv"), got, expected, pytorch, strict=True):
        assert x.shape == true.shape, f"{name} has shape {list(x.shape)}, not {list(true.shape)}; case {case}"
        assert x.dtype == theirs.dtype, f"{name} has dtype {x.dtype}, not {theirs.dtype}; case {case}"
        if true.isnan().any():
            assert x.isnan().equal(true.isnan()), f"{name} has other NaN than the math backend; case {case}"
            continue
        size = max(1.0, true.abs().max().item()) if dtype == torch.float64 and true.numel() else 1.0
        times = TIMES_PYTORCH if name == "out" else TIMES_PYTORCH_GRADIENT
        found.append(accuracy(name, x, true, theirs, FLOOR[dtype] * size, times))
    refuse([x for x in found if not x.passed], f"\n  case {case}")
