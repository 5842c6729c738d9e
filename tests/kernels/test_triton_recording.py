"""Recorded calls of the Triton backend: a replay launches the kernels with the arguments of an ordinary launch.

Calls of many kinds, with other strides, lengths, alignments and tensors, in a random order: each gives the bits of the
ordinary launch. Where there is no GPU, the replays run in Triton's interpreter, and a recording's kernel is the
interpreted function.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.options import KvCache, Options, Sequences

from ..support.interpreter import INTERPRETED, run_in_the_interpreter, starts_the_interpreter
from ..support.triton_calls import DEVICE, HAS_GPU, gpu, runs_triton

CALLS = 45 if HAS_GPU else 9  # of each kind, each ordinary and then twice recorded
LENGTHS = (1, 16, 17, 32, 33) if not HAS_GPU else (1, 16, 17, 32, 33, 64, 100, 128, 129)
SPARE = 64  # elements before and after each tensor


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The recordings of all kinds of calls, empty. In the interpreter its functions are the compiled kernels."""
    from flash_attn_mini.backends.triton import kvcache, launch, launch_bwd, launch_bwd_bias, recording

    if INTERPRETED:
        monkeypatch.setattr(recording, "can_record", lambda: True)
        monkeypatch.setattr(recording, "runner_of", lambda kernel, compiled, grid: kernel[grid])
    every = [module.RECORDINGS for module in (launch, launch_bwd, kvcache, launch_bwd_bias)]
    for kept in every:
        kept.forget()
    yield every
    for kept in every:
        kept.forget()


@dataclasses.dataclass
class Draw:
    """Draws calls. Few shapes, so that many calls are of one kind."""

    generator: torch.Generator
    is_aligned: bool = False  # every tensor begins at a multiple of 16 bytes

    def integer(self, stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=self.generator))

    def one_of(self, choices: Any) -> Any:
        return choices[self.integer(len(choices))]

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        """Random numbers: contiguous, or with heads before rows, or rows far apart; at times off 16 bytes."""
        layout = self.one_of(("rows", "rows", "heads", "wide"))
        shift = self.one_of((0, 8) if self.is_aligned else (0, 0, 0, 1, 8))
        inner = list(shape)
        if layout == "heads":
            inner[-3], inner[-2] = inner[-2], inner[-3]
        if layout == "wide":
            inner[-1] += 8
        size = torch.Size(inner).numel()
        flat = torch.randn(size + 2 * SPARE, generator=self.generator).to(DEVICE, dtype)
        x = flat[SPARE + shift : SPARE + shift + size].view(inner)[..., : shape[-1]]
        return x.transpose(-3, -2) if layout == "heads" else x

    def like(self, x: Tensor) -> Tensor:
        """Other numbers in the same layout, at another address."""
        other = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=x.device)
        other.copy_(torch.randn(other.shape, generator=self.generator))
        return other.as_strided(x.shape, x.stride(), x.storage_offset())

    def wider(self, x: Tensor) -> Tensor:
        """Other numbers with other strides."""
        wide = torch.randn(*x.shape[:-1], x.shape[-1] + 8, generator=self.generator).to(x.device, x.dtype)
        return wide[..., : x.shape[-1]]

    def shifted(self, x: Tensor) -> Tensor:
        """Other numbers with the strides of a contiguous tensor, off 16 bytes."""
        flat = torch.randn(x.numel() + 1, generator=self.generator).to(x.device, x.dtype)
        return flat[1:].view(x.shape)

    def options(self, nheads: int, batch: int, *, may_drop: bool = True) -> Options:
        feature = self.one_of(("", "", "softcap", "alibi", "alibi_batch", "dropout", "window"))
        slopes = None
        if feature.startswith("alibi"):
            slopes = torch.rand((batch, nheads) if feature == "alibi_batch" else (nheads,), generator=self.generator)
            slopes = slopes.to(DEVICE)
        causal = feature != "window" and self.integer(2) == 1
        left, right = (self.integer(20), self.integer(20)) if feature == "window" else (-1, 0 if causal else -1)
        drops = feature == "dropout" and may_drop
        return Options(
            0.25 if drops else 0.0,
            self.one_of((0.25, 0.3, -0.25)),
            causal,
            left,
            right,
            2.0 if feature == "softcap" else 0.0,
            slopes,
        )

    def key_ranges(self, *rows: int) -> Tensor | None:
        """One or two ranges of each row of ``[batch, heads, rows]`` or ``[heads, rows]``."""
        if self.integer(3) > 0:
            return None
        shape = (*rows, *self.one_of(((2,), (2, 2))))
        return torch.randint(-5, 40, shape, generator=self.generator).to(DEVICE, torch.int32)

    def sizes(self) -> tuple[int, int, int, int]:
        """batch, nheads, nheads_k, headdim."""
        nheads_k = self.one_of((1, 2))
        return self.one_of((1, 2)), nheads_k * self.one_of((1, 2)), nheads_k, self.one_of((16, 24, 64))

    def rng_state(self, options: Options) -> Tensor | None:
        if options.dropout_p == 0:
            return None
        return torch.randint(-(2**62), 2**62, (2,), generator=self.generator).to(DEVICE)


def forward_call(draw: Draw) -> tuple[Any, ...]:
    """q, k, v, sequences, options and rng_state."""
    batch, nheads, nheads_k, headdim = draw.sizes()
    options = draw.options(nheads, batch)
    if draw.integer(3) > 0:
        seqlen_q, seqlen_k = draw.one_of(LENGTHS), draw.one_of(LENGTHS)
        q, k = draw.tensor(batch, seqlen_q, nheads, headdim), draw.tensor(batch, seqlen_k, nheads_k, headdim)
        if nheads == nheads_k and seqlen_q == seqlen_k and draw.integer(2):
            k = q  # one tensor in two places
        v = k if draw.integer(4) == 0 else draw.tensor(batch, seqlen_k, nheads_k, headdim)
        options = options._replace(key_ranges=draw.key_ranges(batch, draw.one_of((1, nheads)), seqlen_q))
        return q, k, v, None, options, draw.rng_state(options)
    lengths_q, lengths_k = ([draw.one_of(LENGTHS) for _ in range(batch)] for _ in range(2))
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        for lengths in (lengths_q, lengths_k)
    )
    block_table = None
    q = draw.tensor(sum(lengths_q), nheads, headdim)
    k, v = (draw.tensor(sum(lengths_k), nheads_k, headdim) for _ in range(2))
    if draw.integer(3) == 0:
        pages = -(-max(LENGTHS) // 16)
        k, v = (draw.tensor(batch * pages, 16, nheads_k, headdim) for _ in range(2))
        block_table = torch.randperm(batch * pages, generator=draw.generator).view(batch, pages)
        block_table = block_table.to(DEVICE, torch.int32)
    else:
        options = options._replace(key_ranges=draw.key_ranges(draw.one_of((1, nheads)), sum(lengths_q)))
    sequences = Sequences(cu_q, cu_k, max(lengths_q), max(lengths_k), block_table)
    return q, k, v, sequences, options, draw.rng_state(options)


def forward(call: tuple[Any, ...]) -> list[Tensor]:
    from flash_attn_mini.backends.triton import launch

    return list(launch.forward(*call)[:2])


def backward_call(draw: Draw) -> tuple[Any, ...]:
    """The arguments of launch_bwd.backward."""
    q, k, v, sequences, options, rng_state = forward_call(draw)
    while sequences is not None and sequences.block_table is not None:
        q, k, v, sequences, options, rng_state = forward_call(draw)
    out, lse = forward((q, k, v, sequences, options, rng_state))
    dout = draw.tensor(*out.shape)
    dlse = torch.randn(lse.shape, generator=draw.generator).to(DEVICE) if draw.integer(2) else None
    mask = draw.one_of([(True, True, True), (True, True, True), (True, False, False), (False, True, True)])
    into = tuple(torch.empty_like(x) if draw.integer(4) == 0 else None for x in (q, k, v))
    into = tuple(x if x is None or x.stride(-1) == 1 else None for x in into)
    return dout, q, k, v, out, lse, dlse, sequences, options, rng_state, mask, into


def backward(call: tuple[Any, ...]) -> list[Tensor]:
    from flash_attn_mini.backends.triton import launch_bwd

    return [x.clone() for x in launch_bwd.backward(*call) if x is not None]


def bias_backward(call: tuple[Any, ...]) -> list[Tensor]:
    from flash_attn_mini.backends.triton import launch_bwd_bias

    return [launch_bwd_bias.bias_backward(*call)]


def kvcache_call(draw: Draw) -> tuple[Any, ...]:
    """q, the caches, a KvCache and options."""
    batch, nheads, nheads_k, headdim = draw.sizes()
    seqlen_q, seqlen_new, capacity = draw.one_of((1, 3)), draw.one_of((0, 1, 3)), draw.one_of((48, 64))
    options = draw.options(nheads, batch, may_drop=False)
    is_paged = draw.integer(2) == 1
    rows = (batch * capacity // 16, 16) if is_paged else (batch + 1, capacity)
    k_cache, v_cache = (draw.tensor(*rows, nheads_k, headdim) for _ in range(2))
    k = v = cos = sin = index = table = None
    if seqlen_new > 0:
        k, v = (draw.tensor(batch, seqlen_new, nheads_k, headdim) for _ in range(2))
        if draw.integer(2):
            cos, sin = (torch.rand(80, 8, generator=draw.generator).to(DEVICE, torch.float16) for _ in range(2))
    if is_paged:
        table = torch.randperm(rows[0], generator=draw.generator).view(batch, -1).to(DEVICE, torch.int32)
    elif draw.integer(2):
        index = torch.randperm(batch + 1, generator=draw.generator)[:batch].to(DEVICE, torch.int32)
    lengths = torch.randint(0, capacity - 3, (batch,), generator=draw.generator).to(DEVICE, torch.int32)
    length = -1
    if draw.integer(3) == 0:
        lengths, length = None, draw.integer(capacity - 3)
    leftpad = torch.zeros(batch, dtype=torch.int32, device=DEVICE) if draw.integer(3) == 0 else None
    num_splits = draw.one_of((0, 0, 1, 3))
    split_keys = 32 if num_splits == 0 and draw.integer(4) == 0 else 0
    cache = KvCache(k, v, cos, sin, lengths, length, index, leftpad, table, True, num_splits, split_keys)
    return q_of(draw, batch, seqlen_q, nheads, headdim), k_cache, v_cache, cache, options


def q_of(draw: Draw, *shape: int) -> Tensor:
    return draw.tensor(*shape)


def kvcache(call: tuple[Any, ...]) -> list[Tensor]:
    """The results, and the caches after the call; the caches of ``call`` stay as they are."""
    from flash_attn_mini.backends.triton import kvcache

    q, *caches, cache, options = call
    kept = [x.clone() for x in caches]
    results = [*kvcache.forward_kvcache(q, *caches, cache, options), *(x.clone() for x in caches)]
    for x, before in zip(caches, kept, strict=True):
        x.copy_(before)
    return results


KINDS: dict[str, tuple[Callable[[Draw], tuple[Any, ...]], Callable[[tuple[Any, ...]], list[Tensor]]]] = {
    "forward": (forward_call, forward),
    "backward": (backward_call, backward),
    "kvcache": (kvcache_call, kvcache),
}


def changed(value: Any, of: Callable[[Tensor], Tensor], scale: float, seen: dict[int, Tensor]) -> Any:
    """The same call with other tensors of floating-point numbers and another scale.

    One tensor in two places stays one.
    """
    if isinstance(value, tuple):
        parts = [changed(x, of, scale, seen) for x in value]
        if isinstance(value, Options):
            return Options(*parts)._replace(softmax_scale=value.softmax_scale * scale)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, Tensor):
        return value
    if id(value) not in seen:
        seen[id(value)] = of(value) if value.is_floating_point() else value.clone()
    return seen[id(value)]


def ordinary(recordings: list[Any], run: Callable[[tuple[Any, ...]], list[Tensor]], call: Any) -> list[Tensor]:
    """The results of the call without recordings."""
    from flash_attn_mini.backends.triton import recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "can_record", lambda: False)
        return [x.clone() for x in run(call)]


def strides(x: Tensor) -> list[int]:
    """Of the dimensions of more than one element: a copy may have another stride where there is one."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, strides(a), a.dtype) == (b.shape, strides(b), b.dtype)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@runs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_replays_have_the_bits_of_ordinary_launches(
    kind: str, recordings: list[Any], draw: torch.Generator, described_seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn_mini.backends.triton import recording

    make, run = KINDS[kind]
    drawing, aligned = Draw(draw), Draw(draw, is_aligned=True)
    first = [make(aligned if i < CALLS // 3 else drawing) for i in range(CALLS)]
    calls = first + [changed(call, drawing.like, 1.0, {}) for call in first]
    # Calls that differ in one respect from a recorded one.
    for of, scale in ((drawing.like, 0.5), (drawing.wider, 1.0), (drawing.shifted, 1.0)):
        calls += [changed(call, of, scale, {}) for call in first[: CALLS // 3]]
    order = torch.randperm(len(calls), generator=draw).tolist()
    replays = []
    original = recording.Recording.replay

    def counted(self: Any, *arguments: Any) -> Any:
        replays.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(recording.Recording, "replay", counted)
    for i in [*order, *order]:
        expected = ordinary(recordings, run, calls[i])
        assert_same_bits(run(calls[i]), expected)
    # The aligned calls are recorded, and each is made twice. The others may be unaligned, and those are not recorded.
    assert len(replays) >= CALLS // 3, f"{len(replays)} replays of {2 * len(calls)} calls; {described_seed}"


@runs_triton
def test_one_tensor_in_three_places_is_not_taken_for_three(recordings: list[Any], draw: torch.Generator) -> None:
    """A call with q = k = v is recorded; the same kind of call with three tensors then reads all three."""
    options = Options(0.0, 0.25, True, -1, 0, 0.0, None)
    q, k, v = (torch.randn(1, 16, 2, 16, generator=draw).to(DEVICE, torch.float16) for _ in range(3))
    for call in ((q, q, q, None, options, None), (q, k, v, None, options, None), (k, k, v, None, options, None)):
        assert_same_bits(forward(call), ordinary(recordings, forward, call))
    assert len(recordings[0]._kept) == 1


@runs_triton
@pytest.mark.parametrize("count", [1, 2])
def test_calls_with_key_ranges_are_recorded(count: int, recordings: list[Any], draw: torch.Generator) -> None:
    """A replay reads the ranges of its own call."""
    q, k, v, dout = (torch.randn(1, 32, 2, 16, generator=draw).to(DEVICE, torch.float16) for _ in range(4))
    for _ in range(3):
        ranges = torch.randint(0, 33, (1, 2, 32, count, 2), generator=draw).to(DEVICE, torch.int32)
        options = Options(0.0, 0.25, False, -1, -1, 0.0, None, key_ranges=ranges if count == 2 else ranges[..., 0, :])
        call = (q, k, v, None, options, None)
        out, lse = forward(call)
        assert_same_bits([out, lse], ordinary(recordings, forward, call))
        call = (dout, q, k, v, out, lse, None, None, options, None)
        assert_same_bits(backward(call), ordinary(recordings, backward, call))
    assert [len(every._kept) for every in recordings] == [1, 1, 0, 0]
    assert all(kept is not None for every in recordings for kept in every._kept.values())


@runs_triton
@pytest.mark.parametrize("shape", [(2, 4, 32, 32), (1, 1, 1, 32)], ids=["full", "in_parts"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bool], ids=str)
def test_calls_with_attn_bias_are_recorded(
    shape: tuple[int, ...], dtype: torch.dtype, recordings: list[Any], draw: torch.Generator
) -> None:
    """A replay reads the bias of its own call, and adds the parts of its gradient."""
    q, k, v, dout = (torch.randn(2, 32, 4, 16, generator=draw).to(DEVICE, torch.float16) for _ in range(4))
    for _ in range(3):
        bias = torch.randn(shape, generator=draw)
        bias = (bias > 0 if dtype == torch.bool else bias).to(DEVICE, dtype)
        options = Options(0.0, 0.25, False, -1, -1, 0.0, None, attn_bias=bias)
        call = (q, k, v, None, options, None)
        out, lse = forward(call)
        assert_same_bits([out, lse], ordinary(recordings, forward, call))
        call = (dout, q, k, v, out, lse, None, None, options, None)
        *gradients, softmax_d = backward(call)
        assert_same_bits([*gradients, softmax_d], ordinary(recordings, backward, call))
        if dtype != torch.bool:
            call = (dout, q, k, v, lse, softmax_d, options, None)
            assert_same_bits(bias_backward(call), ordinary(recordings, bias_backward, call))
    assert [len(every._kept) for every in recordings] == [1, 1, 0, int(dtype != torch.bool)]
    assert all(kept is not None for every in recordings for kept in every._kept.values())


@runs_triton
def test_an_unaligned_call_is_neither_recorded_nor_replayed(recordings: list[Any], draw: torch.Generator) -> None:
    options = Options(0.0, 0.25, True, -1, 0, 0.0, None)
    flat = torch.randn(3, 16 * 2 * 16 + 8, generator=draw).to(DEVICE, torch.float16)
    aligned, unaligned = ([x[first:][:512].view(1, 16, 2, 16) for x in flat] for first in (0, 1))
    for tensors in (unaligned, aligned, unaligned, aligned):
        call = (*tensors, None, options, None)
        assert_same_bits(forward(call), ordinary(recordings, forward, call))
    assert len(recordings[0]._kept) == 1


@runs_triton
def test_the_number_of_recordings_is_limited(
    recordings: list[Any], draw: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn_mini.backends.triton import recording

    monkeypatch.setattr(recording, "MAX_RECORDINGS", 3)
    for scale in range(1, 9):
        q = torch.randn(1, 16, 1, 16, generator=draw).to(DEVICE, torch.float16)
        forward((q, q, q, None, Options(0.0, scale / 8, True, -1, 0, 0.0, None), None))
        assert len(recordings[0]._kept) <= 3


@runs_triton
def test_a_recording_keeps_no_tensor(recordings: list[Any], draw: torch.Generator) -> None:
    def tensors_in(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for x in value:
                yield from tensors_in(x)

    drawing = Draw(draw)
    for make, run in KINDS.values():
        for _ in range(4):
            run(make(drawing))
    kept = [recording for every in recordings for recording in every._kept.values() if recording is not None]
    assert kept
    for recording in kept:
        assert not list(tensors_in([recording.new, [launch.arguments for launch in recording.launches]]))


@gpu
def test_a_replay_is_captured_and_runs_on_the_current_stream(recordings: list[Any], draw: torch.Generator) -> None:
    options = Options(0.0, 0.25, True, -1, 0, 0.0, None)
    call = (*(torch.randn(1, 64, 2, 64, generator=draw).to("cuda", torch.float16) for _ in range(3)), None, options)
    expected = forward((*call, None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward((*call, None))
    for x in captured:
        x.zero_()
    graph.replay()
    assert_same_bits(captured, expected)


@gpu
def test_a_capture_before_any_call_is_not_recorded(recordings: list[Any], draw: torch.Generator) -> None:
    """It has the first configuration of the table in place of the tuned one."""
    options = Options(0.0, 0.125, False, -1, -1, 0.0, None)
    q = torch.randn(1, 80, 2, 64, generator=draw).to("cuda", torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward((q, q, q, None, options, None))
    assert not recordings[0]._kept
