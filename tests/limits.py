"""Which curated cases a backend is known not to compute as accurately as the others, and why."""

from __future__ import annotations

from .cases import Case


def unreachable_gradients(case: Case, backend: str) -> str | None:
    """Why the gradients of the case are out of reach on the backend; None when they are not."""
    if backend == "triton" and case.values == "all_1e4":
        return (
            "scores of 8e8, where float32 counts in steps of 64: Triton fuses scale * score - lse and so cannot round "
            "the product as lse was rounded"
        )
    return None
