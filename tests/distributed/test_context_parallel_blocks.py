"""Who owns which tokens, and which blocks a rank works on: decided on the host, so one process can ask for any rank."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from flash_attn_mini import packed_shards, zigzag_shards
from flash_attn_mini.context_parallel import Shards, blocks, functions, ring
from flash_attn_mini.context_parallel.blocks import FAR, Call, Mask
from flash_attn_mini.context_parallel.kernels import Attention
from flash_attn_mini.options import Options

from ..support.overwriting_backend import overwriting_backend

Lengths = int | tuple[int, ...]
CAUSAL, FULL = Mask(FAR, 0, False), Mask(FAR, FAR, False)


@contextlib.contextmanager
def rank_of(size: int, rank: int = 0) -> Iterator[None]:
    """A group of many ranks in which this process is one and no message is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shards_of(lengths: Lengths) -> Shards:
    if isinstance(lengths, int):
        return zigzag_shards(lengths, None)
    return packed_shards([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], None)


def every_shards(lengths: Lengths, size: int) -> list[Shards]:
    """The shards that each rank makes."""
    result = []
    for rank in range(size):
        with rank_of(size, rank):
            result.append(shards_of(lengths))
    return result


def global_rows(shards: Shards, rank: int) -> Tensor:
    return torch.cat(
        [
            torch.arange(0),
            *(
                torch.arange(shards.starts[run.document] + run.start, shards.starts[run.document] + run.stop)
                for run in shards.runs[rank]
            ),
        ]
    )


LAYOUTS: list[tuple[Lengths, int]] = [
    (64, 4),
    (61, 3),
    (5, 4),
    (0, 2),
    (40, 1),
    ((30, 0, 7, 1, 25, 64), 3),
    ((100,), 4),
    ((3, 2, 1), 4),
    ((), 2),
]


@pytest.mark.parametrize(("lengths", "size"), LAYOUTS)
def test_every_token_has_one_owner(lengths: Lengths, size: int) -> None:
    made = every_shards(lengths, size)
    rows = torch.cat([shards.positions for shards in made])
    assert torch.equal(rows.sort().values, torch.arange(lengths if isinstance(lengths, int) else sum(lengths)))
    for rank, shards in enumerate(made):
        assert shards.runs == made[0].runs, "the ranks do not agree"
        assert torch.equal(shards.positions, global_rows(made[0], rank))
        assert torch.equal(shards.positions.sort().values, shards.positions)
        x = torch.arange(shards.starts[-1])[None] * 10
        assert torch.equal(shards.split(x, 1)[0], shards.positions * 10)
        starts = torch.tensor(
            [shards.starts[run.document] for run in shards.runs[rank] for _ in range(run.start, run.stop)]
        )
        assert torch.equal(shards.positions_in_document + starts, shards.positions)


def test_zigzag_gives_rank_r_chunks_r_and_2w_minus_1_minus_r() -> None:
    assert [shards.positions.tolist() for shards in every_shards(12, 3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize("size", [2, 4, 7, 64])
def test_zigzag_is_even_for_any_length(size: int, draw: torch.Generator) -> None:
    length = int(torch.randint(20 * size, 5000 * size, (), generator=draw))
    with rank_of(size):
        shards = shards_of(length)
    assert max(shards.tokens) - min(shards.tokens) <= 2
    work = causal_work(shards)
    assert max(work) <= 1.02 * sum(work) / size + 2 * length, f"length {length}: {work}"


def causal_work(shards: Shards) -> list[int]:
    """Visible pairs of every rank under a causal mask."""
    return [sum((run.start + 1 + run.stop) * (run.stop - run.start) // 2 for run in runs) for runs in shards.runs]


@pytest.mark.parametrize("size", [2, 4, 8, 32])
@pytest.mark.parametrize("documents", [1, 5, 40, 300])
def test_packed_documents_give_even_work_and_tokens(size: int, documents: int, draw: torch.Generator) -> None:
    lengths = tuple(torch.randint(1000, 32_000, (documents,), generator=draw).tolist())
    with rank_of(size):
        shards = shards_of(lengths)
    work, tokens = causal_work(shards), shards.tokens
    one_token = max(lengths)  # rounding to whole tokens may add one, which sees this many keys at most
    assert max(work) <= 1.02 * sum(work) / size + one_token, f"{lengths}: {work}"
    assert max(tokens) <= 1.03 * sum(tokens) / size + 2, f"{lengths}: {tokens}"


def test_short_documents_stay_whole(draw: torch.Generator) -> None:
    lengths = tuple(torch.randint(100, 2000, (400,), generator=draw).tolist())
    with rank_of(4):
        shards = shards_of(lengths)
    assert sum(len(runs) for runs in shards.runs) <= 420
    with rank_of(4):
        keys = blocks.travelling_keys(shards, CAUSAL)
    assert keys.mean <= keys.most <= 0.2 * sum(lengths)


def plainly(use: Callable[[], Tensor]) -> None:
    use()


def in_inference_mode(use: Callable[[], Tensor]) -> None:
    with torch.inference_mode():
        use()


def in_fake_mode(use: Callable[[], Tensor]) -> None:
    with FakeTensorMode():
        use()


def in_func_grad(use: Callable[[], Tensor]) -> None:
    torch.func.grad(lambda x: (x * use().sum()).sum())(torch.ones(1))


@pytest.mark.parametrize("first", [plainly, in_inference_mode, in_fake_mode, in_func_grad])
@pytest.mark.parametrize("second", ["training", "FakeTensorMode"])
def test_shards_work_whatever_mode_used_them_first(first: Callable[[Callable[[], Tensor]], None], second: str) -> None:
    with rank_of(2):
        shards = shards_of((7, 30))
        call = blocks.plan(shards, CAUSAL, True).own[0]
        ids = torch.arange(37)

        def use() -> Tensor:
            call.sequences(torch.device("cpu"))
            return shards.split(torch.ones(37, 2), 0)

        first(use)
        if second == "FakeTensorMode":
            with FakeTensorMode():
                assert use().shape == (shards.tokens[0], 2)
            return
        x = ids.double().requires_grad_()
        (shards.split(x, 0) * 2.0).sum().backward()
        assert x.grad is not None
        assert x.grad.nonzero().flatten().tolist() == shards.positions.tolist()
        assert shards.to_global(shards.to_ranks(x)).tolist() == ids.tolist()
        sequences, documents = call.sequences(torch.device("cpu"))
        for index in (sequences.cu_seqlens_q, documents):
            assert type(index) is Tensor
            assert not index.is_inference()


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
def test_shards_keep_nothing_from_a_compiled_call(is_used: bool) -> None:
    torch._dynamo.reset()
    with rank_of(2):
        shards, ids = shards_of((7, 30)), torch.arange(37)
        if is_used:
            shards.split(ids, 0)
        compiled = torch.compile(lambda x: shards.split(x, 0), fullgraph=True, backend=overwriting_backend())
        for split in (compiled, compiled, lambda x: shards.split(x, 0), compiled):
            assert split(ids).tolist() == shards.positions.tolist()


@pytest.mark.parametrize("lengths", [(7, 30), ()])
def test_positions_are_on_the_cpu_whatever_the_default_device(lengths: Lengths) -> None:
    with rank_of(2), torch.device("meta"):
        shards = packed_shards([0, *accumulate(lengths)], None)
        for positions in (shards.positions, shards.positions_in_document):
            assert positions.device.type == "cpu"
            assert positions.dtype == torch.int64
        x = torch.ones(sum(lengths), device="cpu")
        assert shards.split(x, 0).device.type == "cpu"
        for call in blocks.plan(shards, CAUSAL, True).own:
            sequences, documents = call.sequences(torch.device("cpu"))
            assert sequences.cu_seqlens_q.device.type == documents.device.type == "cpu"


# ---- blocks --------------------------------------------------------------------------------------------------------


def calls_and_keys(shards: Shards, rank: int, mask: Mask, is_packed: bool) -> Iterator[tuple[Call, Tensor]]:
    """Every call of a rank's backward in the ring, with the global rows of the keys that it counts in."""
    for source in range(shards.size):
        block = blocks.block(shards, rank, source, mask, is_packed)
        rows = global_rows(shards, source)
        if source != rank:
            rows = torch.cat([rows[:0], *(rows[first : first + count] for first, count in block.keys)])
        for call in block.calls:
            yield call, rows


def check_calls(shards: Shards, rank: int, mask: Mask, is_packed: bool, calls: Iterator[tuple[Call, Tensor]]) -> Tensor:
    """How often each (local query, global key) is visible in a call. ALiBi's distances are checked too."""
    queries = global_rows(shards, rank)
    seen = torch.zeros(len(queries), shards.starts[-1], dtype=torch.int32)
    for call, keys in calls:
        for a, b in pairwise(call.rectangles):
            follows = (a.q_row + a.q_rows, a.q_rows, a.k_row + a.k_rows, a.k_rows)
            assert is_packed or (b.q_row, b.q_rows, b.k_row, b.k_rows) == follows, f"{a}, {b}: not one batch"
        for r in call.rectangles:
            assert r.left >= -1
            assert r.right >= -1
            assert r.q_rows > 0
            assert r.k_rows > 0
            q = torch.arange(r.q_row, r.q_row + r.q_rows)
            k = keys[r.k_row : r.k_row + r.k_rows]
            x = torch.arange(r.q_rows)[:, None] + r.k_rows - r.q_rows - torch.arange(r.k_rows)
            visible = torch.ones_like(x, dtype=torch.bool)
            if r.left >= 0:
                visible &= x <= r.left
            if r.right >= 0:
                visible &= -x <= r.right
            assert visible.any(), f"{r}: nothing is visible"
            assert r.pairs == visible.sum(), f"{r}: {r.pairs} pairs"
            assert visible.any(0).sum() >= r.k_rows - 1, f"{r}: keys that nobody sees"
            seen[q[:, None], k] += visible.int()
            if mask.alibi:
                distance = (queries[q][:, None] - k).abs()
                assert torch.equal((r.sign * x.abs() + r.offset)[visible], distance[visible]), f"{r}: wrong distances"
        assert call.q[0] + call.q[1] <= len(queries)
        assert call.k[0] + call.k[1] <= len(keys)
    return seen


def expected_pairs(shards: Shards, rank: int, mask: Mask) -> Tensor:
    rows = torch.arange(shards.starts[-1])
    document = torch.bucketize(rows, torch.tensor(shards.starts[1:]), right=True)
    queries = global_rows(shards, rank)
    distance = queries[:, None] - rows
    return (document[queries][:, None] == document) & (distance <= mask.left) & (-distance <= mask.right)


MASKS = [
    CAUSAL,
    FULL,
    Mask(6, 0, False),
    Mask(9, 3, False),
    Mask(0, 0, False),
    Mask(FAR, 4, False),
    Mask(3, FAR, False),
]


@pytest.mark.parametrize(
    ("tokens", "heads", "mask", "mebibytes"),
    [
        (8192, (16, 16), CAUSAL, 8),
        (32768, (16, 16), CAUSAL, 32),
        (32768, (32, 8), CAUSAL, 128),
        (32768, (16, 16), FULL, 64),
        (32768, (32, 8), Mask(4095, 0, False), 28),
        (0, (32, 8), CAUSAL, 0),
    ],
)
def test_steps_run_beside_own_work_where_the_rows_of_both_fit_in_l2(
    tokens: int, heads: tuple[int, int], mask: Mask, mebibytes: int
) -> None:
    with rank_of(2):
        shards = zigzag_shards(2 * tokens, None)
        own = blocks.plan(shards, mask, False).own
    q, k = (torch.empty(1, tokens, number, 128, dtype=torch.bfloat16, device="meta") for number in heads)
    assert ring.runs_beside(own, q, k, (mebibytes << 20) + (1 << 20))
    assert mebibytes == 0 or not ring.runs_beside(own, q, k, (mebibytes << 20) - (1 << 20))


@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize(("lengths", "size"), [(64, 4), (61, 3), (37, 2), (5, 4), (29, 1), ((30, 0, 7, 1, 25, 64), 3)])
def test_calls_show_each_visible_pair_once(lengths: Lengths, size: int, alibi: bool, seed: int) -> None:
    choice = random.Random(seed)
    drawn = Mask(choice.randrange(70), choice.randrange(70), False)
    with rank_of(size):
        shards = shards_of(lengths)
    for mask in [x._replace(alibi=alibi) for x in (*MASKS, drawn)]:
        for rank in range(size):
            expected = expected_pairs(shards, rank, mask)
            for is_packed in (True, False):
                ring = calls_and_keys(shards, rank, mask, is_packed)
                seen = check_calls(shards, rank, mask, is_packed, ring)
                assert torch.equal(seen, expected.int()), f"ring, {mask}, rank {rank}"
            shards.rank = rank
            gathered = blocks.plan_of_gathered(shards, mask, True)
            everything = torch.arange(shards.starts[-1])
            seen = check_calls(shards, rank, mask, True, ((call, everything) for call in gathered))
            assert torch.equal(seen, expected.int()), f"all_gather, {mask}, rank {rank}"
            shards.plans.clear()


@pytest.mark.parametrize("size", [3, 4, 8])
def test_all_ranks_take_the_same_steps(size: int, seed: int) -> None:
    """Messages of different steps start in one order everywhere, so that no two ranks wait for each other for ever."""
    choice = random.Random(seed)
    for _ in range(30):
        lengths = tuple(choice.randrange(60) for _ in range(choice.randrange(1, 9)))
        mask = Mask(choice.choice([0, 3, 20, FAR]), choice.choice([0, 0, 7, FAR]), False)
        numbers = []
        needed = set()
        for rank in range(size):
            with rank_of(size, rank):
                shards = shards_of(lengths)
            steps = blocks.plan(shards, mask, True).steps
            numbers.append([step.number for step in steps])
            needed |= {step.number for step in steps if step.arriving.keys or step.leaving.keys}
            for source in range(size):
                if source != rank and blocks.block(shards, rank, source, mask, True).keys:
                    needed.add((rank - source) % size)
        assert all(x == sorted(needed) for x in numbers), f"{lengths}, {mask}: {numbers}, needed {needed}"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_causal_ring_works_on_half_blocks_in_one_call_a_step(size: int) -> None:
    tokens = 64
    with rank_of(size):
        shards = shards_of(size * tokens)
    for rank in range(size):
        for source in range(size):
            block = blocks.block(shards, rank, source, CAUSAL, False)
            assert len(block.calls) == 1
            (rectangle,) = block.calls[0].rectangles
            if source == rank:
                assert (rectangle.q_rows, rectangle.k_rows, rectangle.right) == (tokens, tokens, 0)
            else:
                assert rectangle.q_rows * rectangle.k_rows == tokens * tokens // 2
                assert rectangle.kind == (-1, -1, 1, 0), "a block without a mask"
                assert block.rows == (tokens // 2 if source < rank else tokens), "only keys that are seen travel"


def test_a_window_reaches_its_neighbours_alone() -> None:
    size, tokens, left = 8, 100, 30
    with rank_of(size):
        shards = shards_of(size * tokens)
    for rank in range(size):
        travelling = {
            source: block.rows
            for source in range(size)
            if source != rank and (block := blocks.block(shards, rank, source, Mask(left, 0, False), False)).keys
        }
        neighbours = {rank - 1, rank + 1} & set(range(size))
        assert set(travelling) == neighbours - ({rank + 1} if rank == size - 1 else set())
        assert all(rows == left for rows in travelling.values())
    assert len(blocks.plan(shards, Mask(left, 0, False), False).steps) <= 2


def test_a_window_takes_one_call_for_both_own_chunks() -> None:
    with rank_of(4):
        shards = shards_of(4 * 100)
    for rank in range(4):
        (call,) = blocks.block(shards, rank, rank, Mask(30, 0, False), False).calls
        assert [r.q_rows for r in call.rectangles] == ([100] if rank == 3 else [50, 50]), (
            "chunks 3 and 4 are neighbours"
        )


def test_packed_documents_take_one_call_a_step(draw: torch.Generator) -> None:
    lengths = tuple(torch.randint(50, 3000, (12,), generator=draw).tolist())
    with rank_of(4):
        shards = shards_of(lengths)
    for rank in range(4):
        for source in range(4):
            assert len(blocks.block(shards, rank, source, CAUSAL, True).calls) <= 1


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(lambda: zigzag_shards(-1, None), ValueError, "seqlen is -1; allowed: at least 0", id="negative"),
        pytest.param(lambda: zigzag_shards(2.5, None), TypeError, "seqlen is 2.5", id="float"),
        pytest.param(lambda: zigzag_shards(8, "group"), TypeError, "group is 'group' .* DeviceMesh", id="group"),
        pytest.param(lambda: packed_shards([1, 2], None), ValueError, "cu_seqlens starts with .1.", id="start"),
        pytest.param(lambda: packed_shards([], None), ValueError, "cu_seqlens starts with", id="empty"),
        pytest.param(lambda: packed_shards([0, 5, 4], None), ValueError, "falls from 5 to 4 at index 2", id="falling"),
        pytest.param(lambda: packed_shards(7, None), TypeError, "cu_seqlens is 7", id="number"),
        pytest.param(lambda: packed_shards(torch.zeros(2), None), TypeError, "float32", id="dtype"),
        pytest.param(lambda: packed_shards([0, "a"], None), TypeError, r"cu_seqlens\[1\] is 'a'", id="text"),
        pytest.param(lambda: zigzag_shards(8, None).split(torch.zeros(7), 0), ValueError, "7 rows .* 8", id="split"),
        pytest.param(lambda: zigzag_shards(8, None).merge(torch.zeros(8), 0), ValueError, "8 rows .* 4", id="merge"),
        pytest.param(lambda: zigzag_shards(8, None).split(torch.zeros(8), 1), ValueError, "dim is 1", id="dim"),
        pytest.param(lambda: zigzag_shards(8, None).split([0] * 8, 0), TypeError, "x is", id="list"),
    ],
)
def test_wrong_shards_are_errors(call: object, error: type[Exception], message: str) -> None:
    with rank_of(2), pytest.raises(error, match=message):
        call()  # type: ignore[operator]


def test_without_torch_distributed_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        zigzag_shards(8, None)


def attention_of(shards: Shards, left: int = -1, causal: bool = True) -> Attention:
    return Attention("f", shards, Options(0.0, 1.0, causal, left, 0 if causal else -1, 0.0, None), False)


@pytest.mark.parametrize(
    ("size", "tokens", "nheads", "nheads_k", "left", "strategy", "reason"),
    [
        pytest.param(1, 1000, 16, 16, -1, "ring", "one rank", id="one-rank"),
        pytest.param(8, 1000, 16, 16, -1, "ulysses", "receives", id="many-ranks"),
        pytest.param(
            8, 1000, 12, 4, -1, "ring", "12 and 4 heads do not divide among 8 ranks", id="heads-do-not-divide"
        ),
        pytest.param(8, 1000, 16, 16, 100, "ring", "receives", id="window"),
        pytest.param(4, 100, 32, 4, -1, "ring", "receives", id="few-key-heads"),
        pytest.param(
            4, 8192, 16, 16, -1, "ring", "travel in 3 of 3 steps of the ring, with 4,096 FLOPs", id="messages-hide"
        ),
        pytest.param(16, 8192, 16, 16, -1, "ulysses", "receives", id="two-machines"),
        pytest.param(4, 7500, 16, 16, -1, "ulysses", "receives", id="messages-do-not-quite-hide"),
        pytest.param(16, 32768, 16, 16, -1, "ring", "13,000 hide it", id="two-machines-messages-hide"),
        pytest.param(8, 0, 16, 16, -1, "ring", "no keys travel", id="no-tokens"),
    ],
)
def test_auto_chooses_by_what_hides_and_what_travels(
    size: int, tokens: int, nheads: int, nheads_k: int, left: int, strategy: str, reason: str
) -> None:
    with rank_of(size):
        shards = shards_of(size * tokens)
    choice = functions.choose_strategy(attention_of(shards, left), nheads, nheads_k)
    assert choice.strategy == strategy
    assert reason in choice.reason


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    with rank_of(4), pytest.raises(ValueError, match=r"a DeviceMesh of 2 dimensions .*; allowed: one dimension"):
        zigzag_shards(8, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))


def test_a_group_without_this_process_is_refused() -> None:
    with rank_of(2), pytest.raises(ValueError, match="group does not have this process"):
        zigzag_shards(8, dist.new_group([1]))
