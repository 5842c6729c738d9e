"""flash_attn_mini.masks: each builder gives the keys of a dense mask that is written down another way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, masks
from flash_attn_mini.reference import attention_reference
from flash_attn_mini.reference.masks import in_key_ranges, visible_keys

from ..support.one_thread import one_thread  # noqa: F401


def integer(draw: torch.Generator, low: int, high: int) -> int:
    """One of low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=draw))


def dense(key_ranges: Tensor, seqlen_k: int) -> Tensor:
    """The mask of key_ranges, whose form is checked: every builder keeps it."""
    assert key_ranges.dtype == torch.int32
    assert key_ranges.shape[-1] == 2
    assert key_ranges.ndim == 4 or key_ranges.shape[-2] == 2
    if key_ranges.numel():
        assert key_ranges.min() >= 0
        assert key_ranges.max() <= seqlen_k
    return in_key_ranges(key_ranges, seqlen_k)


def drawn_boundaries(draw: torch.Generator, rows: int, number: int, seqlen: int) -> Tensor:
    """Boundaries of documents, some of which are empty; tokens before the first and after the last have none."""
    return torch.randint(0, seqlen + 1, (rows, number), generator=draw).sort(1).values


def of_boundaries(boundaries: list[int], seqlen: int) -> Tensor:
    mask = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    for begin, end in pairwise(boundaries):
        mask[begin:end, begin:end] = True
    return mask


def drawn_runs(draw: torch.Generator, rows: int, length: int, most: int) -> Tensor:
    """bool [rows, length] with at most `most` runs of True in a row, also none and rows of True only."""
    edges = torch.randint(0, length + 1, (rows, most, 2), generator=draw).sort(-1).values
    place = torch.arange(length)
    return ((place >= edges[..., :1]) & (place < edges[..., 1:])).any(1)


# ---- builders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_documents_of_boundaries(dtype: torch.dtype, draw: torch.Generator) -> None:
    for _ in range(20):
        seqlen = integer(draw, 1, 30)
        boundaries = drawn_boundaries(draw, 3, integer(draw, 1, 7), seqlen).to(dtype)
        expected = torch.stack([of_boundaries(row, seqlen) for row in boundaries.tolist()])[:, None]
        assert torch.equal(dense(masks.documents(boundaries, seqlen=seqlen), seqlen), expected)
        assert torch.equal(dense(masks.documents(boundaries[0], seqlen=seqlen), seqlen), expected[:1])
        longest = int(boundaries.max())
        assert torch.equal(dense(masks.documents(boundaries), longest), expected[..., :longest, :longest])


def test_documents_of_segments(draw: torch.Generator) -> None:
    for _ in range(20):
        seqlen = integer(draw, 1, 30)
        segments = torch.randint(-1, 2, (3, seqlen), generator=draw)
        neighbours = (segments.diff(dim=1, prepend=segments[:, :1]) != 0).cumsum(1)
        expected = neighbours[:, None, :, None] == neighbours[:, None, None, :]
        assert torch.equal(dense(masks.documents(segment_ids=segments), seqlen), expected)


def test_prefix_lm(draw: torch.Generator) -> None:
    for _ in range(20):
        seqlen = integer(draw, 1, 30)
        lengths = torch.randint(-2, seqlen + 3, (4,), generator=draw)
        prefix = torch.arange(seqlen) < lengths[:, None]
        expected = prefix[:, None, None] | visible_keys(seqlen, seqlen, causal=True)
        assert torch.equal(dense(masks.prefix_lm(lengths, seqlen), seqlen), expected)


def test_chunks(draw: torch.Generator) -> None:
    for _ in range(20):
        seqlen, chunk_size = integer(draw, 1, 30), integer(draw, 1, 12)
        seqlen_q = integer(draw, 1, 35)
        position = torch.arange(seqlen_q)[:, None] + seqlen - seqlen_q
        expected = (position >= 0) & (position // chunk_size == torch.arange(seqlen) // chunk_size)
        assert torch.equal(dense(masks.chunked(seqlen, chunk_size, seqlen_q=seqlen_q), seqlen)[0, 0], expected)
        left = torch.randint(0, seqlen + 1, (3,), generator=draw)
        query, key = position - left[:, None, None], torch.arange(seqlen) - left[:, None, None]
        expected = (query >= 0) & (query // chunk_size == key // chunk_size)
        found = masks.chunked(seqlen, chunk_size, seqlen_q=seqlen_q, left_padding=left)
        assert torch.equal(dense(found, seqlen)[:, 0], expected)
    assert torch.equal(dense(masks.chunked(7, 2**62), 7)[0, 0], torch.ones(7, 7, dtype=torch.bool))


def test_padding(draw: torch.Generator) -> None:
    for _ in range(20):
        seqlen_q, seqlen_k = integer(draw, 0, 9), integer(draw, 1, 30)
        for most in (1, 2):
            kept = drawn_runs(draw, 4, seqlen_k, most)
            found = masks.padding(kept, seqlen_q)
            assert torch.equal(dense(found, seqlen_k), kept[:, None, None].expand(4, 1, seqlen_q, seqlen_k))
            assert found.stride(2) == 0 or seqlen_q == 1, "all queries share memory"
            assert most == 2 or found.ndim == 4


@pytest.mark.parametrize("causal", [True, False])
def test_first_keys_and_a_window(causal: bool, draw: torch.Generator) -> None:
    for _ in range(20):
        seqlen_q, seqlen_k = integer(draw, 1, 30), integer(draw, 0, 30)
        number, window = integer(draw, 0, 35), integer(draw, 0, 35)
        first = (torch.arange(seqlen_k) < number).expand(seqlen_q, seqlen_k)
        if causal:
            first = first & visible_keys(seqlen_q, seqlen_k, causal=True)
        expected = first | visible_keys(seqlen_q, seqlen_k, window_size=(window, 0))
        found = masks.global_and_window(seqlen_q, seqlen_k, number, window, causal=causal)
        assert torch.equal(dense(found, seqlen_k)[0, 0], expected)
    assert torch.equal(dense(masks.global_and_window(3, 5, 2**62, 2**62), 5)[0, 0], visible_keys(3, 5, causal=True))


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_dense_mask_is_converted_and_back(most: int, draw: torch.Generator) -> None:
    for _ in range(20):
        sizes = (integer(draw, 1, 3), integer(draw, 1, 3), integer(draw, 0, 8), integer(draw, 0, 20))
        mask = drawn_runs(draw, sizes[0] * sizes[1] * sizes[2], sizes[3], most).view(sizes)
        found = masks.from_dense(mask)
        assert torch.equal(dense(found, sizes[3]), mask)
        assert most == 2 or found.ndim == 4
        strided = mask.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(masks.from_dense(strided), found)


def test_every_mask_of_few_keys_is_converted_or_refused() -> None:
    """All masks of seven keys, each a call of its own."""
    for number in range(2**7):
        row = torch.tensor([bool(number >> place & 1) for place in range(7)])
        runs = int((row.int().diff(prepend=torch.zeros(1, dtype=torch.int)) == 1).sum())
        mask = row[None, None, None]
        if runs <= 2:
            assert torch.equal(dense(masks.from_dense(mask), 7), mask)
            continue
        with pytest.raises(ValueError, match=rf"mask has {runs} runs of True .* allowed: at most 2"):
            masks.from_dense(mask)


def test_intersections(draw: torch.Generator) -> None:
    for _ in range(20):
        seqlen = integer(draw, 1, 30)
        documents = masks.documents(drawn_boundaries(draw, 1, 5, seqlen)[0], seqlen=seqlen)
        for most in (1, 2):
            kept = masks.padding(drawn_runs(draw, 3, seqlen, most), seqlen)
            expected = dense(documents, seqlen) & dense(kept, seqlen)
            for pair in ((documents, kept), (kept, documents)):
                found = masks.intersection(*pair)
                assert torch.equal(dense(found, seqlen), expected)
                assert found.ndim == kept.ndim


# ---- devices, torch.compile, attention -------------------------------------------------------------------------------

BUILDERS: dict[str, Callable[..., Tensor]] = {
    "documents": lambda ids, lengths: masks.documents(lengths.cumsum(0).clamp(max=ids.shape[1]), seqlen=ids.shape[1]),
    "segments": lambda ids, lengths: masks.documents(segment_ids=ids),
    "prefix_lm": lambda ids, lengths: masks.prefix_lm(lengths, ids.shape[1]),
    "chunked": lambda ids, lengths: masks.chunked(ids.shape[1], 3, left_padding=lengths),
    "global_and_window": lambda ids, lengths: masks.global_and_window(4, ids.shape[1], 2, 3, device=ids.device),
    "intersection": lambda ids, lengths: masks.intersection(
        masks.documents(segment_ids=ids), masks.prefix_lm(lengths, ids.shape[1])
    ),
}
each_builder = pytest.mark.parametrize("name", BUILDERS)


@each_builder
def test_builders_are_traced(name: str, draw: torch.Generator) -> None:
    """One program serves all values and lengths."""
    torch._dynamo.reset()
    compiled = torch.compile(BUILDERS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for seqlen in (9, 17, 30):
        ids = torch.randint(0, 2, (3, seqlen), generator=draw)
        lengths = torch.randint(0, 10, (3,), generator=draw)
        assert torch.equal(compiled(ids, lengths), BUILDERS[name](ids, lengths))


@each_builder
def test_builders_keep_the_device_and_read_no_value(name: str) -> None:
    ids, lengths = torch.zeros(3, 9, dtype=torch.int, device="meta"), torch.zeros(3, dtype=torch.int, device="meta")
    assert BUILDERS[name](ids, lengths).device.type == "meta"


@pytest.mark.gpu
def test_builders_do_not_wait_for_a_gpu(draw: torch.Generator) -> None:
    ids, lengths = torch.randint(0, 2, (3, 30), generator=draw), torch.randint(0, 10, (3,), generator=draw)
    on_gpu = (ids.cuda(), lengths.cuda())
    for build in BUILDERS.values():
        expected = build(ids, lengths)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = build(*on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert found.is_cuda
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["documents", "segments", "prefix_lm", "chunked", "padding", "global_and_window"])
def test_attention_with_the_ranges_of_a_builder(
    name: str, causal: bool, backend: str, device: str, draw: torch.Generator
) -> None:
    """The result is that of the reference with the dense mask as a bias."""
    ids = torch.randint(0, 2, (3, 40), generator=draw)
    if name == "padding":
        key_ranges = masks.padding(drawn_runs(draw, 3, 40, 2), 40)
    elif name == "global_and_window":
        key_ranges = masks.global_and_window(40, 40, integer(draw, 0, 5), integer(draw, 0, 9), causal=causal)
    else:
        key_ranges = BUILDERS[name](ids, torch.randint(0, 20, (3,), generator=draw))
    q, k, v = (torch.randn(3, 40, heads, 32, generator=draw).half() for heads in (4, 2, 2))
    bias = torch.zeros(()).masked_fill(~dense(key_ranges, 40), -torch.inf)
    expected, _ = attention_reference(q, k, v, causal=causal, attn_bias=bias)
    on_device = [x.to(device) for x in (q, k, v, key_ranges)]
    out = flash_attn_func(*on_device[:3], causal=causal, key_ranges=on_device[3], backend=backend)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-2, atol=1e-2)


# ---- errors ----------------------------------------------------------------------------------------------------------

INTEGERS = torch.tensor([0, 3, 7])
ONE = torch.zeros(1, 1, 5, 2, dtype=torch.int)
TWO = torch.zeros(1, 1, 5, 2, 2, dtype=torch.int)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.documents(), "documents has neither cu_seqlens nor segment_ids; allowed: one of the two"),
        (
            lambda: masks.documents(INTEGERS, segment_ids=INTEGERS[None]),
            "documents has both cu_seqlens and segment_ids; allowed: one of the two",
        ),
        (
            lambda: masks.documents(segment_ids=INTEGERS[None], seqlen=3),
            "seqlen is given together with segment_ids; allowed: None",
        ),
        (
            lambda: masks.documents(INTEGERS[None, None]),
            r"cu_seqlens has shape \[1, 1, 3\]; allowed: \[documents \+ 1\] or \[batch, documents \+ 1\]",
        ),
        (lambda: masks.documents(INTEGERS[:0]), r"cu_seqlens has shape \[0\]; allowed: .* at least one boundary"),
        (lambda: masks.documents(segment_ids=INTEGERS), r"segment_ids has shape \[3\]; allowed: \[batch, seqlen\]"),
        (lambda: masks.documents(INTEGERS.flip(0)), "cu_seqlens falls from 7 to 3; allowed: rising or equal values"),
        (lambda: masks.documents(INTEGERS, seqlen=6), "cu_seqlens has 7; allowed: 0 to the number of tokens, 6"),
        (lambda: masks.documents(INTEGERS - 1), "cu_seqlens has -1; allowed: 0 to the number of tokens, 6"),
        (lambda: masks.documents(INTEGERS, seqlen=-1), "seqlen is -1; allowed: an integer, 0 or more"),
        (lambda: masks.prefix_lm(INTEGERS[None], 5), r"prefix_lengths has shape \[1, 3\]; allowed: \[batch\]"),
        (lambda: masks.prefix_lm(INTEGERS, -2), "seqlen is -2; allowed: an integer, 0 or more"),
        (lambda: masks.chunked(5, 0), "chunk_size is 0; allowed: an integer, 1 or more"),
        (lambda: masks.chunked(-5, 1), "seqlen is -5; allowed: an integer, 0 or more"),
        (lambda: masks.chunked(5, 1, seqlen_q=-1), "seqlen_q is -1; allowed: an integer, 0 or more"),
        (
            lambda: masks.chunked(5, 1, left_padding=INTEGERS[None]),
            r"left_padding has shape \[1, 3\]; allowed: \[batch\]",
        ),
        (
            lambda: masks.chunked(5, 1, left_padding=INTEGERS, device="cpu"),
            "device is given together with left_padding; allowed: None",
        ),
        (lambda: masks.padding(INTEGERS > 0, 5), r"key_mask has shape \[3\]; allowed: \[batch, seqlen_k\]"),
        (lambda: masks.padding(INTEGERS[None] > 0, -5), "seqlen_q is -5; allowed: an integer, 0 or more"),
        (
            lambda: masks.padding(torch.arange(12).view(2, 6) % 12 % 2 > 0, 5),
            "key_mask has 3 runs of True in the row of batch 0; allowed: at most 2",
        ),
        (lambda: masks.global_and_window(5, 5, -1, 2), "num_global is -1; allowed: an integer, 0 or more"),
        (lambda: masks.global_and_window(5, 5, 1, -2), "window is -2; allowed: an integer, 0 or more"),
        (
            lambda: masks.from_dense(INTEGERS > 0),
            r"mask has shape \[3\]; allowed: \[1 or batch, 1 or nheads, seqlen_q, seqlen_k\]",
        ),
        (
            lambda: masks.from_dense(torch.ones(2, 3, 4, 9).bool() & (torch.arange(9) % 2 == 0)),
            "mask has 5 runs of True in the row of batch 0, head 0, query 0; allowed: at most 2",
        ),
        (lambda: masks.intersection(TWO, TWO), "first and second have two ranges for each query; allowed: one of"),
        (
            lambda: masks.intersection(ONE, ONE[0]),
            r"second has shape \[1, 5, 2\]; allowed: \[1 or batch, 1 or nheads, seqlen_q, 2\] or \[.* 2, 2\]",
        ),
        (
            lambda: masks.intersection(ONE, ONE[:, :, :4]),
            r"second has shape \[1, 1, 4, 2\]; allowed: .* the seqlen_q of first, which has shape \[1, 1, 5, 2\]",
        ),
        (
            lambda: masks.intersection(ONE.expand(2, 3, 5, 2), ONE.expand(3, 3, 5, 2)),
            r"second has shape \[3, 3, 5, 2\]; allowed: the batch \(or 1\), the nheads \(or 1\)",
        ),
    ],
)
def test_wrong_values(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^flash_attn_mini: {message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.documents([0, 3]), r"cu_seqlens is \[0, 3\] \(list\); allowed: a torch.Tensor"),
        (lambda: masks.documents(INTEGERS.float()), r"cu_seqlens is torch.float32 .*; allowed: a tensor of integers"),
        (lambda: masks.documents(segment_ids=INTEGERS[None] > 0), "segment_ids is torch.bool .* a tensor of integers"),
        (lambda: masks.prefix_lm(3, 5), r"prefix_lengths is 3 \(int\); allowed: a torch.Tensor"),
        (lambda: masks.prefix_lm(INTEGERS, 5.5), r"seqlen is 5.5 \(float\); allowed: an integer, 0 or more"),
        (lambda: masks.chunked(5, "2"), r"chunk_size is '2' \(str\); allowed: an integer, 1 or more"),
        (lambda: masks.chunked(5, 2, left_padding=INTEGERS / 2), "left_padding is torch.float32 .* tensor of integers"),
        (lambda: masks.padding(INTEGERS[None], 5), "key_mask is torch.int64 .*; allowed: torch.bool"),
        (lambda: masks.from_dense(torch.zeros(1, 1, 2, 2)), "mask is torch.float32 .*; allowed: torch.bool"),
        (
            lambda: masks.global_and_window(5, 5, 1, None),
            r"window is None \(NoneType\); allowed: an integer",
        ),
        (lambda: masks.intersection(ONE, ONE.long()), "second is torch.int64 .*; allowed: torch.int32"),
    ],
)
def test_wrong_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^flash_attn_mini: {message}"):
        call()


def test_a_refused_row_is_named(draw: torch.Generator) -> None:
    mask = torch.ones(3, 2, 4, 9, dtype=torch.bool)
    batch, head, query = (integer(draw, 0, size - 1) for size in (3, 2, 4))
    mask[batch, head, query, 1::2] = False
    with pytest.raises(ValueError, match=rf"mask has 5 runs .* of batch {batch}, head {head}, query {query}; allowed"):
        masks.from_dense(mask)
