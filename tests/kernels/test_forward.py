"""flash_attn_func's forward over the curated list (cases.py), on every backend that the machine has."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C, flash_attn_func
from flash_attn_mini.reference import attention_reference

from ..support.bounds import assert_forward_accurate
from ..support.cases import FORWARD_CASES, LARGE_FORWARD_CASES, SMALL_FORWARD_CASES, Case, make_inputs
from ..support.feature_checks import described
from ..support.poison import Guard, PoisonIntact, memory_shortage, poisoned
from ..support.threads import number_of_threads_kept

BY_NAME = {case.name: case for case in FORWARD_CASES}
LAYOUT_CASES = [c for c in FORWARD_CASES if c.layout != "bshd" or not math.isnan(c.poison)]
# Few and many heads, one and several tiles, a causal diagonal: these show a changed order of summation.
REPEATED_CASES = [BY_NAME[n] for n in ("gqa_4", "long_keys", "long_causal", "headdim_256_causal", "mqa_decode")]


def forward(case: Case, q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    out, lse, _ = flash_attn_func(
        q, k, v, softmax_scale=case.softmax_scale, causal=case.causal, return_attn_probs=True, backend=backend
    )
    return out, lse


def check(case: Case, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    q, k, v = make_inputs(case, dtype, device, seed)
    out, lse = forward(case, q, k, v, backend)
    where = described(case, dtype, backend, described_seed)
    assert_forward_accurate(q, k, v, out, lse, case=where, causal=case.causal, softmax_scale=case.softmax_scale)


@pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
def test_forward_is_as_accurate_as_pytorch(
    case: Case, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check(case, backend, device, dtype, seed, described_seed)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", SMALL_FORWARD_CASES, ids=str)
def test_small_case_runs_under_compute_sanitizer(case: Case, seed: int, described_seed: str) -> None:
    check(case, "cuda", "cuda", torch.float16, seed, described_seed)


@pytest.mark.parametrize("case", LARGE_FORWARD_CASES, ids=str)
def test_offsets_beyond_31_bits(case: Case, backend: str, device: str, seed: int, described_seed: str) -> None:
    shortage = memory_shortage(case.memory_gib, device)
    if shortage:
        pytest.skip(shortage)
    check(case, backend, device, torch.float16, seed, described_seed)


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=str)
def test_inputs_and_their_surroundings_are_not_written(case: Case, backend: str, device: str, seed: int) -> None:
    q, k, v = make_inputs(case, torch.float16, device, seed)
    guard = Guard(q, k, v)
    forward(case, q, k, v, backend)
    guard.check()


@pytest.mark.parametrize("case", REPEATED_CASES, ids=str)
def test_forward_repeats_bitwise(case: Case, backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    q, k, v = make_inputs(case, dtype, device, seed)
    out, lse = forward(case, q, k, v, backend)
    for _ in range(3):
        again_out, again_lse = forward(case, q, k, v, backend)
        assert torch.equal(out, again_out)
        assert torch.equal(lse, again_lse)


@pytest.mark.backends("cpu", "cuda")  # triton may be tuned to other tiles for another batch
@pytest.mark.parametrize("case", REPEATED_CASES, ids=str)
def test_batch_and_head_do_not_change_a_row(case: Case, backend: str, device: str, seed: int) -> None:
    """A sequence gives the same bits in a batch of one."""
    q, k, v = make_inputs(case, torch.float16, device, seed)
    out, lse = forward(case, q, k, v, backend)
    last_out, last_lse = forward(case, q[-1:], k[-1:], v[-1:], backend)
    assert torch.equal(out[-1:], last_out)
    assert torch.equal(lse[-1:], last_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", REPEATED_CASES, ids=str)
@number_of_threads_kept()
def test_cpu_result_does_not_depend_on_the_number_of_threads(case: Case, dtype: torch.dtype, seed: int) -> None:
    q, k, v = make_inputs(case, dtype, "cpu", seed)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(forward(case, q, k, v, "cpu"))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_concurrent_calls_do_not_share_anything(backend: str, device: str, seed: int) -> None:
    """Calls from several Python threads at once, each with another shape."""
    cases = [BY_NAME[n] for n in ("gqa_4", "long_keys", "headdim_40_causal", "masked_rows")]
    inputs = [make_inputs(case, torch.float16, device, seed) for case in cases]
    expected = [forward(case, *qkv, backend)[0] for case, qkv in zip(cases, inputs, strict=True)]
    with ThreadPoolExecutor(len(cases)) as pool:
        futures = [
            pool.submit(forward, c, *qkv, backend) for _ in range(5) for c, qkv in zip(cases, inputs, strict=True)
        ]
        for i, future in enumerate(futures):
            assert torch.equal(future.result()[0], expected[i % len(cases)])


def test_out_has_the_strides_of_empty_like_q(backend: str, device: str, seed: int) -> None:
    """The fake implementation has these strides for a dense q that is not contiguous."""
    q, k, v = make_inputs(BY_NAME["layout_bhsd"], torch.float16, device, seed)
    assert flash_attn_func(q, k, v, backend=backend).stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("size", [1, 7])
def test_strides_of_single_element_dimensions_are_ignored(backend: str, device: str, size: int) -> None:
    """PyTorch gives a dimension of size 1 any stride; headdim 1 makes that the last one."""
    shape = (1, size, 1, 1)
    q, k, v = (torch.randn(64, device=device, dtype=torch.float16) for _ in range(3))
    views = [x.as_strided(shape, (99999, 3, 77777, 5)) for x in (q, k, v)]
    plain = [x.contiguous() for x in views]
    assert torch.equal(flash_attn_func(*views, backend=backend), flash_attn_func(*plain, backend=backend))


def test_nan_in_a_query_row_stays_in_that_row(backend: str, device: str, seed: int) -> None:
    q, k, v = make_inputs(BY_NAME["more_keys"], torch.float16, device, seed)
    clean = flash_attn_func(q, k, v, backend=backend)
    q[1, 40, 0] = math.nan
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, backend=backend)
    assert out[1, 40, 0].isnan().all()
    assert lse[1, 0, 40].isnan()
    out[1, 40, 0] = clean[1, 40, 0]
    assert torch.equal(out, clean)


def test_nan_in_a_key_reaches_every_row_that_sees_it(backend: str, device: str, seed: int) -> None:
    """The running maximum keeps a NaN; rows whose causal mask hides the key's tile are clean."""
    q, k, v = make_inputs(BY_NAME["square_513_causal"], torch.float16, device, seed)
    clean = flash_attn_func(q, k, v, causal=True, backend=backend)
    k[0, 300, 1] = math.nan
    out = flash_attn_func(q, k, v, causal=True, backend=backend)
    assert out[0, 300:, 1].isnan().all()
    assert torch.equal(out[0, :300, 1], clean[0, :300, 1])
    assert torch.equal(out[0, :, 0], clean[0, :, 0])


def test_positional_arguments_are_the_official_ones(backend: str, device: str, seed: int) -> None:
    q, k, v = make_inputs(BY_NAME["gqa_4"], torch.float16, device, seed)
    by_position = flash_attn_func(q, k, v, 0.0, 0.3, True, (-1, -1), 0.0, None, False, True, backend=backend)
    by_name = flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, deterministic=True, return_attn_probs=True, backend=backend
    )
    for a, b in zip(by_position, by_name, strict=True):
        assert torch.equal(a, b)


def test_default_scale_is_one_over_sqrt_headdim(backend: str, device: str, seed: int) -> None:
    q, k, v = make_inputs(BY_NAME["headdim_100"], torch.float16, device, seed)
    default = flash_attn_func(q, k, v, backend=backend)
    assert torch.equal(default, flash_attn_func(q, k, v, softmax_scale=0.1, backend=backend))


@pytest.mark.parametrize("right", [-1, 0, 5])
def test_causal_means_a_right_window_of_0(right: int, backend: str, device: str, seed: int) -> None:
    q, k, v = make_inputs(BY_NAME["gqa_4"], torch.float16, device, seed)
    expected = flash_attn_func(q, k, v, causal=True, backend=backend)
    assert torch.equal(expected, flash_attn_func(q, k, v, causal=True, window_size=(-1, right), backend=backend))


# ---- the extension's own entry ------------------------------------------------------------------------------------

OUT_LAYOUTS = ("none", "bshd", "strided", "misaligned")


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("out_layout", OUT_LAYOUTS)
@pytest.mark.parametrize("name", ["gqa_4", "masked_rows", "no_keys", "headdim_40_causal"])
def test_extension_fwd_writes_out_in_place(
    name: str, out_layout: str, backend: str, device: str, seed: int, described_seed: str
) -> None:
    case = BY_NAME[name]
    q, k, v = make_inputs(case, torch.float16, device, seed)
    b, s, h, d = q.shape
    out = {
        "none": lambda: None,
        "bshd": lambda: poisoned((b, s, h, d), q.dtype, device),
        "strided": lambda: poisoned((b, h, s, 2 * d), q.dtype, device).transpose(1, 2)[..., :d],
        "misaligned": lambda: poisoned((b, s, h, d + 1), q.dtype, device)[..., 1:],
    }[out_layout]()
    intact = None if out is None else PoisonIntact(out)
    scale = 1.0 / math.sqrt(d)
    # After out: alibi_slopes, p_dropout, softmax_scale, is_causal, window left and right, softcap, return_softmax.
    results = _C.fwd(q, k, v, out, None, 0.0, scale, case.causal, -1, 0 if case.causal else -1, 0.0, False, None)
    returned, lse, _s_dmask, _rng_state = results
    if out is not None and intact is not None:
        assert returned.data_ptr() == out.data_ptr()
        assert returned.stride() == out.stride()
        intact.check()
    where = f"{case.name}, out {out_layout}, {backend}\n  {described_seed}"
    assert_forward_accurate(q, k, v, returned, lse, case=where, causal=case.causal)


@pytest.mark.backends("cpu", "cuda")
def test_out_may_lie_between_the_rows_of_q(backend: str, device: str, seed: int, described_seed: str) -> None:
    """One buffer, two tensors that interleave and share no element: legal, as for PyTorch's own out= arguments."""
    values = make_inputs(BY_NAME["gqa_4"], torch.float16, device, seed)
    b, s, h, d = values[0].shape
    buffer = torch.empty(b, s, 2, h, d, dtype=torch.float16, device=device)
    q, out = buffer.unbind(2)
    q.copy_(values[0])
    k, v = values[1:]
    returned, lse, *_ = _C.fwd(q, k, v, out, None, 0.0, d**-0.5, False, -1, -1, 0.0, False, None)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(q, values[0])
    assert_forward_accurate(q, k, v, out, lse, case=f"out interleaved with q, {backend}\n  {described_seed}")


def test_masked_rows_are_exactly_as_documented(backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    case = BY_NAME["masked_rows"]
    q, k, v = make_inputs(case, dtype, device, seed)
    out, lse = forward(case, q, k, v, backend)
    unseen = case.seqlen_q - case.seqlen_k
    assert (out[:, :unseen] == 0).all()
    assert (lse[:, :, :unseen] == -math.inf).all()
    assert lse[:, :, unseen:].isfinite().all()
    # The first row with keys sees one key: its out is that key's v.
    assert torch.equal(out[:, unseen], v[:, 0])


def test_reference_and_backend_agree_on_float64_to_rounding(seed: int) -> None:
    """The cpu backend in float64 against the reference: no float32 constant or intermediate hides in it."""
    q, k, v = make_inputs(BY_NAME["square_129_causal"], torch.float64, "cpu", seed)
    out, lse = forward(BY_NAME["square_129_causal"], q, k, v, "cpu")
    expected_out, expected_lse = attention_reference(q, k, v, causal=True)
    assert (out - expected_out).abs().max() < 1e-13
    assert (lse - expected_lse).abs().max() < 1e-13
