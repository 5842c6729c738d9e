"""attn_bias in the Triton backend: results in the interpreter, the parts of the gradient's sums, what it compiles.

The first test runs the others in Triton's interpreter where there is no GPU. test_attn_bias.py runs every case on a
GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func
from flash_attn_mini.options import Options

from ..support.attn_bias_cases import ATTN_BIAS_CASES, AttnBiasCase
from ..support.attn_bias_checks import check_attn_bias, make_biased_call
from ..support.cases import Case
from ..support.gpu_calls import assert_captures_first_call
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.triton_calls import DEVICE, HAS_GPU, gpu, runs_triton

# The cases that the interpreter has time for, in float16: its bfloat16 is float32.
IN_THE_INTERPRETER = (
    *("full", "per_batch", "shared", "one_row", "one_row_shared", "causal_more_queries", "window", "scale_negative"),
    *("softcap", "alibi_softcap", "dropout_mqa", "sinks_nothing", "ranges", "ranges_float", "wide_one_row", "offset"),
    *("mask", "padding", "minus_inf", "lowest_wide", "nothing_float", "nothing_sinks", "transposed", "odd_mask"),
    *("expanded", "decode", "few_keys", "no_keys", "no_queries", "no_queries_one_row", "no_batch", "headdim_33"),
)
IN_FLOAT32 = ("minus_inf", "one_row_shared", "lowest")
# Kinds, layouts and features that others of these cases have too.
THOROUGH = (
    *("per_batch", "shared", "one_row_shared", "causal_more_queries", "scale_negative", "alibi_softcap", "ranges"),
    *("sinks_nothing", "wide_one_row", "offset", "lowest_wide", "nothing_sinks", "odd_mask", "expanded", "few_keys"),
    *("no_queries_one_row", "no_batch"),
)
CASES = [case for case in ATTN_BIAS_CASES if HAS_GPU or str(case) in IN_THE_INTERPRETER + IN_FLOAT32]
CASES += [
    AttnBiasCase(
        Case("masked_rows", "causal, rows before the first key: TMA reads all rows", 2, 2, 2, 203, 113, 64, True),
        "minus_inf",
        sinks=True,
    ),
    AttnBiasCase(
        Case("one_row_window", "blocks of rows that see no key of a block", 1, 4, 2, 300, 130, 64, window_size=(20, 9)),
        "normal",
        per_head=False,
        per_row=False,
    ),
]
BY_NAME = {str(case): case for case in CASES}


def with_dtypes() -> list[Any]:
    return [
        pytest.param(
            case,
            dtype,
            id=f"{case}-{str(dtype).removeprefix('torch.')}",
            marks=[pytest.mark.thorough] * (str(case) in THOROUGH),
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for case in CASES
        if HAS_GPU
        or (dtype == torch.float16 and str(case) not in IN_FLOAT32)
        or (dtype == torch.float32 and str(case) in IN_FLOAT32)
    ]


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@runs_triton
@pytest.mark.parametrize(("case", "dtype"), with_dtypes())
def test_results_and_gradients(case: AttnBiasCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    check_attn_bias(case, "triton", DEVICE, dtype, seed, described_seed)


@runs_triton
@pytest.mark.parametrize("name", ["mask", "nothing_sinks", "masked_rows"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_rows_without_keys_reaches_nothing(name: str, bad: float, seed: int) -> None:
    case = BY_NAME[name] if name in BY_NAME else next(x for x in ATTN_BIAS_CASES if str(x) == name)
    call = make_biased_call(case, torch.float16, DEVICE, seed)
    rows, keys = call.q.shape[1], call.k.shape[1]
    bias = call.attn_bias
    visible = bias if bias.dtype == torch.bool else bias != -torch.inf
    visible = visible.expand(call.q.shape[0], call.q.shape[2], rows, keys)
    if call.options["causal"]:
        visible = visible & torch.ones(rows, keys, dtype=torch.bool, device=DEVICE).tril(keys - rows)
    keyless = ~visible.any(-1).transpose(1, 2)[..., None]
    assert keyless.any()
    expected = call.run("triton")
    results = call.run("triton", q=call.q.masked_fill(keyless, bad), dout=call.dout.masked_fill(keyless, bad))
    for result, x in expected.items():
        assert torch.equal(results[result], x), result
    assert not results["dq"][keyless[..., 0]].any()


# ---- the parts of the gradient's sums -------------------------------------------------------------------------------


def gradient_of_bias(call: Any) -> Tensor:
    from flash_attn_mini.backends.triton import launch, launch_bwd, launch_bwd_bias

    options = Options(0.0, 0.125, False, -1, -1, 0.0, None, attn_bias=call.attn_bias)
    out, lse, _ = launch.forward(call.q, call.k, call.v, None, options)
    *_, softmax_d = launch_bwd.backward(call.dout, call.q, call.k, call.v, out, lse, None, None, options)
    return launch_bwd_bias.bias_backward(call.dout, call.q, call.k, call.v, lse, softmax_d, options)


@runs_triton
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 5, 6])
def test_parts_of_any_number(parts: int, per_row: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pairs of a sequence and a head in parts: each pair counts once, and the result repeats."""
    from flash_attn_mini.backends.triton import launch_bwd_bias

    case = AttnBiasCase(Case("parts", "", 3, 2, 1, 70, 90, 32), "normal", per_head=False, per_row=per_row, is_wide=True)
    call = make_biased_call(case, torch.float16, DEVICE, seed)
    monkeypatch.setattr(launch_bwd_bias, "num_parts", lambda call: 1)
    expected = gradient_of_bias(call)
    monkeypatch.setattr(launch_bwd_bias, "num_parts", lambda call: parts)
    launch_bwd_bias.RECORDINGS.forget()
    got = gradient_of_bias(call)
    size = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6 * max(size, 1.0))
    assert torch.equal(gradient_of_bias(call), got)
    launch_bwd_bias.RECORDINGS.forget()


@runs_triton
def test_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts fill the SMs, and none of them is empty."""
    from flash_attn_mini.backends.triton import launch_bwd_bias

    monkeypatch.setattr(launch_bwd_bias, "num_sms", lambda device: 132)

    def parts_of(batch: int, nheads: int, rows: int, keys: int, *of_bias: int) -> int:
        q, k = torch.empty(batch, rows, nheads, 64, device="meta"), torch.empty(batch, keys, nheads, 64, device="meta")
        bias, rows_of_heads = torch.empty(*of_bias, keys, device="meta"), torch.empty(0, device="meta")
        options = Options(0.0, 0.125, False, -1, -1, 0.0, None, attn_bias=bias)
        tensors = (q.half(), k.half(), k.half(), None, options, None, q.half(), *[rows_of_heads] * 3)
        return launch_bwd_bias.num_parts(launch_bwd_bias.BiasBackwardCall(*tensors))

    assert parts_of(4, 16, 4096, 4096, 1, 16, 4096) == 1  # enough blocks
    assert parts_of(4, 16, 128, 64, 4, 16, 128) == 1  # a pair has its own
    assert parts_of(4, 16, 128, 64, 1, 1, 128) == 64  # all pairs share one block
    assert parts_of(20, 16, 128, 64, 1, 1, 128) == 160  # of two pairs
    assert parts_of(4, 16, 128, 64, 1, 16, 128) == 4
    assert parts_of(64, 16, 4096, 4096, 64, 1, 1) == 1
    assert parts_of(64, 16, 4096, 4096, 1, 1, 1) == 4


# ---- launches -------------------------------------------------------------------------------------------------------


@runs_triton
def test_trace_names_attn_bias(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    call = make_biased_call(next(x for x in ATTN_BIAS_CASES if str(x) == "few_queries"), torch.float16, DEVICE, 0)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    call.run("triton")
    lines = [line for line in capfd.readouterr().err.splitlines() if "triton.flash_" in line]
    assert len(lines) == 4
    assert all("features=attn_bias" in line for line in lines)
    assert "flash_bwd_bias_kernel" in lines[-1]


@runs_triton
def test_a_bias_without_a_gradient_launches_three_kernels(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, draw: torch.Generator
) -> None:
    q = torch.randn(1, 20, 2, 16, generator=draw).to(DEVICE, torch.float16).requires_grad_()
    bias = torch.randn(1, 2, 20, 20, generator=draw).to(DEVICE)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_func(q, q, q, attn_bias=bias, backend="triton").sum().backward()
    assert capfd.readouterr().err.count("triton.flash_") == 3


@runs_triton
def test_some_gradients_have_the_bits_of_all(seed: int) -> None:
    """Without dQ the first kernel runs for what the others read."""
    from flash_attn_mini.backends.triton import launch, launch_bwd

    call = make_biased_call(next(x for x in ATTN_BIAS_CASES if str(x) == "few_queries"), torch.float16, DEVICE, seed)
    options = Options(0.0, 0.125, False, -1, -1, 0.0, None, attn_bias=call.attn_bias)
    out, lse, _ = launch.forward(call.q, call.k, call.v, None, options)
    tensors = (call.dout, call.q, call.k, call.v, out, lse, None, None, options, None)
    expected = launch_bwd.backward(*tensors)
    for wanted in itertools.product((False, True), repeat=3):
        for got, whole, is_wanted in zip(launch_bwd.backward(*tensors, wanted), expected, wanted, strict=False):
            assert torch.equal(got, whole) if is_wanted else got is None


@gpu
def test_only_alignment_compiles_another_kernel() -> None:
    from flash_attn_mini.backends.triton import launch, launch_bwd, launch_bwd_bias

    kernels = (
        *(launch.flash_fwd_kernel, launch_bwd.flash_bwd_dq_kernel, launch_bwd.flash_bwd_dkv_kernel),
        launch_bwd_bias.flash_bwd_bias_kernel,
    )

    def run(rows: int, keys: int, heads: int) -> int:
        q, k = (torch.randn(2, n, 4, 64, dtype=torch.float16, device="cuda") for n in (rows, keys))
        bias = torch.zeros(2, heads, rows, keys, dtype=torch.float16, device="cuda")
        options = Options(0.0, 0.1, True, -1, 0, 0.0, None, attn_bias=bias)
        out, lse, _ = launch.forward(q, k, k, None, options)
        *_, softmax_d = launch_bwd.backward(q, q, k, k, out, lse, None, None, options)
        launch_bwd_bias.bias_backward(q, q, k, k, lse, softmax_d, options)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    run(256, 256, 1)
    known = run(333, 48, 4)  # with rows without a key, and with a gradient of one part, in the dtype of the bias
    assert [run(2, 512, 4), run(77, 1024, 1), run(256, 256, 1)] == [known] * 3


@gpu
@pytest.mark.parametrize("name", ["full", "one_row_shared", "many_pairs"])
def test_capture_in_a_cuda_graph(name: str, seed: int) -> None:
    """A call with attn_bias does not wait for the GPU, or the capture would fail."""
    case = next(x for x in ATTN_BIAS_CASES if str(x) == name)
    call = make_biased_call(dataclasses.replace(case, kind="normal"), torch.float16, "cuda", seed)
    assert_captures_first_call(lambda: [gradient_of_bias(call)])
