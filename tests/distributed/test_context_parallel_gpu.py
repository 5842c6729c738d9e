"""Attention over tokens spread over several GPUs with NCCL: the cases of the CPU in 16 bits, longer ones, streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ..conftest import IS_HOPPER
from ..support import context_parallel_calls as calls
from ..support.ranks import Ranks
from .test_context_parallel import (
    BITS,
    CASES,
    DOCUMENTS,
    FOUR,
    ONE,
    TWO,
    Case,
    check,
    check_that_a_message_names_the_call_of_a_dead_rank,
    tensors_and_options,
)

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, this machine has {GPUS}")]
MEMBERS = FOUR if GPUS >= 4 else TWO


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks([ONE, MEMBERS], tmp_path_factory.mktemp("ranks"), "nccl")
    yield started
    started.close()


def on_gpus(case: Case) -> Case:
    """The case on all GPUs, with head dims and a dtype that CUDA kernels have."""
    dtype = case.dtype if case.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    members = ONE if case.members == ONE else MEMBERS
    return replace(case, members=members, dtype=dtype, headdim=case.headdim * 4 if case.headdim < 32 else 64)


LONG = [
    Case("2048 tokens, causal", MEMBERS, 2048, {"causal": True}, None, 1, (4, 4), 128, torch.bfloat16),
    Case("2000 tokens, window", MEMBERS, 2000, {"window_size": (300, 0)}, None, 1, (4, 4), 64, torch.float16),
    Case("long documents", MEMBERS, (900, 30, 700, 401), {"causal": True}, None, 1, (8, 4), 128, torch.bfloat16),
    Case("1500 tokens, ALiBi", MEMBERS, 1500, {"causal": True}, "heads", 1, (4, 4), 64, torch.bfloat16),
]


@pytest.mark.parametrize("case", [*map(on_gpus, CASES), *LONG], ids=lambda case: case.name.replace(" ", "-"))
def test_results_and_gradients_are_those_of_one_gpu(case: Case, ranks: Ranks, seed: int, described_seed: str) -> None:
    tensors, options = tensors_and_options(case, seed)
    heads_divide = all(heads % len(case.members) == 0 for heads in case.heads)
    for strategy in ("ring", "all_gather", *(["ulysses"] if heads_divide else [])):
        results = ranks.run(case.members, calls.attend, case.lengths, tensors, strategy, options)[0]
        on_gpu = [tuple(x.cuda() for x in given) for given in (tensors, results)]  # float64 is faster there
        settings = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        check(case, strategy, described_seed, on_gpu[0], settings, on_gpu[1])


@pytest.mark.parametrize("heads", [(8, 8), (16, 4)], ids=["equal-heads", "grouped-heads"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_streams_are_ordered_under_load(strategy: str, heads: tuple[int, int], ranks: Ranks, seed: int) -> None:
    """Repeated calls, each behind a delay on another rank's stream: messages wait for work, and work for messages."""
    tensors = calls.draw(1024, 1, heads, 64, torch.bfloat16, seed)
    assert all(ranks.run(MEMBERS, calls.repeat_behind_delays, tensors, strategy))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_a_deterministic_call_is_repeatable(strategy: str, ranks: Ranks, seed: int) -> None:
    tensors = calls.draw(DOCUMENTS, 1, (8, 8), 64, torch.bfloat16, seed)
    options = {"causal": True, "deterministic": True}
    assert all(ranks.run(MEMBERS, calls.repeat, DOCUMENTS, tensors, strategy, options))


def test_ulysses_has_the_bits_of_one_gpu_in_its_forward(ranks: Ranks, seed: int) -> None:
    case = on_gpus(BITS[1])
    tensors, options = tensors_and_options(case, seed)
    arguments = (case.lengths, tensors, "ulysses", options)
    several = ranks.run(MEMBERS, calls.attend_in_small_groups, *arguments)[0]
    alone = ranks.run(ONE, calls.attend, case.lengths, tensors, "ring", options)[0]
    for a, b in zip(several[:2], alone[:2], strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU on this machine")
def test_a_forward_leaves_sms_to_messages_of_known_size(ranks: Ranks, seed: int) -> None:
    tensors = calls.draw(4096 * len(MEMBERS), 1, (16, 16), 64, torch.bfloat16, seed)
    sms = torch.cuda.get_device_properties().multi_processor_count
    for grids, is_equal in ranks.run(MEMBERS, calls.attend_beside_messages, tensors):
        assert grids == [sms - 8] * (len(MEMBERS) - 1) + [sms]  # nothing arrives during the last step
        assert is_equal


def test_a_rank_that_dies_ends_the_others_with_a_message_that_names_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")  # the processes inherit it
    check_that_a_message_names_the_call_of_a_dead_rank(Ranks([TWO], tmp_path, "nccl", timeout=10.0))


def test_memory_of_the_ring_is_that_of_two_blocks(ranks: Ranks) -> None:
    for extra, extra_of_backward, block in ranks.run(MEMBERS, calls.memory_of_a_ring):
        assert extra <= 2.5 * block, f"{extra:.3e} bytes in addition to the results, K and V have {block:.3e}"
        # Two blocks of K and V, the gradients of two; dQ of a step, and the float32 sums of dQ of two calls at a time.
        of_backward = f"{extra_of_backward:.3e} bytes in addition to the gradients, K and V have {block:.3e}"
        assert extra_of_backward <= (2 + 2 + 0.5 + 2 + 0.5) * block, of_backward
