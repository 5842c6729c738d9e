"""Runs a case of key_ranges on a backend and checks its results and gradients against the bounds.

Rows that see no key hold NaN or infinity in q and dout: that reaches no result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini import ops
from flash_attn_mini.argument_checks import checked_options
from flash_attn_mini.options import Options, Sequences
from flash_attn_mini.reference import dropout_mask, dropout_masks_varlen

from .bounds import assert_forward_accurate, rows_without_keys
from .cases import make_dout, make_inputs, options_of
from .flash_bounds import assert_gradients_accurate_beside_flash
from .key_range_cases import KeyRangeCase, make_key_ranges
from .poison import Guard
from .sink_checks import check_sink_gradient, draw_sinks
from .varlen_cases import VarlenCase, make_batch


def results_and_gradients(
    leaves: dict[str, Tensor], dout: Tensor, sequences: Sequences | None, options: Options
) -> dict[str, Tensor]:
    """out, lse, rng_state with dropout, and the gradient of each leaf: "dq" of "q". The options hold other leaves."""
    out, lse, rng_state, _ = ops.forward(leaves["q"], leaves["k"], leaves["v"], sequences, options)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    results = {"out": out.detach(), "lse": lse.detach()}
    results.update({f"d{name}": x for name, x in zip(leaves, gradients, strict=True)})
    if rng_state is not None and options.dropout_p > 0:
        results["rng_state"] = rng_state
    return results


@dataclass
class RangedCall:
    """The tensors and options of a case, as ops.forward takes them."""

    case: KeyRangeCase
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sequences: Sequences | None
    options: dict[str, Any]  # without key_ranges and the sink
    key_ranges: Tensor
    sinks: Tensor | None

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor] | None:
        return None if self.sequences is None else (self.sequences.cu_seqlens_q, self.sequences.cu_seqlens_k)

    def keyless(self) -> Tensor:
        """bool ``[..., rows, nheads]``: of the rows of q, those that see no key."""
        causal, window_size = self.options["causal"], self.options["window_size"]
        keyless = rows_without_keys(self.q, self.k, self.cu_seqlens, causal, window_size, self.key_ranges)
        return keyless.transpose(-1, -2).expand(self.q.shape[:-1])

    def run(self, backend: str, **changes: Any) -> dict[str, Tensor]:
        """The results by name; changes: other tensors or options (q, dout, key_ranges, causal, ...)."""
        given = {"key_ranges": self.key_ranges, "deterministic": True, **self.options, **changes}
        tensors = {name: given.pop(name, getattr(self, name)) for name in ("q", "k", "v", "dout", "sinks")}
        dout = tensors.pop("dout")
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
        options = checked_options(
            *(leaves[x] for x in "qkv"), backend=backend, learnable_sink=leaves.get("sinks"), **given
        )
        return results_and_gradients(leaves, dout, self.sequences, options)

    def expectation(self, rng_state: Tensor | None) -> dict[str, Any]:
        """Options of bounds.py but for the sink."""
        options = {"cu_seqlens": self.cu_seqlens, "key_ranges": self.key_ranges, **self.options}
        if rng_state is not None:
            p, nheads = self.options["dropout_p"], self.q.shape[-2]
            if self.cu_seqlens is not None:
                options["dropout_mask"] = dropout_masks_varlen(rng_state, p, nheads, *self.cu_seqlens)
            else:
                sizes = (self.q.shape[0], nheads, self.q.shape[1], self.k.shape[1])
                options["dropout_mask"] = dropout_mask(rng_state, p, *sizes, device=self.q.device)
        return options


def make_ranged_call(case: KeyRangeCase, dtype: torch.dtype, device: str, seed: int) -> RangedCall:
    of, sequences = case.of, None
    if isinstance(of, VarlenCase):
        batch = make_batch(of, dtype, device, seed)
        q, k, v, dout = batch.q, batch.k, batch.v, batch.dout
        sequences = Sequences(*batch.lengths)
    else:
        q, k, v = make_inputs(of, dtype, device, seed)
        dout = make_dout(of, dtype, device, seed)
    sinks = draw_sinks((of.nheads,), dtype, device, seed) if case.sinks else None
    return RangedCall(
        case, q, k, v, dout, sequences, options_of(of, device), make_key_ranges(case, device, seed), sinks
    )


def check_key_ranges(
    case: KeyRangeCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """Forward and gradients, with NaN or infinity in the rows that see nothing."""
    call = make_ranged_call(case, dtype, device, seed)
    guard = Guard(call.q, call.k, call.v, call.dout, call.key_ranges)
    where = f"{case.of.name} ({case.of.why})\n  {case.shape} dtype={dtype} backend={backend}\n  {described_seed}"
    keyless = call.keyless()[..., None]
    bad = (math.nan, math.inf, -math.inf)[seed % 3]
    results = call.run(backend, q=call.q.masked_fill(keyless, bad), dout=call.dout.masked_fill(keyless, bad))
    guard.check()
    options, inputs = call.expectation(results.get("rng_state")), (call.q, call.k, call.v)
    known = options if call.sinks is None else {"sinks": call.sinks, **options}
    assert_forward_accurate(*inputs, results["out"], results["lse"], case=where, **known)
    gradients = (results["dq"], results["dk"], results["dv"])
    assert_gradients_accurate_beside_flash(*inputs, call.dout, gradients, case=where, **known)
    if call.sinks is not None:
        check_sink_gradient(results["dsinks"], inputs, call.sinks, call.dout, None, where, **options)


Results = dict[str, Tensor]


def assert_same_bits(got: Results, expected: Results, where: object) -> None:
    for name, x in expected.items():
        assert torch.equal(got[name].view(torch.uint8), x.view(torch.uint8)), f"{name} differs, {where}"
