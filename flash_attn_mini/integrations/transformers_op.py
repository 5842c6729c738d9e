"""Custom ops for a transformers model under torch.compile. What depends on the values of a mask stays inside them.

The number of sequences in packed rows is such a value, and a traced program has no tensor of that size. `sequences_of`
therefore returns cu_seqlens with a place for every token, and the number of places that are used on the CPU.
`attend_to_sequences` is `flash_attn_varlen_func` on the used places.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_mini.autograd import below_autograd, in_forward, needs_grad, record, refuse_forward_mode
from flash_attn_mini.backends import backend_of_op, name_of_traced, traced_backend
from flash_attn_mini.ops import library, lse_dtype, run_backward, run_forward
from flash_attn_mini.options import Options, Sequences

_LENGTHS = "Tensor cu_seqlens, Tensor sizes"
_OPTIONS = (
    "float dropout_p, float softmax_scale, SymInt window_size_left, SymInt window_size_right, float softcap,"
    " str? backend"
)
_tags = (torch.Tag.pt2_compliant_tag,)
library.define("_check_mask(Tensor x, Tensor holds, str message) -> Tensor", tags=_tags)
library.define("_sequences_of_rows(Tensor begins) -> (Tensor cu_seqlens, Tensor sizes)", tags=_tags)
library.define(
    f"_attend_to_sequences(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_OPTIONS})"
    " -> (Tensor out, Tensor softmax_lse, Tensor rng_state)",
    tags=(*_tags, torch.Tag.nondeterministic_seeded),
)
library.define(
    "_attend_to_sequences_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    f" Tensor rng_state, {_LENGTHS}, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_tags,
)
_ops = torch.ops.flash_attn_mini
FORWARD = _ops._attend_to_sequences.default
BACKWARD = _ops._attend_to_sequences_backward.default

Three = tuple[Tensor, Tensor, Tensor]


def checked(x: Tensor, holds: Tensor, message: str) -> Tensor:
    """A copy of `x`. Where `holds`, a bool tensor of one element, is false, the program stops when it runs.

    Raises:
        NotImplementedError: With `message`, on the CPU; on a GPU a device-side assertion fails, so that nothing waits.
    """
    return _ops._check_mask(x, holds, message)  # type: ignore[no-any-return]


def sequences_of(begins: Tensor) -> tuple[Tensor, Tensor]:
    """Where the sequences of packed rows lie. Waits for the device.

    Args:
        begins: bool ``[batch, seqlen]``, true for the first token of each sequence, and of each row.

    Returns:
        cu_seqlens, int32 ``[batch * seqlen + 1]``: the first token of each sequence, then ``batch * seqlen`` in all
        other places. On the CPU int64 ``[2]``: the number of sequences, and the length of the longest.
    """
    return _ops._sequences_of_rows(begins)  # type: ignore[no-any-return]


def attend_to_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor, Tensor],
    dropout_p: float,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """`flash_attn_varlen_func` for the result of `sequences_of`. A right window of 0 is a causal mask."""
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    return FORWARD(q, k, v, *lengths, dropout_p, softmax_scale, *window_size, softcap, None)[0]  # type: ignore[no-any-return]


class _AttendToSequences(torch.autograd.Function):
    """The forward op with its gradient. Inputs: the arguments of the op."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sizes: Tensor, *options: Any) -> Three:
        """Run the op and save what the backward reads."""
        *numbers, backend = options
        backend = traced_backend(q.device, backend)
        out, softmax_lse, rng_state = in_forward(FORWARD, q, k, v, cu_seqlens, sizes, *numbers, backend)
        ctx.save_for_backward(q, k, v, out, softmax_lse, rng_state, cu_seqlens, sizes)
        ctx.options = (*numbers, name_of_traced(backend))
        ctx.mark_non_differentiable(softmax_lse, rng_state)
        return out, softmax_lse, rng_state

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *unused: Any) -> Any:
        """The gradients of q, k and v."""
        return (*BACKWARD(dout, *ctx.saved_tensors, *ctx.options), *(None,) * (2 + len(ctx.options)))


def _autograd(*arguments: Any) -> Any:
    refuse_forward_mode(arguments)
    if not needs_grad(arguments[:3]):
        return below_autograd(FORWARD, *arguments)
    return record(_AttendToSequences, *arguments)


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


def _used(cu_seqlens: Tensor, sizes: Tensor, options: tuple[Any, ...]) -> tuple[Sequences, Options]:
    number, longest = sizes.tolist()
    used = cu_seqlens[: number + 1]
    dropout_p, softmax_scale, left, right, softcap, backend = options
    arguments = Options(
        dropout_p, softmax_scale, right == 0, left, right, softcap, None, backend=backend_of_op(backend)
    )
    return Sequences(used, used, longest, longest), arguments


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sizes: Tensor, *options: Any) -> Three:
    out, softmax_lse, _, rng_state = run_forward(q, k, v, *_used(cu_seqlens, sizes, options))
    return out, softmax_lse, rng_state


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    rng_state: Tensor,
    cu_seqlens: Tensor,
    sizes: Tensor,
    *options: Any,
) -> Three:
    sequences, arguments = _used(cu_seqlens, sizes, options)
    drawn = rng_state if arguments.dropout_p > 0 else None
    dq, dk, dv, _ = run_backward(dout, q, k, v, out, softmax_lse, None, sequences, arguments, drawn)
    return dq, dk, dv


# ---- shapes for tracing ---------------------------------------------------------------------------------------------


def _check_mask_fake(x: Tensor, holds: Tensor, message: str) -> Tensor:
    return torch.empty_like(x)


def _sequences_of_rows_fake(begins: Tensor) -> tuple[Tensor, Tensor]:
    cu_seqlens = begins.new_empty(begins.shape[0] * begins.shape[1] + 1, dtype=torch.int32)
    return cu_seqlens, torch.empty(2, dtype=torch.int64, device="cpu")


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sizes: Tensor, *options: Any) -> Three:
    total, nheads, _ = q.shape
    drawn = 2 if options[0] > 0 else 0
    lse = q.new_empty((nheads, total), dtype=lse_dtype(q))
    return torch.empty_like(q), lse, q.new_empty(drawn, dtype=torch.int64)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Three:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


for _name, _run, _fake in (
    ("_check_mask", _check_mask, _check_mask_fake),
    ("_sequences_of_rows", _sequences_of_rows, _sequences_of_rows_fake),
    ("_attend_to_sequences", _forward, _forward_fake),
    ("_attend_to_sequences_backward", _backward, _backward_fake),
):
    for _dispatch_key in ("CPU", "CUDA"):
        library.impl(_name, _run, _dispatch_key)
    torch.library.register_fake(f"flash_attn_mini::{_name}", _fake, lib=library)
library.impl("_attend_to_sequences", _autograd, "Autograd")
