"""flash_attn_func in autograd: saved tensors, computed gradients, checkpointing, torch.func."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from flash_attn_mini import (
    _C,
    available_backends,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    use_backend,
)

from ..support.op_calls import BWD, FWD, PACKED_BWD, Recording, bwd_arguments, fwd_arguments
from ..support.small_attention import qkv


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """``traced(function, link)`` runs the function; the fields of each link with that name in its trace."""

    def run(function: Callable[[], Any], link: str) -> list[str]:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setenv("FLASH_ATTN_MINI_TRACE", "1")
            function()
        lines = [line.split(maxsplit=2) for line in capfd.readouterr().err.splitlines()]
        return [fields for start, name, fields in lines if (start, name) == ("[flash_attn_mini]", link)]

    return run


def dense(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Any:
    return flash_attn_func(q, k, v, deterministic=True, return_attn_probs=True, backend=backend)


def packed(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Any:
    with use_backend(backend):
        return flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), deterministic=True, return_attn_probs=True)


def varlen(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Any:
    lengths = [torch.tensor([0, length, 2 * length], dtype=torch.int32, device=q.device) for length in (9, 13)]
    rows = (x.flatten(0, 1) for x in (q, k, v))
    with use_backend(backend):
        return flash_attn_varlen_func(*rows, *lengths, 9, 13, deterministic=True, return_attn_probs=True)


# ---- saved tensors and computed gradients -------------------------------------------------------------------------


def saved_by(call: Callable[[], Any]) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return saved


def test_only_inputs_out_and_lse_are_saved(backend: str, device: str) -> None:
    q, k, v = qkv(device)
    results: list[Tensor] = []
    saved = saved_by(lambda: results.extend(flash_attn_func(q, k, v, return_attn_probs=True, backend=backend)))
    assert sorted(x.data_ptr() for x in saved) == sorted(x.data_ptr() for x in (q, k, v, *results[:2]))


def test_nothing_is_saved_where_no_gradient_will_be_asked_for(backend: str, device: str) -> None:
    inputs = qkv(device)

    def no_grad() -> None:
        with torch.no_grad():
            assert flash_attn_func(*inputs, backend=backend).grad_fn is None

    def inference_mode() -> None:
        with torch.inference_mode():
            assert flash_attn_func(*inputs, backend=backend).is_inference()

    for call in (no_grad, inference_mode):
        assert saved_by(call) == []
    detached = [x.detach() for x in inputs]
    assert saved_by(lambda: flash_attn_func(*detached, backend=backend)) == []
    assert not flash_attn_func(*detached, backend=backend).requires_grad


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (True, True, True)])
def test_only_gradients_that_are_needed_are_computed(wanted: tuple[bool, ...], backend: str, device: str) -> None:
    inputs = [x.requires_grad_(w) for x, w in zip(qkv(device, requires_grad=False), wanted, strict=True)]
    out = flash_attn_func(*inputs, backend=backend)
    with Recording() as mode:
        out.sum().backward()
    assert [call["output_mask"] for call in mode.arguments(BWD)] == [list(wanted)]
    assert [x.grad is not None for x in inputs] == list(wanted)


class Ignores(torch.autograd.Function):
    """A zero that passes no gradient to its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.number = len(inputs)
        return inputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.number


@pytest.mark.parametrize("is_packed", [False, True], ids=["separate", "packed"])
def test_outputs_that_no_gradient_reaches_cost_no_backward(is_packed: bool, backend: str, device: str) -> None:
    """The node runs, with None for both gradients."""
    inputs = qkv(device)
    out, lse, _ = (packed if is_packed else dense)(*inputs, backend)
    nodes: list[Any] = []
    out.grad_fn.register_hook(lambda _, arriving: nodes.append(arriving[:2]))
    total = Ignores.apply(out, lse) + inputs[0].sum()
    with Recording() as mode:
        total.backward()
    assert nodes == [(None, None)]
    assert mode.arguments(BWD, PACKED_BWD) == []
    assert [x.grad is not None for x in inputs] == [True, False, False]


def test_s_dmask_has_no_gradient(backend: str, device: str) -> None:
    s_dmask = flash_attn_func(*qkv(device), return_attn_probs=True, backend=backend)[2]
    assert not s_dmask.requires_grad


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_backend(
    deterministic: bool, backend: str, device: str, traced: Callable[..., list[str]]
) -> None:
    out = flash_attn_func(*qkv(device), deterministic=deterministic, backend=backend)
    (fields,) = traced(lambda: out.sum().backward(), "set_params_dgrad")
    assert f"deterministic={str(deterministic).lower()}" in fields


@pytest.mark.backends("cpu", "cuda")
def test_deterministic_algorithms_mean_a_deterministic_backward(
    backend: str, device: str, traced: Callable[..., list[str]]
) -> None:
    out = flash_attn_func(*qkv(device), backend=backend)
    torch.use_deterministic_algorithms(True)
    try:
        (fields,) = traced(lambda: out.sum().backward(), "set_params_dgrad")
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic=true" in fields


@pytest.mark.parametrize("forward_by", ["use_backend", "device"])
@pytest.mark.parametrize("backward_under", ["nothing", "another_use_backend", "another_environment"])
def test_backward_runs_on_the_backend_of_the_forward(
    backward_under: str,
    forward_by: str,
    backend: str,
    device: str,
    traced: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if forward_by == "device" and available_backends(device)[0] != backend:
        pytest.skip("another backend is the device's")
    with use_backend(backend) if forward_by == "use_backend" else contextlib.nullcontext():
        out = flash_attn_func(*qkv(device))
    other = "cuda" if backend != "cuda" else "triton"
    if backward_under == "another_environment":
        monkeypatch.setenv("FLASH_ATTN_MINI_BACKEND", other)
    with use_backend(other) if backward_under == "another_use_backend" else contextlib.nullcontext():
        (fields,) = traced(lambda: out.sum().backward(), BWD.name())
    assert f"backend={backend}" in fields.split()


# ---- the graph ----------------------------------------------------------------------------------------------------


def test_gradients_accumulate_over_uses(backend: str, device: str) -> None:
    """One tensor as q, k and v, and a graph that is walked twice."""
    x = torch.randn(2, 7, 3, 16, device=device).half().requires_grad_()
    separate = [x.detach().requires_grad_() for _ in range(3)]
    flash_attn_func(*separate, deterministic=True, backend=backend).sum().backward()
    out = flash_attn_func(x, x, x, deterministic=True, backend=backend).sum()
    out.backward(retain_graph=True)
    expected = sum(s.grad for s in separate)
    torch.testing.assert_close(x.grad, expected, rtol=2e-3, atol=2e-3)
    once = x.grad.clone()
    out.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_changing_a_saved_tensor_in_place_raises(backend: str, device: str) -> None:
    q, k, v = qkv(device)
    for changed in ("out", "k"):
        inner = k * 1
        out = flash_attn_func(q, inner, v, backend=backend)
        total = out.sum()
        (out if changed == "out" else inner).detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def test_second_derivative_raises(backend: str, device: str) -> None:
    """The first derivative is right, also under create_graph. Only the second, which would be a silent zero, raises."""
    q, k, v = qkv(device)
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v, backend=backend).sum(), q)
    (with_graph,) = torch.autograd.grad(flash_attn_func(q, k, v, backend=backend).sum(), q, create_graph=True)
    torch.testing.assert_close(with_graph, dq, rtol=1e-3, atol=1e-3)
    with pytest.raises(NotImplementedError, match=r"double backward.*backends that have it: none"):
        with_graph.square().sum().backward()


def test_second_derivative_through_the_gradient_of_out_is_refused_too(backend: str, device: str) -> None:
    """dq is linear in dout, but this derivative is not implemented either."""
    q, k, v = qkv(device)
    dout = torch.ones_like(q).requires_grad_()
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v, backend=backend), q, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(dq.sum(), dout)


def test_raw_operators_are_differentiable_once(backend: str, device: str) -> None:
    q, k, v = qkv(device)
    expected = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True, backend=backend).sum(), (q, k, v))
    options: dict[str, Any] = {"softmax_scale": 0.25, "deterministic": True, "backend": backend}
    out, lse, *_ = FWD(*fwd_arguments(q, k, v, **options))
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(a, b)
    tensors = (torch.ones_like(q), q, k, v, out.detach(), lse.detach())
    dq, dk, dv, _ = BWD(*bwd_arguments(*tensors, output_mask=[True, False, False], **options))
    assert torch.equal(dq, expected[0])
    assert dk is dv is None
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


@pytest.mark.backends("cpu", "cuda")
def test_the_functions_of_the_extension_record_a_graph(backend: str, device: str) -> None:
    """With the results that no option asks for as None. A caller that gives ``out`` gets no graph."""
    q, k, v = qkv(device)
    expected = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True, backend=backend).sum(), (q, k, v))
    scalars = (0.0, 0.25, False, -1, -1, 0.0, False, None, True)  # p_dropout to deterministic
    out, lse, S_dmask, rng_state = _C.fwd(q, k, v, None, None, *scalars)
    assert S_dmask is rng_state is None
    assert lse.requires_grad
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(a, b)
    given = torch.empty_like(q, requires_grad=False)
    returned, *_ = _C.fwd(q, k, v, given, None, *scalars)
    assert torch.equal(given, out)
    assert not returned.requires_grad
    with torch.no_grad():
        assert not _C.fwd(q, k, v, None, None, *scalars)[0].requires_grad


def test_modes_see_both_operators(backend: str, device: str) -> None:
    """Plain eager calls enter the op through the extension's function, and a dispatch mode sees the op."""
    q, k, v = qkv(device)
    expected = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True, backend=backend).sum(), (q, k, v))
    with Recording() as mode:
        got = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True, backend=backend).sum(), (q, k, v))
    assert mode.count(FWD) == mode.count(BWD) == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    with Recording() as mode:
        flash_attn_func(q.detach(), k.detach(), v.detach(), backend=backend)
    assert mode.count(FWD) == 1
    out = flash_attn_func(q, k, v, backend=backend)
    with Recording() as mode:  # only the backward
        out.sum().backward()
    assert mode.count(BWD) == 1


class PassOn(TorchFunctionMode):
    """For example ``with torch.device("cuda")``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_parameters_and_function_modes_work(backend: str, device: str) -> None:
    q, k, v = (torch.nn.Parameter(x.detach()) for x in qkv(device))
    with PassOn():
        flash_attn_func(q, k, v, backend=backend).sum().backward()
    assert all(x.grad is not None for x in (q, k, v))


# ---- checkpointing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpointing_gives_the_same_gradients(use_reentrant: bool, backend: str, device: str) -> None:
    def attention(*inputs: Tensor) -> Tensor:
        return flash_attn_func(*inputs, causal=True, deterministic=True, backend=backend)

    inputs = qkv(device)
    expected = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
    checkpoint.checkpoint(attention, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    for x, e in zip(inputs, expected, strict=True):
        assert torch.equal(x.grad, e)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
def test_selective_checkpointing_knows_the_operator(kept: bool, backend: str, device: str) -> None:
    """A policy that names the forward op keeps its results instead of running it again."""
    seen: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is FWD:
            seen.append(context.is_recompute)
        must_keep = kept and op is FWD
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if must_keep else policies.PREFER_RECOMPUTE

    def attention(*inputs: Tensor) -> Tensor:
        return flash_attn_func(*inputs, deterministic=True, backend=backend)

    inputs = qkv(device)
    expected = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
    out = checkpoint.checkpoint(
        attention,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),
    )
    out.square().sum().backward()
    assert seen[0] is False
    for x, e in zip(inputs, expected, strict=True):
        assert torch.equal(x.grad, e)


# ---- batched gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)], ids=["out", "lse", "out_and_lse"])
@pytest.mark.parametrize("attention", [dense, packed, varlen])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients_are_those_of_a_loop(
    attention: Callable[..., Any], asked: tuple[int, ...], backend: str, device: str
) -> None:
    """The gradients are batched by PyTorch's older vmap, which torch.func does not know."""
    inputs = qkv(device)
    results = attention(*inputs, backend)
    outputs = [results[i] for i in asked]
    arriving = [torch.randn(3, *x.shape, device=device).to(x.dtype) for x in outputs]
    loop = [torch.autograd.grad(outputs, inputs, [x[i] for x in arriving], retain_graph=True) for i in range(3)]
    batched = torch.autograd.grad(outputs, inputs, arriving, is_grads_batched=True)
    for got, expected in zip(batched, zip(*loop, strict=True), strict=True):
        assert torch.equal(got, torch.stack(expected))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vectorized_jacobian_is_the_plain_one(backend: str, device: str) -> None:
    q, k, v = (x[:1, :2, :2].contiguous() for x in qkv(device, requires_grad=False))

    def attention(*inputs: Tensor) -> Tensor:
        return flash_attn_func(*inputs, deterministic=True, backend=backend)

    jacobian = torch.autograd.functional.jacobian
    for got, expected in zip(
        jacobian(attention, (q, k, v), vectorize=True), jacobian(attention, (q, k, v)), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradcheck_of_batched_gradients() -> None:
    inputs = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *qkv: dense(*qkv, backend="cpu")[:2], inputs, check_batched_grad=True)


# ---- torch.func ---------------------------------------------------------------------------------------------------


def test_func_grad_is_autograds(backend: str, device: str) -> None:
    q, k, v = qkv(device)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, deterministic=True, backend=backend).float().square().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), expected, strict=True):
        assert torch.equal(a, b)
    _, pullback = torch.func.vjp(loss, q, k, v)
    for a, b in zip(pullback(torch.ones((), device=device)), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients_are_those_of_each_sample(backend: str, device: str) -> None:
    """vmap of grad: samples become one batch, forward and backward."""
    q, k, v = (x.detach() for x in qkv(device))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, deterministic=True, backend=backend).float().square().sum()

    samples = [x[:, None] for x in (q, k, v)]
    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*samples)
    for i in range(2):
        expected = torch.func.grad(loss, argnums=(0, 1, 2))(*(x[i] for x in samples))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_vmapped_calls_are_those_of_a_loop(backend: str, device: str) -> None:
    x = torch.randn(3, 2, 5, 2, 16, device=device).half().requires_grad_()

    def attention(q: Tensor) -> Tensor:
        return flash_attn_func(q, q, q, deterministic=True, backend=backend).float().square().sum()

    (got,) = torch.autograd.grad(torch.vmap(attention)(x).sum(), x)
    (expected,) = torch.autograd.grad(sum(attention(sample) for sample in x), x)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=2e-3)  # summed in float16, in another order


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()), "double backward"),
        (lambda f: torch.func.jacrev(torch.func.grad(f)), "double backward"),
        (torch.func.hessian, "forward-mode"),
        (torch.func.jacfwd, "forward-mode"),
    ],
    ids=["grad_of_grad", "jacrev_of_grad", "hessian", "jacfwd"],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_without_a_derivative_raise(
    transform: Callable[..., Any], says: str, backend: str, device: str
) -> None:
    """Never a silent zero."""
    x = torch.randn(1, 3, 1, 8, device=device).half()
    with pytest.raises(NotImplementedError, match=says):
        transform(lambda q: flash_attn_func(q, x, x, backend=backend).float().square().sum())(x)
