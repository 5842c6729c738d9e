"""The Triton backend beyond plain attention: windows, softcap, ALiBi, dropout, sequences of variable length, pages.

The first test runs the others in Triton's interpreter where there is no GPU. test_features.py and test_varlen.py run
the full lists of cases on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.options import Sequences
from flash_attn_mini.reference import attention_varlen_reference, dropout_mask, dropout_masks_varlen, visible_keys

from ..support.bounds import assert_forward_accurate, assert_gradients_accurate
from ..support.cases import Case, make_dlse, make_dout, make_inputs, options_of
from ..support.feature_cases import FEATURE_CASES
from ..support.gpu_calls import assert_captures_first_call
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.poison import Guard
from ..support.triton_calls import DEVICE, HAS_GPU, backward, forward, gpu, make_options, runs_triton
from ..support.varlen_cases import VARLEN_CASES, VarlenCase, expectation_options, make_batch

# The cases that the interpreter has time for, most of them in float16: its bfloat16 is float32.
DENSE_IN_THE_INTERPRETER = (
    *("softcap_scores_1e4", "softcap_masked_rows", "dropout_half", "dropout_most", "dropout_one_key"),
    *("dropout_no_keys", "window_0_0_decode", "alibi_decode", "together_odd_head_dim", "together_layout"),
)
VARLEN_IN_THE_INTERPRETER = (
    *("mixed_causal", "more_and_less", "one_token_each", "empty_around", "all_empty", "no_queries", "no_keys"),
    *("no_sequences", "layout_misaligned", "window_0_0", "together", "together_softcap", "alibi_batch"),
    *("pages_48", "pages_decode", "pages_window", "pages_dropout"),
)
OTHER_DTYPES_FOR = ("together_odd_head_dim", "mixed_causal")
FEATURES_BY_NAME = {case.name: case for case in FEATURE_CASES}
VARLEN_BY_NAME = {case.name: case for case in VARLEN_CASES}


def with_dtypes(cases: list[Any], in_the_interpreter: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for case in cases
        if HAS_GPU or case.name in (in_the_interpreter if dtype == torch.float16 else OTHER_DTYPES_FOR)
    ]


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def rng_state_of(seed: int) -> Tensor:
    """A seed and an offset that need all 64 bits."""
    return torch.tensor([seed * 0x9E3779B97F4A7C15 % 2**64 - 2**63, (seed << 31) + 5], device=DEVICE)


def package_options(case: Any, rng_state: Tensor) -> dict[str, Any]:
    options = options_of(case, DEVICE)
    if options["softmax_scale"] is None:
        options["softmax_scale"] = case.headdim**-0.5
    return {**options, "rng_state": rng_state if case.dropout_p > 0 else None}


@runs_triton
@pytest.mark.parametrize(("case", "dtype"), with_dtypes(FEATURE_CASES, DENSE_IN_THE_INTERPRETER))
def test_features_are_as_accurate_as_pytorch(case: Case, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    inputs, dout = make_inputs(case, dtype, DEVICE, seed), make_dout(case, dtype, DEVICE, seed)
    dlse = make_dlse(case, dtype, DEVICE, seed) if seed % 2 else None
    guard = Guard(*inputs, dout)
    rng_state = rng_state_of(seed)
    options = package_options(case, rng_state)
    out, lse = forward(*inputs, **options)
    *gradients, softmax_d = backward(dout, *inputs, out, lse, dlse, **options)
    guard.check()
    expected = options_of(case, DEVICE)
    if case.dropout_p > 0:
        sizes = (case.batch, case.nheads, case.seqlen_q, case.seqlen_k)
        expected["dropout_mask"] = dropout_mask(rng_state, case.dropout_p, *sizes, device=DEVICE)
    described = f"{case.name} ({case.why})\n  {case.shape} dtype={dtype}\n  {described_seed}"
    assert_forward_accurate(*inputs, out, lse, case=described, **expected)
    assert_gradients_accurate(*inputs, dout, tuple(gradients), case=described, dlse=dlse, **expected)
    assert softmax_d.shape == (case.batch, case.nheads, -(-case.seqlen_q // 128) * 128)
    assert not softmax_d[..., case.seqlen_q :].any()


@runs_triton
@pytest.mark.parametrize(("case", "dtype"), with_dtypes(VARLEN_CASES, VARLEN_IN_THE_INTERPRETER))
def test_variable_lengths_are_as_accurate_as_pytorch(
    case: VarlenCase, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    batch, rng_state = make_batch(case, dtype, DEVICE, seed), rng_state_of(seed)
    options = package_options(case, rng_state)
    guard = Guard(batch.q, batch.k, batch.v, batch.dout)
    sequences = Sequences(*batch.lengths, batch.block_table)
    out, lse = forward(batch.q, batch.k, batch.v, sequences=sequences, **options)
    inputs = (batch.q, batch.rows(batch.k), batch.rows(batch.v))
    sequences = sequences._replace(block_table=None)
    *gradients, softmax_d = backward(batch.dout, *inputs, out, lse, None, sequences=sequences, **options)
    guard.check()
    expected = expectation_options(case, batch, rng_state)
    described = f"{case.name} ({case.why})\n  {case.shape} dtype={dtype}\n  {described_seed}"
    assert_forward_accurate(*inputs, out, lse, case=described, **expected)
    assert_gradients_accurate(*inputs, batch.dout, tuple(gradients), case=described, **expected)

    total_q = sum(case.lengths_q)
    assert softmax_d.shape == (case.nheads, (total_q // 128 + case.batch) * 128)
    delta = (batch.dout.double() * out.double()).sum(-1).T
    padded = torch.zeros(softmax_d.shape, dtype=torch.float64, device=DEVICE)
    for b, (begin, length) in enumerate(zip(batch.cu_seqlens_q.tolist(), case.lengths_q, strict=False)):
        first = (begin // 128 + b) * 128
        padded[:, first : first + length] = delta[:, begin : begin + length]
    torch.testing.assert_close(softmax_d.double(), padded, rtol=1e-4, atol=1e-4)


@runs_triton
@pytest.mark.parametrize("name", ["more_and_less", *["together"] * HAS_GPU])
def test_gradients_of_the_lse_of_variable_lengths(name: str, seed: int, described_seed: str) -> None:
    case = VARLEN_BY_NAME[name]
    batch, rng_state = make_batch(case, torch.float16, DEVICE, seed), rng_state_of(seed)
    inputs, options = (batch.q, batch.k, batch.v), package_options(case, rng_state)
    dlse = torch.randn(case.nheads, sum(case.lengths_q), device=DEVICE)
    sequences = Sequences(*batch.lengths)
    out, lse = forward(*inputs, sequences=sequences, **options)
    *gradients, _ = backward(batch.dout, *inputs, out, lse, dlse, sequences=sequences, **options)
    options = {**options_of(case, DEVICE), **expectation_options(case, batch, rng_state)}
    cumulative, masks = options.pop("cu_seqlens"), options.pop("dropout_mask", None)
    leaves = [x.double().requires_grad_() for x in inputs]
    expected = attention_varlen_reference(*leaves, *cumulative, **options, dropout_masks=masks)
    seen = expected[1] != -torch.inf
    total = (expected[0] * batch.dout).sum() + (expected[1][seen] * dlse[seen]).sum()
    for got, true in zip(gradients, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(got.double(), true, rtol=2e-2, atol=2e-2, msg=lambda m: f"{m}\n{described_seed}")


@runs_triton
@pytest.mark.parametrize("is_float32", [False, True], ids=["float16", "float32"])
def test_the_mask_of_dropout_is_that_of_the_reference_bit_for_bit(is_float32: bool, seed: int) -> None:
    """With v the identity, out is the probabilities; dv of ones at one query shows the backward's mask."""
    dtype, p = (torch.float32 if is_float32 else torch.float16), 0.4
    q, k = torch.zeros(2, 70, 2, 32, dtype=dtype, device=DEVICE), torch.zeros(2, 32, 2, 32, dtype=dtype, device=DEVICE)
    v = torch.eye(32, dtype=dtype, device=DEVICE)[None, :, None].expand(2, 32, 2, 32).contiguous()
    options = {"softmax_scale": 1.0, "causal": False, "dropout_p": p, "rng_state": rng_state_of(seed)}
    mask = dropout_mask(options["rng_state"], p, 2, 2, 70, 32, device=DEVICE)
    out, lse = forward(q, k, v, **options)
    assert torch.equal(out.transpose(1, 2) != 0, mask)
    dout = torch.zeros_like(q)
    dout[:, :32] = v  # dv[j, i] = P[i, j] of the first 32 queries
    _, _, dv, _ = backward(dout, q, k, v, out, lse, None, **options)
    assert torch.equal(dv.permute(0, 2, 3, 1) != 0, mask[:, :, :32])


@runs_triton
def test_the_mask_of_dropout_counts_within_each_sequence(seed: int) -> None:
    cumulative = torch.tensor([0, 37, 37, 120, 121], dtype=torch.int32, device=DEVICE)
    q = torch.zeros(121, 2, 128, dtype=torch.float16, device=DEVICE)
    rows = torch.cat([torch.arange(n) for n in (37, 0, 83, 1)])
    v = torch.eye(128, dtype=torch.float16)[rows][:, None].expand(121, 2, 128).contiguous().to(DEVICE)
    options = {"softmax_scale": 1.0, "causal": False, "dropout_p": 0.25, "rng_state": rng_state_of(seed)}
    out, _ = forward(q, q, v, sequences=Sequences(cumulative, cumulative, 83, 83), **options)
    masks = dropout_masks_varlen(options["rng_state"], 0.25, 2, cumulative, cumulative)
    for b, mask in enumerate(masks):
        begin, end = cumulative[b : b + 2].tolist()
        assert torch.equal(out[begin:end].transpose(0, 1)[..., : end - begin] != 0, mask)


@runs_triton
def test_trace_names_the_features(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    case = FEATURES_BY_NAME["together_layout"]
    inputs = make_inputs(case, torch.float16, DEVICE, 0)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    forward(*inputs, **package_options(case, rng_state_of(0)))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "triton.flash_fwd_kernel" in line]
    assert "features=alibi+dropout" in line
    assert "window=" in line


def check_ranges(ranges: Tensor, visible: Tensor, block: int, step: int) -> None:
    """Check ``ranges`` [blocks of rows, 4] against ``visible`` [rows, columns].

    The steps cover every visible pair. Each step has a visible pair. A step without a mask has no hidden pair.
    """
    for b, (begin, full_begin, full_end, end) in enumerate(ranges.tolist()):
        rows = visible[b * block : (b + 1) * block]
        columns = rows.any(0).nonzero().flatten().tolist()
        masked = [*range(begin, full_begin, step), *range(full_end, end, step)]
        full = [*range(full_begin, full_end, step)]
        steps = [(first, min(first + step, visible.shape[1])) for first in sorted((*masked, *full))]
        assert all(first % step == 0 for first, _ in steps)
        assert len(set(steps)) == len(steps)
        assert set(columns) <= {column for first, last in steps for column in range(first, last)}
        assert all(rows[:, first:last].any() for first, last in steps if rows.any()), f"block {b}: {steps}"
        assert all(rows[:, first : first + step].all() for first in full), f"block {b}: {full}"


@runs_triton
@pytest.mark.parametrize("lengths", [(200, 200), (77, 300), (300, 77), (130, 1), (1, 130)], ids=str)
def test_hidden_blocks_are_skipped_and_only_edges_masked(lengths: tuple[int, int]) -> None:
    from ..support import triton_probes

    (seqlen_q, seqlen_k), (block_m, block_n) = lengths, (64, 32)
    for left, right in itertools.product((0, 31, 150, 2**31 - 1), repeat=2):
        window = (-1 if left > 1000 else left, -1 if right > 1000 else right)
        visible = visible_keys(seqlen_q, seqlen_k, window_size=window)
        for probe, seen, block, step in (
            (triton_probes.visible_keys_probe, visible, block_m, block_n),
            (triton_probes.visible_queries_probe, visible.T, block_n, block_m),
        ):
            ranges = torch.empty(-(-seen.shape[0] // block), 4, dtype=torch.int32, device=DEVICE)
            probe[(ranges.shape[0],)](ranges, seqlen_q, seqlen_k, left, right, False, block_m, block_n)
            check_ranges(ranges, seen, block, step)


@runs_triton
@pytest.mark.parametrize("lengths", [(5, 0, 64, 1, 130, 0), (0, 0), (17,), tuple(i * 7 % 40 for i in range(300))])
def test_every_block_of_every_sequence_is_found_once(lengths: tuple[int, ...]) -> None:
    """300 sequences are more than find_block loads at once: it bisects first."""
    from ..support import triton_probes

    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    blocks = sum(lengths) // 16 + len(lengths)
    found = torch.empty(blocks, 2, dtype=torch.int32, device=DEVICE)
    triton_probes.find_block_probe[(blocks,)](cu_seqlens, len(lengths), sum(lengths), found, 16)
    real = [(b, block) for b, block in found.tolist() if block * 16 < lengths[b]]
    assert real == [(b, block) for b, length in enumerate(lengths) for block in range(-(-length // 16))]


@runs_triton
def test_an_untimed_kind_falls_back_where_resources_run_out() -> None:
    from triton.runtime.errors import OutOfResources

    from flash_attn_mini.backends.triton import configs
    from flash_attn_mini.backends.triton.tuner import first_that_launches

    tried = []

    def launch(config: Any) -> None:
        tried.append(config)
        if config.num_warps == 8:
            raise OutOfResources(250_000, 232_448, "shared memory")

    candidates = configs.FORWARD.candidates(128, 128, 2, False, 1 << 30, timed=False)
    assert [config.num_warps for config in candidates] == [8, 8, 4]
    assert first_that_launches(candidates, launch) is candidates[2]
    assert tried == candidates[:2]
    assert first_that_launches(candidates[2:], launch) is candidates[2]


@runs_triton
def test_a_small_call_with_wide_heads_takes_a_tile_that_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 99 KB of shared memory the first tile of (512, 64) needs more than its estimate."""
    from triton.runtime.errors import OutOfResources

    from flash_attn_mini.backends.triton import tuner
    from flash_attn_mini.backends.triton.configs import BACKWARD_DQ
    from flash_attn_mini.backends.triton.flash_bwd_dq_kernel import flash_bwd_dq_kernel

    monkeypatch.setattr(tuner, "shared_memory_limit", lambda device: 99 * 1024)
    q, v = torch.zeros(1, 8, 1, 512).half(), torch.zeros(1, 8, 1, 64).half()

    def launch(config: Any) -> None:
        if config.kwargs["BLOCK_N"] == 32:
            raise OutOfResources(102_400, 101_376, "shared memory")

    chosen = tuner.Tuner(flash_bwd_dq_kernel, BACKWARD_DQ).choose(q, q, v, False, False, False, launch)
    assert chosen.kwargs["BLOCK_N"] == 16


def untimed_configs() -> list[Any]:
    """(kernel, head dim, configuration) of every entry of the untimed tables."""
    pytest.importorskip("triton")
    from flash_attn_mini.backends.triton import configs

    return [
        pytest.param(kernel, head_dim, config, id=f"{kernel}-{name}-d{head_dim}-{n}")
        for kernel, tables in (
            ("fwd", configs.FORWARD), ("dq", configs.BACKWARD_DQ), ("dkv", configs.BACKWARD_DKV),
            ("dv", configs.BACKWARD_DV),
        )
        for name in ("untimed_hopper", "untimed_plain")
        for head_dim, listed in getattr(tables, name).items()
        for n, config in enumerate(listed)
    ]  # fmt: skip


@gpu
@pytest.mark.parametrize(("kernel", "head_dim", "config"), untimed_configs())
def test_every_untimed_configuration_is_right(
    kernel: str, head_dim: int, config: Any, seed: int, described_seed: str
) -> None:
    from flash_attn_mini.backends.triton import launch, launch_bwd
    from flash_attn_mini.backends.triton.tuner import shared_memory_limit

    case = dataclasses.replace(FEATURES_BY_NAME["together"], headdim=head_dim)
    inputs, dout = make_inputs(case, torch.float16, DEVICE, seed), make_dout(case, torch.float16, DEVICE, seed)
    if config.kwargs["USE_TMA"] and not all(launch.tma_reaches(x) for x in inputs):
        pytest.skip("no TMA on this GPU")
    tuners = {"fwd": launch.TUNER, "dq": launch_bwd.DQ_TUNER, "dkv": launch_bwd.DKV_TUNER, "dv": launch_bwd.DV_TUNER}
    tuner = tuners[kernel]
    if tuner.tables.shared_memory(config, head_dim, head_dim, 2) > shared_memory_limit(inputs[0].device):
        pytest.skip("this GPU has too little shared memory")
    rng_state = rng_state_of(seed)
    given = package_options(case, rng_state)
    del given["rng_state"]
    options = make_options(**given)
    expected = options_of(case, DEVICE)
    sizes = (case.batch, case.nheads, case.seqlen_q, case.seqlen_k)
    expected["dropout_mask"] = dropout_mask(rng_state, case.dropout_p, *sizes, device=DEVICE)
    described = f"{config}, {case.shape}\n  {described_seed}"
    if kernel == "fwd":
        call = launch.prepare(*inputs, options, None, rng_state)
        launch.launch(call, config)
        assert_forward_accurate(*inputs, call.out, call.lse, case=described, **expected)
        return
    out, lse, _ = launch.forward(*inputs, None, options, rng_state)
    call = launch_bwd.prepare(dout, *inputs, out, lse, None, options, None, rng_state)
    launch_bwd.run(call)
    gradients: Any = (call.dq, None, None)
    if kernel == "dq":
        call.dq.fill_(float("nan"))
        launch_bwd.launch_dq(call, config)
    else:
        call.dk.fill_(float("nan"))
        call.dv.fill_(float("nan"))
        for want_dk, want_dv in launch_bwd.dkv_launches(call):
            if kernel == "dkv" or not want_dk:
                launch_bwd.launch_dkv(call, config, want_dk=want_dk, want_dv=want_dv)
        gradients = (None, call.dk if kernel == "dkv" else None, call.dv)
    assert_gradients_accurate(*inputs, dout, gradients, case=described, **expected)


@gpu
def test_no_length_or_window_compiles_another_kernel() -> None:
    from flash_attn_mini.backends.triton import launch

    def run(lengths: tuple[int, ...], window: int) -> int:
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
        q = torch.randn(sum(lengths), 2, 64, dtype=torch.float16, device="cuda")
        options = {"softmax_scale": 0.1, "causal": True, "window_size": (window, 0)}
        forward(q, q, q, sequences=Sequences(cu_seqlens, cu_seqlens, max(lengths), max(lengths)), **options)
        return sum(len(cache[0]) for cache in launch.flash_fwd_kernel.device_caches.values())

    first = run((128, 256), 64)
    assert [run((333, 17, 1), 63), run((500,), 1), run((90, 0, 200), 16)] == [first] * 3


@gpu
def test_capture_in_a_cuda_graph(seed: int) -> None:
    """A call with variable lengths does not wait for the GPU, or the capture would fail."""
    case = VARLEN_BY_NAME["together"]
    batch, rng_state = make_batch(case, torch.float16, DEVICE, seed), rng_state_of(seed)
    inputs, options = (batch.q, batch.k, batch.v), package_options(case, rng_state)
    sequences = Sequences(*batch.lengths)

    def run() -> list[Tensor]:
        out, lse = forward(*inputs, sequences=sequences, **options)
        return [out, *backward(batch.dout, *inputs, out, lse, None, sequences=sequences, **options)]

    assert_captures_first_call(run)
