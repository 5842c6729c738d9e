"""FLASH_ATTN_MINI_TRACE=1 prints each link of the call chain, in order. Without it nothing is printed."""

from __future__ import annotations

import os

import pytest
import torch

from flash_attn_mini import flash_attn_func

from ..support.new_process import run_python

SCRIPT = """
import torch
from flash_attn_mini import flash_attn_func
q = torch.randn(2, 33, 4, 64, dtype=torch.float16, device="{device}", requires_grad=True)
k = torch.randn(2, 65, 2, 64, dtype=torch.float16, device="{device}")
flash_attn_func(q, k, k, causal=True, backend="{backend}").sum().backward()
"""

LINKS = {
    "cpu": [
        "flash_attn_func", "flash_attn_mini::fwd", "mha_fwd", "set_params_fprop", "run_mha_fwd", "run_mha_fwd_cpu",
        "flash_attn_mini::bwd", "mha_bwd", "set_params_dgrad", "run_mha_bwd", "run_mha_bwd_cpu",
    ],
    "cuda": [
        "flash_attn_func", "flash_attn_mini::fwd", "mha_fwd", "set_params_fprop", "run_mha_fwd", "flash_fwd_kernel",
        "flash_attn_mini::bwd", "mha_bwd", "set_params_dgrad", "run_mha_bwd", "flash_bwd_kernel",
    ],
    "triton": ["flash_attn_func", "flash_attn_mini::fwd", "flash_attn_mini::bwd"],
}  # fmt: skip
# Fields of each link's line that a bug report needs.
FIELDS = {
    "flash_attn_func": ["float16[2,33,4,64]", "float16[2,65,2,64]", "causal=True"],
    "flash_attn_mini::fwd": ["q=float16[2,33,4,64]", "k=float16[2,65,2,64]", "backend="],
    "flash_attn_mini::bwd": ["dout=float16[2,33,4,64]", "output_mask=(True,False,False)", "backend="],
    "mha_fwd": ["backend="],
    "set_params_fprop": ["seqlen_q=33", "seqlen_k=65", "h=4", "h_k=2", "d=64"],
    "run_mha_fwd": ["device="],
    "flash_fwd_kernel": ["kBlockM=", "kBlockN=", "grid=", "threads=", "smem="],
    "mha_bwd": ["backend="],
    "set_params_dgrad": ["seqlen_q=33", "seqlen_k=65", "h=4", "h_k=2", "d=64", "deterministic="],
    "run_mha_bwd": ["device="],
    "flash_bwd_kernel": ["kBlockM=", "kBlockN=", "grid=", "threads=", "smem="],
}


def test_trace_prints_each_link_in_order(backend: str, device: str) -> None:
    environment = {**os.environ, "FLASH_ATTN_MINI_TRACE": "1"}
    script = SCRIPT.format(device=device, backend=backend)
    done = run_python("-c", script, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("[flash_attn_mini]")]
    links = [line[1] for line in lines]
    remaining = iter(links)
    for link in LINKS[backend]:
        assert link in remaining, f"{link} is missing or out of order in {links}"
    by_link = {line[1]: " ".join(line[2:]) for line in lines}
    for link in LINKS[backend]:
        for field in FIELDS.get(link, []):
            assert field in by_link[link], f"{link} does not show {field}: {by_link[link]}"
    assert f"backend={backend}" in by_link["flash_attn_mini::fwd"]
    assert f"backend={backend}" in by_link["flash_attn_mini::bwd"]


@pytest.mark.parametrize("trace", [None, "0", ""])
def test_nothing_is_printed_without_it(
    trace: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if trace is not None:  # conftest.py unsets it
        monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", trace)
    exec(SCRIPT.format(device="cpu", backend="cpu"), {})
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "[flash_attn_mini]" not in printed.err


def test_tracing_leaves_a_compiled_graph_whole(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def step(q: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, q, q, backend=backend).sum()

    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    torch._dynamo.reset()
    q = torch.randn(1, 9, 2, 16, device=device).half().requires_grad_()
    torch.compile(step, fullgraph=True, backend="aot_eager")(q).backward()
    links = [line.split()[1] for line in capfd.readouterr().err.splitlines() if line.startswith("[flash_attn_mini]")]
    assert "flash_attn_mini::fwd" in links, "the program that runs prints the links from the op on"
    assert "flash_attn_mini::bwd" in links
