"""The rotation behind layers/rotary.py: its checks, the custom op, and the implementation in PyTorch's operators.

The op is what torch.compile and autograd see. CUDA tensors go to the Triton kernel of rotary_triton.py.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os

import torch
from torch import Tensor

from ..argument_checks import wrong_type


@torch.library.custom_op("flash_attn_mini::_apply_rotary", mutates_args=())
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> Tensor:
    """The rotated tensor; backwards with `conjugate`."""
    out = torch.empty_like(x)
    rotate(x, out, cos, sin, offset, offsets, cu_seqlens, interleaved, conjugate)
    return out


@apply_rotary.register_fake
def _(x: Tensor, *arguments: object) -> Tensor:
    return torch.empty_like(x)


def _keep_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    _, cos, sin, ctx.offset, offsets, cu_seqlens, ctx.interleaved, ctx.conjugate = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(cos, sin, offsets, cu_seqlens)  # type: ignore[arg-type]


def _backward(ctx: torch.autograd.function.FunctionCtx, dout: Tensor) -> tuple[Tensor | None, ...]:
    """A rotation's transpose is the rotation backwards."""
    cos, sin, offsets, cu_seqlens = ctx.saved_tensors  # type: ignore[attr-defined]
    dx = apply_rotary(
        dout,
        cos,
        sin,
        ctx.offset,  # type: ignore[attr-defined]
        offsets,
        cu_seqlens,
        ctx.interleaved,  # type: ignore[attr-defined]
        not ctx.conjugate,  # type: ignore[attr-defined]
    )
    return dx, None, None, None, None, None, None, None


apply_rotary.register_autograd(_backward, setup_context=_keep_for_backward)


# ---- the two implementations -----------------------------------------------------------------------------------------


def rotate(
    x: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Write the rotated `x` to `out`, which may be `x`."""
    if x.device.type == "cpu" or os.environ.get("FLASH_ATTN_MINI_CHECK", "0") not in ("", "0"):
        _check_positions(x, cos, offset, offsets, cu_seqlens)
    rotary_dim = 2 * cos.shape[1]
    if out is not x and rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    if x.device.type == "cuda" and _has_triton():
        from .rotary_triton import rotate as implementation
    else:
        implementation = rotate_by_torch
    implementation(x, out, cos, sin, offset, offsets, cu_seqlens, interleaved, conjugate)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def rotate_by_torch(
    x: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """As rotary_triton.rotate."""
    rows, half = cos.shape
    if x.numel() == 0 or half == 0:
        return
    positions = _positions(x, offset, offsets, cu_seqlens)
    in_table = ((positions >= 0) & (positions < rows))[..., None]
    positions = positions.clamp(0, rows - 1)
    compute = torch.promote_types(x.dtype, torch.float32)
    c = torch.where(in_table, cos[positions].to(compute), 1.0).unsqueeze(-2)  # [..., tokens, 1, half]
    s = torch.where(in_table, sin[positions].to(compute), 0.0).unsqueeze(-2)
    if conjugate:
        s = -s
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].to(compute), x[..., second].to(compute)
    out_a, out_b = a * c - b * s, a * s + b * c
    out[..., first] = out_a
    out[..., second] = out_b


def _positions(x: Tensor, offset: int, offsets: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each token, int64 ``[batch or 1, seqlen]`` or, with cu_seqlens, ``[total]``."""
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device)[None] + offset
        return positions if offsets is None else positions + offsets[:, None]
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    positions = token - cu_seqlens[sequence] + offset
    return positions if offsets is None else positions + offsets[sequence]


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> None:
    """Raise for arguments of `apply_rotary_emb` that are wrong whatever the tensors hold."""
    for name, value in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise wrong_type(name, getattr(value, "dtype", value), "a floating-point torch.Tensor")
    shape = "[batch, seqlen, nheads, headdim]" if cu_seqlens is None else "[total, nheads, headdim] with cu_seqlens"
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(f"flash_attn_mini: x has shape {list(x.shape)}; allowed: {shape}")
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"flash_attn_mini: cos and sin have shapes {list(cos.shape)} and {list(sin.shape)}; allowed: both "
            "[seqlen_ro, rotary_dim / 2]"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"flash_attn_mini: cos of {cos.shape[1]} columns rotates {2 * cos.shape[1]} features; allowed: at most "
            f"headdim, {x.shape[-1]}"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise NotImplementedError("flash_attn_mini: apply_rotary_emb gives cos and sin no gradient; detach them")
    if cu_seqlens is not None:
        _check_integers("cu_seqlens", cu_seqlens, (torch.int32,))
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"flash_attn_mini: cu_seqlens has shape {list(cu_seqlens.shape)}; allowed: [batch + 1]")
    if offsets is None:
        if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
            raise wrong_type("seqlen_offsets", offset, "an integer or a tensor")
        if offset < 0:
            raise ValueError(f"flash_attn_mini: seqlen_offsets is {offset}; allowed: 0 or more")
    else:
        _check_integers("seqlen_offsets", offsets, (torch.int32, torch.int64))
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if offsets.shape != (batch,):
            raise ValueError(f"flash_attn_mini: seqlen_offsets has shape {list(offsets.shape)}; allowed: [{batch}]")
    for name, other in (("cos", cos), ("sin", sin), ("seqlen_offsets", offsets), ("cu_seqlens", cu_seqlens)):
        if other is not None and other.device != x.device:
            raise ValueError(f"flash_attn_mini: {name} is on {other.device}; allowed: the device of x, {x.device}")
    if max_seqlen is not None and (isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt))):
        raise wrong_type("max_seqlen", max_seqlen, "an integer or None")
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    if longest is not None and longest + offset > cos.shape[0]:
        raise ValueError(
            f"flash_attn_mini: cos has {cos.shape[0]} rows; allowed: at least {longest + offset}, one for each position"
        )


def _check_integers(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise wrong_type(name, getattr(value, "dtype", value), f"a tensor of {allowed}")


def _check_positions(x: Tensor, cos: Tensor, offset: int, offsets: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError for cu_seqlens that do not divide the tokens, and positions that the table does not have."""
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != x.shape[0] or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(
                f"flash_attn_mini: cu_seqlens is {ends}; allowed: rising from 0 to the number of tokens, {x.shape[0]}"
            )
    if x.numel() == 0 or (cu_seqlens is None and offsets is None):
        return
    least, most = (int(extreme) for extreme in _positions(x, offset, offsets, cu_seqlens).aminmax())
    if least < 0 or most >= cos.shape[0]:
        raise ValueError(
            f"flash_attn_mini: tokens stand at positions {least} to {most}; allowed: 0 to {cos.shape[0] - 1}, the rows "
            "of cos"
        )
