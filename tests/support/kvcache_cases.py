"""The curated cases of flash_attn_with_kvcache, one reason to fail each, and the tensors of a case. random_kvcache.py
draws others.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import make_slopes, store
from .poison import laid_out, poisoned

POOL_FACTOR = 3  # pages in the pool for each page in use
NO_PAGE = 1 << 30  # what block tables hold past the last page of a sequence


@dataclass(frozen=True)
class KvCacheCase:
    name: str
    why: str
    lengths: tuple[int, ...]  # keys of each sequence before the call, left padding included
    capacity: int  # keys of a cache row; with pages rounded up to whole pages
    seqlen_q: int = 1
    seqlen_new: int | None = None  # None: the cache is only read
    nheads: int = 4
    nheads_k: int = 2
    headdim: int = 64
    page_size: int = 0  # 0: no pages
    shared_pages: int = 0  # leading pages that all sequences share
    leftpad: tuple[int, ...] | None = None
    spare_rows: int = 0  # cache rows of nobody; above 0 cache_batch_idx is given
    lengths_as: str = "tensor"  # cache_seqlens: "tensor", "int" (all lengths are equal) or "none" (the cache is full)
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None  # "heads" or "batch"
    softmax_scale: float | None = None
    rotary_dim: int = 0  # 0: no rotation
    rotary_interleaved: bool = True
    num_splits: int = 0
    split_keys: int = 0
    layout: str = "bshd"  # of q, k and v, and of the caches; a key of poison.LAYOUTS
    cache_layout: str | None = None  # of the caches; None: layout
    memory_gib: float = 0.0  # of the caches in a 16-bit dtype, if a laptop may not have it
    own_headdim_v: int | None = None  # of v and out; None: headdim
    v_in_k: bool = False  # v_cache is a view of the first columns of k_cache

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def headdim_v(self) -> int:
        return self.headdim if self.own_headdim_v is None else self.own_headdim_v

    @property
    def max_pages(self) -> int:
        return -(-self.capacity // self.page_size)

    @property
    def keys(self) -> int:
        """The capacity of a cache row."""
        return self.max_pages * self.page_size if self.page_size else self.capacity

    @property
    def totals(self) -> tuple[int, ...]:
        """Keys of each sequence after the call."""
        return tuple(length + (self.seqlen_new or 0) for length in self.lengths)

    @property
    def group_rows(self) -> int:
        """Queries of all heads that share a key/value head."""
        return self.seqlen_q * self.nheads // self.nheads_k

    @property
    def is_possible(self) -> bool:
        """Whether the fields fit each other."""
        if self.lengths_as == "none" and (self.seqlen_new is not None or set(self.lengths) != {self.keys}):
            return False
        if self.lengths_as == "int" and len(set(self.lengths)) > 1:
            return False
        if self.rotary_dim > (0 if self.seqlen_new is None else self.headdim):
            return False
        return max(self.totals) <= self.keys and (self.leftpad is None or len(self.leftpad) == self.batch)

    @property
    def shape(self) -> str:
        fields = dataclasses.asdict(self).items()
        return " ".join(f"{name}={value}" for name, value in fields if name not in ("name", "why", "memory_gib"))


_case = KvCacheCase
_MIXED = (5, 0, 130, 64, 199)
_DECODE: dict[str, Any] = {"seqlen_new": 1, "causal": True}
# The log-sum-exp of a row with one key has the rounding of a rotated query and key, in PyTorch and here. With few heads
# PyTorch's may be small by chance.
_ROTARY_DECODE: dict[str, Any] = {"nheads": 16, "nheads_k": 8, "rotary_dim": 64, **_DECODE}

_LENGTHS = [
    _case("decode", "one query and one new key, any lengths", _MIXED, 200, **_DECODE),
    _case("read_only", "nothing is appended", _MIXED, 200),
    _case("full", "without cache_seqlens the cache is full", (70, 70), 70, lengths_as="none", causal=True),
    _case("int_length", "one length for all rows, known to the host", (33, 33, 33), 80, lengths_as="int", **_DECODE),
    _case("int_zero", "an empty cache", (0, 0), 16, lengths_as="int", seqlen_new=3, seqlen_q=3, causal=True),
    _case("no_keys", "rows without a key", (0, 0), 16, seqlen_q=2),
    _case("to_the_end", "the new keys end with the cache", (63, 60), 64, seqlen_q=1, seqlen_new=1),
    _case("prompt", "a prompt into an empty cache", (0, 0), 150, seqlen_q=130, seqlen_new=130, causal=True),
    _case("chunk", "a chunk of a prompt behind another", (100, 17), 250, seqlen_q=65, seqlen_new=65, causal=True),
    _case("speculative", "a few queries", (100, 1, 63), 128, seqlen_q=5, seqlen_new=5, nheads=8, causal=True),
    _case("more_queries", "queries before the first key", (3, 0), 64, seqlen_q=20, seqlen_new=4, causal=True),
    _case("fewer_queries", "more new keys than queries", (30, 8), 64, seqlen_q=2, seqlen_new=9, causal=True),
    _case("no_new_keys", "k has no rows", (30, 8), 64, seqlen_new=0, rotary_dim=32),
    _case("no_queries", "only the new keys are written", (30, 8), 64, seqlen_q=0, seqlen_new=5, rotary_dim=32),
    _case("long", "many splits", (4000, 37), 4096, nheads=8, **_DECODE),
    _case("one_row", "a batch of one", (600,), 1000, nheads=8, nheads_k=1, **_DECODE),
]

_HEADS = [
    _case("mha", "as many key heads as query heads", _MIXED, 200, nheads_k=4, **_DECODE),
    _case("mqa", "one key head", _MIXED, 200, nheads=8, nheads_k=1, **_DECODE),
    _case("gqa_3", "three query heads per key head", _MIXED, 200, nheads=9, nheads_k=3, **_DECODE),
    _case("mqa_32", "two warps share key tiles", (600, 37, 300), 640, nheads=32, nheads_k=1, headdim=128, **_DECODE),
    _case("mqa_32_256", "the same, Q in shared memory", (90, 33), 100, nheads=24, nheads_k=1, headdim=256, **_DECODE),
    _case("gqa_chunk", "groups of five over several rows", (50, 3), 90, 7, 7, nheads=10, causal=True),
] + [
    _case(f"headdim_{d}", f"head dim {d}", (70, 0, 33), 100, nheads=16, headdim=d, **_DECODE)
    for d in (1, 33, 40, 96, 128, 192, 200, 255, 256)
]

_ROWS = [
    _case("leftpad", "the first keys are padding", (50, 9, 130), 140, leftpad=(7, 0, 129), **_DECODE),
    _case("leftpad_all", "padding up to the last key", (50, 9), 140, leftpad=(51, 10), **_DECODE),
    _case("leftpad_window", "padding and a window", (50, 90), 140, leftpad=(7, 64), window_size=(40, 3), seqlen_q=6),
    _case("batch_idx", "cache rows in another order", _MIXED, 200, spare_rows=4, **_DECODE),
    _case("batch_idx_leftpad", "both", (50, 9, 130), 140, spare_rows=2, leftpad=(3, 1, 0), **_DECODE),
]

_PAGES = [
    _case(f"pages_{size}", why, (5, 0, 130, 64, 299), 300, page_size=size, **_DECODE)
    for size, why in (
        (1, "a page for each key"),
        (7, "no tile is a multiple of the page"),
        (16, "a common size"),
        (64, "a tile"),
        (100, "between tiles"),
        (256, "larger than a tile"),
        (300, "one page per row"),
    )
] + [
    _case("pages_leftpad", "padding ends within a page", (50, 9, 99), 140, page_size=9, leftpad=(7, 0, 33), **_DECODE),
    _case("pages_shared", "sequences with a common start", (70, 65, 97), 128, page_size=32, shared_pages=2, **_DECODE),
    _case("pages_chunk", "new keys over several pages", (100, 17), 250, 65, 65, page_size=24, causal=True),
    _case("pages_read_only", "a pool that is only read", (70, 0), 128, page_size=16, seqlen_q=3),
    _case("pages_full", "every page of the table is full", (64, 64), 64, page_size=16, lengths_as="none"),
    _case("pages_int", "one length for all rows", (40, 40), 64, page_size=8, lengths_as="int", **_DECODE),
]

_FEATURES = [
    _case("window", "a band", _MIXED, 200, seqlen_q=9, window_size=(20, 5)),
    _case("window_causal", "a sliding window", _MIXED, 200, seqlen_new=1, causal=True, window_size=(31, -1)),
    _case("softcap", "capped scores", _MIXED, 200, softcap=3.0, **_DECODE),
    _case("negative_scale", "the least product has the largest score", _MIXED, 200, softmax_scale=-0.2,
          **_ROTARY_DECODE),
    _case("alibi", "slopes of the heads", _MIXED, 200, alibi="heads", **_DECODE),
    _case("alibi_batch", "slopes of each sequence", _MIXED, 200, seqlen_q=4, alibi="batch", page_size=16),
    _case("rotary", "GPT-J style, all features", _MIXED, 200, **_ROTARY_DECODE),
    _case("rotary_neox", "GPT-NeoX style, in part", _MIXED, 200, rotary_interleaved=False,
          **{**_ROTARY_DECODE, "rotary_dim": 32}),
    _case("rotary_full", "all queries at one position", (40, 3), 80, 5, 5, rotary_dim=48),
    _case("rotary_window", "each query at its own position", (40, 3), 80, 5, 5, rotary_dim=16, window_size=(20, 4)),
    _case("rotary_odd", "a head dim that is odd", (40, 3), 80, 5, 5, headdim=77, rotary_dim=64, causal=True),
    _case("rotary_leftpad", "positions count the padding", (40, 9), 80, leftpad=(12, 9), **_ROTARY_DECODE),
    _case(
        "together",
        "rotary, window, softcap, ALiBi, padding, pages",
        (90, 33, 150),
        200,
        seqlen_q=6,
        seqlen_new=6,
        headdim=72,
        page_size=20,
        leftpad=(5, 0, 41),
        causal=True,
        window_size=(60, -1),
        softcap=8.0,
        alibi="batch",
        rotary_dim=48,
        rotary_interleaved=False,
    ),
]  # fmt: skip

_SPLITS = [
    _case("splits_1", "no splits", _MIXED, 200, num_splits=1, **_DECODE),
    _case("splits_3", "at most three", _MIXED, 200, num_splits=3, **_DECODE),
    _case("splits_many", "more splits than tiles of keys", _MIXED, 200, num_splits=50, **_DECODE),
    _case("split_keys", "splits of 48 keys", _MIXED, 200, split_keys=48, **_DECODE),
    _case("split_keys_leftpad", "splits count from the padding", _MIXED, 220, split_keys=64, leftpad=(5, 0, 77, 3, 9)),
    _case("split_keys_pages", "splits end within pages", _MIXED, 200, split_keys=40, page_size=16, seqlen_q=3),
]

_LAYOUTS = [
    _case(f"layout_{layout}", "strides", (70, 0, 33), 100, 3, 3, headdim=d, causal=True, layout=layout)
    for layout, d in (
        ("bhsd", 64),
        ("sbhd", 64),
        ("packed", 64),
        ("padded_dim", 40),
        ("misaligned", 64),
        ("odd_start", 64),
        ("strided_rows", 64),
    )
] + [
    _case("layout_pages_bhsd", "pages whose heads come first", (70, 33), 100, page_size=16, layout="bhsd", **_DECODE),
    _case("layout_pages_packed", "keys and values in one pool", (70, 9), 100, page_size=16, layout="packed", **_DECODE),
]  # fmt: skip

# Enough rows of a group for the kernel of Hopper that splits the keys.
_GROUP: dict[str, Any] = {"nheads": 8, "nheads_k": 2}
_LONGER = (300, 5, 0, 707, 64)
MANY_ROWS = [
    _case("many_rows", "a group of four, one tile", _LONGER, 720, 16, **_GROUP),
    _case("many_rows_causal", "each query its own keys", _LONGER, 760, 20, 20, causal=True, **_GROUP),
    _case("many_rows_tiles", "four tiles, the last with few rows", _LONGER, 720, 49, nheads=16, causal=True),
    _case("many_rows_129", "one row more than a tile", _LONGER, 720, 129, nheads=2, causal=True),
    _case("many_rows_gqa_3", "a row block ends within a group", _LONGER, 720, 30, nheads=9, nheads_k=3, causal=True),
    _case("many_rows_mqa", "all heads in one tile", (900, 1), 1000, 3, 3, nheads=24, nheads_k=1, causal=True),
    _case("many_rows_window", "a band over several runs", _LONGER, 720, 40, window_size=(150, 20), **_GROUP),
    _case("many_rows_far_window", "row tiles see different keys", (900, 400), 1000, 200, window_size=(30, 0), **_GROUP),
    _case("many_rows_softcap", "capped scores", _LONGER, 720, 17, softcap=3.0, causal=True, **_GROUP),
    _case("many_rows_wide", "references move and scores are lost", _LONGER, 720, 17, softmax_scale=5.0, **_GROUP),
    _case("many_rows_leftpad", "padding", (300, 9, 707), 720, 20, leftpad=(37, 9, 600), causal=True, **_GROUP),
    _case("many_rows_batch_idx", "cache rows in another order", _LONGER, 720, 20, spare_rows=3, **_GROUP),
    _case("many_rows_rotary", "rotated queries", _LONGER, 760, 20, 20, rotary_dim=32, causal=True, **_GROUP),
    _case("many_rows_long", "many splits", (4000, 37), 4096, 16, **_GROUP),
    _case("many_rows_one_row", "a batch of one", (3000,), 3000, 40, nheads=8, nheads_k=1, lengths_as="none"),
] + [
    _case(f"many_rows_headdim_{d}", f"head dim {d}", (300, 9, 707), 720, 20, headdim=d, causal=True, **_GROUP)
    for d in (72, 96, 128, 192, 256)
] + [
    _case(f"many_rows_{d}{name}", "two tiles, the last with few rows", _LONGER, 720, 40, headdim=d, **_GROUP, **options)
    for d in (192, 256)
    for name, options in (("_causal", {"causal": True}), ("_window", {"window_size": (150, 20)}))
] + [
    _case(f"many_rows_pages_{size}", "boxes of a page", _LONGER, 760, 20, 20, page_size=size, headdim=d, causal=True,
          **_GROUP)
    for size, d in ((8, 64), (24, 128), (64, 128), (80, 256), (112, 192), (256, 96), (360, 128))
] + [
    _case(f"many_rows_small_{d}_{size}", "short enough for a sanitizer", (250, 9, 0), 290, 20, 20, headdim=d,
          causal=True, window_size=(120, 0), page_size=size, **_GROUP)
    for size, d in ((8, 64), (24, 128), (8, 256), (0, 128))
]  # fmt: skip

# Rows of a group that need much fewer tiles of 192 rows than of 128. A tile has three consumer warpgroups.
_TALL: dict[str, Any] = {"nheads": 16, "nheads_k": 4, "causal": True}
TALL_TILES = [
    _case(f"tall_{rows}_{d}", f"{consumers} of three consumers have rows of the last tile", _LONGER, 720, rows // 4,
          headdim=d, **_TALL)
    for d in (64, 96, 128)
    for rows, consumers in ((132, 3), (192, 3), (260, 2), (576, 3))
] + [
    _case("tall_mqa", "all heads in one tile", _LONGER, 740, 9, 9, nheads=16, nheads_k=1, headdim=128, causal=True),
    _case("tall_two_heads", "the most queries of a tile", _LONGER, 720, 96, nheads=4, headdim=128, causal=True),
    _case("tall_gqa_3", "a consumer ends within a group", _LONGER, 720, 61, nheads=9, nheads_k=3, headdim=72,
          causal=True),
    _case("tall_window", "a band over several runs", _LONGER, 720, 33, headdim=128, window_size=(120, 20), nheads=8),
    _case("tall_window_64", "the same", _LONGER, 720, 40, window_size=(150, 20), **_GROUP),
    _case("tall_far_window", "consumers see different keys", (900, 400), 1000, 130, nheads=4, headdim=96,
          window_size=(30, 0)),
    _case("tall_softcap", "capped scores", _LONGER, 720, 33, softcap=3.0, headdim=128, **_TALL),
    _case("tall_leftpad", "padding", (300, 9, 707), 720, 33, leftpad=(37, 9, 600), headdim=128, **_TALL),
    _case("tall_long", "many splits", (4000, 37), 4096, 33, headdim=128, **_TALL),
    _case("tall_small", "short enough for a sanitizer", (250, 9, 0), 290, 17, nheads=16, nheads_k=1, headdim=128,
          causal=True, window_size=(120, 0)),
    *(_case(f"tall_small_{d}", "the same", (250, 9, 0), 290, 17, nheads=16, nheads_k=1, headdim=d, causal=True)
      for d in (64, 96)),
] + [
    _case(f"tall_pages_{size}", "boxes of a page", _LONGER, 760, 33, 33, page_size=size, headdim=d, **_TALL)
    for size, d in ((8, 128), (16, 128), (24, 64), (64, 128), (96, 96), (256, 128), (360, 128))
]  # fmt: skip

# How the split-KV kernel of CUDA cuts keys into pieces on 132 SMs, with few rows. On Hopper a cache for fewer keys
# would run on clusters.
_EIGHT_HEADS: dict[str, Any] = {"nheads": 16, "nheads_k": 8, "causal": True, "seqlen_new": 1}
_LENGTHS_OF_16 = (300, 0, 17, 299, 64, 65, 128, 1, 300, 200, 100, 50, 25, 12, 6, 3)
PIECES = [
    _case("pieces_whole_heads", "equal lengths: a piece is a head", (299,) * 16, 2100, **_EIGHT_HEADS),
    _case("pieces_mixed_heads", "the same shape, mixed lengths", _LENGTHS_OF_16, 1100, headdim=128, **_EIGHT_HEADS),
    _case("pieces_of_a_head", "equal lengths: a head has several pieces", (700,) * 2, 8300, **_EIGHT_HEADS),
    _case("pieces_of_heads", "equal lengths: a piece has several heads", (90,) * 64, 2100, **_EIGHT_HEADS),
    _case("pieces_of_sequences", "CTAs of the same keys", (700, 3, 0), 1100, headdim=128, **_EIGHT_HEADS),
    _case("pieces_fewer_than_heads", "a piece has many heads", tuple(range(98)), 2100, headdim=32, **_EIGHT_HEADS),
    _case("pieces_of_40_heads", "the heads do not fill the CTAs", (300, 200), 2100, nheads=40, nheads_k=40,
          **_DECODE),
    _case("pieces_idle_sms", "with a CTA for each head a quarter of the SMs would be idle", _LENGTHS_OF_16[:12], 1000,
          headdim=256, **_EIGHT_HEADS),
    _case("pieces_short", "less than two units", (3, 0), 8300, **_EIGHT_HEADS),
]  # fmt: skip

# On clusters and in the wide form of Hopper, with 132 SMs. Most are short enough for a sanitizer. CLUSTER_SIZES has the
# CTAs of each cluster.
CLUSTERS = [
    _case("cluster", "the CTAs of a cluster share a head", (250,), 256, **_EIGHT_HEADS),
    _case("cluster_pages_7", "the same in pages", (250,), 256, page_size=7, **_EIGHT_HEADS),
    _case("cluster_few_keys", "most CTAs have no key", (20,), 256, headdim=128, **_EIGHT_HEADS),
    _case("cluster_192", "a CTA fills an SM", (250,), 256, nheads=4, nheads_k=4, headdim=192, **_DECODE),
    _case("cluster_of_1", "a CTA has a head", _LENGTHS_OF_16, 301, headdim=128, **_EIGHT_HEADS),
    _case("cluster_of_1_96", "nearly as many heads as SMs", (250, 9, 0, 60) * 4, 300, headdim=96, **_EIGHT_HEADS),
    _case("cluster_of_1_waves", "more CTAs than fit at once", tuple(range(70)), 100, headdim=32, **_EIGHT_HEADS),
    _case("cluster_of_1_256", "the same, one CTA an SM", (250, 9, 0) * 6, 300, headdim=256, **_EIGHT_HEADS),
    _case("cluster_of_1_long_256", "the same, a cache for more keys", _LENGTHS_OF_16, 1000, headdim=256,
          **_EIGHT_HEADS),
    _case("cluster_of_1_512", "too few keys for two CTAs", _LENGTHS_OF_16, 512, headdim=128, **_EIGHT_HEADS),
    _case("cluster_of_1_768", "the same at head dim 64", _LENGTHS_OF_16, 768, **_EIGHT_HEADS),
    _case("cluster_of_1_many", "too many heads for two CTAs", (*_LENGTHS_OF_16, *range(5)), 900, headdim=128,
          **_EIGHT_HEADS),
    _case("cluster_of_1_one_length", "the host knows that no sequence is longer", (600,) * 16, 900, lengths_as="int",
          headdim=128, **_EIGHT_HEADS),
    _case("cluster_of_1_row", "one sequence, many heads", (600,), 900, nheads=80, nheads_k=80, headdim=128, **_DECODE),
    _case("cluster_of_2", "two CTAs have a head", (250, 9, 0, 33, 100, 7, 1, 64), 256, **_EIGHT_HEADS),
    _case("cluster_of_2_for_1", "nearly as many heads as SMs, lengths may differ", _LENGTHS_OF_16, 900, headdim=128,
          **_EIGHT_HEADS),
    _case("cluster_of_2_for_1_64", "the same in pages, more heads than SMs", (*_LENGTHS_OF_16, 70), 1500, page_size=20,
          **_EIGHT_HEADS),
    _case("cluster_of_2_window", "few keys are seen", (250, 9, 0, 33, 100, 7, 1, 64), 256, headdim=128,
          **{**_EIGHT_HEADS, "seqlen_q": 3, "seqlen_new": 3, "window_size": (40, 0)}),
    _case("cluster_of_2_one_length", "the host knows the length of long caches", (4200,) * 8, 9000, lengths_as="int",
          headdim=128, **_EIGHT_HEADS),
    _case("cluster_of_2_full", "the same, without cache_seqlens", (2500,) * 8, 2500, lengths_as="none", headdim=128,
          **{**_EIGHT_HEADS, "seqlen_new": None}),
    _case("cluster_of_4", "four CTAs have a head", (250, 90, 0), 256, headdim=128, **_EIGHT_HEADS),
    _case("cluster_of_4_pages_7", "the same in pages", (250, 90, 0), 256, page_size=7, **_EIGHT_HEADS),
    _case("cluster_of_4_256", "more CTAs of an SM each than GPCs have room for", (250, 90, 0, 33), 256, headdim=256,
          **_EIGHT_HEADS),
    _case("cluster_of_8_leftpad", "left padding, other rows", (250, 90), 256, leftpad=(65, 9), spare_rows=2,
          **_EIGHT_HEADS),
]  # fmt: skip
CLUSTER_SIZES = {case.name: 16 for case in CLUSTERS} | {
    case.name: int(case.name.split("_")[2]) for case in CLUSTERS if case.name.startswith("cluster_of_")
}
WIDE_CTAS = [
    _case("wide_sequences", "two sequences", (250, 90), 2100, headdim=128, **_EIGHT_HEADS),
    _case("wide_one_length", "a length that the host knows", (2500,) * 5, 2600, lengths_as="int", headdim=128,
          **_EIGHT_HEADS),
    _case("wide_one_row", "one sequence in a cache for many keys", (250,), 16500, **_EIGHT_HEADS),
    _case("wide_one_row_pages_7", "the same in pages", (250,), 16500, page_size=7, **_EIGHT_HEADS),
] + [
    _case(f"wide_runs{name}", "a CTA goes from sequence to sequence",
          tuple(53 * i % (keys - 1) * (i % 7 > 0) for i in range(40)), 2100, **{**_EIGHT_HEADS, **options})
    for name, keys, options in (
        ("_64", 300, {}),
        ("_96", 300, {"headdim": 96}),
        ("_128", 300, {"headdim": 128}),
        ("_empty_32", 300, {"headdim": 32, "seqlen_new": None}),
        ("_empty_96", 300, {"headdim": 96, "seqlen_new": None}),
        ("_long_64", 1500, {"page_size": 20, "seqlen_new": None}),
        ("_long_128", 1500, {"headdim": 128, "page_size": 16, "seqlen_new": None}),
        ("_window", 700, {"headdim": 128, "window_size": (150, 0), "seqlen_q": 3, "seqlen_new": 3}),
        ("_misaligned", 300, {"headdim": 77, "softcap": 4.0, "alibi": "heads"}),
    )
]  # fmt: skip

KVCACHE_CASES: list[KvCacheCase] = [
    *(*_LENGTHS, *_HEADS, *_ROWS, *_PAGES, *_FEATURES, *_SPLITS, *_LAYOUTS),
    *(case for case in MANY_ROWS if case.name in ("many_rows_tiles", "many_rows_gqa_3", "many_rows_pages_24")),
]
BY_NAME = {case.name: case for case in (*KVCACHE_CASES, *MANY_ROWS, *TALL_TILES, *PIECES, *CLUSTERS, *WIDE_CTAS)}
# Calls of Hopper's kernel for a cache of latent vectors.
_LATENT: dict[str, Any] = {"nheads": 16, "nheads_k": 1, "headdim": 576, "own_headdim_v": 512, "v_in_k": True}
SMALL_LATENT_CASES = [
    _case("latent", "v is in the columns of k", (250, 9, 0), 290, **_LATENT),
    _case("latent_queries", "several queries", (250, 9, 70), 290, seqlen_q=5, causal=True, **_LATENT),
    _case("latent_pages", "pages", (250, 9, 70), 288, page_size=16, **_LATENT),
    _case("latent_leftpad", "left padding, other rows", (250, 9), 290, leftpad=(65, 9), spare_rows=2, **_LATENT),
]
SMALL_KVCACHE_CASES = [c for c in BY_NAME.values() if max(c.totals) <= 300 and c.seqlen_q <= 20]

# Offsets of more than 31 bits: cache rows, or keys, so far apart that the last one begins past 2^31.
LARGE_KVCACHE_CASES: list[KvCacheCase] = [
    _case("far_batches", "row * batch_stride passes 2^31", (40, 90), 100, layout="far_batches", memory_gib=4.1),
    _case("far_rows", "key * row_stride passes 2^31", (190,), 192, layout="far_rows", memory_gib=6.1, **_DECODE),
    _case("far_pages", "page * page_stride", (1,), 2, 1, 1, page_size=2, layout="far_batches", memory_gib=8.1),
]  # fmt: skip


# ---- the tensors of a case ------------------------------------------------------------------------------------------


@dataclass
class CacheCall:
    """The tensors of a case, in buffers full of poison."""

    case: KvCacheCase
    q: Tensor  # [batch, seqlen_q, nheads, headdim]
    k_cache: Tensor  # [batch_cache, capacity, nheads_k, headdim], or [num_pages, page_size, nheads_k, headdim]
    v_cache: Tensor
    new: tuple[Tensor, Tensor] | tuple[None, None]  # k and v
    lengths: Tensor | int | None  # cache_seqlens
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    rotary: tuple[Tensor, Tensor] | tuple[None, None]  # cos and sin
    alibi_slopes: Tensor | None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The first five arguments."""
        return self.q, self.k_cache, self.v_cache, *self.new

    @property
    def definition(self) -> dict[str, Any]:
        """The other arguments that define the result, as the function and the reference take them."""
        return {
            "rotary_cos": self.rotary[0],
            "rotary_sin": self.rotary[1],
            "cache_seqlens": self.lengths,
            "cache_batch_idx": self.cache_batch_idx,
            "cache_leftpad": self.cache_leftpad,
            "block_table": self.block_table,
            "softmax_scale": self.case.softmax_scale,
            "causal": self.case.causal,
            "window_size": self.case.window_size,
            "softcap": self.case.softcap,
            "rotary_interleaved": self.case.rotary_interleaved,
            "alibi_slopes": self.alibi_slopes,
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """The other arguments of the function."""
        return {**self.definition, "num_splits": self.case.num_splits, "split_keys": self.case.split_keys}

    def slots(self, b: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The first two indices into a cache of keys ``start .. stop - 1`` of sequence b."""
        key = torch.arange(start, stop, device=self.q.device)
        if self.block_table is not None:
            return self.block_table[b].long()[key // self.case.page_size], key % self.case.page_size
        row = b if self.cache_batch_idx is None else int(self.cache_batch_idx[b])
        return torch.full_like(key, row), key

    def visible(self, b: int) -> tuple[Tensor, Tensor]:
        """`slots` of the keys after the call, without the left padding."""
        return self.slots(b, 0 if self.case.leftpad is None else self.case.leftpad[b], self.case.totals[b])

    def appended(self, b: int) -> tuple[Tensor, Tensor]:
        """`slots` of the new keys."""
        return self.slots(b, self.case.lengths[b], self.case.totals[b])


def integers(values: Any, device: str) -> Tensor:
    """int32 ``[n]``, surrounded by numbers far outside of any tensor."""
    buffer = torch.tensor([NO_PAGE] * 4 + list(values) + [NO_PAGE] * 4, dtype=torch.int32, device=device)
    return buffer[4:-4]


def _block_table(case: KvCacheCase, draw: torch.Generator) -> tuple[Tensor, int]:
    """A permuted block table, whose unused entries are no pages, and the number of pages in the pool."""
    pool = POOL_FACTOR * case.batch * case.max_pages
    numbers = torch.randperm(pool, generator=draw)[: case.batch * case.max_pages]
    if case.layout.startswith("far"):
        numbers = pool - 1 - torch.arange(case.batch * case.max_pages)
    table = numbers.view(case.batch, case.max_pages).int()
    table[:, : case.shared_pages] = table[:1, : case.shared_pages]
    for b, total in enumerate(case.totals):
        table[b, -(-total // case.page_size) :] = NO_PAGE if b % 2 else -7
    return table, pool


def make_call(case: KvCacheCase, dtype: torch.dtype, device: str, seed: int) -> CacheCall:
    """The same seed gives the same values everywhere. What belongs to nobody is NaN."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def alloc(shape: tuple[int, ...]) -> Tensor:
        return poisoned(shape, dtype, device, math.nan)

    def random_(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=wide).to(device, dtype)

    per_key = (case.nheads_k, case.headdim)
    near = "bshd" if case.layout.startswith("far") else case.layout
    q_shape = (case.batch, case.seqlen_q, case.nheads, case.headdim)
    q, k, v = laid_out(near, alloc, q_shape, (case.batch, case.seqlen_new or 0, *per_key), case.headdim_v)
    for x in (q, k, v):
        store(x, random_(*x.shape))

    table, batch_idx, rows = None, None, case.batch
    if case.page_size:
        table, rows = _block_table(case, draw)
        table = integers(table.flatten().tolist(), device).view(table.shape)
    elif case.spare_rows:
        rows += case.spare_rows
        batch_idx = integers(torch.randperm(rows, generator=draw)[: case.batch].tolist(), device)
    no_q = (rows, case.page_size or case.keys, 1, 1) if case.layout.startswith("far") else (1, 0, 1, 1)
    cache_shape = (rows, case.page_size or case.keys, *per_key)
    _, k_cache, v_cache = laid_out(case.cache_layout or case.layout, alloc, no_q, cache_shape, case.headdim_v)
    if case.v_in_k:
        v_cache = k_cache[..., : case.headdim_v]

    cos = sin = None
    if case.rotary_dim:
        positions = case.keys + max(case.seqlen_q - (case.seqlen_new or 0), 0) + seed % 3
        angles = torch.rand(positions, case.rotary_dim // 2, generator=draw, dtype=wide) * 6.0
        cos, sin = (poisoned(tuple(angles.shape), dtype, device).copy_(f(angles)) for f in (torch.cos, torch.sin))
    lengths = {"tensor": integers(case.lengths, device), "int": case.lengths[0] if case.lengths else 0, "none": None}
    call = CacheCall(
        case,
        q,
        k_cache,
        v_cache,
        (None, None) if case.seqlen_new is None else (k, v),
        lengths[case.lengths_as],
        batch_idx,
        None if case.leftpad is None else integers(case.leftpad, device),
        table,
        (None, None) if cos is None or sin is None else (cos, sin),
        make_slopes(case.alibi, case.batch, case.nheads, device),
    )
    for b in range(case.batch):
        start = 0 if case.leftpad is None else min(case.leftpad[b], case.lengths[b])
        slots = call.slots(b, start, case.lengths[b])
        for cache in (k_cache, v_cache):
            cache[slots] = random_(case.lengths[b] - start, *cache.shape[2:])
    return call
