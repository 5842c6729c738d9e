"""Calls of flash_attn_with_kvcache drawn at random, and simpler ones in place of one that fails."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from .kvcache_cases import POOL_FACTOR, KvCacheCase
from .poison import LAYOUTS

LAYOUT_NAMES = [name for name in LAYOUTS if not name.startswith(("far", "expanded"))]
TMA_LAYOUTS = [name for name in LAYOUT_NAMES if name not in ("misaligned", "odd_start")]  # head dims: multiples of 8


def random_kvcache(draw: random.Random, is_long: bool = True, is_square: bool = True) -> KvCacheCase:
    """A case with any of the options; each is on in a third of the cases or so. `is_long`: up to 3,000 keys.
    `is_square`: v always has the head dim of k.

    A quarter of the cases suit Hopper's kernel for many rows, and a few its clusters and wide CTAs.
    """
    kind = draw.choices(("any", "many_rows", "few_sequences"), (66, 26, 8))[0]
    is_any, has_many_rows = kind == "any", kind == "many_rows"
    batch, seqlen_q, nheads, nheads_k, headdim = _random_shape(draw, kind)
    seqlen_new = draw.choice((None, None, seqlen_q, seqlen_q, draw.randint(0, 40), 0))
    paged = draw.random() < 0.5
    page_size = draw.choice((1, 16, 64, 256, draw.randint(1, 300), draw.randint(1, 40))) if paged else 0
    if has_many_rows:
        page_size = -(-page_size // 8) * 8
    rows = batch * (POOL_FACTOR if paged else 1)
    most_keys, most_elements = (3000, 1 << 23) if is_long else (100, 1 << 20)
    room = draw.choice((0, draw.randint(0, 40), draw.randint(0, 200), draw.randint(0, 700)))
    room = min(room if is_any else draw.randint(0, most_keys), most_elements // (rows * nheads_k * headdim))
    capacity = max((seqlen_new or 0) + room, 1)
    room = capacity - (seqlen_new or 0)

    lengths_as = draw.choice(("tensor", "tensor", "tensor", "int", "none"))
    if lengths_as == "none" and seqlen_new is not None:
        lengths_as = "tensor"
    if lengths_as == "none":
        full = -(-capacity // page_size) * page_size if paged else capacity
        lengths: tuple[int, ...] = (full,) * batch
    elif lengths_as == "int":
        lengths = (draw.choice((0, room, draw.randint(0, room))),) * batch
    else:
        lengths = tuple(
            draw.choice((0, room, draw.randint(0, room), draw.randint(0, min(room, 20)))) for _ in range(batch)
        )
    leftpad = None
    if draw.random() < 0.3 and not (has_many_rows and paged):
        leftpad = tuple(draw.choice((0, draw.randint(0, n), n + (seqlen_new or 0))) for n in lengths)
    if kind == "few_sequences" and is_long and lengths_as != "none" and headdim <= 128:
        capacity += draw.choice((0, 8192))  # too many keys for clusters, so wide CTAs

    def side() -> int:
        return draw.choice((-1, 0, draw.randint(1, 20), draw.randint(20, 300)))

    rotates = seqlen_new is not None and headdim >= 16 and draw.random() < 0.5
    split_keys = draw.choice((16, 64, draw.randint(16, 300))) if draw.random() < 0.2 else 0
    num_splits = 0 if split_keys else draw.choice((0, 0, 1, draw.randint(2, 20)))
    layouts = TMA_LAYOUTS if has_many_rows else LAYOUT_NAMES
    return KvCacheCase(
        name="random",
        why="drawn at random",
        lengths=lengths,
        capacity=capacity,
        seqlen_q=seqlen_q,
        seqlen_new=seqlen_new,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        page_size=page_size,
        leftpad=leftpad,
        spare_rows=draw.randint(1, batch + 2) if not paged and draw.random() < 0.4 else 0,
        lengths_as=lengths_as,
        causal=draw.random() < 0.5,
        window_size=(side(), side()) if draw.random() < 0.3 else (-1, -1),
        softcap=draw.choice((0.5, 5.0, 30.0)) if draw.random() < 0.25 else 0.0,
        alibi=None if has_many_rows else draw.choice((None, None, "heads", "batch")),
        softmax_scale=draw.choice((None, None, None, draw.uniform(-0.5, 0.5), draw.choice((0.0, 0.3, -0.3)))),
        rotary_dim=16 * draw.randint(1, headdim // 16) if rotates else 0,
        rotary_interleaved=draw.random() < 0.5,
        num_splits=num_splits if is_any else 0,
        split_keys=split_keys if is_any else 0,
        layout=draw.choice(layouts),
        cache_layout=draw.choice((None, draw.choice(layouts))),
        own_headdim_v=None if is_square or draw.random() < 0.75 else draw.randint(1, min(2 * headdim, 512)),
    )


def _random_shape(draw: random.Random, kind: str) -> tuple[int, int, int, int, int]:
    """batch, seqlen_q, nheads, nheads_k, headdim."""
    ratio = draw.choice((1, 1, 2, 3, 4, 8))
    if kind == "few_sequences":
        nheads_k = draw.choice((4, 8, 8))
        return draw.choice((1, 1, 2)), 1, ratio * nheads_k, nheads_k, draw.choice((8 * draw.randint(1, 32), 64, 128))
    batch, nheads_k = draw.choice((1, 2, 3, 5)), draw.choice((1, 1, 2, 3, 4))
    if kind == "many_rows":
        headdim = draw.choice((8 * draw.randint(5, 32), 64, 128))
        least = -(-(17 if headdim > 64 else 33) // ratio)  # cache_kernel in csrc/dispatch/choose_kernel.h
        seqlen_q = draw.choice((least, draw.randint(least, 2 * least), draw.randint(least, 130)))
        return batch, seqlen_q, ratio * nheads_k, nheads_k, headdim
    headdim = draw.choice((8 * draw.randint(1, 32), draw.randint(1, 256), 64, 128))
    seqlen_q = draw.choice((1, 1, draw.randint(2, 16), draw.randint(1, 130)))
    while batch * ratio * nheads_k * seqlen_q * headdim < 256:  # in few elements PyTorch's error is small by chance
        nheads_k *= 2
    return batch, seqlen_q, ratio * nheads_k, nheads_k, headdim


def simpler_kvcache(case: KvCacheCase) -> Iterator[KvCacheCase]:
    """Cases that differ from this one in one simpler or smaller field."""
    return (other for other in _changed(case) if other.is_possible)


def _changed(case: KvCacheCase) -> Iterator[KvCacheCase]:
    for field in dataclasses.fields(case):
        if field.default is not dataclasses.MISSING and field.name not in ("seqlen_q", "nheads", "nheads_k", "headdim"):
            yield dataclasses.replace(case, **{field.name: field.default})
    for b in range(case.batch if case.batch > 1 else 0):
        leftpad = case.leftpad if case.leftpad is None else case.leftpad[:b] + case.leftpad[b + 1 :]
        yield dataclasses.replace(case, lengths=case.lengths[:b] + case.lengths[b + 1 :], leftpad=leftpad)
    if case.leftpad is None:
        yield dataclasses.replace(case, lengths=tuple(n // 2 for n in case.lengths))
        yield dataclasses.replace(case, capacity=max(*case.totals, 1))
    if case.nheads > case.nheads_k:
        yield dataclasses.replace(case, nheads=case.nheads_k)
    if case.nheads_k > 1 and case.nheads == case.nheads_k:
        yield dataclasses.replace(case, nheads=1, nheads_k=1)
    if case.seqlen_q > 1:
        yield dataclasses.replace(case, seqlen_q=case.seqlen_q // 2)
    for headdim in (16, 64):
        if headdim < case.headdim:
            yield dataclasses.replace(case, headdim=headdim)
