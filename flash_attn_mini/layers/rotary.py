"""Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864), under the official package's names.

A Triton kernel on CUDA tensors (rotary_triton.py), PyTorch's operators elsewhere; both behind one custom op
(rotary_op.py), so that torch.compile and autograd see the same thing everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..argument_checks import check_flags
from .rotary_op import apply_rotary, check, rotate


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

    Each pair (a, b) of the first rotary_dim features becomes ``(a cos - b sin, a sin + b cos)``; the others stay.
    Computed in float32 (float64 for float64) whatever the dtype of `cos` and `sin`.

    Args:
        x: ``[batch, seqlen, nheads, headdim]``, or with `cu_seqlens` ``[total, nheads, headdim]``; any strides.
        cos: ``[seqlen_ro, rotary_dim / 2]``, row p for position p; rotary_dim is at most headdim.
        sin: Likewise.
        interleaved: Pairs are features (0, 1), (2, 3), ... (GPT-J); otherwise (0, rotary_dim / 2), ... (GPT-NeoX).
        inplace: Write the result to `x`, which autograd sees. Of a leaf that requires a gradient, which autograd does
            not let anyone change, the values are replaced and the result is a tensor of its own.
        seqlen_offsets: The position of the first token, of all sequences or int32 or int64 ``[batch]`` of each.
        cu_seqlens: int32 ``[batch + 1]``: sequence b is rows cu[b] .. cu[b + 1] - 1 of `x`.
        max_seqlen: The longest sequence's length. Only compared with the size of the table; may be left out.

    Returns:
        Like `x`; with `inplace` `x` itself, but for a leaf. Differentiable (twice, too) in `x`.

    Raises:
        TypeError: For arguments of a wrong type or dtype.
        ValueError: For wrong shapes or devices, or a position that the table does not reach. Positions that depend on a
            GPU tensor are looked at under FLASH_ATTN_MINI_CHECK=1 only; without it, tokens past the table stay as they
            are.
        NotImplementedError: When `cos` or `sin` require a gradient.

    Example:
        >>> import torch
        >>> from flash_attn_mini.layers.rotary import apply_rotary_emb
        >>> angles = torch.outer(torch.arange(32), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> q = torch.randn(2, 20, 8, 64)
        >>> apply_rotary_emb(q, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([0, 12])).shape
        torch.Size([2, 20, 8, 64])
    """
    offset, offsets = (0, seqlen_offsets) if isinstance(seqlen_offsets, Tensor) else (seqlen_offsets, None)
    check(x, cos, sin, offset, offsets, cu_seqlens, max_seqlen)
    check_flags(interleaved=interleaved, inplace=inplace)
    if inplace and not torch.compiler.is_compiling() and not (torch.is_grad_enabled() and x.requires_grad):
        rotate(x, x, cos, sin, offset, offsets, cu_seqlens, interleaved, False)
        return x
    rotated: Tensor = apply_rotary(x, cos, sin, offset, offsets, cu_seqlens, interleaved, False)
    return _write_back(rotated, x) if inplace else rotated


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
    """`apply_rotary_emb` of q and k within qkv, in place.

    Args:
        qkv: ``[batch, seqlen, 3, nheads, headdim]``, or with `num_heads_q` ``[batch, seqlen, num_heads_q + 2 *
            nheads_k, headdim]``.
        cos: As in `apply_rotary_emb`, like the other arguments that are not named here.
        sin: Likewise.
        cos_k: Another table for k.
        sin_k: Likewise.
        interleaved: Likewise.
        seqlen_offsets: Likewise.
        num_heads_q: The number of query heads where q, k and v lie one after the other along the heads.

    Returns:
        `qkv`.

    Raises:
        ValueError: For a qkv of another shape.
        TypeError, ValueError, NotImplementedError: As `apply_rotary_emb`.
    """
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"flash_attn_mini: qkv has shape {list(qkv.shape)}; allowed: [batch, seqlen, 3, nheads, headdim]"
            )
    elif qkv.dim() != 4 or qkv.shape[2] <= num_heads_q or (qkv.shape[2] - num_heads_q) % 2:
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
    """`apply_rotary_emb` of k within kv, in place.

    Args:
        kv: ``[batch, seqlen, 2, nheads_k, headdim]``.
        cos: As in `apply_rotary_emb`, like the other arguments.
        sin: Likewise.
        interleaved: Likewise.
        seqlen_offsets: Likewise.

    Returns:
        `kv`.

    Raises:
        ValueError: For a kv of another shape.
        TypeError, ValueError, NotImplementedError: As `apply_rotary_emb`.
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(
            f"flash_attn_mini: kv has shape {list(kv.shape)}; allowed: [batch, seqlen, 2, nheads_k, headdim]"
        )

    def rotate_keys(kv: Tensor) -> None:
        apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)

    return _in_place(rotate_keys, kv)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The rotation in PyTorch's operators alone, in the dtype of its arguments: what others' tests compare with.

    Args:
        x: ``[batch, seqlen, nheads, headdim]``.
        cos: ``[seqlen, rotary_dim / 2]`` or ``[batch, seqlen, rotary_dim / 2]``: a row for each token.
        sin: Likewise.
        interleaved: As in `apply_rotary_emb`.

    Returns:
        A new tensor like `x`, in the dtype that PyTorch promotes those of the arguments to.
    """
    rotary_dim = 2 * cos.shape[-1]
    pairs, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    together = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([together, rest], dim=-1)


class RotaryEmbedding(nn.Module):
    """Rotates q and k within packed tensors, in place, by tables of angles that grow with the sequences seen.

    The angle of pair i at position p is ``p * base ** (-2 i / dim)``. With `scale_base`, the rotation also scales
    (XPos: Sun et al., arXiv 2212.10554), keys by the inverse of what queries are scaled by.

    Args:
        dim: How many features of a head are rotated.
        base: Of the angles.
        interleaved: As in `apply_rotary_emb`.
        scale_base: For XPos; None = without.
        device: Of the frequencies.

    Example:
        >>> import torch
        >>> from flash_attn_mini.layers.rotary import RotaryEmbedding
        >>> RotaryEmbedding(64)(torch.randn(2, 20, 3, 8, 64)).shape
        torch.Size([2, 20, 3, 8, 64])
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

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
            qkv: As in `apply_rotary_emb_qkv_`; beside `kv` q ``[batch, seqlen, nheads, headdim]``.
            kv: ``[batch, seqlen, 2, nheads_k, headdim]``.
            seqlen_offset: As in `apply_rotary_emb`.
            max_seqlen: How many positions there may be; needed where seqlen_offset is a tensor that goes past those
                of before.
            num_heads_q: As in `apply_rotary_emb_qkv_`.

        Returns:
            qkv, or q and kv.

        Raises:
            TypeError, ValueError, NotImplementedError: As `apply_rotary_emb_qkv_` and `apply_rotary_emb_kv_`.
        """
        positions = qkv.shape[1] + (seqlen_offset if isinstance(seqlen_offset, int) else 0)
        cos, sin, cos_k, sin_k = self._tables_for(positions if max_seqlen is None else max_seqlen, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q=num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _tables_for(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos and sin for q, then for k, of at least so many positions, where `like` is; in float32 for any dtype."""
        tables = self._tables
        if (
            tables is None
            or tables[0].shape[0] < positions
            or tables[0].device != like.device
            or (tables[0].is_inference() and not torch.is_inference_mode_enabled())  # autograd takes none of those
        ):
            # In float32, whatever a cast of the whole model has made of the buffer: positions are large numbers.
            exact = self.inv_freq.dtype == torch.float32
            frequencies = self.inv_freq.to(like.device) if exact else self._frequencies(like.device)
            position = torch.arange(positions, device=like.device, dtype=torch.float32)
            angles = torch.outer(position, frequencies)
            cos, sin = angles.cos(), angles.sin()
            scale = torch.ones_like(cos)
            if self.scale_base is not None:
                feature = torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float32)
                power = (position - positions // 2) / self.scale_base
                scale = ((feature + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
            tables = self._tables = (cos * scale, sin * scale, cos / scale, sin / scale)
        return tables


def _in_place(rotate_parts: Callable[[Tensor], None], packed: Tensor) -> Tensor:
    """Rotate parts of a tensor; of a leaf that requires a gradient, parts of a copy."""
    if not _is_fixed_leaf(packed):
        rotate_parts(packed)
        return packed
    copy = packed.clone()
    rotate_parts(copy)
    return _write_back(copy, packed)


def _write_back(result: Tensor, x: Tensor) -> Tensor:
    """Give `x` the values of `result`, and return the one of them that has the gradient."""
    if not _is_fixed_leaf(x):
        return x.copy_(result)
    x.detach().copy_(result.detach())  # autograd counts it as a change of x, so nothing saved before is misused
    return result


def _is_fixed_leaf(x: Tensor) -> bool:
    return x.is_leaf and x.requires_grad and torch.is_grad_enabled()
