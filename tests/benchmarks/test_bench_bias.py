"""The benchmark of attn_bias on the CPU: it runs end to end, and its contenders agree."""

from __future__ import annotations

from pathlib import Path

from benchmarks import bench_bias, results, tables


def test_it_runs_end_to_end(tmp_path: Path) -> None:
    bench_bias.main(["--grid", "tiny", "--rounds", "2", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / "bias_cpu_d16.json")
    assert [row["bias"] for row in result["data"]] == [bench_bias.FULL, bench_bias.NO_BIAS, *bench_bias.PADDING]
    full, without, *padding = result["data"]
    assert full["forward_to_efficient"] > 0
    assert full["both_to_efficient"] > 0
    assert without["both_to_no_bias"] == 1.0
    assert all(row["both_to_efficient"] is None and row["forward_tflops"] > 0 for row in padding)
    (table,) = tables.bias_tables(result["data"])
    assert bench_bias.PADDING[1] in table
    assert "FlexAttention" not in table
