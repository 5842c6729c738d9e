"""The benchmark of masks on the CPU: it runs end to end, and its masks and key_ranges say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as run_all
from benchmarks import bench_masks, results, tables
from flash_attn_mini.reference import in_key_ranges, visible_keys

TINY = bench_masks.GRIDS["tiny"]
MASKS = bench_masks.masks_of(TINY)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_the_function_of_a_mask_says_what_its_ranges_say(mask: bench_masks.Mask) -> None:
    positions, zero = torch.arange(TINY.seqlen), torch.zeros((), dtype=torch.int64)
    expected = visible_keys(TINY.seqlen, TINY.seqlen, causal=mask.causal)
    if mask.key_ranges is not None:
        expected = expected & in_key_ranges(mask.key_ranges, TINY.seqlen)[0, 0]
    if mask.cu_seqlens is not None:
        sequence = torch.bucketize(positions, mask.cu_seqlens, right=True)
        expected = expected & (sequence[:, None] == sequence)
    visible = mask.visible(zero, zero, positions[:, None], positions[None, :])
    assert torch.equal(visible, expected)
    assert bench_masks.visible_pairs(mask, TINY) == expected.sum()
    assert expected.any(-1).all()


def test_the_masks_are_those_of_the_documents() -> None:
    assert [mask.name for mask in MASKS] == [
        bench_masks.CAUSAL,
        "documents",
        "documents, packed",
        "documents, causal",
        "documents, causal, packed",
        "prefix-LM",
        "chunks, causal",
        "chunks, causal, packed",
        "global and window, causal",
    ]
    perf = bench_masks.GRIDS["perf"]
    assert (perf.seqlen, perf.mean_document, perf.chunk, perf.num_global, perf.window) == (16384, 2048, 2048, 256, 1024)


def test_it_runs_end_to_end(tmp_path: Path) -> None:
    bench_masks.main(["--grid", "tiny", "--rounds", "2", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / "masks_cpu_d16.json")
    assert [row["mask"] for row in result["data"]] == [mask.name for mask in MASKS]
    assert result["data"][0]["both_to_causal"] == 1.0
    assert all(row["forward_tflops"] > 0 and row["both_to_flex"] is None for row in result["data"])
    (table,) = tables.mask_tables(result["data"])
    assert "global and window, causal" in table
    assert any(step.module == "bench_masks" for step in run_all.GPU_STEPS)
