"""The implementations of the forward that benchmarks compare: this library's backends and PyTorch's.

A rival binds [batch, seqlen, heads, headdim] tensors to a call without arguments; what is not attention (transposed
views, choosing PyTorch's kernel) happens outside that call. One that cannot run says why. backward_rivals.py has those
of the backward.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ARCH = "FLASH_ATTN_MINI_ARCH"
Call = partial[Any]  # whose first arguments are q, k and v as the implementation takes them, in a forward


class Rival:
    """One implementation. `name` is what tables call it."""

    name: str
    baseline: str | None = None  # the name of the one that it is compared with in place of the others

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        """A call that computes attention, to be called within `active()`."""
        raise NotImplementedError

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The state that the call needs around it: no autograd, and for PyTorch the chosen kernel."""
        with torch.no_grad():
            yield

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        """What a call returned, as tensors [batch, seqlen, heads, headdim]."""
        return (result,)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
        """Why it cannot run on these tensors, found by trying; None when it can."""
        try:
            with self.active():
                self.bind(q, k, v, causal)()
        except (RuntimeError, NotImplementedError, ImportError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return lines[0]
        return None


class Mini(Rival):
    """flash_attn_mini with one of its backends, called as a user calls it. `arch` holds cuda to its kernels."""

    def __init__(self, backend: str, *, arch: int | None = None) -> None:
        self.name = backend if arch is None else f"{backend} sm{arch}"
        self.backend = backend
        self.arch = arch

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from flash_attn_mini import flash_attn_func

        return partial(flash_attn_func, q, k, v, causal=causal, backend=self.backend)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.no_grad(), kernels_of(self.arch):
            yield


@contextlib.contextmanager
def kernels_of(arch: int | None) -> Iterator[None]:
    """FLASH_ATTN_MINI_ARCH set to an architecture, or unset."""
    before = os.environ.pop(ARCH, None)
    if arch is not None:
        os.environ[ARCH] = str(arch)
    try:
        yield
    finally:
        os.environ.pop(ARCH, None)
        if before is not None:
            os.environ[ARCH] = before


def as_sdpa_takes_them(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [batch, heads, seqlen, headdim] views. Raises NotImplementedError where PyTorch means another mask."""
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError("PyTorch aligns causal to the top left: only equal lengths compare")
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Sdpa(Rival):
    """torch.nn.functional.scaled_dot_product_attention, held to one of its kernels or left to choose."""

    def __init__(self, name: str, kernel: SDPBackend | None) -> None:
        self.name = name
        self.kernel = kernel

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        q, k, v = as_sdpa_takes_them(q, k, v, causal)
        grouped = q.shape[1] != k.shape[1]
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=grouped)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.no_grad(), sdpa_kernel(self.kernel) if self.kernel is not None else contextlib.nullcontext():
            yield

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return (result.transpose(1, 2),)


RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        Mini("cuda"),
        Mini("cuda", arch=80),
        Mini("triton"),
        Mini("cpu"),
        Sdpa("FLASH_ATTENTION", SDPBackend.FLASH_ATTENTION),
        Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION),
        Sdpa("MATH", SDPBackend.MATH),
        Sdpa("SDPA", None),
    )
}


def select(names: list[str], known: Mapping[str, Rival] = RIVALS) -> list[Rival]:
    """The rivals of these names; an unknown name is an error that lists the known ones."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown implementation {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names]
