"""What a call asks for beside its tensors, and how the kernels are told.

The launchers make an Options of a call's arguments. What a call does not use is None to a kernel, by default, and not
compiled in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

LOG2_E = math.log2(math.e)
UNBOUNDED = 2**31 - 1  # a window's side, to a kernel


@dataclass(eq=False)  # frozen would cost each call microseconds
class Options:
    """Meaning and shapes as in backends.triton.forward and varlen_forward. Not to be changed."""

    softmax_scale: float
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None  # None: sequences of one length
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    block_table: torch.Tensor | None = None

    def lengths(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
        """Queries and keys of the longest sequence, for q and k ``[batch, seqlen, heads, headdim]``."""
        return (q.shape[1], k.shape[1]) if self.cu_seqlens_q is None else (self.max_seqlen_q, self.max_seqlen_k)

    def mask(self, seqlen_q: int, seqlen_k: int) -> tuple[bool, tuple[int, int] | None]:
        """(causal and no window, window or None): a window as wide as the longest sequence is none."""
        left, right = self.window_size
        if self.causal:
            right = 0
        if left >= seqlen_k:
            left = -1
        if right >= max(seqlen_q, 1):
            right = -1
        if left < 0 and right <= 0:
            return right == 0, None
        return False, (
            UNBOUNDED if left < 0 else min(left, UNBOUNDED),
            UNBOUNDED if right < 0 else min(right, UNBOUNDED),
        )

    @property
    def modifies_scores(self) -> bool:
        """Whether the logits are more than scaled products, and the kernels' scores in units of log 2."""
        return self.softcap > 0 or self.alibi_slopes is not None

    @property
    def qk_scale(self) -> float:
        """What the kernels multiply products q.k with: see score_mod.py."""
        scale = self.softmax_scale * LOG2_E
        return 2 * scale / self.softcap if self.softcap > 0 else scale

    @property
    def is_plain(self) -> bool:
        """Whether the kernels are compiled with nothing beyond dense attention, the window apart."""
        return self.cu_seqlens_q is None and self.alibi_slopes is None and self.softcap == 0 and self.dropout_p == 0

    @property
    def features(self) -> str:
        """What the kernels are compiled with beyond dense attention, the window apart: "" or names."""
        used = {
            "varlen": self.cu_seqlens_q is not None,
            "paged": self.block_table is not None,
            "softcap": self.softcap > 0,
            "alibi": self.alibi_slopes is not None,
            "dropout": self.dropout_p > 0,
        }
        return "+".join(name for name, is_used in used.items() if is_used)

    def kernel_arguments(self, window: tuple[int, int] | None) -> dict[str, Any]:
        """The arguments of the kernels that a call with this window does not leave out."""
        if window is None and self.is_plain:
            return {}
        arguments: dict[str, Any] = {}
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            arguments["cu_seqlens_q"] = self.cu_seqlens_q.contiguous()
            arguments["cu_seqlens_k"] = self.cu_seqlens_k.contiguous()
            arguments["num_sequences"] = self.cu_seqlens_q.numel() - 1
        if window is not None:
            arguments["window_left"], arguments["window_right"] = window
        if self.softcap > 0:
            arguments["softcap"] = self.softcap * LOG2_E
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.contiguous()
            arguments["alibi_slopes"] = slopes
            arguments["alibi_stride"] = slopes.shape[1] if slopes.ndim == 2 else 0
        if self.dropout_p > 0:
            assert self.rng_state is not None, "dropout needs rng_state"
            arguments["rng_state"] = self.rng_state.contiguous()
            arguments["threshold"] = math.floor(self.dropout_p * 65536 + 0.5)
            arguments["keep_scale"] = 1.0 / (1.0 - self.dropout_p)
        return arguments

    def page_arguments(self, k: torch.Tensor) -> dict[str, Any]:
        """Likewise those of the forward alone, for k ``[pages, page_size, nheads_k, headdim]``."""
        if self.block_table is None:
            return {}
        table = self.block_table.contiguous()
        return {"block_table": table, "block_table_stride": table.shape[1], "page_size": k.shape[1]}
