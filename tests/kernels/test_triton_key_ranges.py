"""key_ranges in the Triton backend: results in the interpreter, the blocks that a kernel visits, what it compiles.

The first test runs the others in Triton's interpreter where there is no GPU. test_key_ranges.py runs every case on a
GPU.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.options import Options
from flash_attn_mini.reference import visible_keys
from flash_attn_mini.reference.masks import in_key_ranges

from ..support.cases import Case
from ..support.gpu_calls import assert_captures_first_call
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.key_range_cases import KEY_RANGE_CASES, KINDS, KeyRangeCase
from ..support.key_range_checks import assert_same_bits, check_key_ranges, make_ranged_call
from ..support.triton_calls import DEVICE, HAS_GPU, gpu, runs_triton

BY_NAME = {str(case): case for case in KEY_RANGE_CASES}
# The cases that the interpreter has time for, most of them in float16: its bfloat16 is float32.
IN_THE_INTERPRETER = (
    *("documents", "prefix_alibi", "chunks", "chunks_more_keys", "left_padding", "padding_sinks", "global_and_window"),
    *("disjoint", "far_apart_dropout", "overlapping", "empty_window", "per_batch", "per_head", "hostile", "few_keys"),
    *("hostile_window", "no_keys", "nothing_sinks"),
    *("varlen_causal", "varlen_features", "varlen_hostile", "varlen_padding", "varlen_all_empty"),
)
IN_FLOAT32 = ("overlapping", "varlen_features")
# Masks and features that others of these cases have too.
THOROUGH = (
    *("chunks", "left_padding", "disjoint", "empty_window", "per_batch", "per_head", "few_keys", "hostile_window"),
    *("no_keys", "varlen_causal", "varlen_hostile", "varlen_padding", "masked_rows_window"),
)
CASES = [
    *(case for case in KEY_RANGE_CASES if HAS_GPU or str(case) in IN_THE_INTERPRETER),
    KeyRangeCase(
        Case("masked_rows", "causal, rows before the first key: TMA reads all rows", 2, 2, 2, 203, 113, 64, True),
        "disjoint",
        per_head=True,
    ),
    KeyRangeCase(
        Case("masked_rows_window", "the same, with a window", 1, 4, 2, 203, 113, 128, window_size=(60, 20)), "single"
    ),
]
BLOCK_M, BLOCK_N, ROWS_OF_UNIT = 64, 32, 16


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
        if HAS_GPU or dtype == torch.float16 or (dtype == torch.float32 and str(case) in IN_FLOAT32)
    ]


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@runs_triton
@pytest.mark.parametrize(("case", "dtype"), with_dtypes())
def test_results_and_gradients(case: KeyRangeCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    check_key_ranges(case, "triton", DEVICE, dtype, seed, described_seed)


# ---- ranges of rows and blocks --------------------------------------------------------------------------------------


def in_turns(draw: torch.Generator, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Some rows see all keys, the next ones few: the blocks of rows that see all of some keys are not one range."""
    lengths = torch.randint(40, 80, (seqlen_q,), generator=draw)
    turn = torch.arange(seqlen_q).repeat_interleave(lengths)[:seqlen_q]
    end = int(torch.randint(1, seqlen_k, (), generator=draw))
    return torch.stack([torch.zeros_like(turn), torch.where(turn % 2 == 0, seqlen_k, end)], dim=-1)


def first_and_second(visible: Tensor) -> Tensor:
    """[rows, 2, 2] of bool [rows, keys]: the runs of keys of each row, at most two; [0, 0) for none."""
    runs = torch.zeros(visible.shape[0], 2, 2, dtype=torch.int32)
    for row, keys in enumerate(visible.int()):
        steps = torch.nn.functional.pad(keys, (1, 1)).diff().nonzero().flatten()
        runs[row].view(-1)[: len(steps)] = steps.int()
    return runs


def check_steps(steps: list[tuple[int, int, bool]], visible: Tensor, hulls: Tensor, where: str) -> None:
    """steps: (begin, end, masked) in the columns of ``visible`` [rows, columns]; hulls [2, 2]: columns to visit.

    Each step is taken once, lies in a hull, and has no hidden pair if it is not masked; all visible pairs are in steps.
    """
    begins = [begin for begin, _, _ in steps]
    assert len(set(begins)) == len(begins), f"{steps} {where}"
    taken = torch.zeros(visible.shape[1], dtype=torch.bool)
    for begin, end, is_masked in steps:
        taken[begin:end] = True
        assert any(begin < b and a < end for a, b in hulls.tolist()), f"{(begin, end)} is not in {hulls} {where}"
        assert is_masked or visible[:, begin:end].all(), f"{(begin, end)} needs a mask {where}"
    assert not visible[:, ~taken].any(), f"{steps} leave out a visible pair {where}"


def steps_of(bounds: Any, step: int, most: int) -> list[tuple[int, int, bool]]:
    begin, full_begin, full_end, end = bounds
    parts = ((begin, full_begin, True), (full_begin, full_end, False), (full_end, end, True))
    return [(first, min(first + step, most), masked) for a, b, masked in parts for first in range(a, b, step)]


def hull_of(runs: Tensor) -> tuple[int, int]:
    """[begin, end) of runs [n, 2]."""
    runs = runs[runs[:, 1] > runs[:, 0]]
    return (int(runs[:, 0].min()), int(runs[:, 1].max())) if len(runs) else (0, 0)


@runs_triton
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("lengths", [(200, 200), (77, 300), (300, 77), (130, 1), (1, 130)], ids=str)
def test_blocks_that_no_row_sees_are_skipped(
    lengths: tuple[int, int], mask: str, draw: torch.Generator, described_seed: str
) -> None:
    from ..support import triton_probes

    (seqlen_q, seqlen_k), is_causal = lengths, mask == "causal"
    window = (seqlen_k // 3, 9) if mask == "window" else (-1, -1)
    allowed = visible_keys(seqlen_q, seqlen_k, causal=is_causal, window_size=window)
    num_blocks, num_units = -(-seqlen_q // BLOCK_M), -(-seqlen_q // BLOCK_M) * BLOCK_M // ROWS_OF_UNIT
    for name, kind in {**KINDS, "in_turns": in_turns}.items():
        where = f"{name} {lengths} {mask} {described_seed}"
        ranges = kind(draw, seqlen_q, max(seqlen_k, 2)).int()
        count = ranges.ndim - 1
        visible = allowed & in_key_ranges(ranges[None, None], seqlen_k)[0, 0]
        blocks = torch.zeros(num_blocks, 2, 4, dtype=torch.int32, device=DEVICE)
        row_ranges = torch.full((2 * count, num_blocks * BLOCK_M), -1, dtype=torch.int32, device=DEVICE)
        unit_ranges = torch.full((4 * count, num_units), -1, dtype=torch.int32, device=DEVICE)
        sides = window if mask == "window" else (None, None)
        of_call = (ranges.contiguous().to(DEVICE), seqlen_q, seqlen_k, *sides, is_causal)
        triton_probes.ranges_of_rows_probe[(num_blocks,)](
            blocks, row_ranges, unit_ranges, *of_call, BLOCK_M, BLOCK_N, ROWS_OF_UNIT, count
        )
        runs = first_and_second(visible)
        got = row_ranges.T.cpu().reshape(-1, count, 2)
        assert torch.equal(got[:seqlen_q], runs[:, :count]), where
        assert not got[seqlen_q:].any(), where
        for b, bounds in enumerate(blocks.tolist()):
            rows = slice(b * BLOCK_M, (b + 1) * BLOCK_M)
            steps = [step for part in bounds for step in steps_of(part, BLOCK_N, seqlen_k)]
            hulls = torch.tensor([hull_of(runs[rows, i]) for i in range(2)])
            check_steps(steps, visible[rows], hulls, f"block {b} of rows, {where}")

        blocks = torch.zeros(-(-seqlen_k // BLOCK_N), 4, dtype=torch.int32, device=DEVICE)
        triton_probes.rows_of_keys_probe[(blocks.shape[0],)](
            blocks, unit_ranges, num_units, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, ROWS_OF_UNIT, count
        )
        for b, bounds in enumerate(blocks.tolist()):
            begin, end = b * BLOCK_N, min((b + 1) * BLOCK_N, seqlen_k)
            seeing = []  # the units of which a hull has one of the keys
            for unit in range(0, seqlen_q, ROWS_OF_UNIT):
                hulls_of_unit = (hull_of(runs[unit : unit + ROWS_OF_UNIT, i]) for i in range(2))
                if any(begin < b and a < end for a, b in hulls_of_unit):
                    seeing += [unit, unit + ROWS_OF_UNIT]
            hulls = torch.tensor([(min(seeing), max(seeing))] if seeing else [(0, 0)])
            steps = steps_of(bounds, BLOCK_M, seqlen_q)
            check_steps(steps, visible.T[begin:end], hulls, f"block {b} of keys, {where}")


@runs_triton
def test_blocks_that_all_rows_see_take_no_mask() -> None:
    """Documents, and a prefix for all with a window: the full blocks are those that a reader expects."""
    from ..support import triton_probes

    num_rows, keys = 240, 512
    rows = torch.arange(num_rows)
    document = torch.stack([torch.full_like(rows, 96), torch.full_like(rows, 320)], -1)
    two = torch.stack([torch.tensor([0, 64]).expand(num_rows, 2), torch.stack([rows + 128, rows + 256], -1)], -2)
    for ranges, expected in ((document, [[96, 96, 320, 320], None]), (two, [[0, 0, 64, 64], [192, 256, 320, 383]])):
        count = ranges.ndim - 1
        blocks = torch.zeros(4, 2, 4, dtype=torch.int32, device=DEVICE)
        row_ranges = torch.zeros(2 * count, 4 * BLOCK_M, dtype=torch.int32, device=DEVICE)
        unit_ranges = torch.zeros(4 * count, 16, dtype=torch.int32, device=DEVICE)
        triton_probes.ranges_of_rows_probe[(4,)](
            blocks, row_ranges, unit_ranges, ranges.int().contiguous().to(DEVICE), num_rows, keys, None, None, False,
            BLOCK_M, BLOCK_N, ROWS_OF_UNIT, count,
        )  # fmt: skip
        for got, wanted in zip(blocks[1].tolist(), expected, strict=True):  # rows 64 to 127
            assert wanted is None or got == wanted
        of_keys = torch.zeros(keys // BLOCK_N, 4, dtype=torch.int32, device=DEVICE)
        triton_probes.rows_of_keys_probe[(keys // BLOCK_N,)](
            of_keys, unit_ranges, 16, num_rows, keys, BLOCK_M, BLOCK_N, ROWS_OF_UNIT, count
        )
        if count == 1:  # the last block has rows past the last one
            assert blocks[3, 0].tolist() == [96, 96, 320, 320]
        # Keys 256 to 287: of the document for all rows; in the window of rows 32 to 128 in full, of rows 1 to 159.
        assert of_keys[8].tolist() == ([0, 0, 192, 240] if count == 1 else [0, 64, 128, 160])


@runs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nan_in_skipped_blocks_reaches_nothing(dtype: torch.dtype, draw: torch.Generator) -> None:
    """Keys in the gap between two ranges, and the rows of another document. The blocks hold 256 rows or keys at most.

    A kernel that visits such a block multiplies NaN by a probability of 0.
    """
    from flash_attn_mini.backends.triton import launch, launch_bwd

    q, k, v, dout = (torch.randn(1, 1024, 1, 16, generator=draw).to(DEVICE, dtype) for _ in range(4))
    rows = torch.arange(1024)
    ends = torch.where(rows < 512, 512, 1024)
    ranges = torch.stack([torch.stack([ends - 20, ends], -1), torch.stack([ends - 512, ends - 493], -1)], -2)
    options = Options(0.0, 0.25, False, -1, -1, 0.0, None, key_ranges=ranges[None, None].int().to(DEVICE))
    out, lse, _ = launch.forward(q, k, v, None, options)
    expected = launch_bwd.backward(dout, q, k, v, out, lse, None, None, options)
    bad_k, bad_v = k.clone(), v.clone()
    for begin in (0, 512):
        bad_k[:, begin + 256 : begin + 257], bad_v[:, begin + 255 : begin + 256] = math.nan, math.nan
    bad_q, bad_dout = q.clone(), dout.clone()
    bad_q[:, 512:], bad_dout[:, 512:] = math.nan, math.nan
    assert torch.equal(launch.forward(q, bad_k, bad_v, None, options)[0], out)
    dq, dk, dv, _ = launch_bwd.backward(dout, q, bad_k, bad_v, out, lse, None, None, options)
    assert torch.equal(dq, expected[0])
    _, dk, dv, _ = launch_bwd.backward(bad_dout, bad_q, k, v, out, lse, None, None, options)
    assert torch.equal(dk[:, :512], expected[1][:, :512])
    assert torch.equal(dv[:, :512], expected[2][:, :512])
    assert dk[:, 512:532].isnan().all()


# ---- launches -------------------------------------------------------------------------------------------------------


@runs_triton
def test_trace_names_key_ranges(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    call = make_ranged_call(BY_NAME["few_queries"], torch.float16, DEVICE, 0)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    call.run("triton")
    lines = [line for line in capfd.readouterr().err.splitlines() if "triton.flash_" in line]
    assert len(lines) == 3
    assert all("features=key_ranges" in line for line in lines)


@runs_triton
def test_some_gradients_have_the_bits_of_all(seed: int) -> None:
    """Without dQ the first kernel runs for what the second one reads."""
    from flash_attn_mini.backends.triton import launch, launch_bwd

    call = make_ranged_call(BY_NAME["per_head"], torch.float16, DEVICE, seed)
    options = Options(0.0, 0.125, False, -1, -1, 0.0, None, key_ranges=call.key_ranges)
    out, lse, _ = launch.forward(call.q, call.k, call.v, None, options)
    tensors = (call.dout, call.q, call.k, call.v, out, lse, None, None, options, None)
    expected = launch_bwd.backward(*tensors)
    for wanted in itertools.product((False, True), repeat=3):
        for got, whole, is_wanted in zip(launch_bwd.backward(*tensors, wanted), expected, wanted, strict=False):
            assert torch.equal(got, whole) if is_wanted else got is None


@gpu
@pytest.mark.parametrize("name", ["documents_long", "shared_prefix", "varlen_features"])
def test_the_backward_repeats_bit_for_bit(name: str, seed: int) -> None:
    call = make_ranged_call(BY_NAME[name], torch.float16, "cuda", seed)
    torch.manual_seed(seed)
    expected = call.run("triton")
    for _ in range(5):
        torch.manual_seed(seed)
        assert_same_bits(call.run("triton"), expected, name)


@gpu
def test_no_length_or_stride_compiles_another_kernel() -> None:
    from flash_attn_mini.backends.triton import launch, launch_bwd

    kernels = (launch.flash_fwd_kernel, launch_bwd.flash_bwd_dq_kernel, launch_bwd.flash_bwd_dkv_kernel)

    def run(rows: int, heads: int) -> int:
        q = torch.randn(2, rows, 4, 64, dtype=torch.float16, device="cuda")
        ranges = torch.zeros(2, heads, rows, 2, 2, dtype=torch.int32, device="cuda")
        options = Options(0.0, 0.1, True, -1, 0, 0.0, None, key_ranges=ranges)
        out, lse, _ = launch.forward(q, q, q, None, options)
        launch_bwd.backward(q, q, q, q, out, lse, None, None, options)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    first = run(256, 1)
    assert [run(333, 4), run(1, 4), run(77, 1)] == [first] * 3


@gpu
def test_capture_in_a_cuda_graph(seed: int) -> None:
    """A call with key_ranges does not wait for the GPU, or the capture would fail."""
    from flash_attn_mini.backends.triton import launch, launch_bwd

    call = make_ranged_call(BY_NAME["varlen_features"], torch.float16, "cuda", seed)
    options = Options(0.0, 0.125, True, -1, 0, 0.0, None, key_ranges=call.key_ranges)

    def run() -> list[Tensor]:
        out, lse, _ = launch.forward(call.q, call.k, call.v, call.sequences, options)
        return [out, *launch_bwd.backward(call.dout, call.q, call.k, call.v, out, lse, None, call.sequences, options)]

    assert_captures_first_call(run)
