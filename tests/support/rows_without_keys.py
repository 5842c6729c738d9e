"""Rows without keys: out and dq are 0, softmax_lse is -inf, and NaN or infinity in them reaches no other result.

A loss such as ``(out / out.norm(dim=-1, keepdim=True)).nan_to_num()`` sends NaN to the dout of these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

from .bounds import rows_without_keys
from .cases import Case, make_dlse, make_dout, make_inputs, options_of
from .sink_checks import draw_sinks
from .varlen_cases import VarlenCase, make_batch

_CAUSAL = Case("causal", "31 rows without keys: every size of tile mixes rows", 2, 4, 2, 130, 99, 64, causal=True)
_LENGTHS = ((70, 5, 33, 0, 129), (40, 90, 33, 7, 0))
CASES = [
    _CAUSAL,
    replace(_CAUSAL, name="headdim_128", why="other tiles", headdim=128),
    Case("groups", "query heads of one key head share a block; padded head dim", 2, 6, 2, 108, 61, 72, causal=True),
    Case("few", "less than one tile", 2, 4, 2, 5, 2, 64, causal=True),
    Case("one_key", "whole row tiles without keys", 1, 4, 2, 200, 1, 64, causal=True),
    Case("window", "a band that begins before the first key", 1, 4, 2, 100, 40, 64, window_size=(5, 3)),
    Case("window_long", "the same over several tiles", 1, 4, 2, 300, 140, 128, window_size=(20, 0)),
    replace(_CAUSAL, name="softcap", why="the derivative of tanh(NaN) is NaN", softcap=3.0),
    replace(_CAUSAL, name="alibi", why="distances from before the first key", alibi="heads"),
    replace(_CAUSAL, name="dropout", why="a dropped NaN is no NaN", dropout_p=0.3),
    VarlenCase("varlen", "rows of other sequences in the same tile", *_LENGTHS, nheads=4, causal=True),
    VarlenCase("varlen_window", "a band in each sequence", (70, 90, 33), (40, 20, 33), nheads=4, window_size=(9, 4)),
    VarlenCase("varlen_no_keys", "no row has a key", (64, 30), (0, 0), nheads=4),
]

Compute = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # q, k, v, dout[, dlse] -> out, lse, dq, dk, dv
Compare = Callable[[str, Tensor, Tensor], bool]  # name, result, result of clean inputs


def check_bad_values(
    compute: Compute,
    inputs: dict[str, Tensor],
    keyless: Tensor,
    where: str,
    same: Compare = lambda _name, got, clean: torch.equal(got, clean),
    values: tuple[float, ...] = (math.nan, math.inf, -math.inf),
    strides: tuple[int, ...] = (1, 7),
    sinks: Tensor | None = None,
) -> None:
    """Bad values in q, dout or dlse of rows without keys change no result. Bad keys leave their out, dq and lse.

    sinks: ``[nheads]``, those of the call. Tensors are dense or varlen. keyless: bool ``[seqlen_q]`` or ``[total_q]``,
    true for rows without keys. strides: the distances of bad keys from each other.
    """
    assert keyless.any()
    clean = compute(inputs)
    _assert_no_result(clean, keyless, where, sinks)
    for value in values:
        for name in ("q", "dout", "dlse"):
            if name in inputs:
                spoiled = inputs[name].clone()
                spoiled[(..., keyless) if name == "dlse" else (..., keyless, slice(None), slice(None))] = value
                for result, got in compute({**inputs, name: spoiled}).items():
                    assert same(result, got, clean[result]), f"{value} in {name} reaches {result}, {where}"
        for name in "kv":
            for stride in strides:
                spoiled = inputs[name].clone()
                spoiled[..., ::stride, :, :] = value
                described = f"{value} in rows of {name} at distances of {stride}, {where}"
                _assert_no_result(compute({**inputs, name: spoiled}), keyless, described, sinks)


def _assert_no_result(results: dict[str, Tensor], keyless: Tensor, where: str, sinks: Tensor | None) -> None:
    for name in ("out", "dq"):
        count = int((results[name][..., keyless, :, :] != 0).sum())  # NaN != 0
        assert count == 0, f"{count} elements of {name} are not 0 in rows without keys, {where}"
    lse, expected = results["lse"][..., keyless], -math.inf if sinks is None else sinks[:, None]
    assert (lse == expected).all(), f"softmax_lse of a row without keys is not {expected}, {where}"


def check_rows_without_keys(
    case: Case | VarlenCase,
    backend: str,
    device: str,
    dtype: torch.dtype,
    seed: int,
    described_seed: str,
    deterministic: bool = True,
    has_sinks: bool = False,
) -> None:
    """`check_bad_values` of a case, with or without sinks.

    Results are compared bit by bit, but a dq that is not deterministic is not.
    """
    options = {**options_of(case, device), "deterministic": deterministic, "return_attn_probs": True}
    sinks = draw_sinks((case.nheads,), torch.float32, device, seed) if has_sinks else None
    options["learnable_sink"] = sinks
    cu_seqlens = None
    if isinstance(case, VarlenCase):
        batch = make_batch(case, dtype, device, seed)
        q, k, v, dout, cu_seqlens = batch.q, batch.k, batch.v, batch.dout, batch.cu_seqlens
        generator = torch.Generator().manual_seed(seed)
        dlse = torch.randn(case.nheads, q.shape[0], generator=generator, dtype=torch.float64).to(device)
    else:
        q, k, v = make_inputs(case, dtype, device, seed)
        dout, dlse = make_dout(case, dtype, device, seed), make_dlse(case, dtype, device, seed)

    def compute(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(seed)  # the dropout mask
        leaves = [inputs[name].detach().requires_grad_() for name in "qkv"]
        if isinstance(case, VarlenCase):
            out, lse, _ = flash_attn_varlen_func(*leaves, *batch.lengths, **options, backend=backend)
        else:
            out, lse, _ = flash_attn_func(*leaves, **options, backend=backend)
        gradients = torch.autograd.grad((out, lse), leaves, (inputs["dout"], inputs["dlse"].to(lse.dtype)))
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients), strict=True))

    def same(name: str, got: Tensor, clean: Tensor) -> bool:
        bound = 8 * torch.finfo(dtype).eps
        if deterministic or name != "dq":
            return torch.equal(got, clean)
        return torch.allclose(got, clean, rtol=bound, atol=bound)

    keyless = rows_without_keys(q, k, cu_seqlens, case.causal, case.window_size)
    where = f"{case}: {case.shape} {dtype} {backend} deterministic={deterministic}\n  {described_seed}"
    check_bad_values(compute, {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}, keyless, where, same, sinks=sinks)
