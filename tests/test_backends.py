"""Which backend a call takes: keyword, context manager, environment, device, in this order, and no silent fallback."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest
import torch

import flash_attn_mini
from flash_attn_mini import available_backends, flash_attn_func, use_backend
from flash_attn_mini.backends import BACKENDS, select_backend

CPU = torch.device("cpu")
VARIABLE = "FLASH_ATTN_MINI_BACKEND"


@pytest.fixture
def everything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend claims to run everywhere: the order of selection alone is under test."""
    for name, entry in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, type(entry)(entry.name, entry.forward, lambda device: None))


@pytest.mark.usefixtures("everything_runs")
def test_keyword_beats_context_beats_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    assert select_backend(CPU).name == "triton"
    with use_backend("cuda"):
        assert select_backend(CPU).name == "cuda"
        assert select_backend(CPU, "cpu").name == "cpu"
    assert select_backend(CPU).name == "triton"


@pytest.mark.usefixtures("everything_runs")
def test_use_backend_nests_and_ends_on_an_exception() -> None:
    with use_backend("triton"):
        with contextlib.suppress(KeyError), use_backend("cuda"):
            assert select_backend(CPU).name == "cuda"
            raise KeyError
        assert select_backend(CPU).name == "triton"
        with use_backend("triton"), use_backend("cpu"):
            assert select_backend(CPU).name == "cpu"
        assert select_backend(CPU).name == "triton"


@pytest.mark.usefixtures("everything_runs")
def test_use_backend_is_per_thread() -> None:
    """A server's threads choose for themselves."""
    entered, leave = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        seen.append(select_backend(CPU, None).name)
        with use_backend("triton"):
            entered.set()
            leave.wait(10)

    with use_backend("cpu"):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        assert select_backend(CPU).name == "cpu"
        leave.set()
        thread.join()
    assert seen == [next(iter(BACKENDS))], "a new thread does not start with the choice of the one that made it"


def test_empty_environment_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert select_backend(CPU).name == "cpu"


def test_default_follows_the_device(backend: str, device: str) -> None:
    assert backend in available_backends(device)
    expected = available_backends(device)[0]
    assert select_backend(torch.device(device)).name == expected
    assert expected == ("cpu" if device == "cpu" else "cuda")


def test_cpu_tensors_never_take_cuda() -> None:
    assert "cuda" not in available_backends("cpu")


UNKNOWN = r"backend 'cudaa'.*unknown.*known: cuda, triton, cpu"


def test_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match=UNKNOWN):
        flash_attn_func(q, q, q, backend="cudaa")
    with pytest.raises(ValueError, match=UNKNOWN), use_backend("cudaa"):
        pytest.fail("the block must not be entered")
    monkeypatch.setenv(VARIABLE, "cudaa")
    with pytest.raises(ValueError, match=UNKNOWN) as raised:
        flash_attn_func(q, q, q)
    assert VARIABLE in str(raised.value)


@pytest.mark.parametrize("how", ["keyword", "context", "environment"])
def test_a_backend_asked_for_by_name_never_falls_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors on the cuda backend: a RuntimeError that names the backend, the device and the reason."""
    q = torch.zeros(1, 2, 1, 8)
    says = re.compile(r"'cuda'.*cpu.*CUDA tensors")
    if how == "keyword":
        with pytest.raises(RuntimeError, match=says):
            flash_attn_func(q, q, q, backend="cuda")
    elif how == "context":
        with pytest.raises(RuntimeError, match=says), use_backend("cuda"):
            flash_attn_func(q, q, q)
    else:
        monkeypatch.setenv(VARIABLE, "cuda")
        with pytest.raises(RuntimeError, match=says):
            flash_attn_func(q, q, q)


@pytest.mark.gpu
def test_cpu_backend_refuses_cuda_tensors() -> None:
    q = torch.zeros(1, 2, 1, 8, device="cuda", dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"'cpu'.*cuda.*CPU tensors"):
        flash_attn_func(q, q, q, backend="cpu")


def test_no_backend_gives_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in BACKENDS.items():
        refuses = type(entry)(entry.name, entry.forward, lambda device, name=name: f"{name} is out of order")
        monkeypatch.setitem(BACKENDS, name, refuses)
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match=r"no backend.*cpu.*cuda is out of order.*triton is .*cpu is "):
        flash_attn_func(q, q, q)


def test_package_exports_what_its_users_need() -> None:
    for name in flash_attn_mini.__all__:
        assert hasattr(flash_attn_mini, name)
