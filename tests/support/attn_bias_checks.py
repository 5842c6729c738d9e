"""Runs a case of attn_bias on a backend and checks its results and gradients against the bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini.argument_checks import checked_options
from flash_attn_mini.reference import attention_reference, dropout_mask

from .attn_bias_cases import AttnBiasCase, make_attn_bias
from .bounds import FLOOR, TIMES_PYTORCH_GRADIENT, accuracy, assert_forward_accurate, pytorch_attention, refuse
from .cases import make_dout, make_inputs, options_of
from .flash_bounds import (
    assert_gradients_accurate_beside_flash,
    deviation_of_bias_gradient,
    flash_bias_gradient,
)
from .key_range_cases import KeyRangeCase, make_key_ranges
from .key_range_checks import results_and_gradients
from .poison import Guard
from .sink_checks import check_sink_gradient, draw_sinks

DEVIATIONS = 4.0  # standard deviations that rounding may add
LOW_LSE, ERROR_OF_LOW_LSE = -(2.0**26), 4e-4  # kLowest in csrc/common/attn_bias.h; relative


@dataclass
class BiasedCall:
    """The tensors and options of a case, as ops.forward takes them."""

    case: AttnBiasCase
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    attn_bias: Tensor
    sinks: Tensor | None
    options: dict[str, Any]  # without attn_bias and the sink

    def run(self, backend: str, **changes: Any) -> dict[str, Tensor]:
        """The results by name; changes: other tensors or options (q, dout, attn_bias, causal, ...)."""
        given = {"deterministic": True, **self.options, **changes}
        names = ("q", "k", "v", "dout", "sinks", "attn_bias")
        tensors = {name: given.pop(name, getattr(self, name)) for name in names}
        dout, bias = tensors.pop("dout"), tensors.pop("attn_bias")
        if bias is not None and bias.is_floating_point():
            tensors["bias"] = bias
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
        bias = leaves.get("bias", bias)
        options = checked_options(
            *(leaves[x] for x in "qkv"), backend=backend, learnable_sink=leaves.get("sinks"), attn_bias=bias, **given
        )
        return results_and_gradients(leaves, dout, None, options)

    def expectation(self, rng_state: Tensor | None) -> dict[str, Any]:
        """Options of bounds.py but for the sink and attn_bias."""
        options = dict(self.options)
        if rng_state is not None:
            sizes = (self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1])
            options["dropout_mask"] = dropout_mask(rng_state, self.options["dropout_p"], *sizes, device=self.q.device)
        return options


def make_biased_call(case: AttnBiasCase, dtype: torch.dtype, device: str, seed: int) -> BiasedCall:
    of = case.of
    options = options_of(of, device)
    if case.key_ranges is not None:
        ranges = KeyRangeCase(of, case.key_ranges, per_batch=case.per_batch, per_head=seed % 2 == 0)
        options["key_ranges"] = make_key_ranges(ranges, device, seed)
    return BiasedCall(
        case,
        *make_inputs(of, dtype, device, seed),
        make_dout(of, dtype, device, seed),
        make_attn_bias(case, dtype, device, seed),
        draw_sinks((of.nheads,), dtype, device, seed) if case.sinks else None,
        options,
    )


def check_bias_gradient(
    got: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    attn_bias: Tensor,
    dout: Tensor,
    where: str,
    **options: Any,
) -> None:
    """Within the bound of PyTorch's own error, or of its error with FlashAttention's formula."""

    def gradient(attention: Any, dtype: torch.dtype) -> Tensor:
        leaf = attn_bias.detach().to(dtype).requires_grad_()
        out, _ = attention(*(x.to(dtype) for x in inputs), attn_bias=leaf, **options)
        return torch.autograd.grad(out, leaf, dout.to(out.dtype))[0]

    assert got.shape == attn_bias.shape, f"{list(got.shape)}, {where}"
    assert got.dtype == attn_bias.dtype, f"{got.dtype}, {where}"
    if got.numel() == 0 or inputs[0].numel() == 0:
        assert not got.any(), where
        return
    dtype = inputs[0].dtype
    expected, pytorch = gradient(attention_reference, torch.float64), gradient(pytorch_attention, dtype)
    flash = flash_bias_gradient(*inputs, dout, attn_bias=attn_bias, **options)
    # The rounding of a sum of this many numbers.
    summed = inputs[0].shape[0] * inputs[0].shape[2] * inputs[0].shape[1] * attn_bias.shape[3] / attn_bias.numel()
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    floor = FLOOR[dtype] + wide * summed * float(dout.abs().max()) * float(inputs[2].abs().max())
    with_deviations = floor
    if summed > 1:  # rows share a bias
        deviation = deviation_of_bias_gradient(*inputs, dout, attn_bias=attn_bias, **options)
        with_deviations += DEVIATIONS * deviation.max().item()
    results = [
        accuracy("dbias", got, expected, x.to(got.dtype), least, times)
        for x, least, times in (
            (pytorch, floor, TIMES_PYTORCH_GRADIENT),
            (flash, floor, TIMES_PYTORCH_GRADIENT),
            (flash, with_deviations, 1.0),
        )
    ]
    refuse([] if any(x.passed for x in results) else results, f"\n  case {where}")
    hidden = (attn_bias == -torch.inf).expand_as(got)
    assert not got[hidden].any(), f"a hidden key has a gradient\n  case {where}"


def checked_low_lse(got: Tensor, inputs: tuple[Tensor, Tensor, Tensor], where: str, **options: Any) -> Tensor:
    """The log-sum-exp with the expected values in rows whose logits are all near the lowest float32.

    There a log-sum-exp of the cuda backend holds the number of keys, with the error that docs/semantics.md names.
    """
    if not (got < LOW_LSE).any():
        return got
    _, expected = attention_reference(*(x.double() for x in inputs), **options)
    low = (expected < LOW_LSE) & expected.isfinite()
    torch.testing.assert_close(
        got[low].double(),
        expected[low],
        rtol=ERROR_OF_LOW_LSE,
        atol=0.0,
        msg=lambda text: f"lse: {text}\n  case {where}",
    )
    return torch.where(low, expected.to(got.dtype), got)


def check_attn_bias(
    case: AttnBiasCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """Forward, and the gradients of q, k, v, of the bias and of a sink."""
    call = make_biased_call(case, dtype, device, seed)
    guard = Guard(call.q, call.k, call.v, call.dout, call.attn_bias)
    where = f"{case.of.name} ({case.of.why})\n  {case.shape} dtype={dtype} backend={backend}\n  {described_seed}"
    results = call.run(backend)
    guard.check()
    options, inputs = call.expectation(results.get("rng_state")), (call.q, call.k, call.v)
    biased = {"attn_bias": call.attn_bias, **options}
    known = biased if call.sinks is None else {"sinks": call.sinks, **biased}
    lse = results["lse"]
    if backend == "cuda":
        lse = checked_low_lse(lse, inputs, where, **known)
    assert_forward_accurate(*inputs, results["out"], lse, case=where, **known)
    gradients = (results["dq"], results["dk"], results["dv"])
    assert_gradients_accurate_beside_flash(*inputs, call.dout, gradients, case=where, **known)
    if call.sinks is not None:
        check_sink_gradient(results["dsinks"], inputs, call.sinks, call.dout, None, where, **biased)
    if "dbias" in results:
        of_others = options if call.sinks is None else {"sinks": call.sinks, **options}
        check_bias_gradient(results["dbias"], inputs, call.attn_bias, call.dout, where, **of_others)
