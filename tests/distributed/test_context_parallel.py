"""Attention over tokens spread over 1 to 4 processes of gloo: results, gradients, errors. The processes start once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

from ..support import context_parallel_calls as calls
from ..support.bounds import assert_forward_accurate, assert_gradients_accurate
from ..support.context_parallel_calls import Lengths
from ..support.one_thread import one_thread  # noqa: F401
from ..support.ranks import Ranks
from ..support.sink_checks import check_sink_gradient, draw_sinks

ONE, APART, TWO, THREE, FOUR = (0,), (1, 3), (0, 1), (0, 1, 2), (0, 1, 2, 3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks([ONE, APART, TWO, THREE, FOUR], tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@dataclass(frozen=True)
class Case:
    """One call. alibi: None, "heads" or "batch" (slopes for each sequence). sinks: "heads" or "batch"."""

    name: str
    members: tuple[int, ...]
    lengths: Lengths
    options: dict[str, Any] = field(default_factory=dict)
    alibi: str | None = None
    batch: int = 2
    heads: tuple[int, int] = (12, 12)
    headdim: int = 8
    dtype: torch.dtype = torch.float32
    sinks: str = "heads"
    headdim_v: int | None = None  # None: headdim


DOCUMENTS = (7, 0, 40, 1, 64, 13)
FAR_KEYS = Case("ALiBi, far keys", TWO, 1700, alibi="heads", batch=1, heads=(2, 2))
CASES = [
    Case("full, two ranks", TWO, 38, heads=(4, 2)),
    Case("causal, ranks 1 and 3 of four", APART, 64, {"causal": True}, heads=(4, 2)),
    Case("causal, odd length", THREE, 61, {"causal": True}, heads=(6, 3)),
    Case("causal, four ranks", FOUR, 64, {"causal": True, "softmax_scale": 0.2}, heads=(8, 4)),
    Case("fewer tokens than chunks", FOUR, 5, {"causal": True}),
    Case("no token", TWO, 0, {"causal": True}),
    Case("one rank", ONE, 21, {"causal": True}),
    Case("window inside a chunk", FOUR, 96, {"window_size": (5, 0)}),
    Case("window, two chunks in one call", THREE, 90, {"window_size": (8, 3)}, "batch", heads=(6, 3)),
    Case("window over several chunks, both sides", FOUR, 64, {"window_size": (25, 11)}),
    Case("window only to the right", THREE, 50, {"window_size": (-1, 6)}),
    Case("softcap and window", TWO, 44, {"softcap": 2.0, "window_size": (30, 0)}),
    Case("ALiBi, causal", THREE, 50, {"causal": True}, alibi="heads"),
    Case("ALiBi, full, slopes for each sequence", FOUR, 53, alibi="batch"),
    Case("ALiBi, window, softcap", TWO, 47, {"window_size": (20, 9), "softcap": 3.0}, alibi="heads"),
    FAR_KEYS,
    Case("documents, ALiBi, far keys", TWO, (1500, 90), {"causal": True}, "heads", heads=(2, 2)),
    Case("documents, causal", FOUR, DOCUMENTS, {"causal": True}, heads=(8, 4)),
    Case("documents, full", THREE, DOCUMENTS, heads=(6, 3)),
    Case("documents, window", FOUR, DOCUMENTS, {"window_size": (9, 4)}),
    Case("documents, ALiBi for each document", TWO, DOCUMENTS, {"causal": True}, alibi="batch"),
    Case("documents, ALiBi, full, softcap", THREE, (30, 44), {"softcap": 4.0}, alibi="heads"),
    Case("documents, one rank", ONE, DOCUMENTS, {"causal": True}),
    Case("documents, none", TWO, (), {"causal": True}),
    Case("bfloat16, causal", FOUR, 160, {"causal": True}, heads=(4, 4), headdim=32, dtype=torch.bfloat16),
    Case("bfloat16, full", FOUR, 160, heads=(4, 4), headdim=32, dtype=torch.bfloat16),
    Case("float16, documents", FOUR, (100, 3, 90), {"causal": True}, heads=(4, 4), headdim=32, dtype=torch.float16),
    Case("bfloat16, ALiBi", THREE, 150, {"causal": True}, "heads", 1, (3, 3), 32, torch.bfloat16),
    Case("float64, ALiBi", THREE, 41, {"window_size": (20, 6)}, alibi="heads", dtype=torch.float64),
    Case("odd head dim, MQA", TWO, 33, {"causal": True}, heads=(4, 1), headdim=5),
    Case("few columns of v", TWO, 44, {"causal": True, "softmax_scale": 0.3}, heads=(4, 2), headdim=24, headdim_v=16),
    Case("many columns of v", THREE, DOCUMENTS, {"causal": True}, heads=(6, 3), headdim=16, headdim_v=40),
]


def tensors_and_options(case: Case, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    tensors = calls.draw(case.lengths, case.batch, case.heads, case.headdim, case.dtype, seed, case.headdim_v)
    options = dict(case.options)
    if case.alibi is not None:
        generator = torch.Generator().manual_seed(seed)
        sequences = case.batch if isinstance(case.lengths, int) else len(case.lengths)
        shape = (case.heads[0],) if case.alibi == "heads" else (sequences, case.heads[0])
        options["alibi_slopes"] = torch.rand(shape, generator=generator)
    return tensors, options


def cumulative(lengths: Lengths) -> tuple[Tensor, Tensor] | None:
    if isinstance(lengths, int):
        return None
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return cu_seqlens, cu_seqlens


def check(case: Case, strategy: str, described: str, tensors: Any, options: Any, results: Any) -> None:
    out, lse, *gradients = results
    q, k, v, dout, dlse = tensors
    shown = f"{case}, {strategy}, {described}"
    settings = {"case": shown, "cu_seqlens": cumulative(case.lengths), **options}
    assert_forward_accurate(q, k, v, out, lse, **settings)
    assert_gradients_accurate(q, k, v, dout, tuple(gradients), dlse=dlse, **settings)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.thorough) if case is FAR_KEYS else case for case in CASES],
    ids=lambda case: case.name.replace(" ", "-"),
)
def test_results_and_gradients_are_those_of_one_gpu(case: Case, ranks: Ranks, seed: int, described_seed: str) -> None:
    tensors, options = tensors_and_options(case, seed)
    heads_divide = all(heads % len(case.members) == 0 for heads in case.heads)
    for strategy in ("ring", "all_gather", *(["ulysses"] if heads_divide else [])):
        results = ranks.run(case.members, calls.attend, case.lengths, tensors, strategy, options)[0]
        check(case, strategy, described_seed, tensors, options, results)


SINKS = [
    Case("sinks, causal", FOUR, 61, {"causal": True}, heads=(8, 4)),
    Case("sinks, full, two ranks", TWO, 38, heads=(4, 2), dtype=torch.float64),
    Case("sinks, documents, window", THREE, DOCUMENTS, {"causal": True, "window_size": (9, 0)}, heads=(6, 3)),
    Case("sinks, bfloat16", FOUR, 160, {"causal": True}, heads=(4, 4), headdim=32, dtype=torch.bfloat16),
    Case("sinks, one rank", ONE, 21, {"causal": True}),
    Case("sinks, per sequence", TWO, 46, {"causal": True}, heads=(4, 2), sinks="batch"),
]


@pytest.mark.parametrize("case", SINKS, ids=lambda case: case.name.replace(" ", "-"))
def test_sinks_join_once(case: Case, ranks: Ranks, seed: int, described_seed: str) -> None:
    tensors, options = tensors_and_options(case, seed)
    shape = (case.batch, case.heads[0]) if case.sinks == "batch" else (case.heads[0],)
    sinks = draw_sinks(shape, case.dtype, "cpu", seed)
    for strategy in ("ring", "all_gather", "ulysses"):
        *results, dsinks = ranks.run(
            case.members, calls.attend_with_sinks, case.lengths, tensors, strategy, options, sinks
        )[0]
        check(case, strategy, described_seed, tensors, {**options, "sinks": sinks}, results)
        q, k, v, dout, dlse = tensors
        cu_seqlens = cumulative(case.lengths)
        check_sink_gradient(dsinks, (q, k, v), sinks, dout, dlse, f"{case}, {strategy}", cu_seqlens, **options)


BITS = [
    Case("one rank, causal", ONE, 70, {"causal": True}, dtype=torch.bfloat16),
    Case("heads in groups", TWO, 45, {"causal": True}, "batch", heads=(16, 8)),
    Case("heads in groups, documents", THREE, DOCUMENTS, {"causal": True}, "batch", heads=(12, 6)),
]


@pytest.mark.parametrize("case", BITS, ids=lambda case: case.name.replace(" ", "-"))
def test_ulysses_and_one_rank_have_the_bits_of_one_gpu(case: Case, ranks: Ranks, seed: int) -> None:
    tensors, options = tensors_and_options(case, seed)
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    if isinstance(case.lengths, int):
        out, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    else:
        cu_seqlens, longest = cumulative(case.lengths)[0], max(case.lengths)  # type: ignore[index]
        arguments = (q, k, v, cu_seqlens, cu_seqlens, longest, longest)
        out, lse, _ = flash_attn_varlen_func(*arguments, **options, return_attn_probs=True)
    gradients = torch.autograd.grad((out, lse), (q, k, v), tensors[3:])
    for strategy in ("ring", "ulysses") if case.members == ONE else ("ulysses",):
        call = calls.attend_in_small_groups
        results = ranks.run(case.members, call, case.lengths, tensors, strategy, options)[0]
        for name, got, expected in zip(("out", "lse", "dq", "dk", "dv"), results, (out, lse, *gradients), strict=True):
            assert torch.equal(got, expected), f"{strategy}: {name} differs"


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "auto"])
def test_a_call_is_repeatable(strategy: str, ranks: Ranks, seed: int) -> None:
    tensors = calls.draw(90, 1, (4, 4), 16, torch.bfloat16, seed)
    options = {"causal": True, "deterministic": True}
    assert all(ranks.run(FOUR, calls.repeat, 90, tensors, strategy, options))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_only_the_gradients_that_are_needed(strategy: str, ranks: Ranks, seed: int) -> None:
    tensors = calls.draw(30, 1, (2, 2), 8, torch.float64, seed)
    got = ranks.run(TWO, calls.partly_wanted, tensors, strategy)[0]
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected = torch.autograd.grad(out, v, tensors[3], retain_graph=True) + torch.autograd.grad(lse, (q, k), tensors[4])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("lengths", [34, DOCUMENTS], ids=["sequence", "documents"])
def test_each_rank_may_use_out_the_log_sum_exp_or_both(
    lengths: Lengths, strategy: str, ranks: Ranks, seed: int
) -> None:
    tensors = calls.draw(lengths, 1, (6, 3), 8, torch.float64, seed)
    got, used = ranks.run(THREE, calls.loss_of_each_rank, lengths, tensors, strategy)[0]
    expected = ranks.run(ONE, calls.attend, lengths, (*tensors[:3], *used), "ring", {"causal": True})[0][2:]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_merge_inverts_split_and_sums_gradients(ranks: Ranks, draw: torch.Generator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128):
        wide = torch.promote_types(dtype, torch.float32)
        x, *weights = torch.randn(4, 2, 13, 3, dtype=wide, generator=draw).to(dtype)
        for merged, gradient in ranks.run(THREE, calls.merge_with_gradient, x, weights):
            assert torch.equal(merged, x)
            torch.testing.assert_close(gradient, sum(w.to(wide) for w in weights).conj().to(dtype))


def test_merge_takes_conjugate_views(ranks: Ranks, draw: torch.Generator) -> None:
    x = torch.randn(2, 13, 3, dtype=torch.complex64, generator=draw)
    assert all(torch.equal(merged, x.conj()) for merged in ranks.run(THREE, calls.merge_conjugate, x))


def test_split_and_merge_in_a_compiled_function(ranks: Ranks, draw: torch.Generator) -> None:
    x = torch.randn(2, 11, 3, generator=draw, requires_grad=True)
    expected = x.sin().exp().cos()
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    for merged, gradient in ranks.run(TWO, calls.compiled_split_and_merge, x.detach()):
        torch.testing.assert_close(merged, expected.detach())
        torch.testing.assert_close(gradient, expected_gradient)


# ---- inside a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "compiled", "checkpointed", "mesh", "fsdp"])
def test_a_layer_trains_as_in_one_process(how: str, ranks: Ranks, draw: torch.Generator) -> None:
    if how == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this PyTorch needs a GPU")
    x = torch.randn(2, 27, 32, generator=draw)
    expected = ranks.run(ONE, calls.train_layer, x, "plain")[0]
    for gradients in ranks.run(FOUR if how in ("mesh", "fsdp") else TWO, calls.train_layer, x, how):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=f"{how}: {name}")


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_autocast_casts_the_inputs(strategy: str, ranks: Ranks) -> None:
    assert ranks.run(TWO, calls.under_autocast, strategy) == [(torch.bfloat16, torch.float32)] * 2


def test_the_training_example_has_the_losses_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tabulate")
    pytest.importorskip("tqdm")
    assert ranks.run(FOUR, calls.train_example, str(tmp_path)) == [0, 0, 0, 0]
    result = json.loads((tmp_path / "losses.json").read_text())
    losses = {name: run["losses"] for name, run in result["runs"].items()}
    assert result["agrees"]
    assert losses["flash_attn_mini"] == pytest.approx(losses["SDPA"], abs=1e-5)
    assert losses["flash_attn_mini"] != losses["SDPA"], "the two runs share their attention"


# ---- wrong use ------------------------------------------------------------------------------------------------------

CHECK = {"FLASH_ATTN_MINI_CHECK": "1"}
WRONG_ON_ALL = [
    ({"options": {"strategy": "tree"}}, "ValueError", "strategy is 'tree'; allowed: auto, ring, all_gather, ulysses"),
    ({"options": {"strategy": "ulysses"}}, "ValueError", "4 heads of q and 2 of k; allowed: multiples of .* 3 ranks"),
    ({"options": {"softcap": -1.0}}, "ValueError", "softcap"),
    ({"options": {"alibi_slopes": torch.rand(3)}}, "ValueError", "alibi_slopes"),
    ({"options": {"dropout_p": 0.1}}, "TypeError", "dropout_p"),
    ({"options": {"window_size": (1, 2, 3)}}, "TypeError", "window_size"),
    (
        {"options": {"key_ranges": torch.zeros(1, 1, 8, 2, dtype=torch.int32)}},
        "NotImplementedError",
        "cp_flash_attn_func does not implement key_ranges; allowed: None. Available: documents as packed_shards",
    ),
    ({"tokens": 1}, "ValueError", "q has 9 tokens; allowed: those of this rank, 8"),
    ({"heads": 3}, "ValueError", "nheads"),
    ({"dtype": torch.int32}, "TypeError", "dtype"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_ON_ALL)
def test_a_wrong_call_is_an_error_on_every_rank(
    changes: dict[str, Any], error: str, message: str, ranks: Ranks
) -> None:
    for done, result in ranks.attempt(THREE, calls.call_with, dict.fromkeys(range(3), changes)):
        assert not done
        name, text, _ = result
        assert name == error, text
        with pytest.raises(Exception, match=message):
            raise Exception(text)


DIFFERENT = [
    ({"heads": 8}, "shape of q of cp_flash_attn_func differs between ranks: .* on rank 0, .* on rank 1"),
    ({"dtype": torch.float64}, "dtype .* differs"),
    ({"options": {"causal": True}}, "options .* differs"),
    ({"options": {"alibi_slopes": torch.ones(4)}}, "alibi_slopes .* differs"),
    ({"options": {"strategy": "all_gather"}}, "strategy .* differs"),
    ({"options": {"return_attn_probs": True}}, "return_attn_probs .* differs"),
    ({"length": 22}, "shards .* differs"),
    ({"tokens": -1}, "wrong arguments on rank 1: ValueError: .* q has 7 tokens|q has 7 tokens"),
    ({"options": {"softcap": -1.0}}, "wrong arguments on rank 1: .*softcap|softcap"),
]


@pytest.mark.parametrize(("changes", "message"), DIFFERENT)
def test_ranks_that_call_differently_are_an_error_on_every_rank(
    changes: dict[str, Any], message: str, ranks: Ranks
) -> None:
    for done, result in ranks.attempt(THREE, calls.call_with, {1: changes}, **CHECK):
        assert not done
        with pytest.raises(Exception, match=message):
            raise Exception(result[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float64}, "dtype of Shards.merge differs between ranks: torch.float32 on rank 0, .* rank 1"),
        ({"width": 8}, "shape of x of Shards.merge differs"),
        ({"rows": -1}, "wrong arguments on rank 1: ValueError: .* x has 7 rows|x has 7 rows"),
        ({"dim": 2}, "wrong arguments on rank 1: ValueError: .* dim is 2|dim is 2"),
        ({"length": 22}, "shards of Shards.merge differs"),
        ({"grad": True}, "gradient of x of Shards.merge differs"),
    ],
)
def test_ranks_that_merge_differently_are_an_error_on_every_rank(
    changes: dict[str, Any], message: str, ranks: Ranks
) -> None:
    for done, (name, text, _) in ranks.attempt(THREE, calls.merge_with, {1: changes}, **CHECK):
        assert not done
        assert name == "ValueError", text
        with pytest.raises(Exception, match=message):
            raise Exception(text)


def test_a_merge_beside_attention_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for done, (_, text, _) in ranks.attempt(TWO, calls.merge_or_attend, **CHECK):
        assert not done
        assert "differs between ranks: Shards.merge on rank 0, cp_flash_attn_func on rank 1" in text


def test_the_check_passes_equal_calls(ranks: Ranks) -> None:
    ranks.run(THREE, calls.call_with, {}, **CHECK)
    ranks.run(THREE, calls.merge_with, {}, **CHECK)
    ranks.run(THREE, calls.merge_with, {0: {"dim": -2}}, **CHECK)  # another name of the same dimension


@pytest.mark.parametrize(
    "members", [pytest.param(TWO, marks=pytest.mark.thorough), (1,)], ids=["every-rank", "one-rank"]
)
@pytest.mark.parametrize("merges", [False, True], ids=["attention", "merge"])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_torch_func_is_refused(transform: str, merges: bool, members: tuple[int, ...], ranks: Ranks) -> None:
    environment = CHECK if members == (1,) else {}
    results = ranks.attempt(TWO, calls.call_under_func, transform, members, merges, **environment)
    for rank, (done, (name, text, _)) in enumerate(results):
        assert not done
        assert name == ("NotImplementedError" if rank in members else "ValueError"), text
        assert f"{'Shards.merge' if merges else 'cp_flash_attn_func'} does not run under torch.func" in text


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (calls.dense_call_with_packed_shards, (), "ValueError", "2 packed documents; allowed: those of zigzag_shards"),
        (calls.varlen_call_with, ({"alibi_slopes": torch.rand(3, 2)},), "ValueError", "with 2 documents"),
        (calls.call_with_a_subclass, (), "TypeError", "q is a Subclass; allowed: a plain torch.Tensor"),
        (calls.double_backward, (), "NotImplementedError", "create_graph=True"),
        (calls.merge_twice_differentiated, (), "NotImplementedError", "create_graph=True"),
        (calls.batched_gradients, (), "NotImplementedError", "a batch of gradients (is_grads_batched)"),
        (calls.call_without_a_backend_for_the_device, (), "RuntimeError", "allowed: nccl for CUDA tensors"),
    ],
)
def test_other_wrong_uses(function: Any, arguments: Any, error: str, message: str, ranks: Ranks) -> None:
    for done, (name, text, _) in ranks.attempt(TWO, function, *arguments):
        assert not done
        assert name == error, text
        assert message in text


def test_the_trace_names_the_strategy_and_the_reason(ranks: Ranks) -> None:
    for text in ranks.run(TWO, calls.traced, FLASH_ATTN_MINI_TRACE="1"):
        assert "strategy=ring" in text
        assert "reason=4and1headsdonotdivideamong2ranks" in text


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {len(case.members) for case in CASES} == {1, 2, 3, 4}


def check_that_a_message_names_the_call_of_a_dead_rank(ranks: Ranks) -> None:
    """Of two ranks, which are closed."""
    try:
        (done, (name, text, _)), (last_done, _) = ranks.attempt(TWO, calls.end_in_the_middle)
    finally:
        ranks.close()
    assert not done
    assert not last_done
    assert name == "RuntimeError"
    assert "cp_flash_attn_func, strategy ring, forward: step 1, K and V to rank 1 and from rank 1" in text


def test_a_rank_that_dies_ends_the_others_with_a_message_that_names_the_call(tmp_path: Path) -> None:
    check_that_a_message_names_the_call_of_a_dead_rank(Ranks([TWO], tmp_path))
