"""What a RotaryEmbedding keeps from a call: tables that are always those of a new module with the same frequencies.

A call may come after a cast, after a change of inv_freq, or after a call that computed nothing or whose tensors did not
outlive it: under FakeTensorMode, inference_mode, torch.func, torch.compile, export, or in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_mini import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flash_attn_mini.layers.rotary import RotaryEmbedding
from flash_attn_mini.reference import apply_rotary_reference

from ..support.one_thread import one_thread  # noqa: F401
from ..support.overwriting_backend import overwriting_backend
from ..support.versions import TORCH

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
HEADDIM = 32
FAR = 1500  # positions at which frequencies that were rounded to 16 bits are wrong by whole turns

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
with_and_without_scales = pytest.mark.parametrize("scale_base", [None, 64.0], ids=["plain", "xpos"])


def new_module(scale_base: float | None = None) -> RotaryEmbedding:
    return RotaryEmbedding(HEADDIM, scale_base=scale_base, device=DEVICE)


def new_qkv(draw: torch.Generator, seqlen: int = 24, batch: int = 1) -> Tensor:
    return torch.randn(batch, seqlen, 3, 2, HEADDIM, generator=draw).to(DEVICE)


def rotated(module: Any, qkv: Tensor, **options: Any) -> Tensor:
    result: Tensor = module(qkv.clone(), **options)
    return result


def assert_rotates_as(module: Any, other: Any, draw: torch.Generator, seqlen: int = 24) -> None:
    """Forward and gradient have the bits of another module."""
    qkv, dout = new_qkv(draw, seqlen), new_qkv(draw, seqlen)
    results = []
    for rotate in (module, other):
        leaf = qkv.clone().requires_grad_()
        out = rotate(leaf * 1)
        results.append((out.detach(), *torch.autograd.grad(out, leaf, dout)))
    for name, actual, expected in zip(("out", "dqkv"), *results, strict=True):
        assert torch.equal(actual, expected), f"{name} differs by {(actual - expected).abs().max().item()}"
    assert not torch.equal(results[0][0], qkv), "nothing was rotated"


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# ---- casts and changes of the frequencies ---------------------------------------------------------------------------

CASTS: dict[str, list[Callable[[nn.Module], object]]] = {
    "bfloat16-float": [nn.Module.bfloat16, nn.Module.float],
    "half-float": [nn.Module.half, nn.Module.float],
    "to-float": [lambda m: m.to(torch.bfloat16), lambda m: m.to(torch.float16), lambda m: m.to(torch.float32)],
    "bfloat16": [nn.Module.bfloat16],
    "half-double": [nn.Module.half, nn.Module.double],
    "to_empty": [lambda m: m.to_empty(device=DEVICE)],
}


@pytest.mark.parametrize("factor", [1.0, 0.25], ids=["of-base", "assigned"])
@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("casts", CASTS.values(), ids=CASTS.keys())
def test_casts_do_not_round_the_frequencies(
    casts: list[Callable[[nn.Module], object]], is_used: bool, factor: float, draw: torch.Generator
) -> None:
    module, expected = new_module(), new_module()
    for m in (module, expected):
        if factor != 1.0:
            m.inv_freq = m.inv_freq * factor
    if is_used:
        rotated(module, new_qkv(draw))
    for cast in casts:
        cast(module)
    assert_rotates_as(module, expected, draw, FAR)


def test_a_cast_module_rotates_by_the_exact_angles(draw: torch.Generator) -> None:
    qkv = new_qkv(draw, FAR)
    out = rotated(new_module().bfloat16().float(), qkv)
    frequencies = 10000.0 ** -(torch.arange(0, HEADDIM, 2, dtype=torch.float64) / HEADDIM)
    angles = torch.outer(torch.arange(FAR, dtype=torch.float64), frequencies).to(DEVICE)
    q = apply_rotary_reference(
        qkv[0, :, 0].double(), angles.cos(), angles.sin(), torch.arange(FAR, device=DEVICE), interleaved=False
    )
    # Of float32 angles: the frequency, its exponent, the product and the sine have each a relative rounding error.
    bound = 8 * FAR * torch.finfo(torch.float32).eps * qkv.abs().max().item()
    assert (out[0, :, 0] - q).abs().max().item() < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_data_that_were_cast_in_place(dtype: torch.dtype, draw: torch.Generator) -> None:
    """FSDP's mixed precision casts the data of buffers without a call of `_apply`."""
    module, assigned, expected = new_module(), new_module(), new_module()
    assigned.inv_freq = assigned.inv_freq * 0.3
    for m in (module, assigned):
        rotated(m, new_qkv(draw))
        m.inv_freq.data = m.inv_freq.data.to(dtype)
    assert_rotates_as(module, expected, draw, FAR)
    expected.inv_freq = assigned.inv_freq.float()
    assert_rotates_as(assigned, expected, draw, FAR)


def assign(module: RotaryEmbedding) -> None:
    module.inv_freq = module.inv_freq / 4


def assign_reversed(module: RotaryEmbedding) -> None:
    module.inv_freq = module.inv_freq.flip(0)


def write(module: RotaryEmbedding) -> None:
    module.inv_freq.mul_(0.25)


def write_twice(module: RotaryEmbedding) -> None:
    """The second tensor has the version and the memory of the first."""
    module.inv_freq = module.inv_freq.data
    module.inv_freq.mul_(0.25)


def write_in_inference_mode(module: RotaryEmbedding) -> None:
    with torch.inference_mode():
        module.inv_freq.mul_(0.25)


def assign_in_inference_mode(module: RotaryEmbedding) -> None:
    with torch.inference_mode():
        module.inv_freq = module.inv_freq / 4


def replace_the_data(module: RotaryEmbedding) -> None:
    module.inv_freq.data = module.inv_freq.data / 4


def replace_the_data_twice(module: RotaryEmbedding) -> None:
    """The allocator may give the first memory to the third tensor."""
    for factor in (0.5, 0.5):
        module.inv_freq.data = module.inv_freq.data * factor


def cast_the_data(module: RotaryEmbedding) -> None:
    module.inv_freq.data = module.inv_freq.data.bfloat16()


def replace_the_buffer(module: RotaryEmbedding) -> None:
    module._buffers["inv_freq"] = module.inv_freq / 4


def set_scale_base(module: RotaryEmbedding) -> None:
    module.scale_base = 100.0


CHANGES = [
    assign, assign_reversed, write, write_twice, write_in_inference_mode, assign_in_inference_mode, replace_the_data,
    replace_the_data_twice, cast_the_data, replace_the_buffer, set_scale_base,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@with_and_without_scales
def test_changes_after_a_call_take_effect(
    change: Callable[[RotaryEmbedding], None], scale_base: float | None, draw: torch.Generator
) -> None:
    module, expected = new_module(scale_base), new_module(scale_base)
    assert_rotates_as(module, new_module(scale_base), draw)
    change(module)
    change(expected)
    assert_rotates_as(module, expected, draw)
    module.reset_parameters()
    expected.reset_parameters()
    assert_rotates_as(module, expected, draw)


def test_frequencies_for_one_call_stay_in_it(draw: torch.Generator) -> None:
    module, other = new_module(), new_module()
    assign(other)
    qkv = new_qkv(draw)
    for _ in range(2):
        assert_rotates_as(module, new_module(), draw)
        one_call = torch.func.functional_call(module, {"inv_freq": other.inv_freq}, (qkv.clone(),))
        assert torch.equal(one_call, rotated(other, qkv))


def test_frequencies_that_require_a_gradient_are_an_error_in_every_backward(draw: torch.Generator) -> None:
    module = new_module()
    module.inv_freq.requires_grad_()
    with torch.no_grad():
        rotated(module, new_qkv(draw))
    for _ in range(2):
        out = module(new_qkv(draw).requires_grad_() * 1)
        with pytest.raises(NotImplementedError, match="cos and sin no derivative"):
            out.sum().backward()


@pytest.mark.parametrize("change", [assign, write, nn.Module.bfloat16], ids=["assign", "write", "cast"])
@pytest.mark.parametrize("how", ["eager", "copied", "mode", "compiled"])
def test_positions_in_a_tensor_may_be_those_of_earlier_calls(
    how: str, change: Callable[[nn.Module], object], draw: torch.Generator
) -> None:
    """The module does not read the tensor: its tables keep the length that earlier calls needed."""
    module = new_module()
    rotated(module, new_qkv(draw, 200))
    change(module)
    expected = new_module()
    expected.inv_freq = module.inv_freq.clone()
    qkv = new_qkv(draw, 2)
    run: Any = compiled_by("aot_eager", module) if how == "compiled" else module
    if how == "copied":
        run = copy.deepcopy(module)
    with FlopCounterMode(display=False) if how == "mode" else contextlib.nullcontext():
        out = rotated(run, qkv, seqlen_offset=torch.tensor([198], device=DEVICE))
    assert_close(out, rotated(expected, qkv, seqlen_offset=198))


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
def test_copies_rotate_by_their_own_frequencies(how: str, draw: torch.Generator) -> None:
    module, expected = new_module(), new_module()
    rotated(module, new_qkv(draw, FAR))
    write(module)
    write(expected)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "copy":
        other = copy.copy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        assert len(file.getvalue()) < FAR * HEADDIM, "the tables were saved"
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert_rotates_as(other, expected, draw)
    assert_rotates_as(module, expected, draw)
    assert not module.state_dict()


# ---- calls that leave nothing behind --------------------------------------------------------------------------------


def call_with_fake_tensors(module: RotaryEmbedding, qkv: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module(torch.empty(qkv.shape, device=qkv.device))


def trace_with_symbols(module: RotaryEmbedding, qkv: Tensor) -> None:
    make_fx(lambda x: rotated(module, x), tracing_mode="symbolic", _allow_non_fake_inputs=True)(qkv)


def export(
    module: RotaryEmbedding, qkv: Tensor, *, strict: bool, is_dynamic: bool = True
) -> torch.export.ExportedProgram:
    if is_dynamic and module.scale_base is not None and TORCH < (2, 7):
        pytest.skip("PyTorch 2.6 exports no dynamic size that a program compares with a bound")
    length = torch.export.Dim("length", min=2, max=2048)
    shapes = ({1: length},) if is_dynamic else None
    return torch.export.export(module, (qkv.clone(),), strict=strict, dynamic_shapes=shapes)


def export_strictly(module: RotaryEmbedding, qkv: Tensor) -> None:
    export(module, qkv, strict=True)


def export_loosely(module: RotaryEmbedding, qkv: Tensor) -> None:
    export(module, qkv, strict=False)


def call_in_inference_mode(module: RotaryEmbedding, qkv: Tensor) -> None:
    with torch.inference_mode():
        rotated(module, qkv)


def call_in_vmap(module: RotaryEmbedding, qkv: Tensor) -> None:
    torch.vmap(lambda x: rotated(module, x))(torch.stack([qkv, -qkv]))


def call_in_func_grad(module: RotaryEmbedding, qkv: Tensor) -> None:
    def loss(frequencies: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"inv_freq": frequencies.detach()}, (qkv.clone(),)).sum()

    torch.func.grad(loss)(module.inv_freq)
    torch.func.grad(lambda x: rotated(module, x).sum())(qkv)


def call_under_autocast(module: RotaryEmbedding, qkv: Tensor) -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        rotated(module, qkv)


def call_compiled(module: RotaryEmbedding, qkv: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=overwriting_backend())
    for _ in range(3):
        rotated(compiled, qkv)


def call_in_jit_trace(module: RotaryEmbedding, qkv: Tensor) -> None:
    torch.jit.trace(lambda x: rotated(module, x), qkv, check_trace=False)


WITHOUT_VALUES = [call_with_fake_tensors, trace_with_symbols, export_strictly, export_loosely]
WITH_VALUES = [call_in_inference_mode, call_in_vmap, call_in_func_grad, call_under_autocast, call_compiled]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("first", [*WITHOUT_VALUES, *WITH_VALUES, call_in_jit_trace])
@with_and_without_scales
def test_eager_calls_do_not_depend_on_the_mode_of_calls_before(
    scale_base: float | None,
    first: Callable[[RotaryEmbedding, Tensor], None],
    is_used: bool,
    draw: torch.Generator,
) -> None:
    module, expected = new_module(scale_base), new_module(scale_base)
    if is_used:
        rotated(module, new_qkv(draw))
    first(module, new_qkv(draw))
    assert_rotates_as(module, expected, draw)


@pytest.mark.parametrize("first", WITHOUT_VALUES)
def test_calls_without_values_do_not_choose_the_centre(
    first: Callable[[RotaryEmbedding, Tensor], None], draw: torch.Generator
) -> None:
    module = new_module(64.0)
    first(module, new_qkv(draw, 10))
    assert_rotates_as(module, new_module(64.0), draw)


def test_a_module_made_in_inference_mode_trains(draw: torch.Generator) -> None:
    with torch.inference_mode():
        module = new_module().bfloat16().to(DEVICE)
        rotated(module, new_qkv(draw))
    assert_rotates_as(module, new_module(), draw)
    write(module)
    expected = new_module()
    write(expected)
    assert_rotates_as(module, expected, draw)


def test_decoding_computes_few_tables(monkeypatch: pytest.MonkeyPatch, draw: torch.Generator) -> None:
    outer, tables = torch.outer, []

    def count(a: Tensor, b: Tensor) -> Tensor:
        tables.append(a.shape[0])
        return outer(a, b)

    module, steps = new_module(), 300
    given = new_qkv(draw, 20 + steps)
    whole = rotated(new_module(), given)
    monkeypatch.setattr(torch, "outer", count)
    parts = [rotated(module, given[:, :20])]
    parts += [rotated(module, given[:, i : i + 1], seqlen_offset=i) for i in range(20, 20 + steps)]
    assert_close(torch.cat(parts, 1), whole)
    assert 1 < len(tables) <= steps // 30
    assert max(tables) <= 2 * (20 + steps)


@pytest.mark.gpu
@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@with_and_without_scales
def test_cuda_graphs_and_eager_calls_share_no_tables(
    scale_base: float | None, is_used: bool, draw: torch.Generator
) -> None:
    """An eager call finds no memory that only a replay fills; a replay reads no tables that the module has replaced."""
    module, qkv = new_module(scale_base), new_qkv(draw)
    rotated(new_module(scale_base), qkv)  # compiles
    if is_used:
        rotated(module, qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rotated(module, qkv)
    assert_rotates_as(module, new_module(scale_base), draw)
    rotated(module, new_qkv(draw, 300))  # longer tables
    reused = [torch.full((24, HEADDIM // 2), float("nan"), device=DEVICE) for _ in range(64)]
    for _ in range(2):
        values = new_qkv(draw)
        qkv.copy_(values)
        graph.replay()
        assert_close(out, rotated(new_module(scale_base), values))
    del reused


@pytest.mark.gpu
def test_a_stream_reads_no_tables_that_another_stream_may_not_have_written(draw: torch.Generator) -> None:
    module, qkv = new_module(), new_qkv(draw)
    expected = rotated(new_module(), qkv)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        module(torch.zeros_like(qkv))
    assert torch.equal(rotated(module, qkv), expected)
    torch.cuda.synchronize()


# ---- torch.compile and export ---------------------------------------------------------------------------------------

COMPILERS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.gpu, pytest.mark.slow])]
DYNAMIC = [
    pytest.param(None, id="default"),
    pytest.param(True, id="dynamic", marks=pytest.mark.thorough),
    pytest.param(False, id="static", marks=pytest.mark.thorough),
]
each_compiler = pytest.mark.parametrize("compiler", [*COMPILERS, "overwriting"])


def compiled_by(compiler: str, module: nn.Module, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    backend = overwriting_backend() if compiler == "overwriting" else compiler
    return torch.compile(module, fullgraph=True, backend=backend, **options)


@each_compiler
@pytest.mark.parametrize("dynamic", DYNAMIC)
@with_and_without_scales
def test_compiled_calls_of_other_lengths(
    scale_base: float | None, dynamic: bool | None, compiler: str, draw: torch.Generator
) -> None:
    module, expected = new_module(scale_base), new_module(scale_base)
    compiled = compiled_by(compiler, module, dynamic=dynamic)
    for seqlen, offset in ((12, 0), (12, 0), (30, 40), (1, 70)):
        qkv = new_qkv(draw, seqlen)
        assert_close(rotated(compiled, qkv, seqlen_offset=offset), rotated(expected, qkv, seqlen_offset=offset))
        with torch.inference_mode():  # eager calls of the same module
            assert torch.equal(rotated(module, qkv), rotated(expected, qkv))
    offsets = torch.tensor([3, 50], device=DEVICE)
    qkv = new_qkv(draw, 6, batch=2)
    options = {"seqlen_offset": offsets, "max_seqlen": 60}
    assert_close(rotated(compiled, qkv, **options), rotated(expected, qkv, **options))


@functools.cache
def compiler_sees_replaced_data() -> bool:
    """Whether compiled code sees another dtype of a buffer's data; PyTorch 2.11 does not compare the tensor again."""

    class Convert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.inv_freq.dtype == torch.bfloat16)

    module: Any = Convert()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    compiled(torch.zeros(4))
    cast_the_data(module)
    return bool(compiled(torch.zeros(4))[0] == 1)


@each_compiler
def test_compiled_calls_see_changes(compiler: str, draw: torch.Generator) -> None:
    module = new_module()
    compiled = compiled_by(compiler, module)
    changes = [lambda m: None, assign, write, nn.Module.bfloat16, replace_the_buffer]
    if compiler_sees_replaced_data():
        changes.insert(1, cast_the_data)
    for change in changes:
        change(module)
        expected = new_module()
        expected.inv_freq = module.inv_freq.clone()
        qkv = new_qkv(draw)
        assert_close(rotated(compiled, qkv), rotated(expected, qkv))


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@with_and_without_scales
def test_exported_module(
    scale_base: float | None, strict: bool, is_used: bool, is_dynamic: bool, draw: torch.Generator
) -> None:
    module = new_module(scale_base)
    if is_used:
        rotated(module, new_qkv(draw))
    program = export(module, new_qkv(draw), strict=strict, is_dynamic=is_dynamic).module()
    for seqlen in (24, 70) if is_dynamic else (24,):
        expected = copy.deepcopy(module)
        qkv = new_qkv(draw, seqlen)
        assert_close(rotated(program, qkv), rotated(expected, qkv))


# ---- a model of rotary and attention --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with rotary embedding, q, k and v in one tensor or in two."""

    def __init__(self, rotary: RotaryEmbedding, backend: str, packed: str, heads: int) -> None:
        super().__init__()
        self.rotary, self.backend, self.packed, self.heads = rotary, backend, packed, heads
        width = heads * rotary.dim
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.project_in(x).unflatten(-1, (3, self.heads, -1)) * 3  # few keys have most of the weight of a query
        options: dict[str, Any] = {"causal": True, "deterministic": True, "backend": self.backend}
        if self.packed == "qkv":
            out = flash_attn_qkvpacked_func(self.rotary(qkv), **options)
        else:
            q, kv = self.rotary(qkv[:, :, 0], qkv[:, :, 1:])
            out = flash_attn_kvpacked_func(q, kv, **options)
        return self.project_out(out.flatten(2))


def new_model(backend: str, device: str, dtype: torch.dtype, packed: str) -> nn.Sequential:
    """Two layers that share one RotaryEmbedding."""
    torch.manual_seed(0)
    headdim, heads = 64, 2
    rotary = RotaryEmbedding(headdim)
    return nn.Sequential(*(Attention(rotary, backend, packed, heads) for _ in range(2))).to(device, dtype)


def distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def assert_runs_and_trains_as_eager(
    compile: Callable[[nn.Module], Callable[..., Any]],
    model_of: Callable[[], nn.Sequential],
    allowed: float,
    draw: torch.Generator,
) -> None:
    """Forwards of other lengths, then steps of training with other data, then a forward, against an eager model."""
    eager, model = model_of(), model_of()
    parameter = next(model.parameters())
    run = compile(model)

    def data(seqlen: int) -> Tensor:
        return torch.randn(3, seqlen, model[0].project_out.in_features, generator=draw).to(parameter)

    def compare_forward(seqlen: int) -> None:
        x = data(seqlen)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            out = run(x).clone()  # the next call of a CUDA graph overwrites its results
            expected = eager(x)
            assert distance(model(x), expected) < allowed, "an eager call of the compiled model"
            assert distance(out, expected) < allowed

    for seqlen in (37, 37, 37, 37, 50, 50, 50, 37):  # a CUDA graph is recorded in the second call of a shape
        compare_forward(seqlen)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for _ in range(6):
        x, target = data(37), data(37)
        losses = []
        torch.compiler.cudagraph_mark_step_begin()
        for m, step, optimizer in zip((eager, model), (eager, run), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (step(x) - target).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            assert all(p.grad is not None for p in m.parameters())
        assert losses[1] == pytest.approx(losses[0], rel=allowed)
        for (name, p), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert distance(p.grad, expected.grad) < 4 * allowed, f"the gradient of {name}"
        for optimizer in optimizers:
            optimizer.step()
        model.load_state_dict(eager.state_dict())  # copies to the same memory, so that errors do not add up
    compare_forward(37)


each_packed = pytest.mark.parametrize("packed", ["qkv", pytest.param("kv", marks=pytest.mark.thorough)])


@pytest.mark.slow
@each_packed
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_model_runs_and_trains(
    compiler: str, packed: str, backend: str, device: str, draw: torch.Generator
) -> None:
    dtype = torch.float32 if backend == "cpu" else torch.bfloat16
    assert_runs_and_trains_as_eager(
        lambda model: compiled_by(compiler, model),
        lambda: new_model(backend, device, dtype, packed),
        1e-4 if backend == "cpu" else 3e-2,
        draw,
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.backends("cuda", "triton")
@each_packed
def test_model_in_cuda_graphs_of_the_compiler_runs_and_trains(
    packed: str, backend: str, device: str, draw: torch.Generator
) -> None:
    torch._dynamo.reset()
    counters.clear()
    assert_runs_and_trains_as_eager(
        lambda model: torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead"),
        lambda: new_model(backend, device, torch.bfloat16, packed),
        3e-2,
        draw,
    )
    assert counters["inductor"]["cudagraph_skips"] == 0
