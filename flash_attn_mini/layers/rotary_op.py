"""The rotation behind layers/rotary.py: the custom op with its derivatives, the two implementations, the checks.

The op is what torch.compile, autograd and torch.func see. CUDA tensors go to the Triton kernel of rotary_triton.py,
other tensors to PyTorch's operators.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from typing import Any

import torch
from torch import Tensor

from ..argument_checks import as_length, check_tensor, wrong_type
from ..namespace import CUSTOM_OPS, NAMESPACE, qualified
from ..ops import is_traced

library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define(
    "_apply_rotary(Tensor x, Tensor cos, Tensor sin, SymInt offset, Tensor? offsets, Tensor? cu_seqlens,"
    " bool interleaved, bool conjugate) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_operator = CUSTOM_OPS._apply_rotary.default


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *arguments: Any) -> Tensor:
    """The op with its derivatives; the arguments are those of its schema."""
    if is_traced(x, cos, sin):
        rotated: Tensor = _operator(x, cos, sin, *arguments)
    else:
        rotated = _Rotation.apply(x, cos, sin, *arguments)
    return rotated


def _apply_rotary(x: Tensor, *arguments: Any) -> Tensor:
    """The rotated tensor; rotated backwards with `conjugate`."""
    out = torch.empty_like(x)
    rotate(x, out, *arguments)
    return out


def _apply_rotary_fake(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x)


library.impl("_apply_rotary", _apply_rotary, "CompositeExplicitAutograd")
torch.library.register_fake(qualified("_apply_rotary"), _apply_rotary_fake, lib=library)


# ---- derivatives: a Function for eager code and torch.func, autograd of the op for compilers -------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.offset, offsets, cu_seqlens, ctx.interleaved, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin, offsets, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    """The transpose of a rotation is the rotation by the negative angle."""
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise _no_table_derivative()
    dx = None if dout is None else _of_saved(ctx, dout, not ctx.conjugate)
    return dx, None, None, None, None, None, None, None


class _Rotation(torch.autograd.Function):
    """The rotation as autograd sees it: linear in x, without a derivative with respect to cos and sin."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        rotated: Tensor = _operator(*arguments)
        return rotated

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tables for the derivatives of both modes."""
        _save(ctx, inputs, output)
        ctx.save_for_forward(*(inputs[i] for i in (1, 2, 4, 5)))

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, cos_tangent: Any, sin_tangent: Any, *others: Any) -> Tensor | None:
        """The tangent of a linear map is the map of the tangent."""
        if cos_tangent is not None or sin_tangent is not None:
            raise _no_table_derivative()
        return None if x_tangent is None else _of_saved(ctx, x_tangent, ctx.conjugate)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        """One call, or one call for each sample."""
        return _vmap(info, in_dims, *arguments)


def _of_saved(ctx: Any, x: Tensor, conjugate: bool) -> Tensor:
    cos, sin, offsets, cu_seqlens = ctx.saved_tensors
    return apply_rotary(x, cos, sin, ctx.offset, offsets, cu_seqlens, ctx.interleaved, conjugate)


def _no_table_derivative() -> NotImplementedError:
    return NotImplementedError("flash_attn_mini: apply_rotary_emb gives cos and sin no derivative; detach them")


def _vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    """torch.vmap over only x adds heads; over other tensors it calls the op once for each sample."""
    x_dim, *other_dims = in_dims
    if x_dim is not None and all(dim is None for dim in other_dims):
        x = x.movedim(x_dim, -3)  # [..., vmap, nheads, headdim]
        return apply_rotary(x.flatten(-3, -2), *arguments).unflatten(-2, x.shape[-3:-1]), x.dim() - 3
    calls = [
        [a if dim is None else a.select(dim, i) for a, dim in zip((x, *arguments), in_dims, strict=True)]
        for i in range(info.batch_size)
    ]
    return torch.stack([apply_rotary(*call) for call in calls]), 0


torch.library.register_autograd(qualified("_apply_rotary"), _backward, setup_context=_save, lib=library)
torch.library.register_vmap(qualified("_apply_rotary"), _vmap, lib=library)


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
    """Write the rotated features to `out`, which may be `x`, as rotary_triton.rotate does."""
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


def checked_offsets(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: Any, cu_seqlens: Tensor | None, max_seqlen: Any
) -> tuple[int, Tensor | None]:
    """Check the arguments of `apply_rotary_emb`, but not the values in tensors.

    Returns:
        The offset that all sequences share, and the integers ``[batch]`` to add to it, or None.
    """
    for name, value in (("x", x), ("cos", cos), ("sin", sin)):
        check_tensor(name, value)
        if not value.is_floating_point():
            raise wrong_type(name, value.dtype, "a floating-point torch.Tensor")
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
    if cu_seqlens is not None:
        _check_integers("cu_seqlens", cu_seqlens, (torch.int32,))
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"flash_attn_mini: cu_seqlens has shape {list(cu_seqlens.shape)}; allowed: [batch + 1]")
    offset, offsets = 0, None
    if isinstance(seqlen_offsets, Tensor):
        _check_integers("seqlen_offsets", seqlen_offsets, (torch.int32, torch.int64))
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if seqlen_offsets.shape not in ((), (batch,)):
            raise ValueError(
                f"flash_attn_mini: seqlen_offsets has shape {list(seqlen_offsets.shape)}; allowed: [{batch}], or a "
                "single number"
            )
        offsets = seqlen_offsets.expand(batch)
    else:
        offset = checked_size("seqlen_offsets", seqlen_offsets)
    for name, other in (("cos", cos), ("sin", sin), ("seqlen_offsets", offsets), ("cu_seqlens", cu_seqlens)):
        if other is not None and other.device != x.device:
            raise ValueError(f"flash_attn_mini: {name} is on {other.device}; allowed: the device of x, {x.device}")
    if max_seqlen is not None:
        max_seqlen = checked_size("max_seqlen", max_seqlen)
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    if longest is not None and longest + offset > cos.shape[0] and _has_tokens(x):
        raise ValueError(
            f"flash_attn_mini: cos has {cos.shape[0]} rows; allowed: at least {longest + offset}, one for each position"
        )
    return offset, offsets


def checked_size(name: str, value: Any) -> Any:
    """An integer from 0 up, from what `as_length` takes."""
    size = as_length(name, value)
    if size < 0:
        raise ValueError(f"flash_attn_mini: {name} is {size}; allowed: 0 or more")
    return size


def _has_tokens(x: Tensor) -> bool:
    """Whether `x` has a position to rotate, even if it has no head."""
    return all(size > 0 for size in x.shape[:-2])


def _check_integers(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise wrong_type(name, getattr(value, "dtype", value), f"a tensor of {allowed}")


def _check_positions(x: Tensor, cos: Tensor, offset: int, offsets: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError for cu_seqlens that do not divide the tokens, and for positions outside the table."""
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != x.shape[0] or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(
                f"flash_attn_mini: cu_seqlens is {ends}; allowed: rising from 0 to the number of tokens, {x.shape[0]}"
            )
    if not _has_tokens(x) or (cu_seqlens is None and offsets is None):
        return
    least, most = (int(extreme) for extreme in _positions(x, offset, offsets, cu_seqlens).aminmax())
    if least < 0 or most >= cos.shape[0]:
        raise ValueError(
            f"flash_attn_mini: the tokens have positions {least} to {most}; allowed: 0 to {cos.shape[0] - 1}, the rows "
            "of cos"
        )
