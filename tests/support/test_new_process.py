"""Processes forked from one that has torch behave as those that `python` starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .new_process import run_python

SAYS = "import os, sys; print(__name__, sys.argv[1:], os.getcwd(), os.environ.get('X'), sys.stdin.read())"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (SAYS, 0),
        ("import sys; sys.exit(3)", 3),
        ("assert False", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import atexit; atexit.register(print, 'last')\nprint('first')", 0),
        ("import module_of_the_test; print(module_of_the_test.x)", 0),
    ],
)
@pytest.mark.parametrize(
    "kind", ["-c", pytest.param("-m", marks=pytest.mark.thorough), pytest.param("script", marks=pytest.mark.thorough)]
)
def test_results_are_those_of_a_started_process(kind: str, code: str, status: int, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "module_of_the_test.py").write_text("x = 5\n")
    (tmp_path / "script_of_the_test.py").write_text(code)
    start = {"-c": ["-c", code], "-m": ["-m", "script_of_the_test"], "script": [f"{tmp_path}/script_of_the_test.py"]}
    arguments = [*start[kind], "--flag", "one two"]
    environment = os.environ | {"X": "5", "PYTHONPATH": str(folder)}
    found = run_python(*arguments, environment=environment, cwd=tmp_path)
    expected = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.returncode == status, found.stderr
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_a_process_changes_nothing_for_the_next() -> None:
    assert run_python("-c", "import os, sys; os.environ['X'] = sys.x = '1'").returncode == 0
    result = run_python("-c", "import os, sys; print('X' in os.environ, hasattr(sys, 'x'), 'torch' in sys.modules)")
    assert result.stdout == "False False True\n", result.stderr
