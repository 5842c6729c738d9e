"""Packing of padded batches, under the names of the official package. Not implemented in this version."""

from __future__ import annotations

from typing import Any, NoReturn


def _not_implemented(function: str) -> NoReturn:
    raise NotImplementedError(
        f"flash_attn_mini: {function} is not implemented in this version, as variable-length attention is not; "
        "backends that have it: none. Available now: batches of sequences of one length"
    )


def index_first_axis(*arguments: Any, **keywords: Any) -> NoReturn:
    """Rows of a tensor by index along its first dimension. Not implemented in this version."""
    _not_implemented("index_first_axis")


def pad_input(*arguments: Any, **keywords: Any) -> NoReturn:
    """From packed ``[total, ...]`` back to ``[batch, seqlen, ...]``. Not implemented in this version."""
    _not_implemented("pad_input")


def unpad_input(*arguments: Any, **keywords: Any) -> NoReturn:
    """From ``[batch, seqlen, ...]`` and a mask to packed ``[total, ...]``. Not implemented in this version."""
    _not_implemented("unpad_input")
