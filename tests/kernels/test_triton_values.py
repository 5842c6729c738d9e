"""The Triton backend on values that the host does not check: wild lengths and pages, NaN and infinity, large softcaps.

The first test runs the others in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_mini
from flash_attn_mini.options import Sequences

from ..support.bounds import assert_forward_accurate, assert_gradients_accurate, rows_without_keys
from ..support.cases import Case, make_dout, make_inputs
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.poison import Guard, PoisonIntact, poisoned
from ..support.rows_without_keys import check_bad_values
from ..support.sink_checks import draw_sinks
from ..support.triton_calls import DEVICE, HAS_GPU, backward, forward, make_options, runs_triton

TOTAL = 101
GOOD = [0, 50, TOTAL]
WILD_LENGTHS = {
    "one row past the end": [0, 100, TOTAL + 1],
    "past the end": [0, 100, 5000],
    "largest": [0, 100, 2**31 - 1],
    "negative": [0, -5, TOTAL],
    "falling": [0, 90, 20],
    "begins late": [60, 2**31 - 1, 0],
    "all": [7, -(2**31), 2**31 - 1],
}
KEYLESS = Case("keyless", "rows without keys and rows with keys in one tile", 1, 2, 1, 90, 66, 32, causal=True)
BAD: dict[str, Any] = {"values": (math.nan, math.inf), "strides": (7,)}  # few: the interpreter is slow
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "window_size": (-1, -1)},
    "window": {"causal": False, "window_size": (40, 7)},
}


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def filled(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Random numbers in a poisoned buffer."""
    tensor = poisoned(shape, dtype, DEVICE)
    return tensor.copy_(torch.randn(shape, generator=draw))


def clamped_ranges(cu_seqlens: list[int]) -> list[tuple[int, int]]:
    """(first row, end) of each sequence, inside the tensor."""
    begins = [min(max(begin, 0), TOTAL) for begin in cu_seqlens[:-1]]
    return [(begin, min(max(end, begin), TOTAL)) for begin, end in zip(begins, cu_seqlens[1:], strict=True)]


@runs_triton
@pytest.mark.parametrize("side", [*(pytest.param(x, marks=pytest.mark.thorough) for x in "qk"), "both"])
@pytest.mark.parametrize("wild", WILD_LENGTHS.values(), ids=WILD_LENGTHS.keys())
def test_wild_lengths_stay_inside_the_tensors(wild: list[int], side: str, draw: torch.Generator) -> None:
    from flash_attn_mini.backends.triton import launch, launch_bwd

    q, k, v, dout = (filled((1, TOTAL, 1, 32), torch.float16, draw)[0] for _ in range(4))
    inputs = Guard(q, k, v, dout)
    cu_q, cu_k = (wild if side != "k" else GOOD), (wild if side != "q" else GOOD)
    lengths = (torch.tensor(cu, dtype=torch.int32, device=DEVICE) for cu in (cu_q, cu_k))
    sequences, options = Sequences(*lengths, TOTAL, TOTAL), make_options(0.2)

    call = launch.prepare(q, k, v, options, sequences)
    outputs = {
        name: poisoned(tuple(getattr(call, name).shape), getattr(call, name).dtype, DEVICE) for name in ("out", "lse")
    }
    intact = [PoisonIntact(t) for t in outputs.values()]
    launch.run(dataclasses.replace(call, **outputs))
    out, lse = outputs["out"][0], outputs["lse"][0]

    call = launch_bwd.prepare(dout, q, k, v, out, lse, None, options, sequences)
    names = ("dq", "dk", "dv", "row_stats")
    gradients = {name: poisoned(tuple(getattr(call, name).shape), getattr(call, name).dtype, DEVICE) for name in names}
    intact += [PoisonIntact(t) for t in gradients.values()]
    launch_bwd.run(dataclasses.replace(call, **gradients))

    for check in (inputs, *intact):
        check.check()
    rows_q, rows_k = clamped_ranges(cu_q), clamped_ranges(cu_k)
    if cu_q == sorted(cu_q) and cu_q[0] == 0:  # else blocks of some sequence may have no index
        for (begin, end), (begin_k, end_k) in zip(rows_q, rows_k, strict=True):
            alone, _ = forward(
                *(x[None] for x in (q[begin:end], k[begin_k:end_k], v[begin_k:end_k])), softmax_scale=0.2
            )
            torch.testing.assert_close(out[begin:end], alone[0], rtol=1e-3, atol=1e-3)
            assert not gradients["dq"][0, begin:end].isnan().any()


@runs_triton
@pytest.mark.parametrize("rows", [5, 200])
def test_rows_without_any_sequence_get_zeros(rows: int, draw: torch.Generator) -> None:
    from flash_attn_mini.backends.triton import launch, launch_bwd

    q, k, v, dout = (torch.randn(rows, 1, 32, generator=draw).half().to(DEVICE) for _ in range(4))
    none = torch.tensor([0, 10**6], dtype=torch.int32, device=DEVICE)[:1]  # what lies behind is no length
    sequences, options = Sequences(none, none, rows, rows), make_options(0.2)
    out, lse, _ = launch.forward(q, k, v, sequences, options)
    gradients = launch_bwd.backward(dout, q, k, v, out, lse, None, sequences, options)[:3]
    assert not out.any()
    assert lse.isneginf().all()
    assert not any(gradient.any() for gradient in gradients)


@runs_triton
@pytest.mark.parametrize("lengths_k", [[0, 60, 124], [0, 60, 2**31 - 1], [0, 2**31 - 1, -(2**31)]], ids=str)
def test_wild_pages_stay_inside_the_pool(lengths_k: list[int], draw: torch.Generator) -> None:
    q = filled((40, 2, 32), torch.float16, draw)
    k, v = (filled((8, 16, 2, 32), torch.float16, draw) for _ in range(2))
    pages = [[3, 0, 7, 5], [999, -7, 2**31 - 1, -(2**31)]]
    table, inside = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in (pages, [pages[0], [7, 0, 7, 0]]))
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, 20, 40], lengths_k))
    sequences = Sequences(cu_q, cu_k, 20, 64, table)
    guard = Guard(q, k, v)
    out, lse = forward(q, k, v, sequences=sequences, softmax_scale=0.2)
    expected, expected_lse = forward(q, k, v, sequences=sequences._replace(block_table=inside), softmax_scale=0.2)
    guard.check()
    assert not out.isnan().any()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def all_results(inputs: Any, dout: Tensor, use_tma: bool, **options: Any) -> dict[str, Tensor]:
    """out, lse and gradients with one small configuration, loading by TMA or not."""
    from flash_attn_mini.backends.triton import configs, launch, launch_bwd

    if HAS_GPU and use_tma and not launch.tma_reaches(*inputs, dout):
        pytest.skip("no TMA on this GPU")
    wide = inputs[0].dtype == torch.float32
    config = configs.tile(32, 32, 4, 1, tma=use_tma) if wide else configs.tile(64, 64, 4, 2, tma=use_tma)
    call = launch.prepare(*inputs, make_options(0.125, **options))
    launch.bind_context(dout.device)
    launch.launch(call, config)
    bwd = launch_bwd.prepare(dout, *inputs, call.out, call.lse, None, call.options)
    launch_bwd.launch_dq(bwd, config)
    launch_bwd.launch_dkv(bwd, config)
    return {"out": call.out, "lse": call.lse, "dq": bwd.dq, "dk": bwd.dk, "dv": bwd.dv}


@runs_triton
@pytest.mark.parametrize("use_tma", [False, True], ids=["plain", "tma"])
@pytest.mark.parametrize(
    ("dtype", "mask", "has_sinks"),
    [
        pytest.param(torch.float16, "causal", False, marks=pytest.mark.thorough),
        (torch.float16, "causal", True),
        (torch.float16, "window", True),
        (torch.float32, "causal", False),
    ],
    ids=str,
)
def test_bad_values_in_rows_without_keys_and_in_keys(
    mask: str, dtype: torch.dtype, has_sinks: bool, use_tma: bool, seed: int, described_seed: str
) -> None:
    """test_rows_without_keys.py for one configuration, with and without TMA."""
    sinks = draw_sinks((KEYLESS.nheads,), torch.float32, DEVICE, seed) if has_sinks else None
    (q, k, v), dout = make_inputs(KEYLESS, dtype, DEVICE, seed), make_dout(KEYLESS, dtype, DEVICE, seed)

    def compute(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        qkv = [inputs[name] for name in "qkv"]
        return all_results(qkv, inputs["dout"], use_tma, learnable_sink=sinks, **MASKS[mask])

    keyless = rows_without_keys(q, k, None, **MASKS[mask])
    where = f"{mask} {dtype} has_sinks={has_sinks} use_tma={use_tma}\n  {described_seed}"
    check_bad_values(compute, {"q": q, "k": k, "v": v, "dout": dout}, keyless, where, sinks=sinks, **BAD)


@runs_triton
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_bad_values_in_rows_without_keys_of_one_sequence(
    has_sinks: bool, draw: torch.Generator, described_seed: str
) -> None:
    sinks = torch.randn(2, generator=draw).to(DEVICE) if has_sinks else None
    q, dout = (filled((170, 2, 32), torch.float16, draw) for _ in range(2))
    k, v = (filled((140, 2, 32), torch.float16, draw) for _ in range(2))
    cu_seqlens = [torch.tensor(cu, dtype=torch.int32, device=DEVICE) for cu in ([0, 130, 170], [0, 100, 140])]
    options = {"sequences": Sequences(*cu_seqlens, 130, 100), "softmax_scale": 0.2, "causal": True}
    options["learnable_sink"] = sinks

    def compute(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        qkv = [inputs[name] for name in "qkv"]
        out, lse = forward(*qkv, **options)
        dq, dk, dv, _ = backward(inputs["dout"], *qkv, out, lse, None, **options)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    keyless = rows_without_keys(q, k, tuple(cu_seqlens), causal=True, window_size=(-1, -1))
    check_bad_values(compute, {"q": q, "k": k, "v": v, "dout": dout}, keyless, described_seed, sinks=sinks, **BAD)


@runs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize(("softcap", "scale"), [(1e3, 0.125), (1e6, 0.125), (1e19, 0.125), (0.05, 1.0), (1e-18, 1.0)])
def test_large_and_small_softcaps(
    softcap: float, scale: float, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """No cap of 10^-4 of the scores: their rounding would show in the derivative of tanh near 0."""
    case = Case("softcap", "far from the scores", 1, 2, 2, 70, 90, 64, True, softcap=softcap, softmax_scale=scale)
    inputs, dout = make_inputs(case, dtype, DEVICE, seed), make_dout(case, dtype, DEVICE, seed)
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True, "softcap": softcap}
    out, lse = forward(*inputs, **options)
    *gradients, _ = backward(dout, *inputs, out, lse, None, **options)
    described = f"softcap={softcap} scale={scale} dtype={dtype}\n  {described_seed}"
    assert_forward_accurate(*inputs, out, lse, case=described, **options)
    assert_gradients_accurate(*inputs, dout, tuple(gradients), case=described, **options)


@runs_triton
def test_the_public_functions_give_the_results_of_the_launchers(draw: torch.Generator) -> None:
    q, k, v = (torch.randn(n, 2, 32, generator=draw).half().to(DEVICE).requires_grad_() for n in (40, 50, 50))
    cumulative = [torch.tensor(cu, dtype=torch.int32, device=DEVICE) for cu in ([0, 15, 40], [0, 20, 50])]
    options = {"sequences": Sequences(*cumulative, 25, 30), "softmax_scale": 32**-0.5, "causal": True}
    plain = [x.detach() for x in (q, k, v)]
    expected, expected_lse = forward(*plain, **options)
    *expected_gradients, _ = backward(torch.ones_like(expected), *plain, expected, expected_lse, None, **options)

    given = {"causal": True, "backend": "triton", "return_attn_probs": True}
    out, lse, _ = flash_attn_mini.flash_attn_varlen_func(q, k, v, *cumulative, 25, 30, **given)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    pairs = zip((out, lse, *gradients), (expected, expected_lse, *expected_gradients), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@runs_triton
def test_dropout_through_the_public_function_uses_one_mask(draw: torch.Generator) -> None:
    """v is the identity, so out shows the mask of the forward, and dv that of the backward."""
    q = torch.randn(1, 32, 2, 32, generator=draw).half().to(DEVICE)
    v = torch.eye(32).half().to(DEVICE)[None, :, None].expand(1, 32, 2, 32).contiguous().requires_grad_()
    given = {"dropout_p": 0.25, "backend": "triton", "return_attn_probs": True}
    out, _, S_dmask = flash_attn_mini.flash_attn_func(q, q, v, **given)
    (dv,) = torch.autograd.grad(out, v, v.detach())
    kept = out.transpose(1, 2) != 0
    assert torch.equal(S_dmask[..., :32, :32] > 0, kept)
    assert torch.equal(dv.permute(0, 2, 3, 1) != 0, kept)
