"""Ctrl-C before a command can answer it: it ends, and nobody sees a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

_HEAD = """
import os, signal, sys
sys.argv = ['allhands', {verb!r}]
interrupt = lambda *_: os.kill(os.getpid(), {number})
"""
# mlx.core is such a module of C, of which Python makes an ImportError.
_IMPORTED = """
sys.argv += {arguments!r}
import allhands.__main__ as command
def imported(name):
    try:
        interrupt()
        raise AssertionError
    except KeyboardInterrupt as error:
        raise ImportError("Encountered an error while initializing the extension.") from error
sys.modules["mlx"] = type(sys)("mlx")
sys.modules["mlx"].__path__ = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            imported(name)
sys.meta_path.insert(0, Finder())
command.run()
"""


def ended(
    code: str, *, verb: str = "env", number: int = signal.SIGINT
) -> subprocess.CompletedProcess[str]:
    code = _HEAD.format(verb=verb, number=int(number)) + code
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("step", ["prepare_process", "preload_blas", "stream_of", "main"])
def test_while_the_command_is_made_ready(step: str) -> None:
    done = ended(
        f"import allhands.__main__ as command\nsetattr(command, {step!r}, interrupt)\ncommand.run()\n"
    )
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("module", ["typing", "ctypes", "typer", "allhands.cli.parser"])
def test_while_the_command_is_imported(module: str) -> None:
    code = (
        "class Finder:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: interrupt()\n"
        f"sys.modules.pop({module!r}, None)\nsys.meta_path.insert(0, Finder())\nimport allhands.__main__\n"
    )
    done = ended(code)
    assert (done.returncode, done.stdout + done.stderr) == (-signal.SIGINT, "")


def test_a_program_that_imports_allhands_keeps_its_own_way() -> None:
    code = "sys.argv = ['mine.py']\nimport allhands\n"
    code += "try:\n    interrupt()\nexcept KeyboardInterrupt:\n    print('mine')\n"
    assert (done := ended(code)).stdout == "mine\n", done.stderr


def test_a_program_in_a_directory_that_is_gone_can_import_allhands() -> None:
    code = "sys.argv = ['-c']\nimport tempfile\nwith tempfile.TemporaryDirectory() as gone:\n    os.chdir(gone)\n"
    done = ended(code + "import allhands\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_in_the_background_of_a_script_ignores_it() -> None:
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nimport allhands.__main__ as command\n"
    done = ended(code + "command.main = interrupt\ncommand.run()\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_while_mlx_is_imported(tiny_model: Path) -> None:
    done = ended(
        _IMPORTED.format(arguments=["--model", str(tiny_model), "-p", "Hello"]), verb="generate"
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("allhands: interrupted")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_a_rank_imports_mlx(tmp_path: Path, number: int) -> None:
    rank = """
from allhands.cluster.environment import recognise
from allhands.cluster.worker import install
with install(recognise({}), {}):
    try:
        interrupt()
        import time
        time.sleep(5)
    except KeyboardInterrupt as error:
        raise ImportError("Encountered an error while initializing the extension.") from error
"""
    done = ended(rank, number=number)
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr


# Python cannot raise in the callback of a weak reference: it prints the exception, and goes on.
_IN_A_CALLBACK = """
import time, weakref
class Gone: pass
def lose(number):
    gone = Gone()
    reference = weakref.ref(gone, lambda _: os.kill(os.getpid(), number))
    del gone
    time.sleep(0.5)
    print("went on", flush=True)
"""


def test_where_python_cannot_raise_it() -> None:
    code = "import allhands.__main__ as command\ncommand.main = lambda: lose(signal.SIGINT)\ncommand.run()\n"
    done = ended(_IN_A_CALLBACK + code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_python_cannot_raise_it_in_a_rank(number: int) -> None:
    code = f"""
from allhands.cluster.environment import recognise
from allhands.cluster.worker import install
with install(recognise({{}}), {{}}):
    lose({int(number)})
"""
    done = ended(_IN_A_CALLBACK + code)
    assert done.returncode == 128 + number
    assert "went on" not in done.stdout
    assert "Traceback" not in done.stderr
    assert "lost" not in done.stderr  # as it would be after a second one
