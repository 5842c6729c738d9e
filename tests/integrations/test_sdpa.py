"""Our kernels under torch.nn.functional.scaled_dot_product_attention: as accurate as the math backend, and counted.

test_sdpa_ops.py calls the ops of aten; test_sdpa_models.py runs models. With a GPU the same cases run on each of
PyTorch's CUDA backends.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attn_mini import sdpa
from flash_attn_mini.backends import extension

from ..support.new_process import ROOT, run_python
from ..support.one_thread import one_thread  # noqa: F401
from ..support.sdpa_cases import CASES, CPU_HAS_GROUPED_HEADS, SdpaCase, assert_accurate, differentiated
from ..support.sdpa_counts import ours_and_pytorchs

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CUDA_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
PLACES = [
    *(pytest.param("cpu", dtype, None, id=f"cpu-{dtype}".replace("torch.", "")) for dtype in CPU_DTYPES),
    *(
        pytest.param("cuda", dtype, backend, id=f"{backend.name}-{dtype}".replace("torch.", ""), marks=pytest.mark.gpu)
        for backend in CUDA_BACKENDS
        for dtype in (torch.float16, torch.bfloat16)
    ),
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
HAS_REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    assert not sdpa.is_active()
    yield
    sdpa.restore()


@contextlib.contextmanager
def selecting(backend: SDPBackend | None) -> Iterator[None]:
    """SDPA with one of PyTorch's backends only, None for its own choice."""
    if backend is None:
        yield
        return
    with sdpa_kernel(backend):
        yield


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def assert_close(got: Any, expected: Any) -> None:
    """For results of two kernels: a few roundings apart."""
    dtypes = {x.dtype for x in (got if isinstance(got, tuple) else (got,))}
    tolerance = 1e-4 if dtypes == {torch.float32} else 3e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def small(device: str, draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 21, 16)), generator=draw).to(device, dtype_of(device))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("device", "dtype", "selected"), PLACES)
def test_arguments(
    case: SdpaCase,
    device: str,
    dtype: torch.dtype,
    selected: SDPBackend | None,
    draw: torch.Generator,
    described_seed: str,
) -> None:
    if device == "cuda" and case.scale is not None and math.isnan(case.scale):
        pytest.skip("PyTorch's CUDA kernels need not agree on NaN")
    *tensors, grad_out = case.make(device, dtype, draw)
    options = case.options(device, dtype, draw)
    with sdpa.sdpa(), selecting(selected), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says why a backend cannot run
        try:
            got, ours, pytorchs = ours_and_pytorchs(
                differentiated, scaled_dot_product_attention, tensors, grad_out, **options
            )
        except RuntimeError as error:
            if selected is None or "No available kernel" not in str(error):
                raise
            pytest.skip(f"PyTorch's {selected.name} does not take the call")
    assert_accurate(f"{case}, {described_seed}", got, tuple(tensors), grad_out, is_flash=ours == 2, **options)
    if case.nheads != case.nheads_k and device == "cpu" and not CPU_HAS_GROUPED_HEADS:
        assert (ours, pytorchs) == (0, 0)
    elif case.is_ours or (case.is_ours_on_cpu and device == "cpu"):
        assert (ours, pytorchs) == (2, 0), "the forward and the backward"
    elif case.rank == 4:
        assert ours == 0


@pytest.mark.parametrize("shape", [(1, 1, 40, 33), (2, 4, 40, 33), (40, 33), (2, 1, 1, 33)], ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_gradient_of_a_mask(
    shape: tuple[int, ...], device: str, draw: torch.Generator, described_seed: str
) -> None:
    """PyTorch's CPU kernel has none: it selects math there."""
    q, k, v, grad_out = (torch.randn(2, 4, n, 32, generator=draw).to(device, torch.bfloat16) for n in (40, 33, 33, 40))
    mask = torch.randn(shape, generator=draw).to(device, torch.bfloat16)

    def results() -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, mask)]
        out = scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
        return out, *torch.autograd.grad(out, leaves, grad_out)

    with sdpa_kernel(SDPBackend.MATH):
        expected = results()
    with sdpa.sdpa(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        got, ours, pytorchs = ours_and_pytorchs(results)
    assert (ours, pytorchs) == (2, 0)
    scale = max(1.0, expected[-1].abs().max().item())
    assert_close(got[:4], expected[:4])
    torch.testing.assert_close(got[4] / scale, expected[4] / scale, atol=3e-2, rtol=3e-2, msg=described_seed)


@devices
def test_dropout_has_pytorchs_mask(device: str, draw: torch.Generator, seed: int) -> None:
    q = small(device, draw)

    def run() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        return differentiated(scaled_dot_product_attention, (q, q, q), torch.ones_like(q), dropout_p=0.3)

    expected = run()
    with sdpa.sdpa():
        got, ours, _ = ours_and_pytorchs(run)
    assert ours == 0
    assert torch.equal(got[0], expected[0])
    assert_close(got, expected)  # a backward on a GPU is not repeatable


@devices
@pytest.mark.parametrize("empty", ["keys", "queries", "batch"])
def test_empty_tensors(device: str, empty: str, draw: torch.Generator) -> None:
    """Zeros for rows without a key. PyTorch 2.11 returns None for an empty batch on a GPU."""
    batch, seqlen_q, seqlen_k = (0 if empty == name else 3 for name in ("batch", "queries", "keys"))
    q, k = small(device, draw, batch, 2, seqlen_q, 16), small(device, draw, batch, 2, seqlen_k, 16)
    with sdpa.sdpa():
        got = differentiated(scaled_dot_product_attention, (q, k, k), torch.ones_like(q))
    for x, shape in zip(got, (q, q, k, k), strict=True):
        assert torch.equal(x, torch.zeros_like(shape))


@devices
@pytest.mark.parametrize("wanted", ["q", "k", "v", ""])
def test_some_inputs_need_no_gradient(device: str, wanted: str, draw: torch.Generator) -> None:
    tensors = {name: small(device, draw) for name in "qkv"}
    grad_out = small(device, draw)
    expected = differentiated(scaled_dot_product_attention, tuple(tensors.values()), grad_out)[1:]
    if wanted:
        tensors[wanted].requires_grad_()
    with sdpa.sdpa():
        out, ours, _ = ours_and_pytorchs(scaled_dot_product_attention, *tensors.values())
        assert ours == 1
        assert out.requires_grad == bool(wanted)
        if wanted:
            (got,) = torch.autograd.grad(out, tensors[wanted], grad_out)
            assert_close(got, expected["qkv".index(wanted)])


@devices
@pytest.mark.parametrize("first_is_ours", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_forward_and_backward_may_run_on_different_kernels(
    device: str, first_is_ours: bool, is_causal: bool, draw: torch.Generator, described_seed: str
) -> None:
    q, k, v = tensors = tuple(small(device, draw).requires_grad_() for _ in range(3))
    grad_out = small(device, draw)
    if first_is_ours:
        sdpa.activate()
    out, forwards, _ = ours_and_pytorchs(scaled_dot_product_attention, q, k, v, is_causal=is_causal)
    (sdpa.restore if first_is_ours else sdpa.activate)()
    gradients, backwards, _ = ours_and_pytorchs(torch.autograd.grad, out, tensors, grad_out)
    assert (forwards, backwards) == ((1, 0) if first_is_ours else (0, 1))
    assert_accurate(described_seed, (out, *gradients), tensors, grad_out, is_causal=is_causal)


@devices
def test_autocast(device: str, draw: torch.Generator) -> None:
    q = torch.randn(2, 3, 21, 16, generator=draw).to(device)
    grad_out = torch.ones_like(q, dtype=torch.bfloat16)

    def run() -> tuple[torch.Tensor, ...]:
        with torch.autocast(device, torch.bfloat16):
            return differentiated(scaled_dot_product_attention, (q, q, q), grad_out)

    expected = run()
    with sdpa.sdpa():
        got, ours, _ = ours_and_pytorchs(run)
    assert ours == 2
    assert [x.dtype for x in got] == [x.dtype for x in expected] == [torch.bfloat16] + [torch.float32] * 3
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


@devices
def test_inference_mode(device: str, draw: torch.Generator) -> None:
    q = small(device, draw)
    expected = scaled_dot_product_attention(q, q, q)
    with sdpa.sdpa(), torch.inference_mode():
        x = q.clone()
        got, ours, _ = ours_and_pytorchs(scaled_dot_product_attention, x, x, x)
    assert ours == 1
    assert_close(got.clone(), expected)


@devices
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch has no batching rule for the CPU's op
def test_vmap_and_torch_func(device: str, draw: torch.Generator) -> None:
    x = small(device, draw, 4, 2, 3, 21, 16)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x, is_causal=True).float().square().sum()

    expected = torch.stack([loss(sample) for sample in x]), torch.stack([torch.func.grad(loss)(sample) for sample in x])
    with sdpa.sdpa():
        got, ours, _ = ours_and_pytorchs(lambda: (torch.vmap(loss)(x), torch.vmap(torch.func.grad(loss))(x)))
    assert ours > 0
    torch.testing.assert_close(got, expected, atol=0.1 if device == "cuda" else 1e-4, rtol=0.05)


@pytest.mark.slow
@devices
def test_compiled_by_inductor(device: str, draw: torch.Generator) -> None:
    """The full graph with dynamic shapes; the strides that inductor asserts are those of the fake implementations."""
    linear = torch.nn.Linear(32, 3 * 32, device=device, dtype=dtype_of(device))

    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = linear(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).sin()

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    with sdpa.sdpa():
        for seqlen in (17, 32, 45):
            x = small(device, draw, 2, seqlen, 32).requires_grad_()
            expected = attend(x)
            got, ours, _ = ours_and_pytorchs(compiled, x)
            assert ours == 1
            assert_close(got, expected)
            grad_out = torch.randn_like(got)
            gradients = [torch.autograd.grad(y, (x, linear.weight), grad_out) for y in (got, expected)]
            torch.testing.assert_close(*gradients, atol=0.1 if device == "cuda" else 1e-4, rtol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("selected", CUDA_BACKENDS, ids=lambda selected: selected.name)
def test_captured_in_a_cuda_graph(selected: SDPBackend, draw: torch.Generator) -> None:
    x = small("cuda", draw, 2, 4, 128, 64).requires_grad_()
    static = torch.empty_like(x).requires_grad_()

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(selected):
            return differentiated(scaled_dot_product_attention, (x, x, x), torch.ones_like(x), is_causal=True)

    with sdpa.sdpa():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, ours, _ = ours_and_pytorchs(run, static)
        assert ours == 2
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        assert_close(got, run(x))


@devices
def test_a_lower_right_bias(device: str, draw: torch.Generator) -> None:
    """PyTorch's CausalBias calls the flash op with a mask that is aligned to the bottom right."""
    from torch.nn.attention.bias import causal_lower_right

    q, k = small(device, draw, 2, 3, 9, 16), small(device, draw, 2, 3, 25, 16)
    mask = torch.ones(9, 25, dtype=torch.bool, device=device).tril(16)
    expected = scaled_dot_product_attention(q, k, k, attn_mask=mask)
    with sdpa.sdpa():
        got = scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(9, 25))
    assert_close(got, expected)


@pytest.mark.gpu
def test_nested_tensors(draw: torch.Generator) -> None:
    rows = [small("cuda", draw, n, 4, 32) for n in (5, 17, 9)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with sdpa.sdpa():
        got = scaled_dot_product_attention(x, x, x).transpose(1, 2).unbind()
    for out, sample in zip(got, rows, strict=True):
        sample = sample.transpose(0, 1)[None]
        expected = scaled_dot_product_attention(sample, sample, sample)[0].transpose(0, 1)
        assert_close(out, expected)


# ---- activating -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden", "shape"), [(-math.inf, (2, 4)), (-65504.0, (2, 4)), (-65504.0, (1, 1))], ids=str)
def test_the_cudnn_op_takes_masks(
    hidden: float, shape: tuple[int, int], dtype: torch.dtype, draw: torch.Generator
) -> None:
    """On CPU tensors, for which PyTorch has no such kernel. Rows without a key are zeros.

    PyTorch 2.11 writes -65504 where a bool mask hides a key, and gives the op the expanded bias.
    """
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    q, k, v, grad_out = (torch.randn(2, 4, n, 32, generator=draw).to(dtype) for n in (50, 64, 64, 50))
    mask = torch.rand(*shape, 50, 64, generator=draw) < 0.5
    mask[:, :, 3] = False
    bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden).expand(2, 4, 50, 64)
    with sdpa.sdpa():
        out, lse, _, _, *rest = results = forward(q, k, v, bias, True)
        gradients = backward(grad_out, q, k, v, out, lse, rest[2], rest[3], bias, *results[2:6], 0.0, False)
    assert not out[:, :, 3].any()
    assert_accurate("the op", (out, *gradients), (q, k, v), grad_out, is_flash=True, attn_mask=mask)


def runs_ours() -> bool:
    q = torch.ones(1, 1, 2, 8)
    return ours_and_pytorchs(scaled_dot_product_attention, q, q, q)[1] == 1


def test_activate_and_restore_may_be_repeated() -> None:
    assert not runs_ours()
    sdpa.activate()
    sdpa.activate()
    assert runs_ours()
    sdpa.restore()
    assert not runs_ours()
    sdpa.restore()
    assert not runs_ours()
    sdpa.activate()
    assert runs_ours()


def test_other_threads_may_call_the_ops_meanwhile() -> None:
    """Each call runs on our kernel or on PyTorch's."""
    is_over = threading.Event()

    def call() -> int:
        q, calls = torch.ones(1, 1, 2, 8), 0
        while not is_over.is_set():
            torch.testing.assert_close(scaled_dot_product_attention(q, q, q), q)
            calls += 1
        return calls

    with ThreadPoolExecutor(4) as threads:
        callers = [threads.submit(call) for _ in range(4)]
        try:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                sdpa.activate()
                sdpa.restore()
        finally:
            is_over.set()
        assert all(caller.result() > 0 for caller in callers)


def test_removing_an_older_handle_deactivates_both() -> None:
    """Two threads that activate at the same time get two handles, and PyTorch's registry keeps either."""
    older, newer = sdpa._register(), sdpa._register()
    assert sdpa.is_active()
    for handle in (older, newer):
        handle.remove()
        assert not sdpa.is_active()
        assert not runs_ours()
    sdpa.activate()
    assert runs_ours()


def test_contexts_nest_and_leave_what_was_there() -> None:
    with sdpa.sdpa():
        with sdpa.sdpa():
            assert runs_ours()
        assert runs_ours()
    assert not runs_ours()
    sdpa.activate()
    with pytest.raises(KeyError), sdpa.sdpa():
        raise KeyError
    assert runs_ours()


@pytest.mark.skipif(not HAS_REGISTRY, reason="this PyTorch has no registry of attention implementations")
def test_pytorchs_registry_lists_and_activates_us() -> None:
    attention: Any = torch.nn.attention
    assert "flash_attn_mini" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("flash_attn_mini")
    assert attention.current_flash_attention_impl() == "flash_attn_mini"
    assert sdpa.is_active()
    assert runs_ours()
    attention.restore_flash_attention_impl()
    assert not sdpa.is_active()
    assert not runs_ours()
    sdpa.activate()
    assert attention.current_flash_attention_impl() == "flash_attn_mini"
    sdpa.restore()
    assert attention.current_flash_attention_impl() is None


@pytest.mark.skipif(not HAS_REGISTRY, reason="this PyTorch has no registry of attention implementations")
def test_an_implementation_that_was_active_comes_back() -> None:
    attention: Any = torch.nn.attention

    class Handle:
        def remove(self) -> None:
            pass

    attention.register_flash_attention_impl("of this test", register_fn=Handle)
    attention.activate_flash_attention_impl("of this test")
    try:
        with sdpa.sdpa():
            assert attention.current_flash_attention_impl() == "flash_attn_mini"
            assert runs_ours()
        assert attention.current_flash_attention_impl() == "of this test"
        assert not runs_ours()
    finally:
        attention.restore_flash_attention_impl()


def test_another_backend_in_the_environment_leaves_the_call_to_pytorch(
    draw: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = small("cpu", draw)
    expected = scaled_dot_product_attention(q, q, q)
    monkeypatch.setenv("FLASH_ATTN_MINI_BACKEND", "cuda")
    with sdpa.sdpa():
        got, ours, pytorchs = ours_and_pytorchs(scaled_dot_product_attention, q, q, q)
    assert (ours, pytorchs) == (0, 1)
    assert torch.equal(got, expected)


def test_an_unknown_backend_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="'nonsense', given by FLASH_ATTN_MINI_BACKEND, is unknown"):
        sdpa.activate()
    assert not sdpa.is_active()


def run_here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return run_python(*arguments, environment=environment, cwd=cwd)


def test_importing_the_package_activates_nothing(tmp_path: Path) -> None:
    program = "import flash_attn_mini; print(flash_attn_mini.sdpa.is_active())"
    assert run_here("-c", program, cwd=tmp_path).stdout == "False\n"


def test_the_command_runs_a_script_and_counts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
        "q = torch.ones(1, 2, 5, 8, requires_grad=True)\n"
        "attend(q, q, q).sum().backward()\n"
        "attend(*[torch.ones(1, 2, 5, 520)] * 3)\n"
        "print(__name__, sys.argv[1:])\n"
        "sys.exit(3)\n"
    )
    result = run_here("-m", "flash_attn_mini", "--sdpa", str(script), "--flag", "x", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (3, "__main__ ['--flag', 'x']\n"), result.stderr
    op = "_scaled_dot_product_flash_attention_for_cpu"
    assert f"{op}: 1 calls on flash_attn_mini, 1 on PyTorch" in result.stderr
    assert f"{op}_backward: 1 calls on flash_attn_mini, 0 on PyTorch" in result.stderr
    result = run_here("-m", "flash_attn_mini", "--sdpa", cwd=tmp_path)
    assert result.returncode == 2
    assert "--sdpa needs a script" in result.stderr


def test_without_the_extension_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "MODULE", None)
    monkeypatch.setattr(extension, "_error", "it is not built")
    with pytest.raises(RuntimeError, match="it is not built"):
        sdpa.activate()
    assert not sdpa.is_active()
    assert sdpa.counts() == {}
    monkeypatch.undo()
    assert not runs_ours()
    with sdpa.sdpa():
        assert runs_ours()
