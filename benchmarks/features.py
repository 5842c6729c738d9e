"""Features of a call that benchmarks measure, and checks of a forward with a feature against the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TAIL = 64  # last queries that are compared with the reference


@dataclass(frozen=True)
class Feature:
    """The options of a call besides causal."""

    name: str
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = field(default=(), repr=False)  # tokens of each sequence; empty: every row is a token
    is_packed: bool = False  # varlen: only the tokens; otherwise a batch padded to the longest

    def slopes(self, q: Tensor) -> Tensor | None:
        """The slopes of the ALiBi paper (Press et al., arXiv 2108.12409): 2^(-8 i / nheads)."""
        if not self.alibi:
            return None
        nheads = q.shape[-2]
        steps = torch.arange(1, nheads + 1, device=q.device, dtype=torch.float32)
        return torch.exp2(-8.0 * steps / nheads)

    def valid_rows(self, x: Tensor) -> Tensor:
        """True for the rows of a padded batch that are tokens, [batch, seqlen]."""
        lengths = torch.tensor(self.lengths, device=x.device)
        return torch.arange(x.shape[1], device=x.device) < lengths[:, None]

    def packed(self, x: Tensor) -> Tensor:
        """Varlen: the tokens of a padded batch, one sequence after the other; otherwise the batch itself."""
        return x[self.valid_rows(x)] if self.is_packed else x

    def sequences(self, device: torch.device) -> dict[str, Any]:
        """The arguments of a varlen call that say where sequences begin; {} for a batch."""
        if not self.is_packed:
            return {}
        cu_seqlens = torch.tensor([0, *self.lengths], device=device).cumsum(0, dtype=torch.int32)
        longest = max(self.lengths)
        return {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }


PLAIN = Feature("plain")


def reference_tail(feature: Feature, q: Tensor, k: Tensor, v: Tensor, causal: bool, rng_state: Tensor | None) -> Tensor:
    """The last queries of the first head of the first sequence, [queries, headdim], from the definition.

    Masks and ALiBi count from the end of the sequence, so the last queries can be computed alone.
    """
    from flash_attn_mini.reference import attention_reference
    from flash_attn_mini.reference.philox import dropout_mask

    rows = min(TAIL, q.shape[1])
    kept = None
    if rng_state is not None:
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
    from flash_attn_mini import ops
    from flash_attn_mini.options import Options

    left, right = feature.window_size
    scale, right = q.shape[-1] ** -0.5, 0 if causal else right
    options = Options(feature.dropout_p, scale, causal, left, right, feature.softcap, feature.slopes(q), False, backend)
    with torch.no_grad():
        out, _, rng_state = ops.forward(q, k, v, None, options)
        expected = reference_tail(feature, q, k, v, causal, rng_state)
        got = out[0, -expected.shape[0] :, 0].to(expected.dtype)
    assert_close_share(f"{backend} with {feature.name} and the reference", [got], [expected], allowed)


def assert_close_share(what: str, got: Sequence[Tensor], expected: Sequence[Tensor], allowed: float) -> None:
    """RuntimeError where two results differ by more than a share of the largest value."""
    for x, y in zip(got, expected, strict=True):
        share = ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
        if not share <= allowed:  # NaN too
            raise RuntimeError(f"{what} disagree by up to {share:.3g} of the largest value")
