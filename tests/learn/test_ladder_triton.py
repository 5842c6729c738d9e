"""The Triton rungs of the ladder, and the kernel of the negative results.

The first test runs the others in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.ladder_calls import assert_right, draw_poisoned
from ..support.triton_calls import DEVICE, HAS_GPU, gpu, runs_triton

SHAPES = [  # batch, seqlen_q, seqlen_k, headdim
    pytest.param(1, 32, 32, 16, id="less than a block"),
    pytest.param(2, 64, 64, 32, id="one block"),
    pytest.param(4, 128, 128, 64, id="whole blocks"),
    pytest.param(2, 70, 130, 64, id="ragged in both directions"),
    pytest.param(1, 1, 65, 128, id="one query"),
]
DTYPES = [torch.float16, torch.float32]


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def version(name: str) -> Any:
    import learn

    return getattr(learn, name)


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "float32"])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k", "headdim"), SHAPES)
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_v2"])
def test_both_loop_orders_are_right(
    name: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    headdim: int,
    dtype: torch.dtype,
    draw: torch.Generator,
    described_seed: str,
) -> None:
    q, k, v = draw_poisoned(draw, batch, seqlen_q, seqlen_k, headdim, dtype, DEVICE)
    assert_right(version(name), q, k, v, described_seed)


@gpu
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_v2"])
def test_both_loop_orders_in_bfloat16(name: str, draw: torch.Generator, described_seed: str) -> None:
    q, k, v = draw_poisoned(draw, 3, 1000, 1000, 128, torch.bfloat16, DEVICE)
    assert_right(version(name), q, k, v, described_seed)


@gpu
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_v2"])
def test_long_sequences_repeat_their_bits(name: str, draw: torch.Generator) -> None:
    """v1 hands its state from thread to thread through memory: a missing barrier would show here."""
    q, k, v = draw_poisoned(draw, 64, 2048, 2048, 64, torch.float16, DEVICE)
    first = version(name)(q, k, v)
    for _ in range(20):
        assert torch.equal(version(name)(q, k, v), first)


@runs_triton
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_v2"])
def test_scale_is_that_of_the_call(name: str, draw: torch.Generator) -> None:
    q, k, v = draw_poisoned(draw, 1, 16, 64, 16, torch.float32, DEVICE)
    torch.testing.assert_close(version(name)(q, k, v, 0.0), v.mean(dim=1, keepdim=True).expand_as(q))
    torch.testing.assert_close(version(name)(q, k, v, 0.25), version(name)(q, k, v))


@runs_triton
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_v2"])
def test_other_shapes_are_refused(name: str) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=DEVICE)

    for shapes, message in (
        ([(4, 16), (4, 16), (4, 16)], r"\[batch, seqlen_q, headdim\]"),
        ([(1, 4, 16), (1, 5, 16), (1, 4, 16)], r"k \[1, 5, 16\], v \[1, 4, 16\]"),
        ([(1, 4, 16), (2, 4, 16), (2, 4, 16)], r"q has shape \[1, 4, 16\], k \[2, 4, 16\]"),
        ([(1, 4, 24)] * 3, "headdim is 24; allowed: 16, 32, 64 and 128"),
        ([(1, 4, 16), (1, 0, 16), (1, 0, 16)], "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            version(name)(*(zeros(*shape) for shape in shapes))


@runs_triton
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(128, 128), (65, 100), (30, 130)])
def test_minimal_triton_is_right(
    seqlen_q: int, seqlen_k: int, causal: bool, draw: torch.Generator, described_seed: str
) -> None:
    q, k, v = draw_poisoned(draw, 1, seqlen_q, seqlen_k, 64, torch.float16, DEVICE)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return version("minimal_triton_attention")(q[0], k[0], v[0], causal=causal)[None]

    assert_right(attention, q, k, v, described_seed, causal=causal)


@runs_triton
def test_minimal_triton_reports_every_length_that_ends_in_time() -> None:
    from learn import experiments

    device = torch.device(DEVICE)
    rows = experiments.minimal_triton_lengths(device, 60.0 if HAS_GPU else 0.5)
    assert [row["N"] for row in rows] == list(experiments.MINIMAL_LENGTHS[: len(rows)])
    assert len(rows) == len(experiments.MINIMAL_LENGTHS) if HAS_GPU else 1 <= len(rows) < 5
    for row in rows:
        assert row["verdict"] == "passed"
        assert 0 < row["mean abs"] < row["max abs"] < row["max rel"]


@runs_triton
def test_versions_are_compared() -> None:
    from learn import experiments

    device = torch.device(DEVICE)
    assert [row["verdict"] for row in experiments.version_errors(device)] == ["passed"] * 3
    (row, *_) = experiments.version_times(device, 0.1)
    assert row["shape"] == "1×256×64"
    assert row["v1, extra bytes"] >= 256 * (64 + 2) * 4
    assert row["v2, extra bytes"] == 0
    assert all(row[f"{name}, ms"] > 0 for name in ("naive", "v1", "v2"))


@runs_triton
@pytest.mark.parametrize("k_transposed", [False, True])
def test_the_kernel_of_the_negative_results_is_right(
    k_transposed: bool, draw: torch.Generator, described_seed: str
) -> None:
    from learn.bench.negative_kernels import attention

    q, k, v = draw_poisoned(draw, 2, 128, 128, 64, torch.float16, DEVICE)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k.mT.contiguous() if k_transposed else k, v, k_transposed=k_transposed)

    assert_right(call, q, k, v, described_seed)
    with pytest.raises(ValueError, match="multiples of 128"):
        attention(q[:, :100], k[:, :100], v[:, :100])


@runs_triton
def test_a_row_of_equal_scores_is_the_mean() -> None:
    q = torch.zeros(1, 3, 16, device=DEVICE)
    v = torch.arange(5.0, device=DEVICE)[None, :, None].expand(1, 5, 16).contiguous()
    k = torch.full_like(v, math.pi)
    for name in ("flash_attention", "flash_attention_v2"):
        torch.testing.assert_close(version(name)(q, k, v), torch.full_like(q, 2.0))


@runs_triton
@pytest.mark.parametrize("name", ["delta", "autotune", "descriptor"])
def test_what_the_choices_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant runs on a small shape; the times are made up."""
    from benchmarks.methods import Budget
    from flash_attn_mini.backends.triton import launch, launch_bwd
    from learn.bench import choices

    if name == "descriptor" and (not HAS_GPU or torch.cuda.get_device_capability() < (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        pytest.importorskip("triton.tools.tensor_descriptor")
    elif not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    launches: list[str] = []
    for module, function in ((launch, "launch"), (launch_bwd, "launch_dq"), (launch_bwd, "launch_dkv")):
        original = getattr(module, function)

        def counted(*arguments: Any, name: str = function, original: Any = original) -> None:
            launches.append(name)
            original(*arguments)

        monkeypatch.setattr(module, function, counted)

    def once(call: Any, rep_ms: float) -> float:
        call()
        return float(len(launches))

    monkeypatch.setattr(choices, "time_cuda", once)
    monkeypatch.setattr(choices, "ROUNDS", 1)
    monkeypatch.setattr(
        choices, "inputs", lambda seqlen, headdim: [torch.randn(1, seqlen, 1, headdim).half().to(DEVICE)] * 4
    )
    figure = choices.FIGURES[name]
    rows = figure.measure([(64, 128, False)], Budget(60.0))
    assert len(rows) == figure.rows_of_point
    assert all((row["head dim"], row["seqlen"], row["mask"]) == (64, 128, "full") for row in rows)
    if name == "delta":
        assert launches == ["launch", "launch_dq", "launch_dkv", "launch_dq", "launch_dkv", "launch_dq"]
        assert rows[0]["saved, percent"] == 50.0  # 3 launches until then, 6 until then
    else:
        assert launches == ["launch"] * len(launches)
        assert len(launches) >= 3
    assert figure.measure([(64, 128, False)], Budget(0.0)) == []  # no time
