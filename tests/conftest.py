"""Fixtures of every test: the session's seed, and the backends and dtypes that this machine can run.

A CPU machine runs the `cpu` backend in four dtypes; a GPU machine adds `cuda` and `triton` in float16 and bfloat16.
"""

from __future__ import annotations

import os
import secrets
import zlib

import pytest
import torch

from .support.new_process import WITHOUT_THOROUGH

SEED_VARIABLE = "FLASH_ATTN_MINI_SEED"
HAS_GPU = torch.cuda.is_available()
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9

CPU_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GPU_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = {"cpu": CPU_DTYPES, "cuda": GPU_DTYPES, "triton": GPU_DTYPES}
BACKENDS = ("cpu", "cuda", "triton") if HAS_GPU else ("cpu",)


def pytest_configure(config: pytest.Config) -> None:
    # Set in the environment so that the workers of pytest-xdist, and subprocesses, share it.
    os.environ.setdefault(SEED_VARIABLE, str(secrets.randbelow(2**31)))
    if "not thorough" in config.option.markexpr:
        os.environ[WITHOUT_THOROUGH] = "1"
    for marker in (
        "gpu: needs a CUDA GPU",
        "slow: takes more than a few seconds",
        "thorough: one more combination of what other tests cover; make test leaves it out unless THOROUGH=1",
        "sanitize: small enough to run under compute-sanitizer",
        "backends(*names): run on these backends only",
    ):
        config.addinivalue_line("markers", marker)


def pytest_report_header(config: pytest.Config) -> str:
    return f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]} (set it to run with the same values)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(f"the same values again: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend`, or `backend` and `dtype`, as arguments of a test: it runs for each that this machine has."""

    def param(backend: str, *values: object) -> object:
        marks = [] if backend == "cpu" else [pytest.mark.gpu]
        names = [backend, *(str(v).removeprefix("torch.") for v in values)]
        return pytest.param(backend, *values, marks=marks, id="-".join(names))

    if "backend" not in metafunc.fixturenames:
        return
    only = metafunc.definition.get_closest_marker("backends")
    backends = [backend for backend in BACKENDS if only is None or backend in only.args]
    if "dtype" in metafunc.fixturenames:
        pairs = [param(backend, dtype) for backend in backends for dtype in DTYPES[backend]]
        metafunc.parametrize(("backend", "dtype"), pairs)
    else:
        metafunc.parametrize("backend", [param(backend) for backend in backends])


def _mark_half_of_the_dtypes(items: list[pytest.Item]) -> None:
    """Of the four dtypes of a case on the CPU two are thorough; which ones depends on the case."""
    dtypes_of: dict[str, dict[torch.dtype, pytest.Item]] = {}
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("dtype") in CPU_DTYPES and "cpu" in (params.get("backend"), params.get("kernels")):
            name = str(params["dtype"]).removeprefix("torch.")
            dtypes_of.setdefault(item.nodeid.replace(name, "", 1), {})[params["dtype"]] = item
    for case, of_dtype in dtypes_of.items():
        if len(of_dtype) == len(CPU_DTYPES):
            turn = zlib.crc32(case.encode()) % len(CPU_DTYPES)
            for dtype in (CPU_DTYPES * 2)[turn : turn + 2]:
                of_dtype[dtype].add_marker("thorough")


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is thorough
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_half_of_the_dtypes(items)
    # Long tests first: a worker that has none left takes from the end of another's list, so no long test comes last.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


@pytest.fixture
def device(backend: str) -> str:
    """Where the backend's tensors live."""
    return "cpu" if backend == "cpu" else "cuda"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test in this session. It does not depend on the other tests that run."""
    return (int(os.environ[SEED_VARIABLE]) + zlib.crc32(request.node.nodeid.encode())) % 2**31


@pytest.fixture
def draw(seed: int) -> torch.Generator:
    """Random numbers from the test's seed."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def described_seed() -> str:
    """The setting that draws the same values again, for failure messages."""
    return f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FLASH_ATTN_MINI_BACKEND", "FLASH_ATTN_MINI_TRACE", "FLASH_ATTN_MINI_CHECK"):
        monkeypatch.delenv(variable, raising=False)
