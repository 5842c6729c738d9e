"""Models that call torch.nn.functional.scaled_dot_product_attention, unchanged, with our kernels under it.

Each model runs forward and backward: a block of a vision transformer as timm writes it, cross-attention of a U-Net to
77 tokens of text, PyTorch's own layers, and BERT and Llama of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flash_attn_mini import sdpa

from ..support.bounds import accuracy, refuse
from ..support.one_thread import one_thread  # noqa: F401
from ..support.sdpa_cases import CPU_HAS_GROUPED_HEADS, math_backend
from ..support.sdpa_counts import ours_and_pytorchs
from ..support.tiny_transformers import DECODER, SMALL, tokens

HEADS, HEADDIM = 4, 16
WIDTH = HEADS * HEADDIM
TIMES, FLOOR = 3.0, 1e-5
# Of the bias of keys, whose gradient is 0: both errors are sums of roundings, and one draw may be a few times another.
TIMES_OF_ZERO = 5 * TIMES

places = pytest.mark.parametrize(
    ("device", "type_"),
    [
        pytest.param("cpu", torch.float32, id="cpu-float32"),
        pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
        pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
    ],
)


class SelfAttention(nn.Module):
    """timm's Attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(HEADDIM), nn.LayerNorm(HEADDIM)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, seqlen, 3, HEADS, HEADDIM).permute(2, 0, 3, 1, 4).unbind(0)
        x = scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=0.0)
        return self.proj(x.transpose(1, 2).reshape(batch, seqlen, width))  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """timm's Block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = SelfAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    """The cross-attention of a U-Net: pixels see 77 tokens of text."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(n, WIDTH, bias=False) for n in (WIDTH, 24, 24))
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.text = nn.Parameter(torch.randn(2, 77, 24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, HEADDIM)).transpose(1, 2)
            for y in (self.to_q(x), self.to_k(self.text), self.to_v(self.text))
        )
        return x + self.to_out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def results(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of the parameters."""
    out = run(model)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), list(model.parameters()), allow_unused=True)
    return out, *(x for x in gradients if x is not None)


def assert_as_accurate_as_math(
    model: nn.Module, run: Callable[[nn.Module], Tensor], device: str, type_: torch.dtype, calls: int, seed: str
) -> None:
    """``calls``: of SDPA in a forward. Their backwards are as many."""
    model = model.to(device)
    with math_backend():
        expected = results(copy.deepcopy(model).double(), run)
        model = model.to(type_)
        pytorch = results(model, run)
    with sdpa.sdpa():
        got, ours, pytorchs = ours_and_pytorchs(results, model, run)
    assert (ours, pytorchs) == (2 * calls, 0)
    found = []
    for i, (x, true, theirs) in enumerate(zip(got, expected, pytorch, strict=True)):
        largest = true.abs().max().item()
        times = TIMES_OF_ZERO if largest < 1e-12 else TIMES
        found.append(accuracy(f"result {i}", x, true, theirs, FLOOR * max(1.0, largest), times))
    refuse([x for x in found if not x.passed], f"\n  {seed}")


@places
@pytest.mark.parametrize("seqlen", [50, 197])
@pytest.mark.parametrize("kind", [VisionBlock, CrossAttention])
def test_blocks(
    kind: type[nn.Module], seqlen: int, device: str, type_: torch.dtype, seed: int, described_seed: str
) -> None:
    torch.manual_seed(seed)
    model, x = kind(), torch.randn(2, seqlen, WIDTH)

    def run(model: nn.Module) -> Tensor:
        return model(x.to(next(model.parameters())))  # type: ignore[no-any-return]

    assert_as_accurate_as_math(model, run, device, type_, 1, described_seed)


@places
def test_pytorchs_encoder_layer(device: str, type_: torch.dtype, seed: int, described_seed: str) -> None:
    torch.manual_seed(seed)
    # Without ReLU, PyTorch's default: a rounding that changes the sign of its input changes whole rows of a gradient.
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, dropout=0.0, activation="gelu", batch_first=True)
    x = torch.randn(2, 33, WIDTH)

    def run(model: nn.Module) -> Tensor:
        return model(x.to(next(model.parameters())))  # type: ignore[no-any-return]

    assert_as_accurate_as_math(model, run, device, type_, 1, described_seed)


def transformers_model(kind: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="sdpa")
    return getattr(transformers, f"{kind}Model")(config).eval()  # type: ignore[no-any-return]


@places
@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_transformers(kind: str, device: str, type_: torch.dtype, seed: int, described_seed: str) -> None:
    torch.manual_seed(seed)
    model = transformers_model(kind, **(SMALL if kind == "Bert" else DECODER))

    def run(model: nn.Module) -> Tensor:
        return model(tokens().to(device)).last_hidden_state  # type: ignore[no-any-return]

    calls = SMALL["num_hidden_layers"]
    if kind == "Llama" and device == "cpu" and not CPU_HAS_GROUPED_HEADS:
        calls = 0
    assert_as_accurate_as_math(model, run, device, type_, calls, described_seed)


def test_a_padded_batch_of_bert(seed: int, described_seed: str) -> None:
    """Its mask is an attn_bias of our kernels."""
    torch.manual_seed(seed)
    model, ids = transformers_model("Bert", **SMALL), tokens()
    mask = torch.ones_like(ids).tril(ids.shape[1] - 2)

    def run(model: nn.Module) -> Tensor:
        return model(ids, attention_mask=mask).last_hidden_state  # type: ignore[no-any-return]

    assert_as_accurate_as_math(model, run, "cpu", torch.float32, SMALL["num_hidden_layers"], described_seed)


@places
def test_training(device: str, type_: torch.dtype, seed: int) -> None:
    """The losses of a few steps with our kernels are those of PyTorch's."""

    def losses(steps: int = 5) -> list[float]:
        torch.manual_seed(seed)
        model, x = VisionBlock().to(device), torch.randn(2, 50, WIDTH).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=type_ == torch.bfloat16):
                loss = (model(x).float() - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses()
    with sdpa.sdpa():
        got, ours, _ = ours_and_pytorchs(losses)
    assert ours == 2 * 5
    assert got == pytest.approx(expected, rel=1e-5 if type_ == torch.float32 else 1e-2)
    assert got[-1] < got[0]
