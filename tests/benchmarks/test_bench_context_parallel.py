"""The benchmark of context parallel: its counts, its model and its tables. Measuring needs several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_context_parallel as bench
from benchmarks import results, tables
from benchmarks.bench_context_parallel import Machine, Model, Point
from flash_attn_mini.reference import visible_keys


@pytest.mark.parametrize("window", [0, 5, 100])
def test_pairs_are_those_that_the_mask_shows(window: int) -> None:
    point, lengths = Point("causal", 8, 2, 2, window), [30, 1, 7]
    shown = [visible_keys(n, n, causal=True, window_size=(window or -1, 0)) for n in lengths]
    assert bench.visible_pairs(point, lengths) == sum(int(x.sum()) for x in shown)


def test_documents_fill_the_ranks() -> None:
    lengths = bench.documents_of(131072)
    assert sum(lengths) == 131072
    assert all(bench.SHORTEST <= n <= bench.LONGEST for n in lengths[:-1])


def test_the_model_is_ideal_where_nothing_travels_and_falls_with_slower_links() -> None:
    fast, slow = Machine(4e14, 1e15, 1e18), Machine(4e14, 1e9, 1e18)
    for size in (1, 2, 8):
        shares = Model(fast, size, 8192, 16, 16).shares()
        assert shares == {name: pytest.approx(1.0, abs=1e-3) for name in ("ring", "ulysses")}
    assert all(share < 0.5 for share in Model(slow, 8, 8192, 16, 16).shares().values())
    assert "ulysses" not in Model(fast, 8, 8192, 16, 4).shares()


def test_the_table_shows_rates_shares_and_the_model(tmp_path: Path) -> None:
    row = {
        "kind": "causal",
        "tokens": 8192,
        "nheads": 16,
        "nheads_k": 16,
        "headdim": 128,
        "gpus": 2,
        "auto": "ring",
        "tflops": {bench.ONE_GPU: 400.0, "ring": 360.0},
        "share": {"ring": 0.9},
        "share_with_host": {"ring": 0.8},
        "waiting": ["PyTorch FLASH"],
        "max_ctas": 16,
        "message_gbps": {"8": 40.0, "64": 150.0},
    }
    results.save("x", benchmark="bench_context_parallel", title="X", data=[row], sources=(), out_dir=tmp_path)
    text = tables.render(results.load(tmp_path / "x.json"))
    assert "360 (0.90; 0.80)" in text
    assert "not ahead of the GPU in every round: PyTorch FLASH." in text
    assert "Our group: 16 CTAs for messages" in text
    assert "ring 0." in text
    assert "150 GB/s at 64 MiB" in text
    assert ", ulysses 0." in text


def test_the_model_writes_its_table(tmp_path: Path) -> None:
    bench.main(["--model", "--out-dir", str(tmp_path)])
    text = tables.render(results.load(tmp_path / "context_parallel_model.json"))
    assert "1024" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_benchmark_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        bench.main([])
