"""An environment in which the extension was never built: the Triton backend and the reference, with autograd.

The first test starts the others in a process whose import of the extension fails: in Triton's interpreter; with the
reference, the default of CPU tensors; on the GPU with Triton, the default of CUDA tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import (
    available_backends,
    compat,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_mini.backends import extension, reference
from flash_attn_mini.backends.triton import ops
from flash_attn_mini.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from flash_attn_mini.options import KvCache, Options
from flash_attn_mini.reference import (
    attention_kvcache_reference,
    attention_reference,
    attention_varlen_reference,
    dropout_mask,
)

from ..support.max_logit_checks import check_max_logits
from ..support.new_process import run_pytest
from ..support.no_extension import NAME

USES_REFERENCE = "TESTS_THE_REFERENCE"  # set in the process that tests the reference
NAME_OF_BACKEND = "reference" if USES_REFERENCE in os.environ else "triton"
HAS_GPU = torch.cuda.is_available() and NAME_OF_BACKEND == "triton"
DEVICE = "cuda" if HAS_GPU else "cpu"
BACKEND = None if HAS_GPU or NAME_OF_BACKEND == "reference" else "triton"  # Triton's interpreter only if asked for
IS_MISSING = extension.missing_reason() is not None
EXPECTED = "EXPECTED_OF_THE_EXTENSION"  # a file with what the extension gives

here = pytest.mark.skipif(not IS_MISSING, reason="runs in a process without the extension")
P = 0.3


def run_without_extension(expected: Path, name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", EXPECTED: str(expected)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no plugin is needed; to import them takes as long as torch
    if name == "reference":
        environment[USES_REFERENCE] = "1"
    elif not HAS_GPU:
        environment["TRITON_INTERPRET"] = "1"
    run_pytest(__file__, "-p", "tests.support.no_extension", environment=environment)


@pytest.mark.slow
@pytest.mark.skipif(IS_MISSING, reason="started by the process with the extension")
@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_all_of_this_without_the_extension(name: str, backend: str, device: str, tmp_path: Path) -> None:
    if device != ("cpu" if name == "reference" else DEVICE):
        pytest.skip("the process tests one device")
    if name == "triton":
        pytest.importorskip("triton", minversion="3.4")
    expected = tmp_path / "expected.pt"
    torch.save({"dropout": with_dropout(backend), "key_ranges": about_key_ranges(backend)}, expected)
    run_without_extension(expected, name)


def with_dropout(backend: str | None) -> list[Tensor]:
    """out, softmax_lse, S_dmask and the gradients of a call from a seed that both processes have."""
    draw = torch.Generator().manual_seed(int(os.environ["FLASH_ATTN_MINI_SEED"]))
    q, k, v = (x.requires_grad_() for x in qkv(draw))
    torch.manual_seed(int(os.environ["FLASH_ATTN_MINI_SEED"]))
    results = flash_attn_func(q, k, v, P, causal=True, return_attn_probs=True, backend=backend)
    dout = torch.randn(q.shape, generator=draw).to(q)
    return [x.detach().cpu() for x in (*results, *torch.autograd.grad(results[0], (q, k, v), dout))]


def about_key_ranges(backend: str | None) -> list[str]:
    """What wrong calls with key_ranges raise: type and text."""
    half = {"dtype": torch.float16}  # every backend takes it
    q, k = torch.zeros(2, 9, 4, 16, **half), torch.zeros(2, 13, 2, 16, **half)
    lengths = torch.tensor([0, 4, 18], dtype=torch.int32)
    shapes = [(9, 2), (1, 1, 9, 3), (1, 1, 9, 3, 2), (3, 1, 9, 2), (1, 2, 9, 2), (1, 1, 8, 2, 2), (1,) * 5 + (2,)]
    of_equal = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    of_equal += [torch.zeros(1, 1, 9, 2), torch.tensor([-5, 3]).expand(1, 1, 9, 2).int()]
    of_equal += [torch.tensor([[0, 3], [4, 14]]).expand(2, 4, 9, 2, 2).int()]
    of_varlen = [torch.zeros(shape, dtype=torch.int32) for shape in [(18, 2), (2, 18, 2), (1, 17, 2), (1, 1, 18, 2)]]
    of_varlen += [torch.zeros(1, 18, 2, dtype=torch.int64), torch.tensor([0, 5]).expand(4, 18, 2).int()]
    rows, keys = q.flatten(0, 1).to(DEVICE), torch.zeros(18, 2, 16, device=DEVICE, **half)
    table = torch.zeros(2, 18, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(3, 1, 2, 16, device=DEVICE, **half)
    of_length = (lengths.to(DEVICE), lengths.to(DEVICE), 14, 14)

    def equal(ranges: Tensor) -> object:
        return flash_attn_func(q.to(DEVICE), k.to(DEVICE), k.to(DEVICE), key_ranges=ranges, backend=backend)

    def varlen(ranges: Tensor) -> object:
        return flash_attn_varlen_func(rows, keys, keys, *of_length, key_ranges=ranges, backend=backend)

    def paged(ranges: Tensor) -> object:
        options = {"block_table": table, "key_ranges": ranges, "backend": backend}
        return flash_attn_varlen_func(rows, pages, pages, *of_length, **options)

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_ATTN_MINI_CHECK", "1")
        for call, wrong in ((equal, of_equal), (varlen, of_varlen), (paged, of_varlen[-1:])):
            for ranges in wrong:
                with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
                    call(ranges.to(DEVICE))
                said.append(f"{raised.type.__name__}: {raised.value}")
    assert all("key_ranges" in text for text in said), said
    return said


def qkv(draw: torch.Generator, dtype: torch.dtype = torch.float16, headdim: int = 16) -> list[Tensor]:
    """q [2, 9, 4, headdim], k and v [2, 13, 2, headdim]."""
    shapes = ((2, 9, 4, headdim), (2, 13, 2, headdim), (2, 13, 2, headdim))
    return [torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes]


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=4e-3, atol=4e-3)


def gradients(run: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
    """Of both outputs of run, weighted."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    total = sum((x.double() * w).sum() for x, w in zip(run(*leaves), weights, strict=True))
    return torch.autograd.grad(total, leaves)


def chosen_backend() -> contextlib.AbstractContextManager[None]:
    """For functions without the argument backend."""
    return contextlib.nullcontext() if BACKEND is None else use_backend(BACKEND)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True, backend=BACKEND)
    return out, lse


@here
def test_what_is_available(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    has_triton = NAME_OF_BACKEND == "triton"
    assert available_backends(DEVICE) == (["triton"] if has_triton else [])
    q = torch.zeros(1, 1, 1, 16, device=DEVICE, dtype=torch.float16)
    for name in ("cpu", "cuda"):
        with use_backend(name), pytest.raises(RuntimeError, match=f"backend '{name}', asked for by use_backend"):
            flash_attn_func(q, q, q)
        with pytest.raises(RuntimeError, match=f"backend '{name}', asked for by the backend argument"):
            flash_attn_func(q, q, q, backend=name)
    with chosen_backend():
        assert flash_attn_func(q, q, q).shape == q.shape
    monkeypatch.setattr("sys.argv", ["flash_attn_mini"])
    runpy.run_module("flash_attn_mini", run_name="__main__")
    printed = capsys.readouterr().out
    assert f"No module named '{NAME}'" in printed
    assert ("triton     available" in printed) == has_triton
    assert "a call takes reference" in printed  # the CPU, which every machine has
    assert ("a call takes triton" in printed) == (DEVICE == "cuda")
    assert "take the triton backend" in printed


@here
@pytest.mark.skipif(HAS_GPU, reason="the GPU takes them")
def test_the_usual_choice_is_the_reference_and_says_once_what_is_missing(draw: torch.Generator) -> None:
    q = torch.randn(1, 3, 1, 16, generator=draw)
    reference.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            flash_attn_func(q, q, q)
    (message,) = (str(one.message) for one in warned)
    assert re.search(r"reference.*_C is not built.*with a C\+\+ compiler.*pip install \.", message)


@here
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (3, 2)},
        {"softcap": 2.0},
        {"alibi": (4,)},
        {"alibi": (2, 4), "causal": True, "softmax_scale": -0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_forward_and_gradients(options: dict[str, Any], dtype: torch.dtype, draw: torch.Generator) -> None:
    inputs = qkv(draw, dtype)
    options = dict(options)
    if "alibi" in options:
        options["alibi_slopes"] = torch.rand(options.pop("alibi"), generator=draw).to(DEVICE)
    expected = attention_reference(*inputs, **options)
    assert_close(attend(*inputs, **options), expected)
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in expected]
    found = gradients(lambda *leaves: attend(*leaves, **options), inputs, *weights)
    assert_close(found, gradients(lambda *leaves: attention_reference(*leaves, **options), inputs, *weights))


@here
@pytest.mark.parametrize("is_varlen", [False, True], ids=["equal", "varlen"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sinks_have_a_gradient(is_varlen: bool, compiled: bool, draw: torch.Generator) -> None:
    inputs = qkv(draw, torch.float32)
    sinks = torch.randn(4, generator=draw).to(DEVICE)
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 5, 5, 18], [0, 20, 22, 26])]
    if is_varlen:
        inputs = [x.flatten(0, 1) for x in inputs]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        options = {"causal": True, "learnable_sink": sinks, "return_attn_probs": True, "backend": BACKEND}
        if is_varlen:
            return flash_attn_varlen_func(q, k, v, *lengths, 13, 20, **options)[:2]
        return flash_attn_func(q, k, v, **options)[:2]

    def reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        if is_varlen:
            return attention_varlen_reference(q, k, v, *lengths, causal=True, sinks=sinks)
        return attention_reference(q, k, v, causal=True, sinks=sinks)

    expected = reference(*inputs, sinks)
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in expected]
    attend = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    assert_close(attend(*inputs, sinks), expected)
    found = gradients(attend, [*inputs, sinks], *weights)
    assert_close(found, gradients(reference, [*inputs, sinks], *weights))


@here
@pytest.mark.parametrize("is_varlen", [False, True], ids=["equal", "varlen"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_max_logits(is_varlen: bool, compiled: bool, draw: torch.Generator) -> None:
    """Together with the gradient of out, and without it."""
    inputs = qkv(draw, torch.float32)
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 5, 5, 18], [0, 20, 22, 26])]
    options: dict[str, Any] = {"causal": True, "backend": BACKEND}
    if is_varlen:
        inputs = [x.flatten(0, 1) for x in inputs]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if is_varlen:
            return flash_attn_varlen_func(q, k, v, *lengths, 13, 20, **options, return_max_logits=True)
        return flash_attn_func(q, k, v, **options, return_max_logits=True)

    leaves = [x.detach().requires_grad_() for x in inputs]
    out, max_logits = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(*leaves)
    out.sum().backward()
    assert all(x.grad is not None for x in leaves)
    known = {"cu_seqlens": tuple(lengths)} if is_varlen else {}
    check_max_logits(max_logits, *inputs[:2], "without the extension", causal=True, **known)


@here
def test_max_logits_under_vmap(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, torch.float32)

    def run(q: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, backend=BACKEND, return_max_logits=True)[1]  # type: ignore[return-value]

    torch.testing.assert_close(torch.vmap(run)(torch.stack([q, -3 * q])), torch.stack([run(q), run(-3 * q)]))


@here
def test_max_logits_with_a_kv_cache_are_refused(draw: torch.Generator) -> None:
    call = kvcache_call(draw)
    tensors = [call[name] for name in ("q", "k_cache", "v_cache")]
    cache = KvCache(None, None, None, None, None, 5, call["cache_batch_idx"], None, None, True, 0, 0)
    options = Options(0.0, 0.25, False, -1, -1, 0.0, None, backend=BACKEND, return_max_logits=True)
    with pytest.raises(NotImplementedError, match="no backend implements return_max_logits with a KV cache"):
        ops.forward_kvcache(*tensors, cache, options)


@here
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_wanted_gradients(wanted: tuple[bool, ...], draw: torch.Generator) -> None:
    inputs = qkv(draw)
    everything = [x.detach().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(attend(*everything)[0].square().sum(), everything)
    leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
    (only,) = (x for x in leaves if x.requires_grad)
    attend(*leaves)[0].square().sum().backward()
    assert torch.equal(only.grad, expected[wanted.index(True)])
    assert not attend(*inputs)[0].requires_grad


@here
@pytest.mark.parametrize("parts", [2, 3])
def test_packed(parts: int, draw: torch.Generator) -> None:
    packed = torch.randn(2, 9, parts, 2, 16, generator=draw).to(DEVICE, torch.float16)
    q = torch.randn(2, 7, 4, 16, generator=draw).to(DEVICE, torch.float16)
    inputs = [packed] if parts == 3 else [q, packed]

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        function = flash_attn_qkvpacked_func if parts == 3 else flash_attn_kvpacked_func
        return function(*leaves, causal=True, return_attn_probs=True, backend=BACKEND)[:2]

    def reference(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return attention_reference(*leaves[:-1], *leaves[-1].unbind(2), causal=True)

    expected = reference(*inputs)
    assert_close(run(*inputs), expected)
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in expected]
    assert_close(gradients(run, inputs, *weights), gradients(reference, inputs, *weights))


@here
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_sequences_of_variable_length(paged: bool, draw: torch.Generator) -> None:
    lengths_q, lengths_k = [5, 0, 12, 1], [9, 3, 0, 17]
    cu_q, cu_k = (torch.tensor([0, *n], device=DEVICE).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k))
    q = torch.randn(sum(lengths_q), 4, 16, generator=draw).to(DEVICE, torch.float16)
    k, v = torch.randn(2, sum(lengths_k), 2, 16, generator=draw).to(DEVICE, torch.float16)
    block_table = None
    if paged:
        k, v = torch.randn(2, 20, 4, 2, 16, generator=draw).to(DEVICE, torch.float16)
        block_table = torch.randperm(20, generator=draw).reshape(4, 5).to(DEVICE, torch.int32)

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(
            *leaves, cu_q, cu_k, 12, 17, causal=True, return_attn_probs=True, block_table=block_table, backend=BACKEND
        )[:2]

    def reference(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return attention_varlen_reference(*leaves, cu_q, cu_k, causal=True, block_table=block_table)

    expected = reference(q, k, v)
    assert_close(run(q, k, v), expected)
    if paged:
        with pytest.raises(NotImplementedError, match="gradients of paged keys"):
            torch.autograd.grad(run(q.requires_grad_(), k, v)[0].sum(), q)
        return
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in expected]
    weights[1] *= expected[1].isfinite()
    found = gradients(lambda *leaves: finite(run(*leaves)), [q, k, v], *weights)
    assert_close(found, gradients(lambda *leaves: finite(reference(*leaves)), [q, k, v], *weights))


@here
def test_wrong_key_ranges_are_named_as_by_the_extension() -> None:
    assert about_key_ranges(BACKEND) == torch.load(os.environ[EXPECTED])["key_ranges"]


@here
def test_key_ranges_with_a_kv_cache_are_refused(draw: torch.Generator) -> None:
    call = kvcache_call(draw)
    tensors = [call[name] for name in ("q", "k_cache", "v_cache")]
    cache = KvCache(None, None, None, None, None, 5, call["cache_batch_idx"], None, None, True, 0, 0)
    options = Options(0.0, 0.25, False, -1, -1, 0.0, None, backend=BACKEND, key_ranges=some_ranges(draw, 1, 1, 3))
    with pytest.raises(NotImplementedError, match=r"key_ranges is not supported with a KV cache.*available"):
        ops.forward_kvcache(*tensors, cache, options)


def some_ranges(draw: torch.Generator, *rows: int) -> Tensor:
    """Two ranges of each row; some are empty, some end past the keys."""
    return torch.randint(-2, 16, (*rows, 2, 2), generator=draw).to(DEVICE, torch.int32)


@here
@pytest.mark.parametrize("sizes", [(1, 1), (2, 4)], ids=["shared", "each"])
def test_key_ranges(sizes: tuple[int, int], draw: torch.Generator) -> None:
    inputs = qkv(draw)
    options = {"causal": True, "key_ranges": some_ranges(draw, *sizes, 9)}
    expected = attention_reference(*inputs, **options)
    assert_close(attend(*inputs, **options), expected)
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in expected]
    weights[1] *= expected[1].isfinite()
    found = gradients(lambda *leaves: finite(attend(*leaves, **options)), inputs, *weights)
    assert_close(found, gradients(lambda *leaves: finite(attention_reference(*leaves, **options)), inputs, *weights))


@here
def test_key_ranges_of_sequences_of_variable_length(draw: torch.Generator) -> None:
    lengths_q, lengths_k = [5, 0, 12, 1], [9, 3, 0, 17]
    cu_q, cu_k = (torch.tensor([0, *n], device=DEVICE).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k))
    inputs = [
        torch.randn(rows, heads, 16, generator=draw).to(DEVICE, torch.float16)
        for rows, heads in ((18, 4), (29, 2), (29, 2))
    ]
    ranges = some_ranges(draw, 4, 18)

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        options = {"return_attn_probs": True, "key_ranges": ranges, "backend": BACKEND}
        return finite(flash_attn_varlen_func(*leaves, cu_q, cu_k, 12, 17, **options)[:2])

    def reference(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return finite(attention_varlen_reference(*leaves, cu_q, cu_k, key_ranges=ranges))

    expected = reference(*inputs)
    assert_close(run(*inputs), expected)
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in expected]
    assert_close(gradients(run, inputs, *weights), gradients(reference, inputs, *weights))


def finite(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return results[0], results[1].masked_fill(~results[1].isfinite(), 0.0)


@here
def test_dropout_has_the_mask_of_the_extension() -> None:
    """From the same seed; equal bits in S_dmask, and so in its signs."""
    expected = torch.load(os.environ[EXPECTED])["dropout"]
    found = with_dropout(BACKEND)
    assert torch.equal(torch.signbit(found[2]), torch.signbit(expected[2]))
    assert torch.equal(found[2], expected[2])
    assert_close(found, expected)


@here
def test_dropout_and_its_gradient(draw: torch.Generator) -> None:
    inputs = qkv(draw)
    torch.manual_seed(3)
    _, _, _, rng_state = official_forward(inputs)
    kept = dropout_mask(rng_state, P, 2, 4, 9, 13, device=DEVICE)

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return attend(*leaves, dropout_p=P)

    def reference(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return attention_reference(*leaves, dropout_p=P, dropout_mask=kept)

    expected = reference(*inputs)
    assert_close(run(*inputs), expected)
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in expected]
    assert_close(gradients(run, inputs, *weights), gradients(reference, inputs, *weights))


def official_forward(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    with chosen_backend():
        return _flash_attn_forward(*inputs, P, 0.25, False, -1, -1, 0.0, None, True)


@here
def test_the_official_functions(draw: torch.Generator) -> None:
    """They give the results of the public functions, and write gradients to the tensors that they are given."""
    inputs = qkv(draw)
    out, lse, S_dmask, rng_state = official_forward(inputs)
    assert S_dmask.shape == (2, 4, 128, 128)
    dout = torch.randn(out.shape, generator=draw).to(DEVICE, torch.float16)
    kept = dropout_mask(rng_state, P, 2, 4, 9, 13, device=DEVICE)
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    expected_out, _ = attention_reference(*leaves, dropout_p=P, dropout_mask=kept)
    expected = torch.autograd.grad(expected_out, leaves, dout.double())
    into = [torch.empty_like(x) for x in inputs]
    versions = [x._version for x in into]
    arguments = (P, 0.25, False, -1, -1, 0.0, None, False, rng_state)
    with chosen_backend():
        softmax_d = _flash_attn_backward(dout, *inputs, out, lse, *into, *arguments)
        with pytest.raises(ValueError, match="rng_state is None"):
            _flash_attn_backward(dout, *inputs, out, lse, *into, *arguments[:-1])
        with pytest.raises(ValueError, match="dv shares memory with dk"):
            _flash_attn_backward(dout, *inputs, out, lse, *into[:2], into[1], *arguments)
    assert softmax_d.shape == (2, 4, 128)
    assert_close(into, expected)
    assert all(x._version > version for x, version in zip(into, versions, strict=True))

    cu_q, cu_k = (torch.tensor([0, n, 2 * n], device=DEVICE, dtype=torch.int32) for n in (9, 13))
    rows, lengths = [x.flatten(0, 1) for x in inputs], (cu_q, cu_k, 9, 13)
    with chosen_backend():
        out, lse, _, empty = _flash_attn_varlen_forward(*rows, *lengths, 0.0, 0.25, True)
        assert empty.numel() == 0
        tensors = (torch.ones_like(out), *rows, out, lse, *(torch.empty_like(x) for x in rows))
        softmax_d = _flash_attn_varlen_backward(*tensors, *lengths, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    assert softmax_d.shape == (4, 2 * 128)


def kvcache_call(draw: torch.Generator) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(DEVICE, torch.float16)

    angles = torch.rand(40, 8, generator=draw) * math.tau
    return {
        "q": normal(2, 3, 4, 16),
        "k_cache": normal(3, 32, 2, 16),
        "v_cache": normal(3, 32, 2, 16),
        "k": normal(2, 3, 2, 16),
        "v": normal(2, 3, 2, 16),
        "rotary_cos": angles.cos().to(DEVICE, torch.float16),
        "rotary_sin": angles.sin().to(DEVICE, torch.float16),
        "cache_seqlens": torch.tensor([5, 17], device=DEVICE, dtype=torch.int32),
        "cache_batch_idx": torch.tensor([2, 0], device=DEVICE, dtype=torch.int32),
        "causal": True,
    }


def copied(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}


@here
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_kv_cache(num_splits: int, draw: torch.Generator) -> None:
    call = kvcache_call(draw)
    expected_call = copied(call)
    expected = attention_kvcache_reference(**expected_call)
    versions = [call[name]._version for name in ("k_cache", "v_cache")]
    found = flash_attn_with_kvcache(**call, num_splits=num_splits, return_softmax_lse=True, backend=BACKEND)
    assert_close(found, expected)
    for name, version in zip(("k_cache", "v_cache"), versions, strict=True):
        torch.testing.assert_close(call[name], expected_call[name], rtol=2e-3, atol=2e-3)
        assert call[name]._version > version, "autograd does not see that the cache was written"


@here
def test_the_kv_cache_has_no_gradient(draw: torch.Generator) -> None:
    torch._dynamo.reset()
    call = kvcache_call(draw)
    call["q"].requires_grad_()
    for run in (flash_attn_with_kvcache, torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)):
        out = run(**call, backend=BACKEND)
        assert out.requires_grad
        with pytest.raises(NotImplementedError, match="backward of flash_attn_with_kvcache"):
            out.sum().backward()
        with torch.no_grad():
            assert not run(**call, backend=BACKEND).requires_grad
    call["k_cache"].requires_grad_()
    with pytest.raises(ValueError, match="k_cache requires a gradient"):
        flash_attn_with_kvcache(**call, backend=BACKEND)


@here
def test_autocast_casts_the_inputs(draw: torch.Generator) -> None:
    inputs = qkv(draw, torch.float32)
    with torch.autocast(DEVICE, torch.float16):
        out, lse, S_dmask = flash_attn_func(*inputs, P, return_attn_probs=True, backend=BACKEND)
        (dq,) = gradients_of_first(lambda q: flash_attn_func(q, *inputs[1:], backend=BACKEND), inputs[0])
        with torch.autocast(DEVICE, enabled=False):
            assert flash_attn_func(*inputs, backend=BACKEND).dtype == torch.float32
    assert (out.dtype, lse.dtype, S_dmask.dtype, dq.dtype) == (torch.float16, torch.float32, torch.float16, dq.dtype)
    assert dq.dtype == torch.float32


def gradients_of_first(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(run(leaf).float().square().sum(), (leaf,))


# ---- transforms and compilers ---------------------------------------------------------------------------------------


@here
@pytest.mark.parametrize("dropout_p", [0.0, P])
def test_torch_func_grad(dropout_p: float, draw: torch.Generator) -> None:
    inputs = qkv(draw)

    def loss(*leaves: Tensor) -> Tensor:
        torch.manual_seed(5)
        out, lse = attend(*leaves, dropout_p=dropout_p)
        return out.float().square().sum() + lse.sin().sum()

    leaves = [x.detach().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@here
def test_vmap_and_its_gradient(draw: torch.Generator) -> None:
    q = torch.randn(3, 1, 5, 2, 16, generator=draw).to(DEVICE, torch.float16)
    k, v = torch.randn(2, 1, 7, 2, 16, generator=draw).to(DEVICE, torch.float16)

    def loss(q: Tensor) -> Tensor:
        return attend(q, k, v)[0].float().square().sum()

    expected = torch.stack([torch.func.grad(loss)(x) for x in q])
    assert torch.equal(torch.vmap(torch.func.grad(loss))(q), expected)
    assert torch.equal(torch.func.grad(lambda q: torch.vmap(loss)(q).sum())(q), expected)


@here
def test_a_compiled_transform_maps_or_raises(draw: torch.Generator) -> None:
    """PyTorch has no public way to differentiate an operator by torch.func.grad in compiled code."""
    torch._dynamo.reset()
    q = torch.randn(3, 1, 5, 2, 16, generator=draw).to(DEVICE, torch.float16)
    k, v = torch.randn(2, 1, 7, 2, 16, generator=draw).to(DEVICE, torch.float16)

    def loss(q: Tensor) -> Tensor:
        return attend(q, k, v)[0].float().square().sum()

    def mapped(q: Tensor) -> Tensor:
        return torch.vmap(lambda q: attend(q, k, v)[0])(q)

    assert torch.equal(torch.compile(mapped, backend="aot_eager", fullgraph=True)(q), mapped(q))
    for run in (
        lambda q: torch.func.grad(loss)(q[0]),
        lambda q: torch.vmap(torch.func.grad(loss))(q),
        lambda q: torch.func.grad(lambda q: torch.vmap(loss)(q).sum())(q),
    ):
        with pytest.raises(Exception, match=r"functorch"):
            torch.compile(run, backend="aot_eager", fullgraph=True)(q)


@here
def test_randomness_of_vmap(draw: torch.Generator) -> None:
    q, k, v = (x[:1].expand(3, *x.shape)[:, :1] for x in qkv(draw))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout_p=P)[0]

    with pytest.raises(RuntimeError, match="randomness='error'"):
        torch.vmap(run)(q, k, v)
    same = torch.vmap(run, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    different = torch.vmap(run, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])
    assert not torch.equal(different[1], different[2])


@here
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dropout_p", [0.0, P])
def test_compiled_training(compiler: str, dropout_p: float, draw: torch.Generator) -> None:
    """One graph, and the bits of eager code, dropout too: the seed is drawn by PyTorch's generator."""
    if compiler == "inductor" and NAME_OF_BACKEND == "reference":
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    inputs = qkv(draw)

    def loss(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        first, _ = attend(*leaves, dropout_p=dropout_p)
        second, lse = attend(*leaves, dropout_p=dropout_p)
        return first.float().square().sum() + second.float().sin().sum() + lse.sin().sum(), (first - second).abs().sum()

    def run(function: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.manual_seed(11)
        total, difference = function(*leaves)
        return [difference.detach(), total.detach(), *torch.autograd.grad(total, leaves)]

    expected, found = run(loss), run(torch.compile(loss, backend=compiler, fullgraph=True))
    assert (found[0] > 0) == (dropout_p > 0), "two calls with dropout have one mask"
    assert_close(found, expected)
    assert torch.equal(found[0] > 0, expected[0] > 0)


@here
def test_compiled_varlen_and_kv_cache(draw: torch.Generator) -> None:
    torch._dynamo.reset()
    cu_seqlens = torch.tensor([0, 5, 12], device=DEVICE, dtype=torch.int32)
    rows = [torch.randn(12, 2, 16, generator=draw).to(DEVICE, torch.float16) for _ in range(3)]

    def varlen(*rows: Tensor) -> Tensor:
        return flash_attn_varlen_func(*rows, cu_seqlens, cu_seqlens, 7, 7, causal=True, backend=BACKEND)

    compiled = torch.compile(varlen, backend="aot_eager", fullgraph=True)
    for x in rows:
        x.requires_grad_()
    expected, found = varlen(*rows), compiled(*rows)
    assert torch.equal(found, expected)
    dout = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, rows, dout), torch.autograd.grad(expected, rows, dout), strict=True
    ):  # fmt: skip
        assert torch.equal(a, b)

    call = kvcache_call(draw)
    of_compiled = copied(call)
    decode = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(decode(**of_compiled, backend=BACKEND), flash_attn_with_kvcache(**call, backend=BACKEND))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(of_compiled[name], call[name])


@here
def test_checkpointing_draws_the_same_mask(draw: torch.Generator) -> None:
    inputs = [x.requires_grad_() for x in qkv(draw)]

    def run(*leaves: Tensor) -> Tensor:
        return attend(*leaves, dropout_p=P)[0]

    torch.manual_seed(2)
    expected = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    torch.manual_seed(2)
    out = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@here
def test_what_has_no_derivative_is_refused(draw: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(draw, torch.float32))
    (dq,) = torch.autograd.grad(attend(q, k, v)[0].square().sum(), q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()
    plain = [x.detach() for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attend(q, *plain[1:])[0], (plain[0],), (plain[0],))
    with pytest.raises(NotImplementedError, match=r"forward-mode|jvp"):
        torch.func.jvp(torch.func.grad(lambda q: attend(q, *plain[1:])[0].sum()), (plain[0],), (plain[0],))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attend(q, *plain[1:])[0], (plain[0],), (plain[0],))
    slopes = torch.rand(4, device=DEVICE, requires_grad=True)
    out, _ = attend(*plain, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes requires a gradient"):
        out.sum().backward()


@here
def test_wrong_calls_are_named(draw: torch.Generator) -> None:
    """tests/api/test_python_checks.py has all of them; here some, through the public functions."""
    q, k, v = qkv(draw)
    with pytest.raises(ValueError, match="k has batch 1"):
        attend(q, k[:1], v)
    wrong = torch.float64 if NAME_OF_BACKEND == "triton" else torch.float8_e5m2
    with pytest.raises(TypeError, match=f"q has dtype .*; allowed on the {NAME_OF_BACKEND} backend"):
        attend(q.to(wrong), k.to(wrong), v.to(wrong))
    with pytest.raises(ValueError, match="softcap is 2 and dropout_p"):
        attend(q, k, v, softcap=2.0, dropout_p=P)
    lengths = torch.tensor([0, 9, 18], device=DEVICE)
    with pytest.raises(TypeError, match="cu_seqlens_q has dtype Long; allowed: int32"):
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), lengths, lengths, 9, 9, backend=BACKEND)
    call = kvcache_call(draw)
    with pytest.raises(ValueError, match="num_splits is -1"):
        flash_attn_with_kvcache(**call, num_splits=-1, backend=BACKEND)


@here
@pytest.mark.parametrize("return_max_logits", [False, True])
def test_operators_pass_the_checks_of_pytorch(return_max_logits: bool, draw: torch.Generator) -> None:
    """opcheck: schema, fakes, and compiled with dynamic shapes."""
    from flash_attn_mini import schemas
    from flash_attn_mini.backends.triton import ops
    from flash_attn_mini.options import Options

    q, k, v = qkv(draw)
    options = Options(0.0, 0.25, True, -1, 0, 0.0, None, backend=BACKEND, return_max_logits=return_max_logits)
    fields = (*schemas.EQUAL_LENGTHS, *options, None)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.FORWARD, (q, k, v, *fields), test_utils=tests)
    out, lse, _ = ops.FORWARD(q, k, v, *fields)
    for mask in ([True, True, True], [False, True, False]):
        torch.library.opcheck(ops.BACKWARD, (out, q, k, v, out, lse, None, *fields, mask), test_utils=tests)


@here
def test_import_flash_attn_gives_this_package() -> None:
    compat.install()
    try:
        import flash_attn

        assert flash_attn.flash_attn_func is flash_attn_func
    finally:
        compat.uninstall()
