"""Rows without keys: NaN and infinity in them reach no other row, and NaN and infinity in keys do not reach them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func

from .bounds import rows_without_keys
from .cases import Case, make_dlse, make_dout, make_inputs, options_of

_CAUSAL = Case("causal", "31 rows without keys: every size of tile mixes rows", 1, 2, 2, 130, 99, 64, causal=True)
CASES = [
    _CAUSAL,
    Case("groups", "query heads that share a key head are rows of one block", 2, 6, 2, 108, 61, 72, causal=True),
    Case("window", "a band that begins before the first key", 1, 4, 2, 200, 90, 128, window_size=(20, 5)),
    replace(_CAUSAL, name="softcap", why="the derivative of tanh(NaN) is NaN", softcap=3.0),
    replace(_CAUSAL, name="alibi", why="distances from before the first key", alibi="heads"),
    replace(_CAUSAL, name="dropout", why="a dropped NaN is no NaN", dropout_p=0.3),
]
BAD_VALUES = (math.nan, math.inf, -math.inf)


def _results(inputs: dict[str, Tensor], case: Case, backend: str, device: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)  # the dropout mask
    leaves = [inputs[name].detach().requires_grad_() for name in "qkv"]
    out, lse, _ = flash_attn_func(
        *leaves, **options_of(case, device), deterministic=True, return_attn_probs=True, backend=backend
    )
    gradients = torch.autograd.grad((out, lse), leaves, (inputs["dout"], inputs["dlse"]))
    names = ("out", "lse", "dq", "dk", "dv")
    return dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True))


def check_rows_without_keys(
    case: Case, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """Bad values in q, dout and dlse of rows without keys change no bit. A bad key leaves their out and dq 0."""
    q, k, v = make_inputs(case, dtype, device, seed)
    inputs = {"q": q, "k": k, "v": v, "dout": make_dout(case, dtype, device, seed)}
    inputs["dlse"] = make_dlse(case, dtype, device, seed)
    unseen = rows_without_keys(q, k, None, case.causal, case.window_size)
    assert 0 < int(unseen.sum()) < case.seqlen_q
    clean = _results(inputs, case, backend, device, seed)
    key = seed % 4  # in one tile with rows that see no key
    for value in BAD_VALUES:
        for name, rows in (("q", (slice(None), unseen)), ("dout", (slice(None), unseen)), ("dlse", (..., unseen))):
            spoiled = inputs[name].clone()
            spoiled[rows] = value
            got = _results({**inputs, name: spoiled}, case, backend, device, seed)
            for result, before in clean.items():
                where = f"{value} in {name} reaches {result}: {case.shape} {dtype} {backend} {described_seed}"
                assert torch.equal(got[result], before), where
        for name in "kv":
            spoiled = inputs[name].clone()
            spoiled[:, key] = value
            got = _results({**inputs, name: spoiled}, case, backend, device, seed)
            where = f"{value} in key {key} of {name}: {case.shape} {dtype} {backend} {described_seed}"
            assert (got["out"][:, unseen] == 0).all(), f"out of a row without keys is not 0, {where}"
            assert (got["lse"][..., unseen] == -math.inf).all(), f"lse of a row without keys is not -inf, {where}"
            assert (got["dq"][:, unseen] == 0).all(), f"dq of a row without keys is not 0, {where}"
