"""Runs a case of flash_attn_with_kvcache and checks the results and every byte of the caches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_mini.reference import apply_rotary_reference, attention_kvcache_reference

from .bounds import FLOOR, accuracy, by_sequence, pytorch_attention, refuse, results_accuracy
from .kvcache_cases import CacheCall, KvCacheCase, make_call
from .poison import Guard

Results = tuple[Tensor, Tensor]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def described(case: KvCacheCase, dtype: torch.dtype, backend: str, described_seed: str) -> str:
    return f"{case.name} ({case.why})\n  {case.shape} dtype={dtype} backend={backend}\n  {described_seed}"


def bits(x: Tensor) -> Tensor:
    """The elements as integers, so that NaN equals itself."""
    return x.view(BITS[x.element_size()])


def copied(*tensors: Tensor) -> list[Tensor]:
    """Copies of tensors of poison.py, inside copies of their buffers."""
    buffers: dict[int, Tensor] = {}
    copies = []
    for x in tensors:
        assert x._base is not None, "give tensors made by poison.py"
        buffer = buffers.setdefault(x._base.data_ptr(), x._base.clone())
        copies.append(buffer.as_strided(x.shape, x.stride(), x.storage_offset()))
    return copies


def run(call: CacheCall, backend: str, **others: Any) -> Results:
    """(out, softmax_lse); ``others`` replace arguments of the call."""
    arguments = {**call.arguments, "return_softmax_lse": True, "backend": backend, **others}
    return flash_attn_with_kvcache(*call.tensors, **arguments)


def check_kvcache(
    case: KvCacheCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> tuple[CacheCall, Results]:
    """Run the case and check it. Returns the call, whose caches now hold the new keys, and its results."""
    call = make_call(case, dtype, device, seed)
    inputs = [call.q, *(x for x in call.new if x is not None)]
    guard = Guard(*inputs)
    caches = (call.k_cache, call.v_cache)
    far = case.layout.startswith("far")  # the buffers are too large to copy
    before = [x.clone() for x in caches] if far else copied(*caches)
    results = run(call, backend)
    guard.check()
    check_results(call, before, results, described(case, dtype, backend, described_seed))
    return call, results


def check_results(call: CacheCall, before: list[Tensor], results: Results, where: str) -> None:
    """Compare the results, and the caches with what they were before the call. Writes to ``before``."""
    case, (out, lse), dtype = call.case, results, call.q.dtype
    shown = f"\n  case {where}"
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (*call.q.shape[:3], case.headdim_v)
    assert (out.shape, out.dtype, out.device) == (shape, dtype, call.q.device), f"out is wrong{shown}"
    assert (lse.shape, lse.dtype) == ((case.batch, case.nheads, case.seqlen_q), lse_dtype), f"lse is wrong{shown}"

    pytorch_out, pytorch_lse, pytorch_k = pytorch_kvcache(call, before)
    expected = attention_kvcache_reference(call.q, *before, *call.new, **call.definition)
    check_caches(call, before, pytorch_k, shown)
    largest_v = before[1].nan_to_num(nan=0.0).abs().max().item()
    accuracies = results_accuracy(dtype, largest_v, results, expected, (pytorch_out, pytorch_lse))
    refuse([x for x in accuracies if not x.passed], shown)
    no_key = (lse == -math.inf).transpose(1, 2)[..., None]
    assert not (out.masked_fill(~no_key, 0.0) != 0.0).any(), f"a row without keys has an out other than 0{shown}"


def check_caches(call: CacheCall, expected: list[Tensor], pytorch_k: list[Tensor], shown: str) -> None:
    """The buffers of the caches equal the expected ones bit for bit. Rotated keys may differ by rounding."""
    if call.rotary[0] is not None:
        for b in range(call.case.batch):
            new = call.appended(b)
            got, exact = call.k_cache[new], rotated_keys(call, b, torch.float64)
            k = accuracy("k_cache", got, exact, pytorch_k[b], FLOOR[got.dtype])
            refuse([] if k.passed else [k], f" of sequence {b}{shown}")
            expected[0][new] = got
    for name, cache, copy in zip(("k_cache", "v_cache"), (call.k_cache, call.v_cache), expected, strict=True):
        whole = copy._base is not None
        ours, theirs = (cache._base, copy._base) if whole else (cache, copy)
        changed = (bits(ours) != bits(theirs)).nonzero()
        where = "the buffer of " if whole else ""
        assert len(changed) == 0, (
            f"{len(changed)} elements of {where}{name} are wrong, first at {changed[0].tolist()}; "
            f"strides {cache.stride()}, offset {cache.storage_offset()}{shown}"
        )


def rotated_keys(call: CacheCall, b: int, dtype: torch.dtype) -> Tensor:
    """The new keys of sequence b, rotated in ``dtype``."""
    k, (cos, sin) = call.new[0], call.rotary
    assert k is not None
    if cos is None or sin is None:
        return k[b].to(dtype)
    positions = call.case.lengths[b] + torch.arange(k.shape[1], device=k.device)
    return apply_rotary_reference(k[b], cos, sin, positions, interleaved=call.case.rotary_interleaved, dtype=dtype)


def rotated_queries(call: CacheCall, b: int, dtype: torch.dtype) -> Tensor:
    """The queries of sequence b, rotated in ``dtype``."""
    case, (cos, sin) = call.case, call.rotary
    if cos is None or sin is None:
        return call.q[b].to(dtype)
    step = 1 if case.causal or case.window_size != (-1, -1) else 0
    positions = case.lengths[b] + step * torch.arange(case.seqlen_q, device=call.q.device)
    return apply_rotary_reference(call.q[b], cos, sin, positions, interleaved=case.rotary_interleaved, dtype=dtype)


def pytorch_kvcache(call: CacheCall, before: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and the new keys of each sequence, by plain PyTorch with all results in the dtype of q."""
    case, dtype = call.case, call.q.dtype
    queries, keys, values, new_keys = [], [], [], []
    for b in range(case.batch):
        start = 0 if case.leftpad is None else case.leftpad[b]
        old = call.slots(b, min(start, case.lengths[b]), case.lengths[b])
        k_b, v_b = before[0][old], before[1][old]
        if call.new[0] is not None and call.new[1] is not None:
            new_keys.append(rotated_keys(call, b, dtype))
            skipped = max(start - case.lengths[b], 0)
            k_b = torch.cat([k_b, new_keys[b][skipped:]])
            v_b = torch.cat([v_b, call.new[1][b, skipped:]])
        queries.append(rotated_queries(call, b, dtype))
        keys.append(k_b)
        values.append(v_b)

    def cumulative(parts: list[Tensor]) -> Tensor:
        return torch.tensor([0, *(len(x) for x in parts)]).cumsum(0)

    out, lse = by_sequence(pytorch_attention, (cumulative(queries), cumulative(keys)))(
        torch.cat(queries),
        torch.cat(keys),
        torch.cat(values),
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        window_size=case.window_size,
        softcap=case.softcap,
        alibi_slopes=call.alibi_slopes,
    )
    lse = lse.unflatten(-1, (case.batch, case.seqlen_q)).transpose(0, 1)
    return out.unflatten(0, (case.batch, case.seqlen_q)), lse, new_keys


def varlen_results(call: CacheCall, backend: str, paged: bool) -> Results:
    """The results of flash_attn_varlen_func on the keys that the cache holds now, in their pages or packed."""
    case = call.case
    device = call.q.device
    starts = [0] * case.batch if case.leftpad is None else case.leftpad
    lengths = [total - start for total, start in zip(case.totals, starts, strict=True)]
    cu_q = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.seqlen_q
    cu_k = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    if paged:
        k, v, table = call.k_cache, call.v_cache, call.block_table
    else:
        slots = [torch.cat(parts) for parts in zip(*(call.visible(b) for b in range(case.batch)), strict=True)]
        k, v, table = call.k_cache[slots[0], slots[1]], call.v_cache[slots[0], slots[1]], None
    out, lse, _ = flash_attn_varlen_func(
        call.q.flatten(0, 1),
        k,
        v,
        cu_q,
        cu_k,
        case.seqlen_q,
        max(lengths),
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        window_size=case.window_size,
        softcap=case.softcap,
        alibi_slopes=call.alibi_slopes,
        return_attn_probs=True,
        block_table=table,
        backend=backend,
    )
    return out.view(*call.q.shape[:3], case.headdim_v), lse.view(case.nheads, case.batch, case.seqlen_q).transpose(0, 1)


def of_rows(call: CacheCall, rows: list[int]) -> CacheCall:
    """The call of only some sequences of a batch, on the same caches."""
    case = call.case
    at = torch.tensor(rows, device=call.q.device)

    def taken(x: Any) -> Any:
        return x[at] if isinstance(x, Tensor) else x

    batch_idx = call.cache_batch_idx
    if batch_idx is None and call.block_table is None:
        batch_idx = torch.arange(case.batch, dtype=torch.int32, device=call.q.device)
    k, v = (taken(x) for x in call.new)
    slopes = call.alibi_slopes
    return CacheCall(
        case,
        call.q[at],
        call.k_cache,
        call.v_cache,
        (k, v),
        taken(call.lengths),
        taken(batch_idx),
        taken(call.cache_leftpad),
        taken(call.block_table),
        call.rotary,
        slopes[at] if slopes is not None and slopes.dim() == 2 else slopes,
    )
