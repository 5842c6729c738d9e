"""flash_attn_func's gradients over the curated list (cases.py), on every backend that the machine has."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C, flash_attn_func, use_backend
from flash_attn_mini.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from flash_attn_mini.reference import attention_reference, attention_reference_backward

from ..support.bounds import assert_gradients_accurate, differentiate
from ..support.cases import (
    FORWARD_CASES,
    LARGE_FORWARD_CASES,
    SMALL_FORWARD_CASES,
    Case,
    make_dlse,
    make_dout,
    make_inputs,
)
from ..support.feature_checks import described
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.limits import unreachable_gradients
from ..support.poison import Guard, PoisonIntact, memory_shortage, poisoned

BY_NAME = {case.name: case for case in FORWARD_CASES}
LAYOUT_CASES = [c for c in FORWARD_CASES if c.layout != "bshd" or not math.isnan(c.poison)]
# Few and many heads, one and several tiles, a causal diagonal, groups: these show a changed order of summation.
REPEATED_CASES = [BY_NAME[n] for n in ("gqa_4", "long_keys", "long_causal", "headdim_256_causal", "mqa_decode")]
SUBSETS = [mask for mask in itertools.product((False, True), repeat=3) if 0 < sum(mask) < 3]


def attention(
    q: Tensor, k: Tensor, v: Tensor, case: Case, backend: str, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    out, lse, _ = flash_attn_func(
        q,
        k,
        v,
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        deterministic=deterministic,
        return_attn_probs=True,
        backend=backend,
    )
    return out, lse


def gradients(
    case: Case,
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    dlse: Tensor | None,
    backend: str,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return differentiate(attention, inputs, dout, dlse, case=case, backend=backend, deterministic=deterministic)


def check(
    case: Case, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str, with_lse: bool = False
) -> None:
    inputs = make_inputs(case, dtype, device, seed)
    dout = make_dout(case, dtype, device, seed)
    dlse = make_dlse(case, dtype, device, seed) if with_lse else None
    judge = assert_gradients_accurate_beside_flash if case.headdim == 1 else assert_gradients_accurate
    judge(
        *inputs,
        dout,
        gradients(case, inputs, dout, dlse, backend),
        case=described(case, dtype, backend, described_seed),
        dlse=dlse,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
    )


@pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
def test_gradients_are_as_accurate_as_pytorch(
    case: Case, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    reason = unreachable_gradients(case, backend)
    if reason is not None:
        pytest.skip(reason)
    check(case, backend, device, dtype, seed, described_seed)


# Without 1e4: at a rowsum(dO * O) of 1e5, delta in float32 keeps two digits of the dlse subtracted from it.
@pytest.mark.parametrize(
    "case", [c for c in SMALL_FORWARD_CASES if c.layout == "bshd" and "1e4" not in c.values], ids=str
)
def test_gradients_through_the_lse_are_as_accurate_as_pytorch(
    case: Case, backend: str, device: str, seed: int, described_seed: str
) -> None:
    dtype = torch.float32 if backend == "cpu" else torch.float16
    check(case, backend, device, dtype, seed, described_seed, with_lse=True)


@pytest.mark.parametrize("name", ["gqa_3_causal", "masked_rows", "headdim_100"])
def test_gradients_of_the_lse_alone(
    name: str, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """out has no gradient."""
    case = BY_NAME[name]
    inputs, dlse = make_inputs(case, dtype, device, seed), make_dlse(case, dtype, device, seed)
    computed = differentiate(attention, inputs, None, dlse, case=case, backend=backend)
    assert (computed[2] == 0).all(), "v does not reach the lse"
    described_case = described(case, dtype, backend, described_seed)
    assert_gradients_accurate(*inputs, None, computed, case=described_case, dlse=dlse, causal=case.causal)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", SMALL_FORWARD_CASES, ids=str)
def test_small_case_runs_under_compute_sanitizer(case: Case, seed: int, described_seed: str) -> None:
    check(case, "cuda", "cuda", torch.float16, seed, described_seed, with_lse="1e4" not in case.values)


@pytest.mark.parametrize("case", LARGE_FORWARD_CASES, ids=str)
def test_offsets_beyond_31_bits(case: Case, backend: str, device: str, seed: int, described_seed: str) -> None:
    """q, k, v and dout each with their rows or batches far apart."""
    shortage = memory_shortage(2 * case.memory_gib, device)
    if shortage:
        pytest.skip(shortage)
    check(case, backend, device, torch.float16, seed, described_seed)


# ---- zeros --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no_keys", "no_keys_causal", "no_queries", "no_tokens", "no_batch"])
def test_empty_sequences_have_zero_gradients(name: str, backend: str, device: str, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    inputs, dout = make_inputs(case, dtype, device, 0), make_dout(case, dtype, device, 0)
    for got, like in zip(gradients(case, inputs, dout, None, backend), inputs, strict=True):
        assert got.shape == like.shape
        assert (got == 0).all()


# ---- layouts of dout and of the gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=str)
def test_inputs_and_their_surroundings_are_not_written(case: Case, backend: str, device: str, seed: int) -> None:
    inputs, dout = make_inputs(case, torch.float16, device, seed), make_dout(case, torch.float16, device, seed)
    guard = Guard(*inputs, dout)
    gradients(case, inputs, dout, None, backend)
    guard.check()


def _every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


DOUT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of_sum": lambda x: x.new_ones(()).expand(x.shape),
    "of_sum_over_rows": lambda x: x[:, :1].expand(x.shape),
    "expanded_last": lambda x: x[..., :1].expand(x.shape),
    "bhsd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last_dim_strided": _every_second,
    "last_dim_first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "misaligned": lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:],
    "negated_view": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("layout", DOUT_LAYOUTS)
def test_dout_may_have_any_strides(layout: str, backend: str, device: str, seed: int, described_seed: str) -> None:
    """dout has the strides that the next operation gave it: those of out.sum() are 0."""
    case, dtype = BY_NAME["gqa_3_causal"], torch.float16
    inputs = make_inputs(case, dtype, device, seed)
    dout = DOUT_LAYOUTS[layout](make_dout(case, dtype, device, seed).contiguous())
    computed = gradients(case, inputs, dout, None, backend)
    where = f"{layout}, {described(case, dtype, backend, described_seed)}"
    assert_gradients_accurate(*inputs, dout, computed, case=where, causal=True)


@pytest.mark.parametrize("layout", ["expanded", "last_dim_strided"])
def test_dlse_may_have_any_strides(layout: str, backend: str, device: str, seed: int) -> None:
    case = BY_NAME["gqa_3_causal"]
    inputs, dout = make_inputs(case, torch.float16, device, seed), make_dout(case, torch.float16, device, seed)
    dlse = make_dlse(case, torch.float16, device, seed)
    dlse = dlse[:1, :1, :1].expand(dlse.shape) if layout == "expanded" else _every_second(dlse)
    expected = gradients(case, inputs, dout, dlse.contiguous(), backend, deterministic=True)
    for a, b in zip(gradients(case, inputs, dout, dlse, backend, deterministic=True), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["layout_bhsd", "layout_bhsd_causal", "layout_sbhd", "layout_padded_dim"])
def test_gradients_have_the_strides_of_empty_like(name: str, backend: str, device: str, seed: int) -> None:
    """The fake implementation has these strides."""
    case = BY_NAME[name]
    inputs, dout = make_inputs(case, torch.float16, device, seed), make_dout(case, torch.float16, device, seed)
    for got, like in zip(gradients(case, inputs, dout, None, backend), inputs, strict=True):
        assert got.stride() == torch.empty_like(like).stride()


def gradient_buffers(layout: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv to be written, NaN themselves and surrounded by NaN."""

    def make(like: Tensor) -> Tensor:
        b, s, h, d = like.shape
        return {
            "bshd": lambda: poisoned((b, s, h, d), like.dtype, like.device.type),
            "strided": lambda: poisoned((b, h, s, 2 * d), like.dtype, like.device.type).transpose(1, 2)[..., :d],
            "misaligned": lambda: poisoned((b, s, h, d + 1), like.dtype, like.device.type)[..., 1:],
        }[layout]()

    dq, dk, dv = (make(x) for x in inputs)
    return dq, dk, dv


def packed_buffers(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one [batch, seqlen, 3, nheads, headdim], as the packed functions write them."""
    b, s, h, d = inputs[0].shape
    dq, dk, dv = poisoned((b, s, 3, h, d), inputs[0].dtype, inputs[0].device.type).unbind(2)
    return dq, dk, dv


IN_PLACE_CASES = ["gqa_3_causal", "masked_rows", "no_keys", "headdim_100", "square_129_causal"]
IN_PLACE = [(name, layout) for name in IN_PLACE_CASES for layout in ("bshd", "strided", "misaligned")]
IN_PLACE.append(("square_129_causal", "packed"))  # one tensor holds all three if their shapes agree


@pytest.mark.parametrize(("name", "layout"), IN_PLACE)
def test_official_backward_writes_in_place(
    name: str, layout: str, backend: str, device: str, seed: int, described_seed: str
) -> None:
    """_flash_attn_forward and _flash_attn_backward as code for the official package calls them, by position."""
    case, dtype = BY_NAME[name], torch.float16
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)
    options = (0.0, case.headdim**-0.5, case.causal, -1, -1, 0.0, None)
    with use_backend(backend):
        out, lse, s_dmask, rng_state = _flash_attn_forward(*inputs, *options, False)
        assert s_dmask.numel() == rng_state.numel() == 0
        given = packed_buffers(inputs) if layout == "packed" else gradient_buffers(layout, inputs)
        intact = [PoisonIntact(x) for x in given] if layout != "packed" else []
        versions = [x._version for x in given]
        softmax_d = _flash_attn_backward(dout, *inputs, out, lse, *given, *options, False, rng_state)
    for check_surroundings in intact:
        check_surroundings.check()
    if layout != "packed":  # slices of one buffer share its version
        assert all(x._version > before for x, before in zip(given, versions, strict=True))
    where = f"{layout}, {described(case, dtype, backend, described_seed)}"
    assert_gradients_accurate(*inputs, dout, given, case=where, causal=case.causal)
    expected = torch.einsum("bshd,bshd->bhs", dout.double(), out.double())
    assert softmax_d.shape == (case.batch, case.nheads, -(-case.seqlen_q // 128) * 128)
    torch.testing.assert_close(softmax_d[..., : case.seqlen_q].double(), expected, rtol=1e-4, atol=1e-4)


def test_official_backward_skips_gradients_that_are_none(backend: str, device: str, seed: int) -> None:
    case = BY_NAME["gqa_3_causal"]
    inputs, dout = make_inputs(case, torch.float16, device, seed), make_dout(case, torch.float16, device, seed)
    options = (0.0, 0.125, True, -1, -1, 0.0, None)
    with use_backend(backend):
        out, lse, *_ = _flash_attn_forward(*inputs, *options, False)
        complete = gradient_buffers("bshd", inputs)
        _flash_attn_backward(dout, *inputs, out, lse, *complete, *options, True)
        for mask in [*SUBSETS, (False, False, False)]:
            given = gradient_buffers("bshd", inputs)
            asked = [x if wanted else None for x, wanted in zip(given, mask, strict=True)]
            _flash_attn_backward(dout, *inputs, out, lse, *asked, *options, True)
            for got, expected, wanted in zip(given, complete, mask, strict=True):
                assert torch.equal(got, expected) if wanted else got.isnan().all()


# ---- subsets of the gradients, repeated calls ---------------------------------------------------------------------


@pytest.mark.parametrize("mask", SUBSETS, ids=lambda mask: "".join(n for n, m in zip("qkv", mask, strict=True) if m))
@pytest.mark.parametrize("name", ["gqa_3_causal", "more_keys", "headdim_100", "masked_tile"])
def test_one_gradient_does_not_depend_on_the_others(
    name: str, mask: tuple[bool, bool, bool], backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    """Inputs that need no gradient get none, and the others get the same bits as when all are computed."""
    case = BY_NAME[name]
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)
    complete = gradients(case, inputs, dout, None, backend, deterministic=True)
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    attention(*leaves, case, backend, deterministic=True)[0].backward(dout)
    for leaf, wanted, expected in zip(leaves, mask, complete, strict=True):
        assert torch.equal(leaf.grad, expected) if wanted else leaf.grad is None


@pytest.mark.parametrize("case", REPEATED_CASES, ids=str)
def test_deterministic_backward_repeats_bitwise(
    case: Case, backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)
    dlse = make_dlse(case, dtype, device, seed)
    expected = gradients(case, inputs, dout, dlse, backend, deterministic=True)
    for _ in range(3):
        for a, b in zip(gradients(case, inputs, dout, dlse, backend, deterministic=True), expected, strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", REPEATED_CASES, ids=str)
def test_cpu_gradients_do_not_depend_on_the_number_of_threads(case: Case, dtype: torch.dtype, seed: int) -> None:
    inputs, dout = make_inputs(case, dtype, "cpu", seed), make_dout(case, dtype, "cpu", seed)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(gradients(case, inputs, dout, None, "cpu"))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_concurrent_backwards_do_not_share_anything(backend: str, device: str, seed: int) -> None:
    cases = [BY_NAME[n] for n in ("gqa_4", "long_keys", "headdim_40_causal", "masked_rows")]
    calls = [
        (c, make_inputs(c, torch.float16, device, seed), make_dout(c, torch.float16, device, seed), None, backend, True)
        for c in cases
    ]
    expected = [gradients(*call) for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(gradients, *call) for _ in range(5) for call in calls]
        for i, future in enumerate(futures):
            for a, b in zip(future.result(), expected[i % len(calls)], strict=True):
                assert torch.equal(a, b)


def test_nan_in_a_row_of_dout_stays_in_its_head(backend: str, device: str, seed: int) -> None:
    """The row's dq and its head's dk and dv become NaN; the rest keeps its bits."""
    case = BY_NAME["more_keys"]
    inputs, dout = make_inputs(case, torch.float16, device, seed), make_dout(case, torch.float16, device, seed)
    clean = gradients(case, inputs, dout, None, backend, deterministic=True)
    dout[1, 40, 0] = math.nan
    dq, dk, dv = gradients(case, inputs, dout, None, backend, deterministic=True)
    assert dq[1, 40, 0].isnan().all()
    assert dk[1, :, 0].isnan().all()
    assert dv[1, :, 0].isnan().all()
    for got, before in zip((dk, dv), clean[1:], strict=True):
        assert torch.equal(got[1, :, 1], before[1, :, 1])
        assert torch.equal(got[0], before[0])
    dq[1, 40, 0] = clean[0][1, 40, 0]
    assert torch.equal(dq, clean[0])


# ---- gradcheck ----------------------------------------------------------------------------------------------------

GRADCHECKED = [c for c in SMALL_FORWARD_CASES if c.values in ("normal", "zeros") and c.layout == "bshd"]
TINY = [
    Case("tiny", "every single derivative", 1, 2, 1, 3, 5, 4),
    Case("tiny_causal", "the same, rows without keys", 1, 3, 1, 5, 3, 3, causal=True),
    Case("tiny_scale", "a negative scale", 1, 2, 2, 4, 4, 5, causal=True, softmax_scale=-0.7),
]


def gradcheck(case: Case, seed: int, fast_mode: bool) -> None:
    inputs = [x.requires_grad_() for x in make_inputs(case, torch.float64, "cpu", seed)]

    def results(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(*qkv, case=case, backend="cpu")
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # -inf has no numerical derivative

    assert torch.autograd.gradcheck(results, inputs, fast_mode=fast_mode)


@pytest.mark.parametrize("case", TINY, ids=str)
def test_gradcheck_of_every_derivative(case: Case, seed: int) -> None:
    gradcheck(case, seed, fast_mode=False)


@pytest.mark.parametrize("case", GRADCHECKED, ids=str)
def test_gradcheck_along_random_directions(case: Case, seed: int) -> None:
    gradcheck(case, seed, fast_mode=True)


# ---- the reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gqa_3_causal", "masked_rows", "no_keys", "scale_negative", "square_65"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out_and_lse"])
def test_written_out_reference_is_the_derivative_of_the_reference(name: str, with_lse: bool, seed: int) -> None:
    case = BY_NAME[name]
    inputs, dout = make_inputs(case, torch.float64, "cpu", seed), make_dout(case, torch.float64, "cpu", seed)
    dlse = make_dlse(case, torch.float64, "cpu", seed) if with_lse else None
    options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    out, lse = attention_reference(*inputs, **options)
    written = attention_reference_backward(dout, *inputs, out, lse, dlse, **options)
    for a, b in zip(written, differentiate(attention_reference, inputs, dout, dlse, **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_float64_agrees_with_the_reference_to_rounding(seed: int) -> None:
    """No float32 constant or intermediate hides in the cpu backend's float64."""
    case = dataclasses.replace(BY_NAME["square_129_causal"], headdim=40)
    inputs, dout = make_inputs(case, torch.float64, "cpu", seed), make_dout(case, torch.float64, "cpu", seed)
    dlse = make_dlse(case, torch.float64, "cpu", seed)
    expected = differentiate(attention_reference, inputs, dout, dlse, causal=True)
    for a, b in zip(gradients(case, inputs, dout, dlse, "cpu"), expected, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_extension_bwd_returns_four_and_none_for_unwanted_gradients(seed: int) -> None:
    case = BY_NAME["gqa_3_causal"]
    q, k, v = make_inputs(case, torch.float32, "cpu", seed)
    dout = make_dout(case, torch.float32, "cpu", seed)
    out, lse, *_ = _C.fwd(q, k, v, None, None, 0.0, 0.125, True, -1, 0, 0.0, False, None)
    # After softmax_lse: dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, is_causal, windows, softcap, deterministic,
    # generator, rng_state; then arguments that the official extension does not have.
    official = (dout, q, k, v, out, lse, None, None, None, None, 0.0, 0.125, True, -1, 0, 0.0, False, None, None)
    complete = _C.bwd(*official)
    assert [list(x.shape) for x in complete[:3]] == [list(x.shape) for x in (q, k, v)]
    dq, dk, dv, softmax_d = _C.bwd(*official, None, [False, True, False])
    assert dq is dv is None
    assert torch.equal(dk, complete[1])
    assert torch.equal(softmax_d[..., : case.seqlen_q], complete[3][..., : case.seqlen_q])
