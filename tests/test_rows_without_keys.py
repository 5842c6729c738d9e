"""Rows without a key: out 0, softmax_lse -inf, no gradient; what they hold reaches no other row and no key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

NHEADS, NHEADS_K = 4, 2
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Case:
    name: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    headdim: int = 64
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    is_varlen: bool = False

    def __str__(self) -> str:
        return self.name

    def visible(self) -> Tensor:
        """[total_q, total_k], true where the query sees the key."""
        blocks = []
        left, right = self.options.get("window_size", (-1, -1))
        for seqlen_q, seqlen_k in zip(self.lengths_q, self.lengths_k, strict=True):
            at = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
            key = torch.arange(seqlen_k)[None, :]
            seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
            if self.options.get("causal"):
                seen &= key <= at
            if left >= 0:
                seen &= key >= at - left
            if right >= 0:
                seen &= key <= at + right
            blocks.append(seen)
        whole = torch.zeros(sum(self.lengths_q), sum(self.lengths_k), dtype=torch.bool)
        row = column = 0
        for block in blocks:
            whole[row : row + block.shape[0], column : column + block.shape[1]] = block
            row, column = row + block.shape[0], column + block.shape[1]
        return whole


CASES = [
    Case("causal", (130, 130), (100, 100)),
    Case("causal_128", (130, 130), (100, 100), headdim=128),
    Case("causal_headdim_40", (130,), (100,), headdim=40),
    Case("causal_few", (5, 5), (2, 2)),
    Case("causal_one_key", (200,), (1,)),
    Case("window", (100,), (40,), options={"window_size": (5, 3)}),
    Case("window_long", (300,), (140,), options={"window_size": (20, 0)}, headdim=128),
    Case("softcap", (130,), (100,), options={"causal": True, "softcap": 5.0}),
    Case("varlen", (70, 5, 33, 0, 129), (40, 90, 33, 7, 0), is_varlen=True),
    Case("varlen_window", (70, 90, 33), (40, 20, 33), options={"window_size": (9, 4)}, is_varlen=True),
    Case("varlen_no_keys", (64, 30), (0, 0), is_varlen=True, options={}),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


class Inputs(NamedTuple):
    """Rows of all sequences: q and dout [total_q, heads, headdim], k and v [total_k, ...], dlse [heads, total_q]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


class Results(NamedTuple):
    out: Tensor
    lse: Tensor  # [heads, total_q]
    dq: Tensor
    dk: Tensor
    dv: Tensor


def make(case: Case, dtype: torch.dtype, device: str, draw: torch.Generator) -> Inputs:
    rows_q, rows_k = sum(case.lengths_q), sum(case.lengths_k)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    keys = (rows_k, NHEADS_K, case.headdim)
    tensors = (randn(rows_q, NHEADS, case.headdim), randn(*keys), randn(*keys), randn(rows_q, NHEADS, case.headdim))
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(*(x.to(device, dtype) for x in tensors), randn(NHEADS, rows_q).to(device, lse_dtype))


def attend(case: Case, inputs: Inputs, backend: str, deterministic: bool = False) -> Results:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    options = {**case.options, "deterministic": deterministic, "return_attn_probs": True, "backend": backend}
    if case.is_varlen:
        cu_seqlens = [
            torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=inputs.q.device)
            for x in (case.lengths_q, case.lengths_k)
        ]
        longest = (max(case.lengths_q), max(case.lengths_k))
        out, lse, _ = flash_attn_varlen_func(*leaves, *cu_seqlens, *longest, **options)
    else:
        out, lse, _ = flash_attn_func(*(x.unflatten(0, (len(case.lengths_q), -1)) for x in leaves), **options)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    gradients = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    return Results(out.detach(), lse.detach(), *gradients)


def assert_nothing(results: Results, keyless: Tensor, where: str) -> None:
    """Of the rows without a key: out, softmax_lse, dq."""
    for name, value in (("out", results.out[keyless]), ("dq", results.dq[keyless])):
        wrong = (value != 0).nonzero()  # NaN too
        assert wrong.numel() == 0, f"{name} of {len(wrong)} elements of rows without a key is not 0, {where}"
    assert (results.lse[:, keyless] == -math.inf).all(), f"softmax_lse of a row without a key is not -inf, {where}"


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("poisoned", ["dout", "q", "dlse"])
@each_case
def test_poison_in_rows_without_a_key_reaches_nothing(
    case: Case, poisoned: str, value: float, backend: str, device: str, dtype: torch.dtype, draw: torch.Generator,
    described_seed: str,
) -> None:  # fmt: skip
    """All other rows, and dk and dv, are as with clean inputs."""
    inputs = make(case, dtype, device, draw)
    keyless = ~case.visible().any(dim=1).to(device)
    assert keyless.any()
    spoiled = getattr(inputs, poisoned).clone()
    (spoiled.T if poisoned == "dlse" else spoiled)[keyless] = value
    bound = CLOSE[dtype]
    for deterministic in (False, True):
        where = f"{case}, {poisoned} = {value}, {backend}, {dtype}, deterministic={deterministic}\n  {described_seed}"
        clean = attend(case, inputs, backend, deterministic)
        got = attend(case, inputs._replace(**{poisoned: spoiled}), backend, deterministic)
        assert_nothing(clean, keyless, where)
        assert_nothing(got, keyless, where)
        for name, a, b in zip(Results._fields, got, clean, strict=True):
            said = f"{name}, {where}"
            torch.testing.assert_close(a, b, rtol=bound, atol=bound, msg=lambda m, said=said: f"{said}\n{m}")


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("poisoned", ["k", "v"])
@each_case
def test_rows_without_a_key_are_0_whatever_keys_hold(
    case: Case, poisoned: str, value: float, backend: str, device: str, dtype: torch.dtype, draw: torch.Generator,
    described_seed: str,
) -> None:  # fmt: skip
    """Every key is hidden from them, those that other rows of the same tile see included."""
    inputs = make(case, dtype, device, draw)
    keyless = ~case.visible().any(dim=1).to(device)
    for every in (1, 7):  # all keys, and one in seven
        spoiled = getattr(inputs, poisoned).clone()
        spoiled[::every] = value
        got = attend(case, inputs._replace(**{poisoned: spoiled}), backend)
        where = f"{case}, {poisoned} = {value}, {backend}, {dtype}\n  {described_seed}"
        rows = got.out[keyless]
        assert not (rows != 0).any(), f"out of a row without a key is not 0, {where}"
        assert (got.lse[:, keyless] == -math.inf).all(), f"softmax_lse is not -inf, {where}"
        if poisoned == "v":
            assert_nothing(got, keyless, where)


def test_a_normalised_output_trains(backend: str, device: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    """0 / 0 in the rows without a key makes their dout NaN, although nothing that is summed depends on them."""
    case = CASES[0]
    inputs = make(case, dtype, device, draw)
    results = []
    for is_sliced_first in (False, True):
        q, k, v = leaves = [x.unflatten(0, (2, -1)).detach().requires_grad_() for x in inputs[:3]]
        out = flash_attn_func(q, k, v, causal=True, deterministic=True, backend=backend)
        out = out[:, 30:] if is_sliced_first else out
        unit = (out / out.norm(dim=-1, keepdim=True)).nan_to_num()
        loss = (unit if is_sliced_first else unit[:, 30:]).sum()
        results.append(torch.autograd.grad(loss, leaves))
    for name, a, b in zip(("dq", "dk", "dv"), *results, strict=True):
        assert a.isfinite().all(), name
        torch.testing.assert_close(a, b, rtol=CLOSE[dtype], atol=CLOSE[dtype])
