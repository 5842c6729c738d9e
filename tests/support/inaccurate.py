"""The error of inaccurate results, and how often it must occur to fail a test.

The bounds are multiples of PyTorch's error, which may be small by chance, above all where it has one in few elements.
So a test fails at once only if an error is many times its bound, and else if results are inaccurate with several
values, one after the other. `conftest.py` runs such a test again, and `random_loop.py` such a case.
"""

from __future__ import annotations

FEW = 30  # elements with an error of PyTorch
# A test fails at once if an error is above so many bounds, and else if it is inaccurate with so many values in a row.
OF_FEW, OF_MANY = (100.0, 8), (4.0, 3)


class InaccurateError(AssertionError):
    """A result whose error is above its bound; ``excess`` is error / bound, ``elements`` those with an error of
    PyTorch."""

    def __init__(self, message: str, excess: float, elements: int) -> None:
        super().__init__(message)
        self.excess = excess
        self.elements = elements

    @property
    def times_to_fail(self) -> int:
        """With how many values, one after the other, results must be inaccurate for a test to fail."""
        by_chance, times = OF_FEW if 0 < self.elements < FEW else OF_MANY
        return times if self.excess <= by_chance else 1
