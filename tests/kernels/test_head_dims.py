"""Head dims: v with a head dim of its own, and head dims up to 512, on every backend and in every function.

The tests of values run the Triton backend in its interpreter where there is no GPU. test_random.py and test_kvcache.py
draw other pairs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_mini.backends.triton.checks_kvcache import check_kvcache as check_kvcache_in_python
from flash_attn_mini.options import KvCache, Options
from flash_attn_mini.reference import attention_reference

from ..conftest import CPU_DTYPES, IS_HOPPER
from ..support.attn_bias_cases import AttnBiasCase
from ..support.attn_bias_checks import check_attn_bias
from ..support.bounds import assert_forward_accurate
from ..support.cases import Case, make_dout, make_inputs
from ..support.feature_checks import check_dense, check_varlen, described
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.instruction_sets import each_lesser_level, run_on
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.key_range_cases import KeyRangeCase
from ..support.key_range_checks import check_key_ranges
from ..support.kvcache_cases import KvCacheCase
from ..support.kvcache_checks import check_kvcache
from ..support.max_logit_checks import check_case
from ..support.on_backends import gpu, here, on_backends
from ..support.op_calls import (
    ATTN_BIAS_BWD,
    BWD,
    FWD,
    FWD_KVCACHE,
    assert_fake_is_like_real,
    attn_bias_bwd_arguments,
    bwd_arguments,
    fwd_arguments,
    kvcache_arguments,
)
from ..support.triton_calls import HAS_GPU
from ..support.varlen_cases import VarlenCase
from ..support.versions import TORCH


def dense(headdim: int, headdim_v: int, why: str, *sizes: int, **options: Any) -> Case:
    """``sizes``: batch, nheads, nheads_k, seqlen_q, seqlen_k."""
    name = "_".join([f"{headdim}_{headdim_v}", *options])
    return Case(name, why, *(sizes or (2, 4, 2, 77, 130)), headdim, own_headdim_v=headdim_v, **options)


def varlen(headdim: int, headdim_v: int, why: str, **options: Any) -> VarlenCase:
    name = "_".join([f"varlen_{headdim}_{headdim_v}", *options])
    lengths = ((70, 5, 33, 0, 129), (40, 90, 33, 7, 0))
    return VarlenCase(name, why, *lengths, 4, 2, headdim, own_headdim_v=headdim_v, **options)


def kvcache(headdim: int, headdim_v: int, why: str, **options: Any) -> KvCacheCase:
    name = "_".join([f"{headdim}_{headdim_v}", *options])
    lengths: tuple[int, ...] = options.pop("lengths", (5, 0, 130, 64))
    return KvCacheCase(name, why, lengths, 200, headdim=headdim, own_headdim_v=headdim_v, **options)


SMALL = ("40_72", "72_40_causal", "1_33", "64_8", "varlen_40_24_causal", "key_ranges_24_40", "attn_bias_24_40")
WIDE_SMALL = ("16_300", "300_16_causal", "varlen_8_264")

PAIRS = [
    dense(192, 128, "DeepSeek's training", causal=True),
    dense(192, 128, "several row and key tiles", 1, 4, 4, 300, 513),
    dense(192, 128, "a window", 1, 4, 2, 300, 513, window_size=(100, 30)),
    dense(192, 128, "rows without keys", 2, 2, 2, 300, 150, causal=True),
    dense(192, 128, "rows of all are views of other strides", 2, 2, 1, 150, 170, layout="bhsd"),
    dense(192, 128, "rows start at odd elements", 2, 2, 1, 150, 170, layout="misaligned"),
    dense(192, 128, "two modifiers", 1, 4, 4, 200, 300, softcap=3.0, alibi="heads"),
    dense(192, 128, "dropout", 1, 4, 4, 200, 300, alibi="heads", dropout_p=0.2),
    dense(160, 120, "scaled by a negative number", 2, 4, 4, 129, 260, causal=True, softmax_scale=-0.1),
    dense(136, 8, "few columns of v", 1, 2, 2, 65, 200),
    dense(128, 192, "v is the wider one", causal=True),
    dense(40, 72, "neither is a kernel's head dim", 1, 2, 1, 33, 50),
    dense(72, 40, "the kernel's head dim is that of q", 1, 2, 1, 33, 50, causal=True),
    dense(1, 33, "the smallest head dim, an odd one", 1, 2, 2, 20, 33),
    dense(33, 1, "one column of out", 1, 2, 2, 20, 33, causal=True),
    dense(256, 64, "the largest of CUDA's", 1, 2, 1, 65, 129),
    dense(64, 8, "few columns", 2, 2, 2, 33, 40),
    dense(64, 128, "rows of all are views of other strides", layout="bhsd"),
    dense(128, 64, "rows start at odd elements", layout="misaligned", causal=True),
    dense(96, 64, "slices of wider tensors", layout="padded_dim"),
    dense(64, 96, "capped scores", softcap=3.0, causal=True),
    dense(96, 32, "window and ALiBi", window_size=(30, 5), alibi="batch"),
    dense(64, 32, "dropout", dropout_p=0.2, causal=True),
    dense(64, 128, "no keys", 2, 3, 3, 17, 0),
    dense(64, 128, "no queries", 2, 3, 3, 0, 17),
    dense(128, 64, "decoding", 3, 8, 2, 1, 257, causal=True, softmax_scale=0.2),
    dense(64, 128, "rows without keys", 2, 2, 2, 108, 61, causal=True, softmax_scale=-0.2),
]
WIDE = [
    dense(512, 512, "the largest head dim", causal=True),
    dense(512, 512, "several row and key tiles", 1, 2, 1, 200, 300),
    dense(320, 320, "a multiple of 64", 1, 2, 1, 70, 90),
    dense(257, 257, "just above that of the CUDA kernels", 1, 2, 2, 70, 90, causal=True),
    dense(512, 64, "few columns", causal=True),
    dense(64, 512, "many columns", window_size=(40, 3)),
    dense(16, 300, "short enough for an interpreter", 1, 2, 1, 20, 33),
    dense(300, 16, "the same, q is the wider one", 1, 2, 1, 20, 33, causal=True),
    dense(384, 384, "dropout", dropout_p=0.2),
    dense(384, 300, "capped scores, ALiBi", softcap=4.0, alibi="heads"),
]
VARLEN = [
    varlen(192, 128, "DeepSeek's training", causal=True),
    varlen(64, 96, "window and dropout", window_size=(20, 5), dropout_p=0.2),
    varlen(72, 40, "ALiBi", alibi="batch", layout="bhsd"),
    VarlenCase("varlen_40_24_causal", "short", (9, 0, 30), (14, 5, 30), 2, 1, 40, True, own_headdim_v=24),
]
PAGES = [varlen(192, 128, "pages", causal=True, page_size=16), varlen(40, 72, "pages", page_size=48)]
WIDE_VARLEN = [
    varlen(512, 512, "the largest head dim", causal=True),
    varlen(320, 128, "pages", page_size=16),
    VarlenCase("varlen_8_264", "short", (9, 0, 30), (14, 5, 30), 2, 1, 8, own_headdim_v=264),
]


@pytest.fixture
def device(kernels: str) -> str:
    return "cuda" if kernels == "cuda" or (kernels == "triton" and HAS_GPU) else "cpu"


def without_cuda(cases: list[Any], small: tuple[str, ...]) -> Any:
    """`on_backends` for cases that the CUDA kernels lack."""
    mark = on_backends(cases, small)
    mark.args[1][:] = [param for param in mark.args[1] if param.values[1] != "cuda"]
    return mark


@pytest.mark.slow
@starts_the_interpreter
def test_triton_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


# ---- forward and gradients ------------------------------------------------------------------------------------------


@on_backends(PAIRS, SMALL)
def test_pairs(case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    torch.manual_seed(seed)
    check_dense(case, kernels, device, dtype, seed, described_seed)


@without_cuda(WIDE, WIDE_SMALL)
def test_wide(case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    torch.manual_seed(seed)
    check_dense(case, kernels, device, dtype, seed, described_seed)


@on_backends(VARLEN, SMALL)
def test_varlen_pairs(
    case: VarlenCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    torch.manual_seed(seed)
    check_varlen(case, kernels, device, dtype, seed, described_seed)


@on_backends(PAGES, ())
def test_pages(case: VarlenCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    check_varlen(case, kernels, device, dtype, seed, described_seed)


@without_cuda(WIDE_VARLEN, WIDE_SMALL)
def test_wide_varlen(
    case: VarlenCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_varlen(case, kernels, device, dtype, seed, described_seed)


RANGES = [
    KeyRangeCase(dense(192, 128, "two ranges, a sink", causal=True), "shared_prefix", sinks=True),
    KeyRangeCase(Case("key_ranges_24_40", "short", 1, 2, 1, 20, 33, 24, own_headdim_v=40), "shared_prefix", sinks=True),
    KeyRangeCase(varlen(40, 72, "two ranges"), "shared_prefix", per_head=True),
]


@on_backends(RANGES, SMALL)
def test_key_ranges(
    case: KeyRangeCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_key_ranges(case, kernels, device, dtype, seed, described_seed)


BIASES = [
    AttnBiasCase(dense(192, 128, "a bias and its gradient", causal=True), "normal"),
    AttnBiasCase(dense(40, 72, "one row of a bias"), "normal", per_row=False, sinks=True),
    AttnBiasCase(dense(72, 40, "dropout, one bias for all", dropout_p=0.2), "normal", per_batch=False, per_head=False),
    AttnBiasCase(Case("attn_bias_24_40", "short", 1, 2, 1, 20, 33, 24, own_headdim_v=40), "normal"),
]


@on_backends(BIASES, SMALL)
def test_attn_bias(
    case: AttnBiasCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    torch.manual_seed(seed)
    check_attn_bias(case, kernels, device, dtype, seed, described_seed)


@without_cuda([AttnBiasCase(dense(512, 320, "a bias and its gradient", causal=True), "normal")], ())
def test_wide_attn_bias(
    case: AttnBiasCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_attn_bias(case, kernels, device, dtype, seed, described_seed)


@on_backends([dense(192, 128, "pairs", causal=True), *VARLEN[:1]], ())
def test_max_logits(
    case: Case | VarlenCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_case(case, kernels, dtype, device, seed, described_seed)


@without_cuda([dense(512, 512, "wide")], ())
def test_wide_max_logits(
    case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_case(case, kernels, dtype, device, seed, described_seed)


# ---- a KV cache -----------------------------------------------------------------------------------------------------

DECODE: dict[str, Any] = {"seqlen_new": 1, "causal": True}
CACHES = [
    kvcache(192, 128, "one query", **DECODE),
    kvcache(128, 192, "one query", nheads=8, **DECODE),
    kvcache(512, 512, "the largest head dim of v", nheads=16, nheads_k=1, **DECODE),
    kvcache(576, 512, "DeepSeek's decoding: 16 heads on one, pages", nheads=16, nheads_k=1, page_size=16, **DECODE),
    kvcache(576, 512, "the same, splits", nheads=16, nheads_k=1, num_splits=3, **DECODE),
    kvcache(530, 40, "rows past the largest power of two", seqlen_q=3, seqlen_new=3, rotary_dim=16, causal=True),
    kvcache(64, 32, "a prompt", lengths=(0, 3), seqlen_q=70, seqlen_new=70, causal=True),
    kvcache(192, 128, "rotary, a chunk", seqlen_q=5, seqlen_new=5, rotary_dim=64, causal=True),
    kvcache(40, 72, "pages and splits", page_size=7, num_splits=3, **DECODE),
    kvcache(300, 40, "splits, many rows", nheads=12, nheads_k=1, seqlen_q=4, num_splits=2),
    kvcache(96, 64, "left padding, a window", leftpad=(1, 0, 9, 64), window_size=(40, 0)),
    kvcache(33, 1, "one column", alibi="heads", **DECODE),
    kvcache(64, 96, "rows at odd elements", layout="misaligned", softcap=5.0, **DECODE),
    KvCacheCase("24_40", "short", (5, 0, 30), 40, 1, 1, headdim=24, own_headdim_v=40, causal=True),
    KvCacheCase("40_24_pages", "short", (5, 30), 40, 2, 2, headdim=40, own_headdim_v=24, page_size=7, num_splits=2),
]


@without_cuda(CACHES, ("24_40", "40_24_pages"))
def test_kvcache(
    case: KvCacheCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_kvcache(case, kernels, device, dtype, seed, described_seed)


@pytest.mark.parametrize("kernels", [pytest.param("cpu", marks=here), pytest.param("triton", marks=gpu)])
def test_v_in_the_columns_of_k(kernels: str, device: str, draw: torch.Generator) -> None:
    """One latent head, as in DeepSeek's decoding: v_cache is a view of the first columns of k_cache."""
    dtype = torch.float32 if kernels == "cpu" else torch.bfloat16
    q = torch.randn(3, 1, 16, 576, generator=draw).to(device, dtype)
    k_cache = torch.randn(3, 100, 1, 576, generator=draw).to(device, dtype)
    lengths = torch.tensor([100, 1, 37], dtype=torch.int32, device=device)
    v_cache = k_cache[..., :512]
    results = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True, backend=kernels
    )
    for b, length in enumerate(lengths.tolist()):
        out, lse = (x[b : b + 1] for x in results)
        rows = (q[b : b + 1], k_cache[b : b + 1, :length], v_cache[b : b + 1, :length])
        assert_forward_accurate(*rows, out, lse, case=f"sequence {b}")


# ---- instruction sets of CPUs ---------------------------------------------------------------------------------------


SCRIPT = """
from tests.conftest import CPU_DTYPES
from tests.kernels.test_head_dims import BIASES, CACHES, PAIRS, VARLEN, WIDE
from tests.support.attn_bias_checks import check_attn_bias
from tests.support.feature_checks import check_dense, check_varlen
from tests.support.kvcache_checks import check_kvcache

torch.manual_seed(seed)
lists = ((check_dense, PAIRS + WIDE), (check_varlen, VARLEN), (check_attn_bias, BIASES), (check_kvcache, CACHES))
for check, cases in lists:
    for i, case in enumerate(cases):
        check(case, "cpu", "cpu", CPU_DTYPES[i % len(CPU_DTYPES)], seed, f"seed {seed}")
print("checked")
"""


@here
@each_lesser_level
def test_lesser_instruction_sets(level: str) -> None:
    run_on(level, SCRIPT)


# ---- what chooses and what refuses ----------------------------------------------------------------------------------


def qkv(device: str, headdim: int, headdim_v: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    shapes = ((2, 9, 4, headdim), (2, 13, 2, headdim), (2, 13, 2, headdim_v))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


@here
@pytest.mark.parametrize(
    ("headdim", "headdim_v", "message"),
    [
        (513, 64, r"q has headdim 513 \(shape .*; allowed: 1 to 512"),
        (64, 576, r"v has headdim 576 \(shape .*; allowed: 1 to 512"),
        (64, 0, r"v has headdim 0 \(shape .*; allowed: 1 to 512"),
    ],
)
def test_head_dims_out_of_range(headdim: int, headdim_v: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*qkv("cpu", headdim, headdim_v))


@here
def test_keys_of_another_head_dim_than_queries() -> None:
    q, k, v = qkv("cpu", 64, 32)
    with pytest.raises(ValueError, match=r"k has headdim 32 \(shape .*; allowed: the headdim of q, 64"):
        flash_attn_func(q, v, v)
    with pytest.raises(ValueError, match=r"v has headdim 64 \(shape .*; allowed: the headdim of v_cache, 32"):
        flash_attn_with_kvcache(q, k, v, k[:, :1], k[:, :1], cache_seqlens=3)


@here
def test_out_and_gradients_have_the_columns_of_v() -> None:
    q, k, v = qkv("cpu", 48, 32)
    out, lse, *_ = FWD(*fwd_arguments(q, k, v))
    message = r"{} has shape \[2, 9, 4, 48\]; allowed: the shape of q with the headdim of v, \[2, 9, 4, 32\]"
    with pytest.raises(ValueError, match=message.format("dout")):
        BWD(*bwd_arguments(q, q, k, v, out, lse))
    with pytest.raises(ValueError, match=message.format("out")):
        BWD(*bwd_arguments(out, q, k, v, q, lse))
    with pytest.raises(ValueError, match=message.format("out")):
        _C.fwd(q, k, v, torch.empty_like(q), None, 0.0, 0.25, False, -1, -1, 0.0, False, None)


@here
@pytest.mark.parametrize("checks_of", ["extension", "python"])
@pytest.mark.parametrize("nheads_k", [1, 2])
def test_caches_in_one_tensor(nheads_k: int, checks_of: str) -> None:
    """v_cache is columns of k_cache: a call may read them, and append only where the two do not overlap."""
    q = torch.randn(2, 1, 4, 48).half()
    both = torch.randn(2, 7, nheads_k, 80).half()
    k_cache, inside, outside = both[..., :48], both[..., 16:48], both[..., 48:]
    new = {"k": torch.randn(2, 1, nheads_k, 48).half(), "v": torch.randn(2, 1, nheads_k, 32).half()}

    def attend(v_cache: Tensor, **options: Any) -> None:
        arguments = kvcache_arguments(q, k_cache, v_cache, **options)
        if checks_of == "extension":
            FWD_KVCACHE(*arguments)
        else:
            end = 3 + len(KvCache._fields)
            check_kvcache_in_python(*arguments[:3], KvCache(*arguments[3:end]), Options(*arguments[end:]))

    for v_cache in (inside, outside):
        attend(v_cache)
    attend(outside, cache_seqlen=3, **new)
    for v_cache in (inside, inside.squeeze(2).unsqueeze(2) if nheads_k == 1 else inside):
        with pytest.raises(ValueError, match="k_cache shares memory with v_cache; allowed: memory of its own"):
            attend(v_cache, cache_seqlen=3, **new)


@gpu
@pytest.mark.parametrize(("headdim", "headdim_v"), [(320, 320), (64, 320), (512, 512)])
def test_cuda_tensors_take_triton_above_256(
    headdim: int, headdim_v: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = [x.requires_grad_() for x in qkv("cuda", headdim, headdim_v)]
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_func(*inputs, causal=True).sum().backward()
    traced = capfd.readouterr().err
    assert "triton, because the CUDA kernels lack headdim" in traced
    assert "backend=cuda" not in traced
    assert traced.count("backend=triton") >= 2
    with use_backend("cuda"), pytest.raises(NotImplementedError, match=r"allowed on the cuda backend: 1 to 256"):
        flash_attn_func(*inputs)


@gpu
@pytest.mark.skipif(not IS_HOPPER, reason="the kernel is one of Hopper's")
def test_latent_heads_are_not_padded(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    inputs = qkv("cuda", 192, 128)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_func(*inputs, causal=True)
    assert "d=192 d_v=128" in capfd.readouterr().err


@gpu
def test_a_cache_of_another_head_dim_takes_triton(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    q, k, v = qkv("cuda", 64, 32)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_with_kvcache(q, k, v)
    assert "triton, because the CUDA kernels lack headdim 64 with headdim 32 of v" in capfd.readouterr().err
    with pytest.raises(NotImplementedError, match="allowed on the cuda backend: the headdim of q, 64"):
        flash_attn_with_kvcache(q, k, v, backend="cuda")


# ---- compilers and transforms ---------------------------------------------------------------------------------------

ops_only = pytest.mark.parametrize("kernels", [pytest.param("cpu", marks=here), *(pytest.param("cuda", marks=gpu),)])


@ops_only
@pytest.mark.parametrize(("headdim", "headdim_v"), [(48, 32), (32, 48)])
def test_ops_under_opcheck(headdim: int, headdim_v: int, kernels: str, device: str) -> None:
    q, k, v = qkv(device, headdim, headdim_v)
    bias = torch.randn(2, 4, 9, 13, device=device).to(q.dtype)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = fwd_arguments(*(x.clone().requires_grad_() for x in (q, k, v)), attn_bias=bias)
    torch.library.opcheck(FWD, arguments, test_utils=tests)
    out, lse, *_ = FWD(*fwd_arguments(q, k, v, attn_bias=bias))
    assert out.shape == (2, 9, 4, headdim_v)
    dout = torch.randn_like(out)
    of_backward = bwd_arguments(dout, q, k, v, out, lse, attn_bias=bias)
    torch.library.opcheck(BWD, of_backward, test_utils=tests[:3])
    *gradients, softmax_d = BWD(*of_backward)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    of_bias = attn_bias_bwd_arguments(dout, q, k, v, lse, softmax_d, attn_bias=bias)
    torch.library.opcheck(ATTN_BIAS_BWD, of_bias, test_utils=tests[:3])


@here
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_fake_results_have_the_strides_of_real_ones(layout: str, seed: int) -> None:
    kernels = make_inputs(dense(48, 32, "strides", layout=layout), torch.float16, "cpu", seed)
    assert_fake_is_like_real(FWD, fwd_arguments(*kernels))
    assert_fake_is_like_real(FWD_KVCACHE, kvcache_arguments(*kernels))


@here
@pytest.mark.skipif(TORCH < (2, 13), reason="not tested before PyTorch 2.13")
def test_compiled(draw: torch.Generator) -> None:
    torch._dynamo.reset()
    q, k, v = (x.float().requires_grad_() for x in qkv("cpu", 48, 32))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True).tanh()

    results = [f(q, k, v) for f in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True))]
    dout = torch.randn(results[0].shape, generator=draw)
    gradients = [torch.autograd.grad(x, (q, k, v), dout) for x in results]
    assert torch.equal(*results)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@here
def test_vmap(draw: torch.Generator) -> None:
    shapes = ((3, 2, 9, 4, 48), (3, 2, 13, 2, 48), (3, 2, 13, 2, 32))
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    out = torch.vmap(flash_attn_func)(q, k, v)
    assert torch.equal(out, torch.stack([flash_attn_func(*x) for x in zip(q, k, v, strict=True)]))


@here
@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
def test_gradient_of_the_lse(dtype: torch.dtype, seed: int, described_seed: str) -> None:
    case = dense(72, 40, "gradients of out and lse", causal=True)
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cpu", seed))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    dout, dlse = make_dout(case, dtype, "cpu", seed), torch.randn_like(lse.detach())
    dlse = dlse.masked_fill(lse.detach().isinf(), 0.0)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    where = described(case, dtype, "cpu", described_seed)
    assert_gradients_accurate_beside_flash(q, k, v, dout, gradients, dlse=dlse, case=where, causal=True)


@here
def test_pages_are_the_keys_in_order(draw: torch.Generator) -> None:
    """Paged keys of 48 columns with values of 32 give the bits of keys without pages."""
    q = torch.randn(10, 4, 48, generator=draw)
    k, v = torch.randn(4, 8, 2, 48, generator=draw), torch.randn(4, 8, 2, 32, generator=draw)
    lengths = torch.tensor([0, 10], dtype=torch.int32), torch.tensor([0, 30], dtype=torch.int32)
    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, *lengths, 10, 30, block_table=table)
    rows = [x[table[0].long()].flatten(0, 1)[:30] for x in (k, v)]
    assert torch.equal(out, flash_attn_varlen_func(q, *rows, *lengths, 10, 30))
    expected, _ = attention_reference(q[None], *(x[None] for x in rows))
    torch.testing.assert_close(out[None].double(), expected, rtol=1e-5, atol=1e-5)
