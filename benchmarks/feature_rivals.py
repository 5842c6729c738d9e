"""One call of this library with a feature and the same call without it, forward and backward.

The rivals of bench_features.py, which compares each with the plain one of its own backend. What is not attention
(packing sequences, slopes) happens outside the call that is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.backward_rivals import upstream_gradient
from benchmarks.rivals import Call, Rival, kernels_of

TAIL = 64  # last queries that are compared with the reference


@dataclass(frozen=True)
class Feature:
    """What a call asks for beside causal."""

    name: str
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = field(default=(), repr=False)  # tokens of each sequence; none: all are tokens
    is_packed: bool = False  # varlen: the tokens alone; otherwise a batch padded to the longest

    def slopes(self, q: Tensor) -> Tensor | None:
        """The slopes of the ALiBi paper (Press et al., arXiv 2108.12409): 2^(-8 i / nheads)."""
        if not self.alibi:
            return None
        nheads = q.shape[-2]
        steps = torch.arange(1, nheads + 1, device=q.device, dtype=torch.float32)
        return torch.exp2(-8.0 * steps / nheads)

    def valid_rows(self, x: Tensor) -> Tensor:
        """The rows of a padded batch that are tokens, bool [batch, seqlen]."""
        lengths = torch.tensor(self.lengths, device=x.device)
        return torch.arange(x.shape[1], device=x.device) < lengths[:, None]

    def packed(self, x: Tensor) -> Tensor:
        """Varlen: the tokens of a padded batch, one sequence after the other; otherwise the batch itself."""
        return x[self.valid_rows(x)] if self.is_packed else x

    def where(self, device: torch.device) -> tuple[Any, ...]:
        """Varlen: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
        cu_seqlens = torch.tensor([0, *self.lengths], device=device).cumsum(0, dtype=torch.int32)
        return cu_seqlens, cu_seqlens, max(self.lengths), max(self.lengths)


PLAIN = Feature("plain")


class FeatureForward(Rival):
    """A forward called as a user calls it; `arch` holds the cuda backend to its kernels."""

    arch: int | None = None

    def __init__(self, backend: str, feature: Feature) -> None:
        self.name = feature.name
        self.backend = backend
        self.feature = feature

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

        feature = self.feature
        options: dict[str, Any] = {
            "dropout_p": feature.dropout_p,
            "causal": causal,
            "window_size": feature.window_size,
            "softcap": feature.softcap,
            "alibi_slopes": feature.slopes(q),
            "backend": self.backend,
        }
        inputs = [feature.packed(x) for x in (q, k, v)]
        if feature.is_packed:
            return partial(flash_attn_varlen_func, *inputs, *feature.where(q.device), **options)
        return partial(flash_attn_func, *inputs, **options)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with super().active(), kernels_of(self.arch):
            yield


class FeatureBackward(Rival):
    """A backward op, with every kernel that it launches and no autograd around it."""

    def __init__(self, backend: str, feature: Feature) -> None:
        self.name = feature.name
        self.backend = backend
        self.feature = feature

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        ops, feature = torch.ops.flash_attn_mini, self.feature
        dout = upstream_gradient(q)
        if feature.lengths:  # nothing arrives at what is no token
            dout.mul_(feature.valid_rows(q)[..., None, None])
        dout, q, k, v = (feature.packed(x) for x in (dout, q, k, v))
        slopes = feature.slopes(q)
        left, right = feature.window_size
        scalars = (feature.dropout_p, q.shape[-1] ** -0.5, causal, left, 0 if causal else right, feature.softcap)
        return_softmax = deterministic = False
        last = ([True, True, True], self.backend)
        with torch.no_grad():
            if not feature.is_packed:
                out, lse, _, rng_state = ops._flash_attn_forward(
                    q, k, v, slopes, *scalars, return_softmax, deterministic, self.backend
                )
                backward = ops._flash_attn_backward.default
                return partial(
                    backward, dout, q, k, v, out, lse, None, slopes, *scalars, deterministic, rng_state, *last
                )
            cu_seqlens_q, cu_seqlens_k, *longest = feature.where(q.device)
            where = (cu_seqlens_q, cu_seqlens_k, slopes, *longest)
            out, lse, _, rng_state = ops._flash_attn_varlen_forward(
                q, k, v, cu_seqlens_q, cu_seqlens_k, None, slopes, *longest, *scalars, return_softmax, deterministic,
                self.backend,
            )  # fmt: skip
            backward = ops._flash_attn_varlen_backward.default
            return partial(backward, dout, q, k, v, out, lse, None, *where, *scalars, deterministic, rng_state, *last)

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        dq, dk, dv, _ = result
        return dq, dk, dv


def reference_tail(feature: Feature, q: Tensor, k: Tensor, v: Tensor, causal: bool, rng_state: Tensor) -> Tensor:
    """The last queries of the first head of the first sequence, [queries, headdim], from the definition.

    Masks and ALiBi count from the end of the sequence, so the last queries may stand alone.
    """
    from flash_attn_mini.reference import attention_reference
    from flash_attn_mini.reference.philox import dropout_mask

    rows = min(TAIL, q.shape[1])
    kept = None
    if feature.dropout_p > 0:
        kept = dropout_mask(rng_state, feature.dropout_p, 1, 1, q.shape[1], k.shape[1], q.device)[..., -rows:, :]
    slopes = feature.slopes(q)
    out, _ = attention_reference(
        q[:1, -rows:, :1],
        k[:1, :, :1],
        v[:1, :, :1],
        causal=causal,
        window_size=feature.window_size,
        softcap=feature.softcap,
        alibi_slopes=None if slopes is None else slopes[:1],
        dropout_p=feature.dropout_p,
        dropout_mask=kept,
    )
    return out[0, :, 0]


def check_tail(backend: str, feature: Feature, q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: float) -> None:
    """RuntimeError unless the last rows of a dense forward are those of the definition."""
    left, right = feature.window_size
    with torch.no_grad():
        out, _, _, rng_state = torch.ops.flash_attn_mini._flash_attn_forward(
            q, k, v, feature.slopes(q), feature.dropout_p, q.shape[-1] ** -0.5, causal, left, 0 if causal else right,
            feature.softcap, False, False, backend,
        )  # fmt: skip
        expected = reference_tail(feature, q, k, v, causal, rng_state)
        got = out[0, -expected.shape[0] :, 0].to(expected.dtype)
    assert_close_share(f"{backend} with {feature.name} and the reference", [got], [expected], allowed)


def assert_close_share(what: str, got: Sequence[Tensor], expected: Sequence[Tensor], allowed: float) -> None:
    """RuntimeError where two results differ by more than a share of the largest value."""
    for x, y in zip(got, expected, strict=True):
        share = ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
        if not share <= allowed:  # NaN too
            raise RuntimeError(f"{what} disagree by up to {share:.3g} of the largest value")
