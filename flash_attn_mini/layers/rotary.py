"""Rotary position embedding, under the name and path of the official package. Not implemented in this version."""

from __future__ import annotations

from typing import Any, NoReturn


def apply_rotary_emb(*arguments: Any, **keywords: Any) -> NoReturn:
    """Rotate q or k by position (``x [batch, seqlen, nheads, headdim]``). Not implemented in this version.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "flash_attn_mini: apply_rotary_emb is not implemented in this version; backends that have it: none. "
        "Available now: flash_attn_mini.reference.apply_rotary_reference"
    )
