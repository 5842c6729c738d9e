"""The kernels of csrc/single_tile, for up to 64 queries and keys of equal length: which calls they take, and their
accuracy. The short cases of all other tests on CUDA run on them too.
"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
import torch

from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import available_backends

from ..conftest import GPU_DTYPES
from ..kernels.test_random import LAYOUT_NAMES
from ..support.cases import Case, make_dout, make_inputs
from ..support.feature_checks import check_dense
from ..support.gpu_calls import run_on_sm80

pytestmark = pytest.mark.gpu

TRACED = re.compile(r"run_mha_(fwd|bwd) +device=cuda (single_tile|arch=\w+) kHeadDim=(\d+)")
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 49, 63, 64)  # around the tiles of 16, 32 and 64 rows
each_dtype = pytest.mark.parametrize("dtype", GPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def default_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if "cuda" not in available_backends("cuda"):
        pytest.skip("the build has no CUDA kernels for this GPU")
    monkeypatch.delenv("FLASH_ATTN_MINI_ARCH", raising=False)


# ---- calls ----------------------------------------------------------------------------------------------------------


def kernels_of(capfd: pytest.CaptureFixture[str], case: Case, **options: Any) -> list[tuple[str, str, str]]:
    """Direction, kernel and head dim, for the forward and the backward of a call."""
    q, k, v = (x.requires_grad_() for x in make_inputs(case, torch.bfloat16, "cuda", 0))
    out = flash_attn_func(q, k, v, causal=case.causal, window_size=case.window_size, backend="cuda", **options)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return [
        (way, "arch" if kernel.startswith("arch") else kernel, d)
        for way, kernel, d in TRACED.findall(capfd.readouterr().err)
    ]


@pytest.mark.parametrize("nheads_k", [4, 2])
@pytest.mark.parametrize(("headdim", "compiled"), [(64, 64), (72, 96), (128, 128)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 9)}], ids=str)
def test_kernel_runs(
    nheads_k: int,
    headdim: int,
    compiled: int,
    options: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    case = Case("call", "any", 2, 4, nheads_k, 64, 50, headdim, **options)
    assert kernels_of(capfd, case) == [(way, "single_tile", str(compiled)) for way in ("fwd", "bwd")]


@pytest.mark.parametrize(
    ("seqlens", "headdim", "options"),
    [
        ((65, 64), 64, {}),
        ((64, 65), 64, {}),
        ((64, 64), 136, {}),
        ((64, 64), 64, {"softcap": 1.0}),
        ((64, 64), 64, {"dropout_p": 0.5}),
    ],
    ids=str,
)
def test_other_kernels_run(
    seqlens: tuple[int, int],
    headdim: int,
    options: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    case = Case("call", "any", 2, 4, 4, *seqlens, headdim)
    assert [kernel for _, kernel, _ in kernels_of(capfd, case, **options)] == ["arch", "arch"]


def test_max_logits_concern_the_forward(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    case = Case("call", "any", 2, 4, 4, 64, 64, 64)
    assert [kernel for _, kernel, _ in kernels_of(capfd, case, return_max_logits=True)] == ["arch", "single_tile"]


def test_a_chosen_architecture_runs_its_kernels(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_sm80(monkeypatch)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    case = Case("call", "any", 2, 4, 4, 16, 16, 64)
    assert [kernel for _, kernel, _ in kernels_of(capfd, case)] == ["arch", "arch"]


def test_scratch_is_not_allocated() -> None:
    """Forward and backward of many short sequences allocate the results and the row statistics."""
    q, k, v = (torch.randn(2048, 15, 16, 72, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(flash_attn_func(q, k, v, backend="cuda"), (q, k, v), dout)
    # Results: out, dq, dk, dv. Statistics of a row and a head: 4 bytes of lse; delta has 128 rows a sequence.
    assert torch.cuda.max_memory_allocated() - before < 4.5 * q.nbytes


# ---- accuracy -------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths(
    seqlen_q: int, seqlen_k: int, causal: bool, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """One key: dq and dk are exactly 0, which PyTorch's are not (test_one_key)."""
    headdim = (64, 72, 96, 128, 40, 8)[(seqlen_q + seqlen_k) % 6]
    case = Case("lengths", "tiles of 16, 32 and 64", 3, 3, 3, seqlen_q, max(seqlen_k, 2), headdim, causal)
    check_dense(case, "cuda", "cuda", dtype, seed, described_seed)


@each_dtype
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_one_key(seqlen_q: int, dtype: torch.dtype, seed: int) -> None:
    """The probability is 1: out is v, dv the sum of dout."""
    case = Case("one_key", "", 5, 3, 3, seqlen_q, 1, 64)
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cuda", seed))
    dout = make_dout(case, dtype, "cuda", seed)
    out = flash_attn_func(q, k, v, backend="cuda")
    assert torch.equal(out, v.expand_as(out))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    expected = dout.double().sum(1, keepdim=True)
    eps = torch.finfo(dtype).eps
    assert ((dv - expected).abs() <= eps * expected.abs() + 1e-5 * dout.double().abs().sum(1, keepdim=True)).all()
    # dS = P (dP - delta): both are the same products, summed in another order.
    bound = 1e-4 * (dout.double().abs() * v.double().abs()).sum(-1).amax()
    assert dq.abs().max() <= bound * k.abs().max()
    assert dk.abs().max() <= bound * q.abs().max() * seqlen_q


def random_case(draw: random.Random) -> Case:
    nheads_k = draw.randint(1, 3)
    side = [draw.choice((-1, 0, draw.randint(1, 70))) for _ in range(2)]
    headdim = draw.choice((64, 72, 128, draw.randint(1, 128)))
    return Case(
        "random",
        "drawn at random",
        batch=draw.choice((draw.randint(1, 9), 150)),  # with many heads of keys a group of queries shares a CTA
        nheads=nheads_k * draw.randint(1, 3),
        nheads_k=nheads_k,
        seqlen_q=draw.randint(1, 64),
        seqlen_k=draw.randint(2, 64),
        headdim=headdim,
        causal=draw.random() < 0.3,
        window_size=(side[0], side[1]) if draw.random() < 0.4 else (-1, -1),
        softmax_scale=draw.choice((None, None, draw.uniform(0.01, 0.5), -draw.uniform(0.01, 0.3))),
        layout=draw.choice([name for name in LAYOUT_NAMES if name != "packed"]),
        own_headdim_v=draw.choice((None, None, draw.randint(1, 128))),
    )


@each_dtype
@pytest.mark.parametrize("chunk", range(20))
def test_random_cases(chunk: int, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    for number in range(15):
        own_seed = (seed + number) % 2**31
        check_dense(random_case(random.Random(own_seed)), "cuda", "cuda", dtype, own_seed, described_seed)


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_and_keys_that_do_not_count(bad: float, dtype: torch.dtype, seed: int) -> None:
    """Queries without a key, and keys that no query sees, may hold anything: no other value changes."""
    for (seqlen_q, seqlen_k), (left, right) in itertools.product(
        ((40, 20), (20, 40), (64, 33)), ((0, 0), (3, 0), (0, 35))
    ):
        case = Case("window", "", 2, 2, 2, seqlen_q, seqlen_k, 64)
        inputs = make_inputs(case, dtype, "cuda", seed)
        dout = make_dout(case, dtype, "cuda", seed)
        i = torch.arange(seqlen_q, device="cuda")[:, None] + seqlen_k - seqlen_q
        j = torch.arange(seqlen_k, device="cuda")
        visible = (j >= i - left) & (j <= i + right)
        results = []
        for poisoned in (False, True):
            q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
            own_dout = dout.clone()
            if poisoned:
                with torch.no_grad():
                    for x, hidden in ((q, ~visible.any(1)), (k, ~visible.any(0)), (v, ~visible.any(0))):
                        x[:, hidden] = bad
                own_dout[:, ~visible.any(1)] = bad
            out = flash_attn_func(q, k, v, window_size=(left, right), backend="cuda")
            results.append((out, *torch.autograd.grad(out, (q, k, v), own_dout)))
        for name, clean, got in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            assert torch.equal(clean, got), f"{name} of lengths {seqlen_q}, {seqlen_k} and window {left}, {right}"


@each_dtype
def test_gradient_of_the_log_sum_exp(dtype: torch.dtype, seed: int) -> None:
    """Against float64, of a loss that reads out and lse."""
    for seqlen, headdim in ((15, 72), (32, 128), (64, 64)):
        case = Case("lse", "", 3, 2, 2, seqlen, seqlen, headdim)
        q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cuda", seed))
        dout, dlse = make_dout(case, dtype, "cuda", seed), torch.randn(3, 2, seqlen, device="cuda")
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, backend="cuda")
        got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
        wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        scores = wide[0] @ wide[1].mT * headdim**-0.5
        expected = torch.autograd.grad(
            (scores.softmax(-1) @ wide[2], scores.logsumexp(-1)), wide, (dout.double().transpose(1, 2), dlse.double())
        )
        for name, a, b in zip(("dq", "dk", "dv"), got, expected, strict=True):
            b = b.transpose(1, 2)
            error = (a.double() - b).abs().max().item()
            assert error <= 8 * torch.finfo(dtype).eps * b.abs().max().item(), f"{name} of {seqlen}, {headdim}"


@each_dtype
def test_repeated_calls_have_equal_bits(dtype: torch.dtype, seed: int) -> None:
    case = Case("repeats", "", 400, 4, 4, 49, 49, 72)
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cuda", seed))
    dout = make_dout(case, dtype, "cuda", seed)
    first = None
    for _ in range(50):
        out = flash_attn_func(q, k, v, backend="cuda")
        results = (out, *torch.autograd.grad(out, (q, k, v), dout))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))
