"""The schemas of the ops ``flash_attn_mini::…``, derived from the fields of `Options`, `Sequences` and `KvCache`.

A call of an op is ``op(q, k, v, *(sequences or EQUAL_LENGTHS), *options, rng_state)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch

from .options import KvCache, Options, Sequences

# By the type of a field. An op has no Sequences without tensors, so that a tensor may always be None.
_TYPES: dict[Any, str] = {
    float: "float",
    bool: "bool",
    int: "SymInt",
    str | None: "str?",
    torch.Tensor: "Tensor?",
    torch.Tensor | None: "Tensor?",
}

EQUAL_LENGTHS = (None, None, 0, 0, None)  # in place of the fields of Sequences


def arguments_of(fields: type[Options] | type[Sequences] | type[KvCache]) -> str:
    """The fields as arguments of a schema."""
    return ", ".join(f"{_TYPES[type_]} {name}" for name, type_ in get_type_hints(fields).items())


OPTIONS, SEQUENCES, KV_CACHE = arguments_of(Options), arguments_of(Sequences), arguments_of(KvCache)

FORWARD = f"(Tensor q, Tensor k, Tensor v, {SEQUENCES}, {OPTIONS}, Tensor? rng_state)"
BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dsoftmax_lse, "
    f"{SEQUENCES}, {OPTIONS}, Tensor? rng_state, bool[3] output_mask)"
)
ATTN_BIAS_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor softmax_d, "
    f"{OPTIONS}, Tensor? rng_state) -> Tensor"
)
KVCACHE_FORWARD = f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {KV_CACHE}, {OPTIONS})"

GRADIENTS = " -> (Tensor dq, Tensor dk, Tensor dv, Tensor softmax_d)"  # None for a gradient that is not wanted
OUT_AND_LSE = " -> (Tensor out, Tensor softmax_lse)"
FORWARD_RESULTS = " -> (Tensor out, Tensor softmax_lse, Tensor max_logits)"  # None for max_logits that are not wanted


def sequences_and_options(arguments: Sequence[Any]) -> tuple[Sequences | None, Options, Sequence[Any]]:
    """The arguments of an op after its first tensors as values, and those that follow."""
    sequences = None if arguments[0] is None else Sequences(*arguments[:_NUM_SEQUENCES])
    return sequences, Options(*arguments[_NUM_SEQUENCES:_END_OF_OPTIONS]), arguments[_END_OF_OPTIONS:]


def cache_and_options(arguments: Sequence[Any]) -> tuple[KvCache, Options]:
    """The arguments of the KV cache op after q and the caches as values."""
    return KvCache(*arguments[:_NUM_CACHE]), Options(*arguments[_NUM_CACHE:])


_NUM_SEQUENCES, _NUM_CACHE = len(Sequences._fields), len(KvCache._fields)
_END_OF_OPTIONS = _NUM_SEQUENCES + len(Options._fields)
