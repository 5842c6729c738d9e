"""One attention call as the Triton launchers see it: tensors, mask, features, and the kernel arguments of the features.

A feature that a call does not use is None to a kernel, which is the default, and is not compiled in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...options import Options, Sequences
from .attn_bias import bias_of_call
from .key_ranges import num_ranges, range_arguments, readable
from .operands import head_dim_block, value_block
from .recording import Recorder
from .score_mod import modifies_scores, qk_scale, score_features, score_mod_of

UNBOUNDED = 2**31 - 1  # one side of a window, to a kernel


@dataclass(eq=False)
class Call:
    """What forward and backward share. A batch of sequences of variable length is one batch entry with all rows."""

    q: torch.Tensor  # [batch, seqlen_q, nheads, headdim]
    k: torch.Tensor  # [batch, seqlen_k, nheads_k, headdim]; paged: [num_pages, page_size, nheads_k, headdim]
    v: torch.Tensor  # like k, with its own head dim
    sequences: Sequences | None
    options: Options
    rng_state: torch.Tensor | None  # int64 [2], with dropout: seed and offset

    def __post_init__(self) -> None:
        self.recorder: Recorder | None = None  # of the launches that follow
        key_ranges = self.options.key_ranges
        if key_ranges is not None:
            self.options = self.options._replace(key_ranges=readable(key_ranges, self.is_varlen))
        seqlen_q, seqlen_k = self.longest(self.q, self.k)
        left, right = self.options.window_size_left, self.options.window_size_right
        if self.options.causal:
            right = 0
        if left >= seqlen_k:
            left = -1
        if right >= max(seqlen_q, 1):
            right = -1
        self.causal = left < 0 and right == 0  # the mask is causal and nothing more
        self.window: tuple[int, int] | None = None  # None too if the window is wider than the longest sequence
        if left >= 0 or right > 0:
            self.window = (
                UNBOUNDED if left < 0 else min(left, UNBOUNDED),
                UNBOUNDED if right < 0 else min(right, UNBOUNDED),
            )

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors of the arguments: q, k, v, sequences, options, rng_state."""
        arguments = (self.q, self.k, self.v, *(self.sequences or ()), *self.options, self.rng_state)
        return [x for x in arguments if isinstance(x, torch.Tensor)]

    def head_dim_arguments(self) -> dict[str, int]:
        """The arguments of the kernels for the head dims of q and k, and of v."""
        head_dim, head_dim_v = self.q.shape[3], self.v.shape[3]
        return {
            "HEAD_DIM": head_dim,
            "BLOCK_D": head_dim_block(head_dim),
            "HEAD_DIM_V": head_dim_v,
            "BLOCK_DV": value_block(head_dim, head_dim_v),
        }

    def head_dim_blocks(self) -> tuple[int, int]:
        """The columns of a tile of keys and of one of values."""
        arguments = self.head_dim_arguments()
        return arguments["BLOCK_D"] + arguments.get("BLOCK_REST", 0), arguments["BLOCK_DV"]

    @property
    def has_no_sequence(self) -> bool:
        """True for a batch of 0 sequences. q may still have rows, because the host does not read cu_seqlens."""
        return self.sequences is not None and self.sequences.cu_seqlens_q.numel() == 1

    @property
    def is_varlen(self) -> bool:
        return self.sequences is not None

    def longest(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
        """Queries and keys of the longest sequence, for q and k ``[batch, seqlen, heads, headdim]``."""
        if self.sequences is None:
            return q.shape[1], k.shape[1]
        return self.sequences.max_seqlen_q, self.sequences.max_seqlen_k

    @property
    def key_rows(self) -> int:
        """Rows of k and v, as the forward kernel's seqlen_k."""
        return self.k.shape[1]

    @property
    def begin_row(self) -> int:
        """Equal lengths: the first row that sees a key. 0 with key_ranges, which give the keys of each row."""
        if self.num_ranges > 0 or (not self.causal and self.window is None):
            return 0
        right = 0 if self.window is None else self.window[1]
        return max(self.q.shape[1] - self.k.shape[1] - right, 0)

    @property
    def may_have_keyless_rows(self) -> bool:
        """True if some row sees no key, or if the lengths are not known here; not with key_ranges."""
        return (
            self.num_ranges == 0 and (self.causal or self.window is not None) and (self.is_varlen or self.begin_row > 0)
        )

    @property
    def has_bounds(self) -> bool:
        """True if a window, key_ranges or attn_bias bound the keys of each query."""
        options = self.options
        return self.window is not None or options.key_ranges is not None or options.attn_bias is not None

    @property
    def num_ranges(self) -> int:
        """Ranges of keys of a query; 0 without key_ranges."""
        key_ranges = self.options.key_ranges
        return 0 if key_ranges is None else num_ranges(key_ranges, self.is_varlen)

    @property
    def modifies_scores(self) -> bool:
        """True if the logits are more than scaled products of q and k: see score_mod.py."""
        return modifies_scores(self.options)

    @property
    def qk_scale(self) -> float:
        """The kernels' factor on products of q and k."""
        return qk_scale(self.options)

    @property
    def pair_bytes(self) -> int:
        """Bytes that the kernels load for each pair of a row and a key, at most: all dtypes of attn_bias have one
        configuration."""
        return 0 if self.options.attn_bias is None else 4

    @property
    def is_plain(self) -> bool:
        """True if the kernels compile no feature in, except the causal mask."""
        return self.window is None and not self.features

    @property
    def features(self) -> str:
        """The features that the kernels compile in, except masks: "" or names."""
        options = self.options
        if (
            self.sequences is None
            and not self.modifies_scores
            and options.dropout_p == 0
            and options.key_ranges is None
        ):
            return ""
        used = {
            "varlen": self.is_varlen,
            "paged": self.sequences is not None and self.sequences.block_table is not None,
            **score_features(options),
            "dropout": options.dropout_p > 0,
            "key_ranges": options.key_ranges is not None,
        }
        return "+".join(name for name, is_used in used.items() if is_used)

    def feature_arguments(self) -> dict[str, Any]:
        """The arguments of the features that this call uses, key_ranges and pages excepted."""
        if self.is_plain:
            return {}
        arguments: dict[str, Any] = {}
        if self.sequences is not None:
            cu_seqlens_q, cu_seqlens_k = self.sequences.cu_seqlens_q, self.sequences.cu_seqlens_k
            arguments["cu_seqlens"] = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
            arguments["num_sequences"] = cu_seqlens_q.numel() - 1
        if self.window is not None:
            arguments["window_left"], arguments["window_right"] = self.window
        if self.modifies_scores:
            arguments["SCORE_MOD"], arguments["score_mod"] = True, score_mod_of(self.options)
        if self.options.attn_bias is not None:
            arguments["attn_bias"] = bias_of_call(self.options.attn_bias)
        if self.options.dropout_p > 0:
            assert self.rng_state is not None, "dropout needs rng_state"
            arguments["rng_state"] = self.rng_state.contiguous()
            arguments["threshold"] = math.floor(self.options.dropout_p * 65536 + 0.5)
            arguments["keep_scale"] = 1.0 / (1.0 - self.options.dropout_p)
        return arguments

    def range_arguments(self) -> dict[str, Any]:
        """The arguments of the kernels that read key_ranges."""
        key_ranges = self.options.key_ranges
        return {} if key_ranges is None else range_arguments(key_ranges, self.is_varlen)

    def page_arguments(self) -> dict[str, Any]:
        """The arguments of the forward kernel for keys in pages."""
        if self.sequences is None or self.sequences.block_table is None:
            return {}
        table = self.sequences.block_table.contiguous()
        return {
            "block_table": table,
            "max_pages": table.shape[1],
            "num_pages": self.k.shape[0],
            "page_size": self.k.shape[1],
        }


def as_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Rows ``[total, heads, headdim]`` as a batch of one. Pages ``[num_pages, page_size, ...]`` stay as they are."""
    return tensor if tensor.ndim == 4 else tensor.unsqueeze(0)
