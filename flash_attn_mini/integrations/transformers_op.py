"""Custom ops for a transformers model under torch.compile. They hide the values of a mask from the compiler.

The number of sequences in packed rows is such a value, and a traced program has no tensor of that size. So
`sequences_of` returns cu_seqlens with a place for every token, and, on the CPU, the number of places that are used.
`attend_to_sequences` is `flash_attn_varlen_func` on the used places.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops, schemas
from ..allocation import empty_contiguous_last, empty_out, lse_dtype
from ..namespace import CUSTOM_OPS, NAMESPACE, qualified
from ..options import Options, Sequences
from ..rng_state import draw_in_program
from ..score_mod import with_modified_rows
from ..transforms import autocast

_LENGTHS = "Tensor cu_seqlens, Tensor sizes"
_OPTIONS = f"{schemas.OPTIONS}, Tensor? rng_state"
_tags = (torch.Tag.pt2_compliant_tag,)
library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define("_check_mask(Tensor x, Tensor holds, str message) -> Tensor", tags=_tags)
library.define("_sequences_of_rows(Tensor begins) -> (Tensor cu_seqlens, Tensor sizes)", tags=_tags)
library.define(
    f"_attend_to_sequences(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_OPTIONS}) -> (Tensor out, Tensor softmax_lse)",
    tags=_tags,
)
library.define(
    "_attend_to_sequences_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    f" Tensor? dsoftmax_lse, {_LENGTHS}, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_tags,
)
FORWARD = CUSTOM_OPS._attend_to_sequences.default
BACKWARD = CUSTOM_OPS._attend_to_sequences_backward.default


def checked(x: Tensor, holds: Tensor, message: str) -> Tensor:
    """A copy of `x`. Where `holds`, a bool tensor of one element, is false, the program stops when it runs.

    Raises:
        NotImplementedError: With `message`, on the CPU; on a GPU a device-side assertion fails instead, without a wait.
    """
    return CUSTOM_OPS._check_mask(x, holds, message)  # type: ignore[no-any-return]


def sequences_of(begins: Tensor) -> tuple[Tensor, Tensor]:
    """The boundaries of the sequences of packed rows. Synchronises with the device.

    Args:
        begins: bool ``[batch, seqlen]``, true for the first token of each sequence, and of each row.

    Returns:
        cu_seqlens, int32 ``[batch * seqlen + 1]``: the first token of each sequence, then ``batch * seqlen`` in all
        other places. On the CPU int64 ``[2]``: the number of sequences, and the length of the longest.
    """
    return CUSTOM_OPS._sequences_of_rows(begins)  # type: ignore[no-any-return]


def attend_to_sequences(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, Tensor], options: Options) -> Tensor:
    """`flash_attn_varlen_func` for the result of `sequences_of`."""
    q, k, v = autocast(q), autocast(k), autocast(v)
    rng_state = draw_in_program(q, k, v) if options.dropout_p > 0 else None
    out, _ = with_modified_rows(lambda unmodified: FORWARD(q, k, v, *lengths, *unmodified, rng_state), options)
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, sizes, *options, rng_state = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, sizes, rng_state)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dsoftmax_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, softmax_lse, *lengths, rng_state = ctx.saved_tensors
    nothing = (None,) * (3 + len(ctx.options))
    if dout is None and dsoftmax_lse is None:
        return (None, None, None, *nothing)
    if dout is None:
        dout = torch.zeros_like(out)
    results = BACKWARD(dout, q, k, v, out, softmax_lse, dsoftmax_lse, *lengths, *ctx.options, rng_state)
    return (*results, *nothing)


# ---- the ops themselves ---------------------------------------------------------------------------------------------


def _check_mask(x: Tensor, holds: Tensor, message: str) -> Tensor:
    if holds.is_cuda:
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise NotImplementedError(message)
    return x.clone()


def _sequences_of_rows(begins: Tensor) -> tuple[Tensor, Tensor]:
    starts = begins.flatten().nonzero().flatten()
    total, number = begins.numel(), starts.numel()
    cu_seqlens = F.pad(starts, (0, total + 1 - number), value=total).to(torch.int32)
    return cu_seqlens, torch.tensor([number, int(cu_seqlens.diff().max()) if number else 0])


def _used(cu_seqlens: Tensor, sizes: Tensor, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fields of Sequences and Options, and rng_state."""
    number, longest = sizes.tolist()
    used = cu_seqlens[: number + 1]
    *fields, rng_state = options
    return Sequences(used, used, longest, longest), Options(*fields), rng_state


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sizes: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return ops.forward_without_graph(q, k, v, *_used(cu_seqlens, sizes, options))


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dsoftmax_lse: Tensor | None,
    cu_seqlens: Tensor,
    sizes: Tensor,
    *options: Any,
) -> tuple[Tensor | None, ...]:
    return ops.backward(dout, q, k, v, out, softmax_lse, dsoftmax_lse, *_used(cu_seqlens, sizes, options))[:3]


# ---- shapes for tracing ---------------------------------------------------------------------------------------------


def _check_mask_fake(x: Tensor, holds: Tensor, message: str) -> Tensor:
    return torch.empty_like(x)


def _sequences_of_rows_fake(begins: Tensor) -> tuple[Tensor, Tensor]:
    cu_seqlens = begins.new_empty(begins.shape[0] * begins.shape[1] + 1, dtype=torch.int32)
    return cu_seqlens, torch.empty(2, dtype=torch.int64, device="cpu")


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    total, nheads, _ = q.shape
    return empty_out(q, v), q.new_empty((nheads, total), dtype=lse_dtype(q))


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return empty_contiguous_last(q), empty_contiguous_last(k), empty_contiguous_last(v)


for _name, _run, _fake in (
    ("_check_mask", _check_mask, _check_mask_fake),
    ("_sequences_of_rows", _sequences_of_rows, _sequences_of_rows_fake),
    ("_attend_to_sequences", _forward, _forward_fake),
    ("_attend_to_sequences_backward", _backward, _backward_fake),
):
    for _dispatch_key in ("CPU", "CUDA"):
        library.impl(_name, _run, _dispatch_key)
    torch.library.register_fake(qualified(_name), _fake, lib=library)
torch.library.register_autograd(qualified("_attend_to_sequences"), _gradients, setup_context=_save, lib=library)
