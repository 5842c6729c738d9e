"""Runs one case, dense or varlen, on a backend and checks its results against the bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_mini import use_backend
from flash_attn_mini.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward
from flash_attn_mini.reference import dropout_mask

from .bounds import assert_forward_accurate
from .cases import Case, make_dout, make_inputs, options_of
from .flash_bounds import assert_gradients_accurate_beside_flash
from .poison import Guard
from .varlen_cases import VarlenCase, expectation_options, make_batch


def official_options(case: Case | VarlenCase, device: str) -> dict[str, Any]:
    """The options as the official package's `_flash_attn_forward` takes them, which returns the rng_state."""
    options = options_of(case, device)
    left, right = options.pop("window_size")
    scale = options.pop("softmax_scale")
    return {
        **options,
        "softmax_scale": case.headdim**-0.5 if scale is None else scale,
        "window_size_left": left,
        "window_size_right": right,
    }


def expected_options(case: Case, rng_state: Tensor, device: str) -> dict[str, Any]:
    """The options as the reference takes them; the dropout mask follows from the returned rng_state."""
    options = options_of(case, device)
    if case.dropout_p > 0:
        sizes = (case.batch, case.nheads, case.seqlen_q, case.seqlen_k)
        options["dropout_mask"] = dropout_mask(rng_state, case.dropout_p, *sizes, device=device)
    return options


def described(case: Case | VarlenCase, dtype: torch.dtype, backend: str, described_seed: str) -> str:
    return f"{case.name} ({case.why})\n  {case.shape} dtype={dtype} backend={backend}\n  {described_seed}"


def check_dense(case: Case, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    """Forward and gradients."""
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, device, seed))
    dout = make_dout(case, dtype, device, seed)
    guard = Guard(q, k, v, dout)
    with use_backend(backend):
        out, lse, _, rng_state = _flash_attn_forward(q, k, v, **official_options(case, device), return_softmax=False)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    guard.check()
    options = expected_options(case, rng_state, device)
    where = described(case, dtype, backend, described_seed)
    with torch.no_grad():
        assert_forward_accurate(q, k, v, out, lse, case=where, **options)
    assert_gradients_accurate_beside_flash(q, k, v, dout, gradients, case=where, **options)


def check_varlen(
    case: VarlenCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """Forward and, without pages, gradients."""
    batch = make_batch(case, dtype, device, seed)
    inputs = [batch.q, batch.k, batch.v]
    guard = Guard(*inputs, batch.dout)
    leaves = [x.detach().requires_grad_(not case.page_size) for x in inputs]
    with use_backend(backend):
        out, lse, _, rng_state = _flash_attn_varlen_forward(
            *leaves, *batch.lengths, **official_options(case, device), block_table=batch.block_table
        )
    where = described(case, dtype, backend, described_seed)
    options = expectation_options(case, batch, rng_state)
    rows = (batch.q, batch.rows(batch.k), batch.rows(batch.v))
    assert_forward_accurate(*rows, out.detach(), lse.detach(), case=where, **options)
    if not case.page_size:
        gradients = torch.autograd.grad(out, leaves, batch.dout)
        assert_gradients_accurate_beside_flash(*rows, batch.dout, gradients, case=where, **options)
    guard.check()
