"""The benchmark of short sequences on the CPU: it runs end to end, and its contenders agree."""

from __future__ import annotations

from pathlib import Path

from benchmarks import bench_short, results, tables


def test_it_runs_end_to_end(tmp_path: Path) -> None:
    bench_short.main(["--grid", "tiny", "--rounds", "2", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / "short_cpu.json")
    assert [row["direction"] for row in result["data"]] == ["forward", "both"]
    assert all(row["ratio"][bench_short.OURS] == 1.0 and row["ratio"]["SDPA"] > 0 for row in result["data"])
    (table,) = tables.short_tables(result["data"])
    assert "3 × 15 tokens, 2 heads of 24: forward and backward" in table
