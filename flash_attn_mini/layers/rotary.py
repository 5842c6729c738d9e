"""Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864), under the official package's names.

A Triton kernel rotates CUDA tensors (rotary_triton.py), PyTorch's operators rotate other tensors. One custom op
contains both (rotary_op.py), so that torch.compile, autograd and torch.func see the same operator on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..argument_checks import as_flag, as_length, check_number, check_tensor
from ..ops import is_traced
from ..transforms import computes_values, is_plain
from .rotary_op import apply_rotary, checked_offsets, checked_size, rotate


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate q or k by the positions of its tokens.

    Each pair (a, b) of the first rotary_dim features becomes ``(a cos - b sin, a sin + b cos)``. The other features do
    not change. The arithmetic is float32 (float64 for float64 `x`) for any dtype of `cos` and `sin`.

    Args:
        x: ``[batch, seqlen, nheads, headdim]``, or with `cu_seqlens` ``[total, nheads, headdim]``. Any floating dtype,
            any strides.
        cos: ``[seqlen_ro, rotary_dim / 2]``, any floating dtype. Row p is for position p, rotary_dim at most headdim.
        sin: The same shape as `cos`.
        interleaved: Pairs are features (0, 1), (2, 3), ... (GPT-J); otherwise (0, rotary_dim / 2), ... (GPT-NeoX).
        inplace: Write the result to `x`. Autograd sees the change. If `x` is a leaf that requires a gradient, autograd
            allows no operator to change it: its values are replaced and the result is another tensor.
        seqlen_offsets: The position of the first token: one integer for all sequences (Python, NumPy or a tensor
            without dimensions), or an int32 or int64 tensor ``[batch]``.
        cu_seqlens: int32 ``[batch + 1]``: sequence b is rows cu[b] .. cu[b + 1] - 1 of `x`.
        max_seqlen: The length of the longest sequence, optional. It is only compared with the size of the table.

    Returns:
        A tensor like `x`; with `inplace` `x` itself, unless `x` is a leaf that requires a gradient. Differentiable in
        `x` any number of times, in reverse and forward mode; torch.vmap works.

    Raises:
        TypeError: For arguments of a wrong type or dtype.
        ValueError: For wrong shapes or devices, or a position outside the table. Positions that depend on a GPU tensor
            are checked under FLASH_ATTN_MINI_CHECK=1 only; without it, tokens outside the table are not rotated.
        NotImplementedError: From the backward, or from forward-mode differentiation, when a derivative with respect to
            `cos` or `sin` is requested.

    Example:
        >>> import torch
        >>> from flash_attn_mini.layers.rotary import apply_rotary_emb
        >>> angles = torch.outer(torch.arange(32), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> q = torch.randn(2, 20, 8, 64)
        >>> apply_rotary_emb(q, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([0, 12])).shape
        torch.Size([2, 20, 8, 64])
    """
    offset, offsets = checked_offsets(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    interleaved, inplace = as_flag("interleaved", interleaved), as_flag("inplace", inplace)
    if inplace and not _needs_grad(x, cos, sin) and not is_traced(x, cos, sin) and is_plain(x, cos, sin):
        rotate(x, x, cos, sin, offset, offsets, cu_seqlens, interleaved, False)
        return x
    rotated: Tensor = apply_rotary(x, cos, sin, offset, offsets, cu_seqlens, interleaved, False)
    return _write_back(rotated, x) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb  # an older name


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of a packed qkv in place. See `apply_rotary_emb`.

    Args:
        qkv: ``[batch, seqlen, 3, nheads, headdim]``, or with `num_heads_q` ``[batch, seqlen, num_heads_q + 2 *
            nheads_k, headdim]``.
        cos: ``[seqlen_ro, rotary_dim / 2]``, the table for q, and for k unless `cos_k` is given.
        sin: The same shape as `cos`.
        cos_k: Another table for k.
        sin_k: The same shape as `cos_k`.
        interleaved: As in `apply_rotary_emb`.
        seqlen_offsets: As in `apply_rotary_emb`.
        num_heads_q: The number of query heads, if the heads of q, k and v share one dimension, in this order.

    Returns:
        `qkv`. If `qkv` is a leaf that requires a gradient, another tensor with the same values.

    Raises:
        TypeError: If qkv is no tensor or num_heads_q is no integer.
        ValueError: For a qkv of another shape, or num_heads_q below 1.
        TypeError, ValueError, NotImplementedError: As `apply_rotary_emb`.

    Example:
        >>> import torch
        >>> from flash_attn_mini.layers.rotary import apply_rotary_emb_qkv_
        >>> angles = torch.outer(torch.arange(20), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> qkv = torch.randn(2, 20, 8 + 2 * 2, 64)  # 8 query heads, 2 key and 2 value heads
        >>> apply_rotary_emb_qkv_(qkv, angles.cos(), angles.sin(), num_heads_q=8) is qkv
        True
    """
    check_tensor("qkv", qkv)
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"flash_attn_mini: qkv has shape {list(qkv.shape)}; allowed: [batch, seqlen, 3, nheads, headdim]"
            )
    else:
        num_heads_q = as_length("num_heads_q", num_heads_q)
        if num_heads_q < 1:
            raise ValueError(f"flash_attn_mini: num_heads_q is {num_heads_q}; allowed: 1 or more")
        if qkv.dim() != 4 or qkv.shape[2] <= num_heads_q or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                f"flash_attn_mini: qkv has shape {list(qkv.shape)}; allowed: [batch, seqlen, nheads, headdim], "
                f"nheads = num_heads_q + 2 * nheads_k, with num_heads_q = {num_heads_q}"
            )

    def rotate_parts(qkv: Tensor) -> None:
        if num_heads_q is None:
            q, k = qkv[:, :, 0], qkv[:, :, 1]
        else:
            q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : (num_heads_q + qkv.shape[2]) // 2]
        apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
        apply_rotary_emb(
            k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets
        )

    return _in_place(rotate_parts, qkv)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of a packed kv in place. See `apply_rotary_emb`.

    Args:
        kv: ``[batch, seqlen, 2, nheads_k, headdim]``.
        cos: ``[seqlen_ro, rotary_dim / 2]``.
        sin: The same shape as `cos`.
        interleaved: As in `apply_rotary_emb`.
        seqlen_offsets: As in `apply_rotary_emb`.

    Returns:
        `kv`. If `kv` is a leaf that requires a gradient, another tensor with the same values.

    Raises:
        TypeError: If kv is no tensor.
        ValueError: For a kv of another shape.
        TypeError, ValueError, NotImplementedError: As `apply_rotary_emb`.

    Example:
        >>> import torch
        >>> from flash_attn_mini.layers.rotary import apply_rotary_emb_kv_
        >>> angles = torch.outer(torch.arange(20), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> apply_rotary_emb_kv_(torch.randn(2, 20, 2, 8, 64), angles.cos(), angles.sin()).shape
        torch.Size([2, 20, 2, 8, 64])
    """
    check_tensor("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(
            f"flash_attn_mini: kv has shape {list(kv.shape)}; allowed: [batch, seqlen, 2, nheads_k, headdim]"
        )

    def rotate_keys(kv: Tensor) -> None:
        apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)

    return _in_place(rotate_keys, kv)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The rotation with PyTorch's operators, in the dtype of its arguments. Tests of other projects compare with it.

    Args:
        x: ``[batch, seqlen, nheads, headdim]``.
        cos: ``[seqlen, rotary_dim / 2]`` or ``[batch, seqlen, rotary_dim / 2]``: one row for each token.
        sin: The same shape as `cos`.
        interleaved: As in `apply_rotary_emb`.

    Returns:
        A new tensor like `x`, in the dtype that PyTorch's type promotion gives.
    """
    rotary_dim = 2 * cos.shape[-1]
    pairs, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    together = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([together, rest], dim=-1)


class _Kept(NamedTuple):
    """Tables of an earlier call, and what they were computed from.

    Attributes:
        inv_freq: The frequencies, as an object.
        memory: Another tensor on the memory of inv_freq, which keeps its address from being used again.
        key: Everything else that decides the values of the tables, and the stream that wrote them.
        tables: float32 cos and sin for q, then for k.
    """

    inv_freq: Tensor
    memory: Tensor
    key: tuple[Any, ...]
    tables: tuple[Tensor, Tensor, Tensor, Tensor]


class RotaryEmbedding(nn.Module):
    """Rotates q and k of packed tensors in place. The tables of cos and sin grow with the positions in use.

    The angle of pair i at position p is ``p * inv_freq[i]``. The buffer inv_freq is float32 and holds ``base ** (-2 i /
    dim)`` until a user changes it. It keeps its values when the module is cast (``module.bfloat16()``).

    Later eager calls use the tables again if inv_freq has not changed since. Writes that autograd does not count
    (``inv_freq.data.mul_(2)``) take effect only after `reset_parameters`. Compiled and captured calls compute the rows
    of their positions again, and keep nothing.

    With `scale_base` (XPos: Sun et al., arXiv 2212.10554) the module also multiplies queries by ``s_i ** ((p - c) /
    scale_base)``, ``s_i = (2 i + 0.4 dim) / (1.4 dim)``, and divides keys by it, so that scores fall with the distance.
    The centre c is half of the positions of the first call. It does not change, so that keys in a cache stay valid when
    the table grows: decoding token by token gives the scores of a prefill. The official package moves the centre with
    each new table; scores within one table are the same. `reset_parameters` forgets the centre. Calls of fake tensors
    and torch.export do not choose it: if several programs share a cache, call the module once before the export.

    Args:
        dim: The number of features of a head to rotate, an even integer.
        base: The base of the angles, above 0.
        interleaved: As in `apply_rotary_emb`.
        scale_base: The length over which XPos scales, in positions, above 0; None for rotation without scaling.
        device: The device of the frequencies.

    Raises:
        TypeError: For arguments of a wrong type.
        ValueError: For a dim that is not even, or a number that is not above 0.

    Example:
        >>> import torch
        >>> from flash_attn_mini.layers.rotary import RotaryEmbedding
        >>> RotaryEmbedding(64)(torch.randn(2, 20, 3, 8, 64)).shape
        torch.Size([2, 20, 3, 8, 64])
    """

    inv_freq: Tensor
    _kept: _Kept | None = None
    _longest = 0  # positions of earlier eager calls

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = as_length("dim", dim)
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"flash_attn_mini: dim is {dim}; allowed: an even number of features, 2 or more")
        self.base = _positive("base", base)
        self.interleaved = as_flag("interleaved", interleaved)
        self.scale_base = None if scale_base is None else _positive("scale_base", scale_base)
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._centre: int | None = None

    def reset_parameters(self) -> None:
        """Compute the frequencies again, and forget the tables, their length and the centre of XPos."""
        self.inv_freq = self._frequencies(self.inv_freq.device)
        self._kept = self._centre = None
        self._longest = 0

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place.

        Args:
            qkv: As in `apply_rotary_emb_qkv_`. With `kv`: q ``[batch, seqlen, nheads, headdim]``.
            kv: ``[batch, seqlen, 2, nheads_k, headdim]``.
            seqlen_offset: The position of the first token, as in `apply_rotary_emb`.
            max_seqlen: The number of positions that the tables must have. Give it if seqlen_offset is a tensor and
                positions are beyond those of earlier eager calls: the module does not read tensors.
            num_heads_q: As in `apply_rotary_emb_qkv_`.

        Returns:
            qkv, or q and kv.

        Raises:
            ValueError: For a negative seqlen_offset or max_seqlen, or if an XPos factor does not fit float32: a
                position too far from the centre.
            TypeError, ValueError, NotImplementedError: As `apply_rotary_emb_qkv_` and `apply_rotary_emb_kv_`.
        """
        check_tensor("qkv", qkv)
        if qkv.dim() < 4:
            raise ValueError(f"flash_attn_mini: qkv has shape {list(qkv.shape)}; allowed: [batch, seqlen, ...]")
        first = 0 if isinstance(seqlen_offset, Tensor) else checked_size("seqlen_offset", seqlen_offset)
        if max_seqlen is not None:
            positions = checked_size("max_seqlen", max_seqlen)
        elif isinstance(seqlen_offset, Tensor):
            positions = max(qkv.shape[1], self._longest)
        else:
            positions = qkv.shape[1] + first
        centre = self._centre_for(positions, qkv)
        if self._keeps_tables(qkv):
            cos, sin, cos_k, sin_k = self._kept_tables(positions, qkv.device, centre)
        elif max_seqlen is not None or isinstance(seqlen_offset, Tensor):
            cos, sin, cos_k, sin_k = self._new_tables(0, positions, qkv.device, centre)
        else:
            cos, sin, cos_k, sin_k = self._new_tables(first, positions, qkv.device, centre)
            seqlen_offset = 0  # row 0 of these tables is for the first token
        if not torch.compiler.is_compiling() and positions > self._longest and not _is_rehearsal(qkv):
            self._longest = positions
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q=num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Move the module as nn.Module does. inv_freq keeps its values: a cast rounds them, and `to_empty` drops them.

        Memory that replaces a meta tensor has no values: they are computed again.
        """
        before = self._buffers.get("inv_freq")
        super()._apply(fn, recurse)
        if before is None or self.inv_freq is before:
            return self
        if before.is_meta and not self.inv_freq.is_meta:
            self.reset_parameters()
        else:
            with torch.inference_mode(False):
                self.inv_freq = before.to(self.inv_freq.device, copy=True)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no tables: their inv_freq is another tensor."""
        return {**self.__dict__, "_kept": None}

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        """The frequencies of base. No inference tensor, which would not count what is written to it."""
        with torch.inference_mode(False):
            exponent = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
            return torch.pow(self.base, -exponent)

    def _keeps_tables(self, qkv: Tensor) -> bool:
        """Whether tables may outlive this call, and those of earlier calls may serve it.

        Tensors of a trace, a mode, a transform or a CUDA graph are valid within it, and a CUDA graph would read tables
        that the module has replaced. Tables with a gradient have the graph of one call.
        """
        inv_freq = self.inv_freq
        return not (
            is_traced(qkv, inv_freq)
            or not is_plain(qkv, inv_freq)
            or inv_freq.requires_grad
            or inv_freq.is_inference()
            or (qkv.is_cuda and torch.cuda.is_current_stream_capturing())
        )

    def _kept_tables(
        self, positions: int, device: torch.device, centre: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tables of earlier calls, or new ones if those are too short or were computed from something else."""
        inv_freq, kept = self.inv_freq, self._kept
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        source = (inv_freq.data_ptr(), inv_freq.dtype, inv_freq._version, self.base, self.dim)
        key = (device, stream, *source, self.scale_base, centre)
        rows = positions
        if kept is not None and kept.inv_freq is inv_freq and kept.key == key:
            if kept.tables[0].shape[0] >= positions:
                return kept.tables
            rows += max(positions // 4, 64)  # decoding needs one row more in each step
            if centre is not None:
                rows = min(rows, centre + self._xpos_reach() + 1)
        with torch.inference_mode(False):  # autograd refuses to save inference tensors
            tables = self._new_tables(0, rows, device, centre)
            self._kept = _Kept(inv_freq, inv_freq.detach(), key, tables)
        return tables

    def _new_tables(
        self, first: int, stop: int, device: torch.device, centre: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """float32 cos and sin for q, then for k, of the positions first to stop - 1."""
        position = torch.arange(first, stop, device=device, dtype=torch.float32)
        angles = torch.outer(position, self._exact_frequencies(device))
        cos, sin = angles.cos(), angles.sin()
        if centre is None:
            return cos, sin, cos, sin
        scale = self._xpos_scale(position, centre)
        return cos * scale, sin * scale, cos / scale, sin / scale

    def _exact_frequencies(self, device: torch.device) -> Tensor:
        """inv_freq in float32, on a device."""
        given = self.inv_freq
        if given.is_meta and device.type != "meta":  # load_state_dict(assign=True) leaves it there
            return self._frequencies(device)
        exact = given.to(device, torch.float32)
        if given.dtype not in (torch.float16, torch.bfloat16) or given.shape[0] != self.dim // 2:
            return exact
        # The data were cast past _apply, as by the mixed precision of FSDP, and large positions multiply the error of
        # rounded frequencies. Those of base are known exactly.
        default, dtype = self._frequencies(device), torch.finfo(given.dtype)
        is_default = torch.isclose(exact, default, rtol=dtype.eps, atol=dtype.tiny * dtype.eps)
        return torch.where(is_default, default, exact)

    def _centre_for(self, positions: int, qkv: Tensor) -> int | None:
        """The centre of XPos, which the first call chooses; None without XPos."""
        if self.scale_base is None:
            return None
        centre = positions // 2 if self._centre is None else self._centre
        reach = self._xpos_reach()
        if max(centre, positions - 1 - centre) > reach:
            raise ValueError(
                f"flash_attn_mini: the XPos factors of {positions} positions around the centre {centre} do not fit "
                f"float32; allowed: at most {reach} positions from the centre. reset_parameters() and a first call "
                "with max_seqlen choose another centre"
            )
        if self._centre is None and not _is_rehearsal(qkv):
            self._centre = centre
        return centre

    def _xpos_reach(self) -> int:
        assert self.scale_base is not None
        return int(MAX_XPOS_EXPONENT * self.scale_base)

    def _xpos_scale(self, position: Tensor, centre: int) -> Tensor:
        """The factor of each query and pair, float32 ``[positions, dim / 2]``."""
        assert self.scale_base is not None
        feature = torch.arange(0, self.dim, 2, device=position.device, dtype=torch.float32)
        power = (position - centre) / self.scale_base
        return torch.pow((feature + 0.4 * self.dim) / (1.4 * self.dim), power[:, None])


MAX_XPOS_EXPONENT = math.log(torch.finfo(torch.float32).max) / math.log(1.4 / 0.4)
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # PyTorch 2.6 has only the latter


def _is_rehearsal(qkv: Tensor) -> bool:
    """Whether a call computes no values: it is exported, or its tensors are fake."""
    if torch.compiler.is_compiling():
        return bool(_is_exporting())
    return not computes_values(qkv)


def _positive(name: str, value: Any) -> float:
    check_number(name, value, "a number above 0")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"flash_attn_mini: {name} is {value}; allowed: a number above 0")
    return float(value)


def _in_place(rotate_parts: Callable[[Tensor], None], packed: Tensor) -> Tensor:
    """Rotate parts of a tensor, or of a copy if it is a leaf that requires a gradient."""
    if not _is_fixed_leaf(packed):
        rotate_parts(packed)
        return packed
    copy = packed.clone()
    rotate_parts(copy)
    return _write_back(copy, packed)


def _write_back(result: Tensor, x: Tensor) -> Tensor:
    """Give `x` the values of `result`. Returns `x`, or `result` if autograd lets no operator change `x`."""
    if not _is_fixed_leaf(x):
        return x.copy_(result)
    x.detach().copy_(result.detach())  # raises the version of x, so that autograd refuses an older x that it saved
    return result


def _is_fixed_leaf(x: Tensor) -> bool:
    return x.is_leaf and _needs_grad(x)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
