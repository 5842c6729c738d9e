"""A copy of the package from a repository for Hugging Face's kernels, in one process with the installed package.

Where the package `kernels` is installed, `kernels.get_kernel` loads the copy; elsewhere the tests import it in the same
way. On the CPU the copy computes with the reference, and with Triton in a second process, in its interpreter; on a GPU
with Triton.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flash_attn_mini
from build_tools import hub_repository
from flash_attn_mini import sdpa

from ..support.interpreter import INTERPRETED, run_in_the_interpreter, starts_the_interpreter
from ..support.sdpa_counts import ours_and_pytorchs

HUB_NAME = "org/flash-attn-mini"
HAS_KERNELS = importlib.util.find_spec("kernels") is not None
HAS_REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")
P = 0.3

on_both = pytest.mark.backends("cpu", "triton")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="the first process runs it")


@pytest.fixture
def named(backend: str) -> str | None:
    """The backend that calls name; None on the CPU, where the copy takes the reference, which has no name."""
    return "triton" if INTERPRETED or backend == "triton" else None


def using(module: ModuleType, backend: str | None) -> Any:
    return contextlib.nullcontext() if backend is None else module.use_backend(backend)


@pytest.mark.slow
@pytest.mark.thorough
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    hub_repository.write(folder)
    return folder


@pytest.fixture(scope="module")
def hub(repository: Path) -> Iterator[None]:
    """Makes `HUB_NAME` the repository, without a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"{HUB_NAME}={repository}")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def copy(repository: Path, hub: None) -> ModuleType:
    if HAS_KERNELS:
        import kernels

        return kernels.get_kernel(HUB_NAME, version=hub_repository.VERSION)
    variant = repository / "build" / ("torch-cuda" if torch.version.cuda else "torch-cpu")
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def part(copy: ModuleType, name: str) -> ModuleType:
    """A module of the copy, or of the installed package."""
    return importlib.import_module(f"{copy.__name__}.{name}")


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=4e-3, atol=4e-3)


# ---- what the copy is -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_KERNELS, reason="the package kernels is not installed")
def test_kernels_loads_the_variant_of_this_torch(copy: ModuleType) -> None:
    import kernels

    (loaded,) = (kernel for kernel in kernels.get_loaded_kernels() if kernel.module is copy)
    assert str(loaded.metadata.name) == "flash-attn-mini"
    assert loaded.metadata.id == copy.__name__
    assert Path(copy.__file__).parent.name == ("torch-cuda" if torch.version.cuda else "torch-cpu")


def test_every_module_of_the_copy_is_the_copys(copy: ModuleType) -> None:
    folder = Path(copy.__file__).parent
    skipped = {"__main__", "__init__"}
    if importlib.util.find_spec("triton") is None:
        skipped |= {path.stem for path in folder.rglob("*.py") if "import triton" in path.read_text()}
    for path in folder.rglob("*.py"):
        if path.stem not in skipped and "backends/triton" not in path.as_posix():
            part(copy, ".".join(path.relative_to(folder).with_suffix("").parts))
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{copy.__name__}."):
            assert Path(module.__file__).is_relative_to(folder), f"{name} comes from {module.__file__}"
    ours = {x for x in vars(flash_attn_mini).values() if callable(x)}
    assert not ours & {x for x in vars(copy).values() if callable(x)}


def ops_of(namespace: str) -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name for name in names if name.startswith(f"{namespace}::")}


def test_each_copy_has_its_ops(copy: ModuleType) -> None:
    part(copy, "layers.rotary")
    importlib.import_module("flash_attn_mini.layers.rotary")
    for module in (copy, flash_attn_mini):
        namespace = module.__name__
        assert {f"{namespace}::{name}" for name in ("triton_fwd", "draw_rng_state", "_apply_rotary")} <= ops_of(
            namespace
        )
    assert part(copy, "backends.triton.ops").FORWARD is not torch.ops.flash_attn_mini.triton_fwd.default
    assert part(copy, "backends.extension").MODULE is None, "the extension's ops are those of the installed package"


def test_the_reason_why_the_copy_has_no_extension(copy: ModuleType) -> None:
    q = torch.zeros(1, 1, 1, 16)
    with pytest.raises(ValueError, match="backend 'other', given by the backend argument, is unknown"):
        copy.flash_attn_func(q, q, q, backend="other")
    assert (
        f"imported as {copy.__name__}, has no compiled extension" in part(copy, "backends.extension").missing_reason()
    )


# ---- what it computes -----------------------------------------------------------------------------------------------


def equal_lengths(draw: torch.Generator, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q [2, 9, 4, 16], k and v [2, 13, 2, 16]."""
    shapes = ((2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16))
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def differentiated(run: Callable[..., Any], inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The results of run, and the gradients of both, weighted."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = run(*leaves)[:2]
    finite = lse.masked_fill(~lse.isfinite(), 0.0)
    total = (out.double() * weights[0]).sum() + (finite.double() * weights[1]).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def assert_same_results(
    copy: ModuleType, backend: str | None, inputs: list[Tensor], run: Callable[..., Any], draw: torch.Generator
) -> None:
    """The copy gives what the installed package gives; `run` gets the module first."""
    seed = int(torch.randint(2**31, (), generator=draw))
    shapes = [x.shape for x in run(flash_attn_mini, *inputs, backend=backend)[:2]]
    weights = [torch.randn(shape, generator=draw).to(inputs[0].device) for shape in shapes]
    results = []
    for module in (copy, flash_attn_mini):
        torch.manual_seed(seed)
        results.append(differentiated(lambda *x, m=module: run(m, *x, backend=backend), inputs, weights))
    assert_close(*results)


EQUAL_LENGTHS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"softcap": 2.0},
    {"alibi": (4,)},
    {"alibi": (2, 4), "causal": True, "softmax_scale": -0.3},
    {"sinks": (4,)},
    {"dropout_p": P},
    {"dropout_p": P, "sinks": (2, 4), "causal": True},
]
VARIABLE_LENGTHS: list[dict[str, Any]] = [
    {},
    {"causal": True, "alibi": (4, 4)},
    {"dropout_p": P, "sinks": (4,)},
]
PRECISIONS = [torch.float32, torch.float16]


def some(values: list[Any]) -> list[Any]:
    """The last in the interpreter, which is slow: tests/kernels/test_triton.py tests what the kernels compute."""
    return values[-1:] if INTERPRETED else values


@on_both
@pytest.mark.parametrize("options", some(EQUAL_LENGTHS), ids=str)
@pytest.mark.parametrize("precision", some(PRECISIONS), ids=str)
def test_equal_lengths(
    copy: ModuleType,
    named: str | None,
    device: str,
    options: dict[str, Any],
    precision: torch.dtype,
    draw: torch.Generator,
) -> None:
    inputs = equal_lengths(draw, device, precision)
    options = dict(options)
    for shape, name in (("alibi", "alibi_slopes"), ("sinks", "learnable_sink")):
        if shape in options:
            options[name] = torch.rand(options.pop(shape), generator=draw).to(device)

    def run(module: ModuleType, *qkv: Tensor, backend: str | None) -> Any:
        return module.flash_attn_func(*qkv, **options, return_attn_probs=True, backend=backend)

    assert_same_results(copy, named, inputs, run, draw)


@on_both
@pytest.mark.parametrize("options", some(VARIABLE_LENGTHS), ids=str)
def test_variable_lengths(
    copy: ModuleType, named: str | None, device: str, options: dict[str, Any], draw: torch.Generator
) -> None:
    cu_q, cu_k = (
        torch.tensor([0, *n], device=device).cumsum(0, dtype=torch.int32) for n in ([5, 0, 130, 1], [9, 3, 0, 17])
    )
    inputs = [torch.randn(n, h, 16, generator=draw).to(device) for n, h in ((136, 4), (29, 2), (29, 2))]
    options = dict(options)
    for shape, name in (("alibi", "alibi_slopes"), ("sinks", "learnable_sink")):
        if shape in options:
            options[name] = torch.rand(options.pop(shape), generator=draw).to(device)

    def run(module: ModuleType, *qkv: Tensor, backend: str | None) -> Any:
        return module.flash_attn_varlen_func(
            *qkv, cu_q, cu_k, 130, 17, **options, return_attn_probs=True, backend=backend
        )

    assert_same_results(copy, named, inputs, run, draw)


@on_both
def test_pages(copy: ModuleType, named: str | None, device: str, draw: torch.Generator) -> None:
    cu_q, cu_k = (torch.tensor([0, *n], device=device).cumsum(0, dtype=torch.int32) for n in ([5, 2], [9, 17]))
    q = torch.randn(7, 4, 16, generator=draw).to(device)
    k, v = torch.randn(2, 10, 4, 2, 16, generator=draw).to(device)
    block_table = torch.randperm(10, generator=draw).reshape(2, 5).to(device, torch.int32)
    results = [
        module.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 5, 17, block_table=block_table, return_attn_probs=True, backend=named
        )[:2]
        for module in (copy, flash_attn_mini)
    ]
    assert_close(*results)


@on_both
@pytest.mark.parametrize("lengths_as", ["tensor", "int", "none"])
def test_kv_cache(copy: ModuleType, named: str | None, device: str, lengths_as: str, draw: torch.Generator) -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device)

    angles = torch.rand(40, 8, generator=draw) * math.tau
    call: dict[str, Any] = {"q": normal(2, 3, 4, 16), "k_cache": normal(3, 32, 2, 16), "v_cache": normal(3, 32, 2, 16)}
    call |= {"causal": True, "cache_batch_idx": torch.tensor([2, 0], device=device, dtype=torch.int32)}
    call["learnable_sink"] = normal(4)
    if lengths_as != "none":
        call |= {"k": normal(2, 3, 2, 16), "v": normal(2, 3, 2, 16)}
        call |= {"rotary_cos": angles.cos().to(device), "rotary_sin": angles.sin().to(device)}
        is_int = lengths_as == "int"
        call["cache_seqlens"] = 17 if is_int else torch.tensor([5, 17], device=device, dtype=torch.int32)
    results = []
    for module in (copy, flash_attn_mini):
        own = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
        found = module.flash_attn_with_kvcache(**own, return_softmax_lse=True, backend=named)
        results.append([*found, own["k_cache"], own["v_cache"]])
    assert_close(*results)


@on_both
def test_the_official_backward(copy: ModuleType, named: str | None, device: str, draw: torch.Generator) -> None:
    """It writes gradients to the tensors that it is given, and returns softmax_d."""
    q, k, v = equal_lengths(draw, device, torch.float32)
    out, lse, _ = flash_attn_mini.flash_attn_func(q, k, v, return_attn_probs=True, backend=named)
    dout = torch.randn(out.shape, generator=draw).to(device)
    rows = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
    lse_of_rows = lse.transpose(0, 1).flatten(1)
    lengths = [torch.tensor([0, n, 2 * n], device=device, dtype=torch.int32) for n in (9, 13)]
    results = []
    for module in (copy, flash_attn_mini):
        interface = part(module, "flash_attn_interface")
        into = [torch.empty_like(x) for x in (q, k, v)]
        into_rows = [torch.empty_like(x) for x in rows[1:4]]
        options = (0.0, 0.25, False, -1, -1, 0.0, None, False)
        with using(module, named):
            softmax_d = interface._flash_attn_backward(dout, q, k, v, out, lse, *into, *options)
            softmax_d_of_rows = interface._flash_attn_varlen_backward(
                *rows, lse_of_rows, *into_rows, *lengths, 9, 13, *options
            )
        results.append([softmax_d, *into, softmax_d_of_rows, *into_rows])
    assert_close(*results)


# ---- two copies in one process --------------------------------------------------------------------------------------


@on_both
def test_both_in_one_graph(copy: ModuleType, named: str | None, device: str, draw: torch.Generator) -> None:
    torch._dynamo.reset()
    inputs = equal_lengths(draw, device, torch.float16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = copy.flash_attn_func(q, k, v, causal=True, backend=named)
        return flash_attn_mini.flash_attn_func(first, k, v, backend=named)

    gradients = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in inputs]
        gradients.append(torch.autograd.grad(function(*leaves).float().square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_use_backend_of_one_is_not_that_of_the_other(copy: ModuleType) -> None:
    backends = part(copy, "backends")
    with flash_attn_mini.use_backend("triton"):
        assert backends.chosen_backend() is None
    with copy.use_backend("triton"):
        assert flash_attn_mini.backends.chosen_backend() is None
        assert backends.chosen_backend() == "triton"


def test_sdpa_needs_the_extension_which_a_copy_lacks(copy: ModuleType, draw: torch.Generator) -> None:
    """A copy's error leaves the kernels of the installed package active."""
    theirs = part(copy, "sdpa")
    q, k, v = torch.randn(3, 1, 2, 33, 16, generator=draw)
    with sdpa.sdpa():
        with pytest.raises(RuntimeError, match="has no compiled extension; flash_attn_mini may have one"):
            theirs.activate()
        theirs.restore()
        _, ours, _ = ours_and_pytorchs(scaled_dot_product_attention, q, k, v)
        assert (ours, sdpa.is_active(), theirs.is_active(), theirs.counts()) == (1, True, False, {})
    if HAS_REGISTRY:
        assert theirs.NAME not in torch.nn.attention.list_flash_attention_impls()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[Any]:
    """This process as a group."""
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
def test_context_parallel(
    copy: ModuleType, process_group: Any, strategy: str, alibi: bool, draw: torch.Generator
) -> None:
    inputs = [torch.randn(1, 32, 2, 16, generator=draw) for _ in range(3)]
    options = {"causal": True, "alibi_slopes": torch.rand(2, generator=draw) if alibi else None}
    options |= {"return_attn_probs": True}
    backend = "triton" if INTERPRETED else None
    shards = copy.zigzag_shards(32, process_group)
    weights = [torch.randn(1, 32, 2, 16, generator=draw), torch.randn(1, 2, 32, generator=draw)]
    with using(copy, backend):
        found = differentiated(
            lambda *qkv: copy.cp_flash_attn_func(*qkv, shards, strategy=strategy, **options), inputs, weights
        )
    expected = differentiated(lambda *qkv: flash_attn_mini.flash_attn_func(*qkv, **options), inputs, weights)
    assert_close(found, expected)


# ---- transformers ---------------------------------------------------------------------------------------------------


def tiny_llama(attention: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def assert_like_eager(model: Any, device: str, draw: torch.Generator) -> None:
    """Logits, gradients and generated tokens of a padded batch."""
    eager, model = tiny_llama("eager").to(device), model.to(device)
    tokens = torch.randint(64, (2, 11), generator=draw).to(device)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    results = []
    for each in (model, eager):
        for given in (None, mask):
            logits = each(tokens, attention_mask=given).logits
            logits = logits if given is None else logits[given.bool()]
            each.zero_grad()
            logits.square().mean().backward()
            results.append([logits.detach(), *(p.grad.clone() for p in each.parameters())])
    for found, expected in zip(results[:2], results[2:], strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5 if device == "cpu" else 2e-3)
    generate = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    if device == "cpu":  # elsewhere rounding may choose another token
        assert torch.equal(model.generate(tokens, **generate), eager.generate(tokens, **generate))


@not_interpreted
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_name_of_the_repository_as_attn_implementation(
    copy: ModuleType, device: str, draw: torch.Generator
) -> None:
    pytest.importorskip("transformers")
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        pytest.skip("kernels is not installed, or its version is not one that this transformers takes")
    model = tiny_llama(HUB_NAME)
    assert model.config._attn_implementation == HUB_NAME
    from transformers import modeling_flash_attention_utils as flash

    assert flash._flash_fn is copy.flash_attn_func
    assert flash._flash_varlen_fn is copy.flash_attn_varlen_func
    assert_like_eager(model, device, draw)


@not_interpreted
def test_both_copies_register_with_transformers(copy: ModuleType, draw: torch.Generator) -> None:
    pytest.importorskip("transformers")
    from flash_attn_mini.integrations import transformers as integration

    theirs = part(copy, "integrations.transformers")
    names = [module.register() for module in (integration, theirs)]
    assert names[0] == "attn_mini"
    assert names[1] != names[0]
    for name in names:
        assert_like_eager(tiny_llama(name), "cpu", draw)
