"""The max_logits of a call against the definition, up to the rounding of scores."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func
from flash_attn_mini.reference import attention_max_logits

from .attn_bias_cases import AttnBiasCase
from .attn_bias_checks import make_biased_call
from .cases import Case, make_inputs, options_of
from .key_range_cases import KeyRangeCase
from .key_range_checks import make_ranged_call
from .varlen_cases import VarlenCase, make_batch

MAX_LOGIT_ERROR = 4e-6  # on Hopper, beyond the rounding of scores (docs/semantics.md)


def check_max_logits(
    got: Tensor,
    q: Tensor,
    k: Tensor,
    where: object,
    *,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    key_ranges: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softcap: float = 0.0,
    **options: Any,
) -> None:
    """Assert shape, dtype and values; ``options``: those of `attention_scores`.

    The bound is that of a product of q and k in float32 (float64 for float64 inputs) with any order of its sum, and of
    a few roundings of the logit. On CUDA the bound has MAX_LOGIT_ERROR too, and tanh has a relative error of 2^-11.
    """
    is_varlen = cu_seqlens is not None
    nheads, headdim = q.shape[-2:]
    scale = options.pop("softmax_scale", None)
    scale = headdim**-0.5 if scale is None else scale
    of_sums = {"softmax_scale": abs(scale), **options}
    options.update(softmax_scale=scale, softcap=softcap, attn_bias=attn_bias)
    expected = torch.full((nheads,) if is_varlen else (q.shape[0], nheads), -math.inf, dtype=torch.float64)
    expected = expected.to(q.device)
    largest_sum = expected.clone()  # of |q| |k| scale over the head dim
    parts = [(slice(None), slice(None))]
    if cu_seqlens is not None:
        spans = zip(*(pairwise(x.tolist()) for x in cu_seqlens), strict=True)
        parts = [(slice(*of_q), slice(*of_k)) for of_q, of_k in spans]
    for i, (rows, keys) in enumerate(parts):
        of_q, of_k, of_ranges, slopes = q, k, key_ranges, alibi_slopes
        if is_varlen:
            of_q, of_k = q[None, rows], k[None, keys]
            of_ranges = None if key_ranges is None else key_ranges[None, :, rows]
            slopes = alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        found = attention_max_logits(of_q, of_k, key_ranges=of_ranges, alibi_slopes=slopes, **options)
        sums = attention_max_logits(of_q.abs(), of_k.abs(), key_ranges=of_ranges, **of_sums)
        expected = torch.maximum(expected, found.view_as(expected))
        largest_sum = torch.maximum(largest_sum, sums.view_as(expected))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    assert got.dtype == dtype, where
    assert got.shape == expected.shape, where
    assert not got.requires_grad, where
    has_pair = expected != -math.inf
    assert torch.equal(got == -math.inf, ~has_pair), f"{got} and {expected}, {where}"
    magnitude = largest_sum + expected.abs()
    bound = torch.finfo(dtype).eps * (headdim + 32) * magnitude + torch.finfo(torch.float32).tiny
    if q.is_cuda and dtype == torch.float32:  # Hopper reads most logits from probabilities
        bound = bound + MAX_LOGIT_ERROR
    if softcap > 0:
        tanh = 2.0**-11 if q.is_cuda else 1e-6  # relative
        bound = bound + (tanh if dtype == torch.float32 else 0.0) * softcap
    error = torch.where(has_pair, got.double() - expected, 0.0).abs()
    wrong = error > torch.where(has_pair, bound, 0.0)
    assert not wrong.any(), f"{got}, expected {expected}, error {error.max():g}, bound {bound[wrong]}, {where}"


def check_case(
    case: Case | VarlenCase | KeyRangeCase | AttnBiasCase,
    kernels: str,
    dtype: torch.dtype,
    device: str,
    seed: int,
    described_seed: str,
) -> None:
    """The max_logits of a case on a backend."""
    where = f"{case} {case.shape} dtype={dtype} backend={kernels} {described_seed}"
    torch.manual_seed(seed)
    known: dict[str, Any] = {}
    options: dict[str, Any] = {"backend": kernels, "return_max_logits": True}
    lengths: tuple[Any, ...] = ()
    if isinstance(case, KeyRangeCase):
        call = make_ranged_call(case, dtype, device, seed)
        q, k, v, of_k, features = call.q, call.k, call.v, call.k, call.options
        known = {"key_ranges": call.key_ranges}
        options["learnable_sink"] = call.sinks
        if call.sequences is not None:
            lengths, known["cu_seqlens"] = call.sequences[:4], call.cu_seqlens
    elif isinstance(case, VarlenCase):
        batch = make_batch(case, dtype, device, seed)
        q, k, v, of_k, features = batch.q, batch.k, batch.v, batch.rows(batch.k), options_of(case, device)
        lengths, known["cu_seqlens"], options["block_table"] = batch.lengths, batch.cu_seqlens, batch.block_table
    elif isinstance(case, AttnBiasCase):
        biased = make_biased_call(case, dtype, device, seed)
        q, k, v, of_k, features = biased.q, biased.k, biased.v, biased.k, dict(biased.options)
        known = {"attn_bias": biased.attn_bias, "key_ranges": features.pop("key_ranges", None)}
        options["learnable_sink"] = biased.sinks
    else:
        q, k, v = make_inputs(case, dtype, device, seed)
        of_k, features = k, options_of(case, device)
    masks = {name: known[name] for name in ("key_ranges", "attn_bias") if name in known}
    function: Any = flash_attn_varlen_func if lengths else flash_attn_func
    _, max_logits = function(q, k, v, *lengths, **features, **masks, **options)
    del features["dropout_p"]
    check_max_logits(max_logits, q, of_k, where, **features, **known)
