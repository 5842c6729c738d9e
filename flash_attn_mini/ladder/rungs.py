"""The list of rungs, and the table that compares each with the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..backends import extension, triton
from ..reference import attention_reference
from .naive import naive_attention
from .online_softmax import online_softmax_attention
from .verify import VerifyReport, verify

KEY_LENGTHS = (128, 256, 500, 1000, 4096)
HEADDIM = 128
BLOCK = 64  # queries and keys of one block in every rung
MAX_QUERIES = 256  # several blocks of rows, and still fast in Triton's interpreter


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: the attention of a single head, ``run(q, k, v, softmax_scale, causal) -> out``."""

    name: str
    source: str
    scores: Callable[[int, int], tuple[int, int]]  # the largest block of scores that exists, from the two lengths
    device: Callable[[], str]
    unavailable_reason: Callable[[], str | None]
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], torch.Tensor]


def _fastest_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _all_scores(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    return seqlen_q, seqlen_k


def _one_block(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    return min(seqlen_q, BLOCK), min(seqlen_k, BLOCK)


def _run_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool) -> torch.Tensor:
    return naive_attention(q, k, v, softmax_scale=softmax_scale, causal=causal)


def _run_online_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> torch.Tensor:
    return online_softmax_attention(q, k, v, softmax_scale=softmax_scale, causal=causal)[0]


def _triton_unavailable() -> str | None:
    return triton.kernels_unavailable_reason(torch.device(_fastest_device()))


def _triton_device() -> str:
    """The CPU with Triton's interpreter, else CUDA."""
    return "cpu" if triton.kernels_unavailable_reason(torch.device("cpu")) is None else "cuda"


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
        "naive attention (PyTorch)",
        "flash_attn_mini/ladder/naive.py",
        _all_scores,
        _fastest_device,
        lambda: None,
        _run_naive,
    ),
    Rung(
        "online softmax (PyTorch)",
        "flash_attn_mini/ladder/online_softmax.py",
        _one_block,
        _fastest_device,
        lambda: None,
        _run_online_softmax,
    ),
    Rung(
        "minimal Triton",
        "flash_attn_mini/ladder/minimal_triton.py",
        _one_block,
        _triton_device,
        _triton_unavailable,
        _run_minimal_triton,
    ),
    Rung(
        "minimal CUDA",
        "csrc/minimal/flash_attn_minimal.cu",
        _one_block,
        lambda: "cuda",
        _cuda_unavailable,
        _run_minimal_cuda,
    ),
)


def measure(rung: Rung, seqlen_k: int, causal: bool, dtype: torch.dtype = torch.float32) -> VerifyReport:
    """Run one rung on random inputs with ``seqlen_k`` keys and head dim 128, and compare it with the reference.

    Args:
        rung: An element of `RUNGS`.
        seqlen_k: The number of keys; the number of queries is at most 256.
        causal: Whether the mask is causal.
        dtype: The dtype of q, k and v.

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
    """One row (rung, keys, mask, scores, errors, verdict) for each rung that runs here and each length.

    Returns:
        The rows, and one line for each rung that does not run: its name, its source and the reason.
    """
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
                scores = " x ".join(map(str, rung.scores(min(seqlen_k, MAX_QUERIES), seqlen_k)))
                rows.append([rung.name, str(seqlen_k), mask, scores, *errors, f"{report.cosine:.6f}", verdict])
    return rows, reasons


HEADERS = ["rung", "keys", "mask", "scores held", "max abs", "mean abs", "max rel", "cosine", "verdict"]
