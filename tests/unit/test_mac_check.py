"""The check that a person with a Mac runs: one file, whatever fails, without private data."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny import write_chat_data

SCRIPT = Path(__file__).parents[2] / "scripts" / "mac_check.sh"
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")

# In place of allhands: says everything that is private, fails in one part and hangs in another.
STUB = f"""#!{sys.executable}
import getpass, os, socket, subprocess, sys, time
print("home", os.path.expanduser("~/models"), "user", getpass.getuser(), "host", socket.gethostname())
print("at 192.168.17.4 and fe80::1c2b:33ff:fe44:5566%en0 and 2001:db8:1:2:3:4:5:6, ether 5c:1b:f4:00:00:01")
print("mail some.body@example.org, key hf_abcdefghijklmnop, token=qwertz and", os.environ["HF_TOKEN"])
print("file /Users/somebody/run and /home/another/run and /private/var/folders/zz/zyx_n0000/T/run")
print("\\x1b[31mred\\x1b[0m", "words", sys.argv[1:])
if sys.argv[1:3] == ["model", "check"]:
    print("the gradient is wrong", file=sys.stderr)
    sys.exit(3)
if sys.argv[1] == "demo":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
"""


def check(place: Path, *options: str, allhands: Path, **variables: str) -> subprocess.Popen[str]:
    """Start the script in ``place``; its report is ``report.txt`` there."""
    assert BASH is not None
    words = [BASH, str(SCRIPT), "--allhands", str(allhands), "--out", "report.txt", *options]
    return subprocess.Popen(
        words, cwd=place, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
    )


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    (programs / "allhands").write_text(STUB)
    (programs / "allhands").chmod(0o755)
    return programs / "allhands"


def child_of(report: str) -> int:
    found = re.search(r"^child (\d+)$", report, re.MULTILINE)
    assert found
    return int(found.group(1))


def gone(process: int) -> bool:
    """Whether the process ends within some seconds; one that nobody has waited for has ended, too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_parts_fail_and_hang_and_nothing_private_is_told(stub: Path, tmp_path: Path) -> None:
    home, token = str(tmp_path / "home"), "a-token-of-mine"
    options = ("--parts", "doctor gradient demo tests", "--limit", "5")
    process = check(tmp_path, *options, allhands=stub, HOME=home, HF_TOKEN=token)
    said, _ = process.communicate(timeout=60)
    report = (tmp_path / "report.txt").read_text()
    assert process.returncode == 1
    assert said.splitlines()[-1] == ("mac_check: 1 of 4 parts succeeded, the report is report.txt")
    results = re.findall(r"^== (\w+): (.*?)(?: in| with| after|,|:) ", report, re.MULTILINE)
    assert dict(results) == {
        "doctor": "done",
        "gradient": "FAILED",
        "demo": "FAILED",
        "tests": "left out",
    }
    assert "== gradient: FAILED with code 3" in report
    assert "the gradient is wrong" in report
    assert "words ['cluster', 'check'" in report
    assert gone(child_of(report))
    host = socket.gethostname()
    private = [home, token, host, "192.168", "fe80", "2001:db8", "5c:1b", "example.org", "hf_"]
    private += [
        "qwertz",
        "somebody",
        "another",
        "/private",
        "zyx_n0000",
        "\x1b",
        str(SCRIPT.parents[1]),
    ]
    assert [each for each in private if each in report] == []
    assert not re.search(rf"\b{re.escape(psutil.Process().username())}\b", report)


@pytest.mark.slow
def test_a_check_that_is_stopped_still_writes_its_report(stub: Path, tmp_path: Path) -> None:
    process = check(tmp_path, "--parts", "demo doctor tests", allhands=stub, HF_TOKEN="x")
    report, deadline = tmp_path / "report.txt", time.monotonic() + 20
    while not (report.exists() and "== doctor" in report.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # into the next part, which hangs
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert said.splitlines()[-1].endswith("1 of 3 parts succeeded, the report is report.txt")
    text = report.read_text()
    assert "== demo: stopped" in text
    assert "== tests: left out" in text
    assert gone(child_of(text))


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    assert BASH is not None
    for words in (["--bogus"], ["--limit"], ["--limit", "soon"]):
        done = subprocess.run(
            [BASH, SCRIPT, *words], cwd=tmp_path, capture_output=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("parts", "gaps", "speeds"),
    [
        pytest.param("facts versions ranks", 1, 0, marks=pytest.mark.slow),
        pytest.param("doctor model gradient pipeline resume speed", 2, 2, marks=pytest.mark.long),
    ],
)
def test_real_parts_at_a_small_size(
    parts: str, gaps: int, speeds: int, tiny_model: Path, tmp_path: Path
) -> None:
    data = write_chat_data(tmp_path / "data", valid=8)
    allhands = Path(sys.executable).with_name("allhands")
    options = ("--small", "--parts", parts, "--model", str(tiny_model), "--data", str(data))
    process = check(tmp_path, *options, allhands=allhands, MLX_DISABLE_COMPILE="1")
    said, _ = process.communicate(timeout=280)
    report = (tmp_path / "report.txt").read_text()
    count = len(parts.split())
    assert process.returncode == 0, said + report
    assert said.splitlines()[-1].startswith(f"mac_check: {count} of {count} parts succeeded")
    found = [float(gap) for gap in re.findall(r"difference of the losses: (\S+)", report)]
    assert found == pytest.approx([0] * gaps, abs=1e-4)
    assert "resume" not in parts or found[-1] == 0  # bit for bit
    measured = re.findall(r"tokens/s: allhands ([\d.]+), mlx_lm ([\d.]+)", report)
    assert len(measured) == speeds
    assert all(float(value) > 0 for pair in measured for value in pair)


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run([program, SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_only_what_the_bash_of_macos_knows() -> None:
    """macOS has bash 3.2 of 2007, and BSD tools; shellcheck takes the newest bash for granted."""
    text = SCRIPT.read_text()
    newer = (
        r"declare -A|local -n|mapfile|readarray|\$\{\w+(,|\^)|&>>|\|&|wait -n|coproc|EPOCHSECONDS"
    )
    of_gnu = r"\btimeout \d|\bsetsid\b|\bnproc\b|sed -[a-z]*[ri]\b|date -d|stat -c|readlink -f|--[a-z]+-lines"
    assert re.findall(newer, text) == []
    assert re.findall(of_gnu, text) == []
