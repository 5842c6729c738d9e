"""The teaching kernels of learn/csrc, in CUDA and in CuTe, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from learn import minimal_cuda_attention, tensor_core_attention

from ..support.ladder_calls import assert_right, draw_poisoned

pytestmark = pytest.mark.gpu

KERNELS: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
    "minimal": (minimal_cuda_attention, torch.float32),
    "minimal_without_padding": (
        lambda *x, **options: minimal_cuda_attention(*x, padded=False, **options),
        torch.float32,
    ),
    "tensor_cores": (tensor_core_attention, torch.float16),
}
every_kernel = pytest.mark.parametrize("name", KERNELS)


def check(
    name: str, batch_heads: tuple[int, int], seqlens: tuple[int, int], headdim: int, causal: bool,
    draw: torch.Generator, shown: str,
) -> None:  # fmt: skip
    """Compares a kernel with the reference on random inputs in poisoned buffers."""
    attention, dtype = KERNELS[name]
    tensors = draw_poisoned(draw, batch_heads[0] * batch_heads[1], *seqlens, headdim, dtype, "cuda")

    def call(*tensors: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, batch_heads) for x in tensors)  # [batch, heads, seqlen, headdim]
        return attention(q, k, v, causal=causal).flatten(0, 1)

    assert_right(call, *tensors, shown, causal=causal)


@every_kernel
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("seqlen", [1, 64, 65, 128, 256, 500, 1000, 4096])
def test_right_for_lengths(
    name: str, seqlen: int, headdim: int, causal: bool, draw: torch.Generator, described_seed: str
) -> None:
    check(name, (2, 3), (seqlen, seqlen), headdim, causal, draw, described_seed)


@every_kernel
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    [
        pytest.param(1, 333, True, id="one query sees every key"),
        pytest.param(65, 129, False, id="one more than each tile"),
        pytest.param(70, 200, True, id="diagonal to the right of the tile's corner"),
        pytest.param(200, 70, True, id="rows without keys"),
        pytest.param(5, 0, False, id="no keys"),
    ],
)
def test_right_for_ragged_shapes(
    name: str, seqlen_q: int, seqlen_k: int, causal: bool, draw: torch.Generator, described_seed: str
) -> None:
    check(name, (1, 2), (seqlen_q, seqlen_k), 64, causal, draw, described_seed)


@pytest.mark.parametrize("headdim", [1, 7, 40, 96])
def test_the_minimal_kernel_takes_any_head_dim(headdim: int, draw: torch.Generator, described_seed: str) -> None:
    check("minimal", (2, 1), (63, 130), headdim, True, draw, described_seed)


@every_kernel
def test_rows_that_see_no_key_are_zero(name: str, draw: torch.Generator) -> None:
    attention, dtype = KERNELS[name]
    q, k, v = (x[None] for x in draw_poisoned(draw, 1, 200, 70, 64, dtype, "cuda"))
    out = attention(q, k, v, causal=True)[0, 0]
    assert torch.equal(out[:130], torch.zeros_like(out[:130]))
    assert (out[130:] != 0).any()


@every_kernel
def test_nan_in_a_query_stays_in_its_row(name: str, draw: torch.Generator) -> None:
    attention, dtype = KERNELS[name]
    q, k, v = (x[None] for x in draw_poisoned(draw, 1, 64, 64, 64, dtype, "cuda"))
    q[..., 3, :] = float("nan")
    out = attention(q, k, v)[0, 0]
    assert out[3].isnan().all()
    assert not out[torch.arange(64, device="cuda") != 3].isnan().any()


@every_kernel
def test_the_scale_is_that_of_the_call(name: str, draw: torch.Generator) -> None:
    attention, dtype = KERNELS[name]
    q, k, v = (x[None] for x in draw_poisoned(draw, 2, 64, 100, 64, dtype, "cuda"))
    for scale in (0.03, -0.5):
        expected = torch.softmax(q.double() @ k.double().mT * scale, dim=-1) @ v.double()
        torch.testing.assert_close(attention(q, k, v, softmax_scale=scale).double(), expected, rtol=2e-3, atol=2e-3)


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("name", "shapes", "error", "message"),
    [
        ("minimal", [(1, 1, 16, 136)] * 3, ValueError, "headdim is 136; allowed: up to 128"),
        ("tensor_cores", [(1, 1, 16, 96)] * 3, ValueError, "headdim is 96; allowed: 64 and 128"),
        ("minimal", [(16, 64)] * 3, ValueError, r"\[batch, heads, seqlen, headdim\]"),
        ("minimal", [(1, 1, 16, 64), (1, 2, 16, 64), (1, 2, 16, 64)], ValueError, "number of heads"),
        ("minimal", [(1, 1, 16, 64), (1, 1, 16, 64), (1, 1, 17, 64)], ValueError, "seqlen 16 and v 17"),
        ("minimal", [(1, 70000, 1, 8)] * 3, ValueError, "70000; allowed: up to 65535"),
    ],
)
def test_other_shapes_are_refused(name: str, shapes: Any, error: type[Exception], message: str) -> None:
    attention, dtype = KERNELS[name]
    with pytest.raises(error, match=message):
        attention(*(zeros(*shape, dtype=dtype) for shape in shapes))


def test_other_dtypes_and_layouts_are_refused() -> None:
    for name, dtype in (("minimal", torch.float16), ("tensor_cores", torch.float32), ("tensor_cores", torch.bfloat16)):
        x = zeros(1, 1, 16, 64, dtype=dtype)
        with pytest.raises(TypeError, match="takes"):
            KERNELS[name][0](x, x, x)
    strided = zeros(1, 16, 2, 64).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        minimal_cuda_attention(strided, strided, strided)
    misaligned = zeros(16 * 64 + 1, dtype=torch.float16)[1:].view(1, 1, 16, 64)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        tensor_core_attention(misaligned, misaligned, misaligned)
