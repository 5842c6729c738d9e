"""The ops of aten with our kernels, called directly: results, log-sum-exp, and the layouts that PyTorch promises.

On a machine without a GPU the CUDA ops run on CPU tensors, which PyTorch does not implement.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func, sdpa

from ..support.one_thread import one_thread  # noqa: F401
from ..support.sdpa_cases import (
    CASES,
    CPU_HAS_GROUPED_HEADS,
    SdpaCase,
    assert_accurate,
    differentiated,
)
from ..support.sdpa_counts import ours_and_pytorchs
from ..support.versions import TORCH

aten = torch.ops.aten
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _active() -> Iterator[None]:
    with sdpa.sdpa():
        yield


@dataclass(frozen=True)
class Op:
    """An op with tensors ``[batch, nheads, seqlen, headdim]``."""

    name: str
    before: tuple[Any, ...]  # arguments between the tensors and dropout_p
    is_top_left: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Any, ...]:
        if self.name == "_flash_attention_forward":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            lengths = (None, None, q.shape[1], k.shape[1])
            out, *others = aten._flash_attention_forward(q, k, v, *lengths, 0.0, is_causal, False, scale=scale)
            return out.transpose(1, 2), *others
        return getattr(aten, self.name)(q, k, v, *self.before, 0.0, is_causal, scale=scale)  # type: ignore[no-any-return]


CPU_OP = Op("_scaled_dot_product_flash_attention_for_cpu", (), is_top_left=True)
CUDA_OPS = [
    Op("_scaled_dot_product_flash_attention", (), is_top_left=False),
    Op("_scaled_dot_product_cudnn_attention", (None, True), is_top_left=True),
    Op("_scaled_dot_product_efficient_attention", (None, True), is_top_left=True),
    Op("_flash_attention_forward", (), is_top_left=False),
]
PLACES = [
    *(pytest.param("cpu", op, id=f"cpu-{op.name}") for op in (CPU_OP, *CUDA_OPS)),
    *(pytest.param("cuda", op, id=f"cuda-{op.name}", marks=pytest.mark.gpu) for op in CUDA_OPS),
]
OURS = [case for case in CASES if not case.mask and (case.is_ours or case.layout == "last")]


def visible(case: SdpaCase, is_top_left: bool, device: str) -> Tensor:
    """bool ``[seqlen_q, seqlen_k]``: the mask of the case."""
    mask = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=device)
    return mask.tril(0 if is_top_left else case.seqlen_k - case.seqlen_q) if case.is_causal else mask


def exact_lse(q: Tensor, k: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """The natural log-sum-exp of the scores in float64; inf for a row without a key, as PyTorch's flash kernel has."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.double() @ k.mT * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return scores.masked_fill(~mask, -math.inf).logsumexp(-1).masked_fill(~mask.any(-1), math.inf)


@pytest.mark.parametrize("case", OURS, ids=lambda case: case.name)
@pytest.mark.parametrize(("device", "op"), PLACES)
@pytest.mark.parametrize("type_", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_results(
    case: SdpaCase, device: str, op: Op, type_: torch.dtype, draw: torch.Generator, described_seed: str
) -> None:
    q, k, v, grad_out = case.make(device, type_, draw)
    tensors, mask = (q, k, v), visible(case, op.is_top_left, device)
    lse: list[Tensor] = []

    def attend(*tensors: Tensor) -> Tensor:
        out, logsumexp, *_ = op(*tensors, case.is_causal, case.scale)
        lse.append(logsumexp)
        return out  # type: ignore[no-any-return]

    got, ours, pytorchs = ours_and_pytorchs(differentiated, attend, tensors, grad_out)
    assert (ours, pytorchs) == (2, 0)
    options: dict[str, Any] = {"attn_mask": mask, "scale": case.scale, "enable_gqa": case.nheads != case.nheads_k}
    assert_accurate(f"{case}, {described_seed}", got, tensors, grad_out, is_flash=True, **options)
    rows = lse[0].squeeze(-1) if lse[0].dim() == 4 else lse[0][..., : case.seqlen_q]
    torch.testing.assert_close(rows.double(), exact_lse(q, k, mask, case.scale), atol=1e-4, rtol=1e-4)
    assert lse[0][..., case.seqlen_q :].isposinf().all() or lse[0].dim() == 4


def layout_of(x: Any) -> Any:
    """What a fake implementation promises. The stride of a dimension of size 1 does not matter."""
    if not isinstance(x, Tensor):
        return x
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return tuple(x.shape), x.dtype, strides if x.numel() else None


@pytest.mark.parametrize("case", OURS, ids=lambda case: case.name)
@pytest.mark.parametrize(("device", "op"), PLACES)
def test_layouts_are_those_of_the_fake_implementations(
    case: SdpaCase, device: str, op: Op, draw: torch.Generator
) -> None:
    q, k, v, grad_out = case.make(device, torch.bfloat16, draw)
    if op.name == "_flash_attention_forward" and case.layout == "last":
        pytest.skip("the transposed views of this helper have another order of strides")
    with FakeTensorMode() as mode:
        promised = op(*(mode.from_tensor(x) for x in (q, k, v)), case.is_causal, case.scale)
    got, ours, _ = ours_and_pytorchs(op, q, k, v, case.is_causal, case.scale)
    assert ours == 1
    assert [layout_of(x) for x in got] == [layout_of(x) for x in promised]

    def backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, results: tuple[Any, ...]) -> Any:
        out, lse = results[:2]
        if op.name == "_scaled_dot_product_flash_attention_for_cpu":
            return getattr(aten, f"{op.name}_backward")(grad_out, q, k, v, out, lse, 0.0, case.is_causal)
        if op.name == "_flash_attention_forward":
            grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
            lengths, state = (None, None, q.shape[1], k.shape[1]), results[2:4]
            return aten._flash_attention_backward(grad_out, q, k, v, out, lse, *lengths, 0.0, case.is_causal, *state)
        if op.name == "_scaled_dot_product_flash_attention":
            end = (*results[2:6], 0.0, case.is_causal, *results[6:8])
        elif op.name == "_scaled_dot_product_cudnn_attention":
            end = (*results[6:8], None, *results[2:6], 0.0, case.is_causal)
        else:
            mask = [True, True, True, False]
            return aten._scaled_dot_product_efficient_attention_backward(
                grad_out, q, k, v, None, out, lse, *results[2:4], 0.0, mask, case.is_causal
            )
        return getattr(aten, f"{op.name}_backward")(grad_out, q, k, v, out, lse, *end)

    with warnings.catch_warnings(), FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (grad_out, q, k, v)]
        fake_results = tuple(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in got)
        promised = backward(*fakes, fake_results)
    gradients, ours, _ = ours_and_pytorchs(backward, grad_out, q, k, v, got)
    assert ours == 1
    lacks_groups = {"_scaled_dot_product_efficient_attention": TORCH < (2, 14), CPU_OP.name: not CPU_HAS_GROUPED_HEADS}
    if case.nheads != case.nheads_k and lacks_groups.get(op.name):
        promised = (promised[0], *gradients[1:])  # of the query's heads
    assert [layout_of(x) for x in gradients] == [layout_of(x) for x in promised]


@devices
def test_the_efficient_op_without_log_sum_exp(device: str, draw: torch.Generator) -> None:
    q = torch.randn(2, 3, 5, 16, generator=draw).to(device, torch.float16)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, q, q, None, False)
    assert lse.shape == (2, 3, 0)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, q, q), atol=1e-3, rtol=1e-3)


@devices
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2), (None, None)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_flash_op_has_windows(
    device: str, window: tuple[int | None, int | None], is_causal: bool, draw: torch.Generator
) -> None:
    q, k, v = (
        torch.randn(2, n, 2, 16, generator=draw).to(device, torch.bfloat16).requires_grad_() for n in (30, 21, 21)
    )
    grad_out = torch.randn(q.shape, generator=draw).to(q)
    left, right = window
    results, ours, _ = ours_and_pytorchs(
        aten._flash_attention_forward, q, k, v, None, None, 30, 21, 0.0, is_causal, False,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    size = (-1 if left is None else left, -1 if right is None else right)
    expected, lse, _ = flash_attn_func(q, k, v, causal=is_causal, window_size=size, return_attn_probs=True)
    assert ours == 1
    assert torch.equal(results[0], expected)
    assert torch.equal(results[1], lse.masked_fill(lse == -math.inf, math.inf))
    gradients, ours, _ = ours_and_pytorchs(torch.autograd.grad, results[0], (q, k, v), grad_out)
    assert ours == 1
    expected_gradients = torch.autograd.grad(expected, (q, k, v), grad_out)
    torch.testing.assert_close(gradients, expected_gradients, atol=0.02, rtol=0.02)  # a GPU does not repeat dq


@devices
@pytest.mark.skipif(TORCH < (2, 7), reason="this PyTorch pads the log-sum-exp of varlen calls")
def test_the_flash_op_has_sequences_of_different_lengths(device: str, draw: torch.Generator) -> None:
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 9, 31], [0, 14, 20, 20]))
    q, k, v = (torch.randn(n, 2, 16, generator=draw).to(device, torch.bfloat16).requires_grad_() for n in (31, 20, 20))
    grad_out = torch.randn(q.shape, generator=draw).to(q)
    lengths = (ends_q, ends_k, 22, 14)
    results, ours, _ = ours_and_pytorchs(
        aten._flash_attention_forward, q, k, v, *lengths, 0.0, True, False, window_size_left=5
    )
    expected, lse, _ = flash_attn_varlen_func(
        q, k, v, *lengths, causal=True, window_size=(5, -1), return_attn_probs=True
    )
    assert ours == 1
    assert torch.equal(results[0], expected)
    assert torch.equal(results[1], lse.masked_fill(lse == -math.inf, math.inf))
    gradients, ours, _ = ours_and_pytorchs(torch.autograd.grad, results[0], (q, k, v), grad_out)
    assert ours == 1
    expected_gradients = torch.autograd.grad(expected, (q, k, v), grad_out)
    torch.testing.assert_close(gradients, expected_gradients, atol=0.02, rtol=0.02)  # a GPU does not repeat dq


@pytest.mark.gpu
def test_varlen_attn_runs_our_kernels(draw: torch.Generator) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    ends = torch.tensor([0, 9, 31], dtype=torch.int32, device="cuda")
    q = torch.randn(31, 2, 64, generator=draw).to("cuda", torch.bfloat16).requires_grad_()

    def attend() -> tuple[Tensor, ...]:
        out = varlen.varlen_attn(q, q, q, ends, ends, 22, 22, window_size=(-1, 0))
        return out, *torch.autograd.grad(out.float().square().sum(), q)

    got, ours, pytorchs = ours_and_pytorchs(attend)
    assert (ours, pytorchs) == (2, 0)
    sdpa.restore()
    torch.testing.assert_close(got, attend(), atol=0.03, rtol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("op", CUDA_OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("first_is_ours", [True, False])
def test_forward_and_backward_may_run_on_different_kernels(
    op: Op, first_is_ours: bool, draw: torch.Generator, described_seed: str
) -> None:
    """Also where a row has no key: PyTorch's log-sum-exp is inf there, ours elsewhere -inf."""
    more_queries = op.name in ("_scaled_dot_product_flash_attention", "_flash_attention_forward")
    case = SdpaCase(op.name, 96 if more_queries else 64, 64, headdim=64, is_causal=True)
    q, k, v, grad_out = case.make("cuda", torch.bfloat16, draw)
    tensors: tuple[Tensor, ...] = tuple(x.requires_grad_() for x in (q, k, v))
    switch: list[Callable[[], None]] = [sdpa.restore, sdpa.activate]
    if not first_is_ours:
        switch.reverse()
        sdpa.restore()
    out = op(*tensors, True, None)[0]
    switch[0]()
    got = out, *torch.autograd.grad(out, tensors, grad_out)
    switch[1]()
    options = {"attn_mask": visible(case, op.is_top_left, "cuda")}
    assert_accurate(f"{case}, {described_seed}", got, tensors, grad_out, is_flash=True, **options)


def test_a_call_that_neither_can_do_gets_pytorchs_error() -> None:
    q = torch.ones(2, 3, 5, 16)
    with pytest.raises(NotImplementedError, match="CPU"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    with pytest.raises(NotImplementedError, match="CPU"):
        aten._scaled_dot_product_efficient_attention(q, q, q, torch.zeros(2, 3, 5, 5), True, 0.5)


# ---- masks ----------------------------------------------------------------------------------------------------------


def efficient(*arguments: Any) -> Any:
    return aten._scaled_dot_product_efficient_attention(*arguments)


def efficient_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, results: Any) -> Any:
    wanted = [True, True, True, True]
    return aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, bias, *results[:2], *results[2:4], 0.0, wanted, False
    )


@pytest.mark.parametrize("seqlen_k", [48, 37])
@devices
def test_a_bias_of_the_efficient_op(seqlen_k: int, device: str, draw: torch.Generator, described_seed: str) -> None:
    """Results, gradients and layouts. Rows without a key have a log-sum-exp of 0, as in PyTorch's kernel."""
    q, k, v, grad_out = (
        torch.randn(2, 4, n, 32, generator=draw).to(device, torch.bfloat16) for n in (21, seqlen_k, seqlen_k, 21)
    )
    bias = torch.randn(2, 1, 21, seqlen_k, generator=draw).to(device, torch.bfloat16)
    bias[:, :, ::5] = -math.inf
    bias = bias.expand(2, 4, -1, -1)
    got, ours, _ = ours_and_pytorchs(efficient, q, k, v, bias, True, 0.0, False)
    assert ours == 1
    assert not got[0][:, :, ::5].any()
    assert not got[1][:, :, :21:5].any()
    gradients, ours, _ = ours_and_pytorchs(efficient_backward, grad_out, q, k, v, bias, got)
    assert ours == 1
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
        expected = (out, *torch.autograd.grad(out, leaves, grad_out))
    for x, true in zip((got[0], *gradients), expected, strict=True):
        torch.testing.assert_close(x, true, atol=5e-2, rtol=5e-2, msg=lambda text: f"{text}\n{described_seed}")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, bias)]
        promised = efficient(*fakes, True, 0.0, False)
        fake_results = tuple(mode.from_tensor(x) for x in got)
        promised_gradients = efficient_backward(mode.from_tensor(grad_out), *fakes, fake_results)
    assert [layout_of(x) for x in got] == [layout_of(x) for x in promised]
    assert [layout_of(x) for x in gradients] == [layout_of(x) for x in promised_gradients]


@pytest.mark.parametrize("first_is_ours", [True, False])
def test_a_masked_backward_runs_on_the_other_kernel(
    first_is_ours: bool, draw: torch.Generator, described_seed: str
) -> None:
    """Rows without keys too. The CPU op takes masks of two and of four dimensions."""
    q, k, v, grad_out = (torch.randn(2, 4, n, 32, generator=draw) for n in (21, 37, 37, 21))
    for shape in ((21, 37), (2, 1, 1, 37), (1, 4, 21, 37)):
        mask = torch.randn(shape, generator=draw)
        mask[..., ::2, :] = -math.inf if shape[-2] > 1 else 0.0

        def run(mask: Tensor, is_mixed: bool) -> Any:
            name = "_scaled_dot_product_flash_attention_for_cpu"
            results = []
            for step in range(2):
                (sdpa.activate if (step == 0) == first_is_ours or not is_mixed else sdpa.restore)()
                if step == 0:
                    results += getattr(aten, name)(q, k, v, attn_mask=mask)
                else:
                    results += getattr(aten, f"{name}_backward")(
                        grad_out, q, k, v, *results, 0.0, False, attn_mask=mask
                    )
            sdpa.activate()
            return results

        for got, expected in zip(run(mask, True), run(mask, False), strict=True):
            torch.testing.assert_close(
                got, expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{text}\n{described_seed}"
            )
