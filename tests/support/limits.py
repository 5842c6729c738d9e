"""Curated cases that a backend is known to compute less accurately than the others, with the reason."""

from __future__ import annotations

from .cases import Case


def unreachable_gradients(case: Case, backend: str) -> str | None:
    """Why the backend cannot compute the gradients of the case accurately; None if it can."""
    if backend == "triton" and case.values == "all_1e4":
        return (
            "scores of 8e8, where float32 has steps of 64: Triton fuses scale * score - lse and so cannot round "
            "the product as lse was rounded"
        )
    return None
