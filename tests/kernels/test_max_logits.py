"""return_max_logits on every backend: values, what does not count, compile, vmap, autocast, errors.

The tests of values run the Triton backend in its interpreter where there is no GPU.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    ops,
)
from flash_attn_mini.argument_checks import checked_options

from ..conftest import CPU_DTYPES, GPU_DTYPES
from ..support.cases import FORWARD_CASES, Case
from ..support.feature_cases import FEATURE_CASES
from ..support.instruction_sets import each_lesser_level, run_on
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.key_range_cases import KEY_RANGE_CASES, KeyRangeCase
from ..support.max_logit_checks import MAX_LOGIT_ERROR, check_case, check_max_logits
from ..support.on_backends import gpu, here, on_backends
from ..support.op_calls import FWD, FWD_KVCACHE, PACKED_FWD, fwd_arguments, kvcache_arguments, packed_fwd_arguments
from ..support.random_loop import CHUNKS, each_chunk
from ..support.triton_calls import HAS_GPU
from ..support.varlen_cases import VARLEN_CASES, VarlenCase
from .test_random import random_case

RANDOM_CASES = {"cpu": 600, "cuda": 1000, "triton": 40}
DENSE = [*FORWARD_CASES, *FEATURE_CASES]
SMALL = ("no_keys", "no_queries", "decode_causal", "masked_all_but_one", "values_negative", "softcap_masked_rows",
         "alibi_scale_negative", "window_0_0_decode", "dropout_most", "varlen_small", "ranges_small")  # fmt: skip
VARLEN = [
    *VARLEN_CASES,
    VarlenCase("varlen_small", "empty sequences, and rows without keys", (9, 0, 3), (4, 2, 0), causal=True, nheads=4),
]
RANGES = [
    *KEY_RANGE_CASES,
    KeyRangeCase(Case("ranges_small", "two ranges", 2, 2, 1, 20, 33, 16, causal=True), "shared_prefix", sinks=True),
]


@pytest.fixture
def device(kernels: str) -> str:
    return "cuda" if kernels == "cuda" or (kernels == "triton" and HAS_GPU) else "cpu"


def small(draw: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=draw) for shape in ((2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16))]


@pytest.mark.slow
@starts_the_interpreter
def test_triton_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


# ---- values ---------------------------------------------------------------------------------------------------------


@on_backends(DENSE, SMALL)
def test_equal_lengths(
    case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_case(case, kernels, dtype, device, seed, described_seed)


@on_backends(VARLEN, SMALL)
def test_variable_length(
    case: VarlenCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_case(case, kernels, dtype, device, seed, described_seed)


@on_backends(RANGES, SMALL)
def test_key_ranges(
    case: KeyRangeCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_case(case, kernels, dtype, device, seed, described_seed)


@each_chunk
@pytest.mark.parametrize(
    "kernels", [pytest.param("cpu", marks=here), *(pytest.param(x, marks=gpu) for x in ("cuda", "triton"))]
)
def test_random_cases(chunk: int, kernels: str, device: str, seed: int, described_seed: str) -> None:
    dtypes = CPU_DTYPES if kernels == "cpu" else GPU_DTYPES
    for number in range(RANDOM_CASES[kernels] // CHUNKS):
        own_seed = (seed + number) % 2**31
        draw = random.Random(own_seed)
        case, dtype = random_case(draw), draw.choice(dtypes)
        check_case(case, kernels, dtype, device, own_seed, f"{described_seed}, {own_seed}")


# Head h of q is +-2^e times a fixed vector, and that of k the vector: scores far apart, of one sign, or 0.
EXPONENTS = (-100, -40, -10, 0, 10, 40)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("seqlens", [(1, 1), (70, 300), (300, 70)], ids=str)
@on_backends([64, 128], SMALL)
def test_heads_of_very_different_scores(
    case: int, kernels: str, device: str, dtype: torch.dtype, seqlens: tuple[int, int], sign: float, draw: Any
) -> None:
    """Negative scores: a zero, as of a row or key past the end, would be larger than any of them."""
    exponents = [max(e, -8) if dtype == torch.float16 else e for e in EXPONENTS]
    exponents = [min(e, 8) for e in exponents] if dtype == torch.float16 else exponents
    shape = (1, seqlens[0], len(exponents), case), (1, seqlens[1], 1, case)
    q, k, v = (1 + torch.rand(s, generator=draw) for s in (*shape, shape[1]))
    q = q * torch.tensor([sign * 2.0**e for e in exponents])[:, None]
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    for causal in (False, True):
        _, max_logits = flash_attn_func(q, k, v, causal=causal, backend=kernels, return_max_logits=True)
        check_max_logits(max_logits, q, k, (case, seqlens, causal), causal=causal)
        assert (max_logits * sign > (-MAX_LOGIT_ERROR if device == "cuda" else 0.0)).all()
    cu_seqlens = torch.tensor([0, seqlens[0]], dtype=torch.int32, device=device)
    lengths = cu_seqlens, cu_seqlens // seqlens[0] * seqlens[1], *seqlens
    _, max_logits = flash_attn_varlen_func(q[0], k[0], v[0], *lengths, backend=kernels, return_max_logits=True)
    check_max_logits(max_logits, q[0], k[0], "varlen", cu_seqlens=lengths[:2])


@pytest.mark.parametrize("spread", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("causal", [False, True])
@on_backends([64, 128], SMALL)
def test_long_sequences(
    case: int, kernels: str, device: str, dtype: torch.dtype, causal: bool, spread: float, draw: Any
) -> None:
    """From 4,096 keys on Hopper reads logits from probabilities; the second call has lost none of the first's bits."""
    q = torch.randn(1, 200, 2, case, generator=draw).mul(spread).to(device, dtype)
    k, v = (torch.randn(1, 4100, 1, case, generator=draw).to(device, dtype) for _ in range(2))
    found = [flash_attn_func(q, k, v, causal=causal, backend=kernels, return_max_logits=True)[1] for _ in range(2)]
    check_max_logits(found[0], q, k, (case, causal, spread), causal=causal)
    assert torch.equal(*found)


@on_backends([64], SMALL)
def test_zeros_nan_and_infinity(case: int, kernels: str, device: str, dtype: torch.dtype) -> None:
    """Zeros of either sign are more than -inf; a NaN does not count; infinity does."""
    q = torch.zeros(1, 5, 4, case, device=device, dtype=dtype)
    k = torch.zeros(1, 150, 4, case, device=device, dtype=dtype)
    q[0, :, 0] = -0.0
    k[0, :, 1, 0], q[0, :, 1, 0] = 1.0, -2.0
    q[0, 3, 1, 0] = math.nan
    k[0, :, 2, 0], q[0, :, 2, 0] = 1.0, -1.0
    q[0, 2, 2, 0] = math.inf
    q[0, :, 3] = math.nan
    _, max_logits = flash_attn_func(q, k, k, softmax_scale=1.0, backend=kernels, return_max_logits=True)
    expected = [0.0, -2.0, math.inf, -math.inf]
    assert max_logits[0].tolist() == pytest.approx(expected, rel=0.0, abs=MAX_LOGIT_ERROR if device == "cuda" else 0.0)


@on_backends([64], SMALL)
def test_a_call_without_keys_or_queries(case: int, kernels: str, device: str, dtype: torch.dtype) -> None:
    for seqlen_q, seqlen_k in ((5, 0), (0, 5), (0, 0)):
        q = torch.ones(2, seqlen_q, 4, case, device=device, dtype=dtype)
        k = torch.ones(2, seqlen_k, 2, case, device=device, dtype=dtype)
        _, max_logits = flash_attn_func(q, k, k, backend=kernels, return_max_logits=True)
        assert max_logits.tolist() == [[-math.inf] * 4] * 2


# ---- what does not count, and what does not change ------------------------------------------------------------------


@on_backends([64], SMALL)
def test_sinks_and_dropout_do_not_count(
    case: int, kernels: str, device: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    q, k, v = (torch.randn(2, n, 2, case, generator=draw).to(device, dtype) for n in (33, 70, 70))
    options = {"causal": True, "backend": kernels, "return_max_logits": True}
    _, expected = flash_attn_func(q, k, v, **options)
    sinks = torch.full((2,), 100.0, device=device)
    for more in ({"learnable_sink": sinks}, {"dropout_p": 0.9}):
        _, got = flash_attn_func(q, k, v, **options, **more)
        assert torch.equal(got, expected), more


@on_backends([64], SMALL)
def test_other_results_and_gradients_stay(
    case: int, kernels: str, device: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    """With ALiBi, which takes one CUDA kernel with and without max_logits; and the order of the results."""
    inputs = [torch.randn(2, n, 2, case, generator=draw).to(device, dtype) for n in (33, 70, 70)]
    slopes = torch.tensor([0.25, 0.0625], device=device)
    results = []
    for return_max_logits in (False, True):
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.manual_seed(3)
        found = flash_attn_func(
            *leaves, 0.2, causal=True, alibi_slopes=slopes, return_attn_probs=True, deterministic=True,
            backend=kernels, return_max_logits=return_max_logits,
        )  # fmt: skip
        results.append((*found, *torch.autograd.grad((found[0].float().sum() + found[1].sum()), leaves)))
    without, (out, lse, S_dmask, max_logits, *gradients) = results
    assert not max_logits.requires_grad
    for a, b in zip(without, (out, lse, S_dmask, *gradients), strict=True):
        if kernels == "triton":  # another kernel, whose compiler contracts other products and sums
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(a, b)


@on_backends([16], SMALL)
@pytest.mark.parametrize("form", ["qkv", "kv", "varlen_qkv", "varlen_kv"])
def test_packed(form: str, case: int, kernels: str, device: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    packed = torch.randn(2, 33, 3, 4, case, generator=draw).to(device, dtype)
    cu_seqlens = torch.tensor([0, 20, 66], dtype=torch.int32, device=device)
    is_varlen = form.startswith("varlen")
    x = packed.flatten(0, 1) if is_varlen else packed
    q, k, v = x.unbind(-3)
    pairs = (cu_seqlens, cu_seqlens, 46, 46) if is_varlen else ()
    options: dict[str, Any] = {"causal": True, "backend": kernels, "return_max_logits": True}
    separate: Any = flash_attn_varlen_func if is_varlen else flash_attn_func
    if form.endswith("qkv"):
        function: Any = flash_attn_varlen_qkvpacked_func if is_varlen else flash_attn_qkvpacked_func
        got = function(x, *((cu_seqlens, 46) if is_varlen else ()), **options)
    else:
        function = flash_attn_varlen_kvpacked_func if is_varlen else flash_attn_kvpacked_func
        got = function(q, x[..., 1:, :, :], *pairs, **options)
    for a, b in zip(got, separate(q, k, v, *pairs, **options), strict=True):
        assert torch.equal(a, b)


SCRIPT = """
from tests.support.feature_cases import SMALL_FEATURE_CASES
from tests.support.key_range_cases import SMALL_KEY_RANGE_CASES
from tests.support.max_logit_checks import check_case

for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for case in (*SMALL_FEATURE_CASES, *SMALL_KEY_RANGE_CASES):
        check_case(case, "cpu", dtype, "cpu", seed, f"{level} {seed}")
print("checked")
"""


@here
@each_lesser_level
def test_lesser_instruction_sets(level: str) -> None:
    run_on(level, SCRIPT)


# ---- PyTorch around it ----------------------------------------------------------------------------------------------


@here
@pytest.mark.parametrize("is_varlen", [False, True], ids=["equal", "varlen"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(is_varlen: bool, dynamic: bool, draw: torch.Generator) -> None:
    inputs = small(draw)
    lengths = (torch.tensor([0, 4, 18]).int(), torch.tensor([0, 20, 26]).int(), 14, 20)
    if is_varlen:
        inputs = [x.flatten(0, 1) for x in inputs]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if is_varlen:
            return flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_max_logits=True)
        return flash_attn_func(q, k, v, causal=True, return_attn_probs=True, return_max_logits=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, *_, max_logits = function(*leaves)
        assert not max_logits.requires_grad
        results.append((out, max_logits, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@here
def test_export(draw: torch.Generator) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flash_attn_func(q, k, v, return_max_logits=True)

    inputs = tuple(small(draw))
    got = torch.export.export(Attention(), inputs).module()(*inputs)
    for a, b in zip(got, Attention()(*inputs), strict=True):
        assert torch.equal(a, b)


@here
@pytest.mark.parametrize("is_varlen", [False, True], ids=["equal", "varlen"])
@pytest.mark.parametrize("wanted", [False, True])
def test_opcheck(wanted: bool, is_varlen: bool, draw: torch.Generator) -> None:
    inputs = small(draw)
    sequences: Any = None
    if is_varlen:
        inputs = [x.flatten(0, 1) for x in inputs]
        sequences = ops.Sequences(torch.tensor([0, 4, 18]).int(), torch.tensor([0, 20, 26]).int(), 14, 20)
    q, k, v = (x.requires_grad_() for x in inputs)
    options = {"sequences": sequences, "causal": True, "return_max_logits": wanted}
    torch.library.opcheck(FWD, fwd_arguments(q, k, v, **options))
    packed = torch.stack([k.detach(), v.detach()], dim=-3).requires_grad_()
    torch.library.opcheck(PACKED_FWD, packed_fwd_arguments(q, packed, **options))


@here
@pytest.mark.parametrize("randomness", ["none", "same", "different"])
@pytest.mark.parametrize("is_varlen", [False, True], ids=["equal", "varlen"])
def test_vmap(is_varlen: bool, randomness: str, draw: torch.Generator) -> None:
    samples = [small(draw) for _ in range(3)]
    q, k, v = (torch.stack([one[i] for one in samples]) for i in range(3))
    lengths: tuple[Any, ...] = ()
    function: Any = flash_attn_func
    if is_varlen:
        q, k, v = (x.flatten(1, 2) for x in (q, k, v))
        lengths = (torch.tensor([0, 4, 18]).int(), torch.tensor([0, 20, 26]).int(), 14, 20)
        function = flash_attn_varlen_func
    options: dict[str, Any] = {"causal": True, "return_max_logits": True}
    how = {} if randomness == "none" else {"randomness": randomness}
    dropping = {} if randomness == "none" else {"dropout_p": 0.5}

    def of_sample(q: Tensor, k: Tensor) -> Tensor:  # v is the same for all samples
        return function(q, k, v[0], *lengths, **options, **dropping)[-1]  # type: ignore[no-any-return]

    got = torch.vmap(of_sample, **how)(q, k)
    expected = torch.stack([function(a, b, v[0], *lengths, **options)[-1] for a, b in zip(q, k, strict=True)])
    assert torch.equal(got, expected)


@here
def test_gradients_under_transforms(draw: torch.Generator) -> None:
    q, k, v = small(draw)

    def loss(q: Tensor) -> tuple[Tensor, Tensor]:
        out, max_logits = flash_attn_func(q, k, v, return_max_logits=True)
        return out.square().sum(), max_logits

    gradient, max_logits = torch.func.grad(loss, has_aux=True)(q)
    torch.testing.assert_close(gradient, torch.func.grad(lambda q: flash_attn_func(q, k, v).square().sum())(q))
    assert torch.equal(max_logits, loss(q)[1])


@here
def test_autocast(draw: torch.Generator) -> None:
    inputs = small(draw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, max_logits = flash_attn_func(*inputs, return_max_logits=True)
    assert out.dtype == torch.bfloat16
    q, k, _ = (x.bfloat16() for x in inputs)
    check_max_logits(max_logits, q, k, "autocast")


@gpu
@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_cuda_graph(kernels: str, device: str, draw: torch.Generator) -> None:
    """Each replay begins at -inf."""
    q, k, v = (torch.randn(2, 200, 4, 64, generator=draw).to(device, torch.bfloat16) for _ in range(3))
    flash_attn_func(q, k, v, backend=kernels, return_max_logits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, max_logits = flash_attn_func(q, k, v, backend=kernels, return_max_logits=True)
    for factor in (3.0, 0.125):
        q.mul_(factor)
        graph.replay()
        check_max_logits(max_logits, q, k, factor)


# ---- errors ---------------------------------------------------------------------------------------------------------


@here
@pytest.mark.parametrize("flag", ["yes", [True], torch.ones(2)], ids=["text", "list", "tensor"])
def test_wrong_flags(flag: Any, draw: torch.Generator) -> None:
    q, k, v = small(draw)
    with pytest.raises(TypeError, match="return_max_logits"):
        flash_attn_func(q, k, v, return_max_logits=flag)
    with pytest.raises(TypeError, match="return_max_logits"):
        checked_options(q, k, v, 0.0, None, False, (-1, -1), 0.0, None, False, None, return_max_logits=flag)


@here
@pytest.mark.parametrize("flag", [1, torch.tensor(True), 0, None], ids=str)
def test_other_truth_values(flag: Any, draw: torch.Generator) -> None:
    result = flash_attn_func(*small(draw), return_max_logits=flag)
    assert isinstance(result, tuple) == bool(flag)


@here
def test_a_kv_cache_has_none(draw: torch.Generator) -> None:
    q, cache = torch.randn(2, 1, 4, 16, generator=draw), torch.randn(2, 9, 2, 16, generator=draw)
    with pytest.raises(TypeError, match="return_max_logits"):
        flash_attn_with_kvcache(q, cache, cache, return_max_logits=True)  # type: ignore[call-arg]
    with pytest.raises(NotImplementedError, match="no backend implements return_max_logits with a KV cache"):
        FWD_KVCACHE(*kvcache_arguments(q, cache, cache, return_max_logits=True))
