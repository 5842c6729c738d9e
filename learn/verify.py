"""Compare two tensors: four measures of the error and a verdict, for the table of the ladder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RTOL = 1e-2
ATOL = 1e-3
MIN_COSINE = 0.999


@dataclass(frozen=True)
class VerifyReport:
    """The result of :func:`verify`. ``str(report)`` is one line.

    Attributes:
        max_abs: Largest absolute error.
        mean_abs: Mean absolute error.
        max_rel: Largest ``|out - ref| / max(|ref|, ATOL)``. The floor ATOL keeps it finite where ref is 0.
        cosine: Cosine similarity of the two flattened tensors; 1 when both are zero.
        passed: Every element within ``ATOL + RTOL * |ref|``, nothing NaN, and ``cosine > MIN_COSINE``.
    """

    max_abs: float
    mean_abs: float
    max_rel: float
    cosine: float
    passed: bool

    def __str__(self) -> str:
        return (
            f"{'passed' if self.passed else 'FAILED'}: max abs {self.max_abs:.2e}, mean abs {self.mean_abs:.2e}, "
            f"max rel {self.max_rel:.2e}, cosine {self.cosine:.6f}"
        )


def verify(out: torch.Tensor, ref: torch.Tensor) -> VerifyReport:
    """Compare an attention output with the reference's.

    Args:
        out: Any shape, any floating dtype, any device.
        ref: The reference, of the same shape.

    Returns:
        A report. ``passed`` is true if every element is within rtol 1e-2 and atol 1e-3, and the cosine similarity is
        above 0.999.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> import torch
        >>> from learn import verify
        >>> ref = torch.ones(4, 8)
        >>> verify(ref + 1e-4, ref).passed
        True
    """
    if out.shape != ref.shape:
        raise ValueError(f"verify: out has shape {list(out.shape)}, ref {list(ref.shape)}; allowed: equal shapes")
    if ref.numel() == 0:
        return VerifyReport(0.0, 0.0, 0.0, 1.0, True)
    out, ref = out.detach().double().flatten().cpu(), ref.detach().double().flatten().cpu()
    error = (out - ref).abs()
    norms = out.norm() * ref.norm()
    cosine = 1.0 if out.norm() == 0 and ref.norm() == 0 else (out @ ref / norms).item()
    within = bool((error <= ATOL + RTOL * ref.abs()).all())  # False for NaN
    return VerifyReport(
        max_abs=error.max().item(),
        mean_abs=error.mean().item(),
        max_rel=(error / ref.abs().clamp_min(ATOL)).max().item(),
        cosine=cosine,
        passed=within and cosine > MIN_COSINE,
    )
