"""Sizes of small models and tokens for them, for the tests of transformers' models."""

from __future__ import annotations

from typing import Any

import torch

LENGTH = 13
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 99,
}
DECODER = {**SMALL, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}


def tokens(batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    """The same tokens in every call, without padding."""
    return torch.randint(1, 99, (batch, length), generator=torch.Generator().manual_seed(1))
