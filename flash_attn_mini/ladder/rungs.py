"""The list of rungs, and the table that holds each against the float64 reference: python -m flash_attn_mini.ladder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..backends import extension, triton
from ..reference import attention_reference
from .online_softmax import online_softmax_attention
from .verify import VerifyReport, verify

KEY_LENGTHS = (128, 256, 500, 1000, 4096)
HEADDIM = 128
MAX_QUERIES = 256  # enough for several blocks of rows, and quick in Triton's interpreter


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: a single head's attention, ``run(q, k, v, softmax_scale, causal) -> out``."""

    name: str
    source: str
    device: Callable[[], str]
    unavailable_reason: Callable[[], str | None]
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], torch.Tensor]


def _fastest_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _run_online_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> torch.Tensor:
    return online_softmax_attention(q, k, v, softmax_scale=softmax_scale, causal=causal)[0]


def _triton_unavailable() -> str | None:
    return triton.unavailable_reason(torch.device(_fastest_device()))


def _triton_device() -> str:
    """The CPU under Triton's interpreter, which alone runs there."""
    return "cpu" if triton.unavailable_reason(torch.device("cpu")) is None else "cuda"


def _run_minimal_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> torch.Tensor:
    from .minimal_triton import minimal_triton_attention

    return minimal_triton_attention(q, k, v, softmax_scale=softmax_scale, causal=causal)


def _cuda_unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    reason = extension.missing_reason()
    if reason is None and not hasattr(extension.load(), "minimal_fwd"):
        return "flash_attn_mini._C was built without CUDA; build it on a machine with nvcc: pip install ."
    return reason


def _run_minimal_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> torch.Tensor:
    out: torch.Tensor = extension.load().minimal_fwd(q, k, v, softmax_scale, causal)
    return out


RUNGS: tuple[Rung, ...] = (
    Rung(
        "online softmax (PyTorch)",
        "flash_attn_mini/ladder/online_softmax.py",
        _fastest_device,
        lambda: None,
        _run_online_softmax,
    ),
    Rung(
        "minimal Triton",
        "flash_attn_mini/ladder/minimal_triton.py",
        _triton_device,
        _triton_unavailable,
        _run_minimal_triton,
    ),
    Rung("minimal CUDA", "csrc/minimal/flash_attn_minimal.cu", lambda: "cuda", _cuda_unavailable, _run_minimal_cuda),
)


def measure(rung: Rung, seqlen_k: int, causal: bool, dtype: torch.dtype = torch.float32) -> VerifyReport:
    """Run one rung on random data of ``seqlen_k`` keys at head dim 128, and compare it with the reference.

    Raises:
        RuntimeError: If the machine cannot run the rung.
    """
    reason = rung.unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"flash_attn_mini.ladder: {rung.name}: {reason}")
    device = rung.device()
    generator = torch.Generator().manual_seed(seqlen_k)
    lengths = (min(seqlen_k, MAX_QUERIES), seqlen_k, seqlen_k)
    q, k, v = (torch.randn(n, HEADDIM, generator=generator).to(device, dtype) for n in lengths)
    out = rung.run(q, k, v, HEADDIM**-0.5, causal)
    expected, _ = attention_reference(*(t[None, :, None] for t in (q, k, v)), causal=causal)
    return verify(out, expected[0, :, 0])


def table(key_lengths: Sequence[int] = KEY_LENGTHS) -> tuple[list[list[str]], list[str]]:
    """The rows (rung, keys, mask, errors, verdict) of every rung that runs here, and why the others do not."""
    rows, reasons = [], []
    for rung in RUNGS:
        reason = rung.unavailable_reason()
        if reason is not None:
            reasons.append(f"{rung.name} ({rung.source}): {reason}")
            continue
        for seqlen_k in key_lengths:
            for causal in (False, True):
                report = measure(rung, seqlen_k, causal)
                errors = (f"{x:.2e}" for x in (report.max_abs, report.mean_abs, report.max_rel))
                verdict = "passed" if report.passed else "FAILED"
                mask = "causal" if causal else "full"
                rows.append([rung.name, str(seqlen_k), mask, *errors, f"{report.cosine:.6f}", verdict])
    return rows, reasons


HEADERS = ["rung", "keys", "mask", "max abs", "mean abs", "max rel", "cosine", "verdict"]
