"""The choice of a backend: keyword, context manager, environment, device, in this order; no silent fallback."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import flash_attn_mini
from flash_attn_mini import available_backends, backends, flash_attn_func, use_backend
from flash_attn_mini.backends import BACKENDS, extension, select_backend

from ..support.new_process import run_python

CPU = torch.device("cpu")
VARIABLE = "FLASH_ATTN_MINI_BACKEND"


@contextlib.contextmanager
def reasons(answer: Callable[[str], str | None]) -> Iterator[None]:
    """Every backend gives ``answer(name)`` as its reason not to run, None for "it can", on any device."""

    def forget() -> None:
        for function in vars(backends).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    forget()
    with pytest.MonkeyPatch.context() as patch:
        for name, entry in BACKENDS.items():
            changed = dataclasses.replace(entry, unavailable_reason=lambda device, name=name: answer(name))
            patch.setitem(BACKENDS, name, changed)
        yield
    forget()


@pytest.fixture
def everything_runs() -> Iterator[None]:
    """Tests the order of selection only."""
    with reasons(lambda name: None):
        yield


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
    """Each thread of a server has its own choice."""
    entered, leave = threading.Event(), threading.Event()
    default = select_backend(CPU).name
    assert default != "triton"
    seen: list[str] = []

    def other() -> None:
        seen.append(select_backend(CPU).name)
        with use_backend("cpu"):
            entered.set()
            leave.wait(10)

    with use_backend("triton"):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        assert select_backend(CPU).name == "triton"
        leave.set()
        thread.join()
    assert seen == [default], "a new thread starts with the default, not with the choice of the thread that made it"


def test_empty_environment_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert select_backend(CPU).name == "cpu"


def test_default_follows_the_device(backend: str, device: str) -> None:
    assert backend in available_backends(device)
    expected = available_backends(device)[0]
    assert select_backend(torch.device(device)).name == expected
    assert expected == ("cpu" if device == "cpu" else "cuda")


def test_cpu_tensors_take_the_cpu_backend_although_triton_could_interpret() -> None:
    """TRITON_INTERPRET=1 makes triton available on the CPU; that is for debugging, never a default."""
    with reasons(lambda name: "it takes CUDA tensors" if name == "cuda" else None):
        assert select_backend(CPU).name == "cpu"


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
def test_a_named_backend_never_falls_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_backend_gives_the_reason() -> None:
    with reasons(lambda name: f"{name} is out of order"):
        with pytest.raises(RuntimeError, match=r"no backend.*cpu is out of order"):
            select_backend(CPU)
        with pytest.raises(RuntimeError, match=r"'triton'.*the backend argument.*triton is out of order"):
            select_backend(CPU, "triton")


@pytest.mark.parametrize("how", ["keyword", "context"])
@pytest.mark.skipif("triton" in available_backends("cpu"), reason="the interpreter runs")
def test_the_op_gives_the_reason_of_triton(how: str) -> None:
    q = torch.zeros(1, 2, 1, 8)
    chosen = use_backend("triton") if how == "context" else contextlib.nullcontext()
    with chosen, pytest.raises(RuntimeError, match=r"triton.* cannot run on cpu: \S"):
        flash_attn_func(q, q, q, backend="triton" if how == "keyword" else None)


def test_reserved_sms_end_with_their_context_and_belong_to_a_thread() -> None:
    def reserved() -> int:
        count: int = extension.load().reserve_sms(0)
        extension.load().reserve_sms(count)
        return count

    of_thread = []
    with (
        contextlib.suppress(KeyError),
        extension.reserved_sms(16),
        extension.reserved_sms(0),
        extension.reserved_sms(4),
    ):
        assert reserved() == 4
        thread = threading.Thread(target=lambda: of_thread.append(reserved()))
        thread.start()
        thread.join()
        raise KeyError
    assert of_thread == [0]
    assert reserved() == 0


def test_the_import_takes_neither_the_compiler_nor_triton() -> None:
    """Both take longer than torch's own import, and TRITON_INTERPRET=1 may be set up to the import of Triton."""
    script = (
        "import sys, torch; before = set(sys.modules); import flash_attn_mini;"
        " print({'torch._dynamo', 'triton'} & (set(sys.modules) - before))"
    )
    run = run_python("-c", script)
    assert run.stdout == "set()\n"


def test_package_exports_what_its_users_need() -> None:
    for name in flash_attn_mini.__all__:
        assert hasattr(flash_attn_mini, name)


def test_only_an_extension_that_was_never_built_is_replaced_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_error", "it does not load")
    monkeypatch.setattr(backends, "_resolve", backends._resolve.__wrapped__)
    with pytest.raises(RuntimeError, match="no backend can run on cpu; cpu: it does not load"):
        select_backend(torch.device("cpu"))
    monkeypatch.setattr(extension, "IS_BUILT", False)
    assert select_backend(torch.device("cpu")).name == "reference"
