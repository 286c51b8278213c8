"""Common commands on a simulated Mac: nothing of Linux or of CUDA is asked for, and they work.

The simulation shows Metal's facts and computes on this computer's CPU. It cannot show how Metal
computes, which docs/platforms.md says.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from macs import DOUBLE, SOURCE, Mac, simulated_mac
from tiny import run_allhands, write_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="simulates a Mac on Linux")

# Not the last steps of a run, at which a rank may already be ending.
TRAINING = ("--iters", "4", "--batch-size", "4", "--num-layers", "2", "--val-batches", "2")


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[Mac]:
    with simulated_mac(tmp_path) as found:
        yield found


# --- the simulation itself ------------------------------------------------------------------------

# Each as a statement of a module of allhands, the error that a Mac gives, and the journal's kind:
# a name that is missing is not written down.
LINUX = [
    ("os.sched_getaffinity(0)", "AttributeError", None),
    ("os.pidfd_open(1)", "AttributeError", None),
    ("os.memfd_create('x')", "AttributeError", None),
    ("os.getxattr('.', 'user.x')", "AttributeError", None),
    ("os.O_TMPFILE", "AttributeError", None),
    ("select.epoll()", "AttributeError", None),
    ("signal.pidfd_send_signal(1, 9)", "AttributeError", None),
    ("socket.SO_BINDTODEVICE", "AttributeError", None),
    ("socket.TCP_USER_TIMEOUT", "AttributeError", None),
    ("fcntl.F_ADD_SEALS", "AttributeError", None),
    ("resource.prlimit(0, 1)", "AttributeError", None),
    ("time.CLOCK_BOOTTIME", "AttributeError", None),
    ("psutil.Process().cpu_affinity()", "AttributeError", None),
    ("psutil.Process().memory_full_info().pss", "AttributeError", None),
    ("open('/proc/self/status')", "FileNotFoundError", "file"),
    ("os.stat('/sys/fs/cgroup')", "FileNotFoundError", "file"),
    ("os.listdir('/dev/shm')", "FileNotFoundError", "file"),
    ("pathlib.Path('/proc/cpuinfo').read_text()", "FileNotFoundError", "file"),
    ("ctypes.CDLL('libc.so.6')", "OSError", "library"),
    ("ctypes.CDLL('libnvidia-ml.so.1')", "OSError", "library"),
    ("ctypes.CDLL('libnvrtc.so.12')", "OSError", "library"),
    ("ctypes.CDLL(None).prctl(1, 9)", "AttributeError", "symbol"),
    ("ctypes.CDLL(None).mallopt(1, 9)", "AttributeError", "symbol"),
    ("subprocess.run(['nvidia-smi', '-L'])", "FileNotFoundError", "program"),
    ("subprocess.run(['patchelf', '--version'])", "FileNotFoundError", "program"),
    ("socket.socket(socket.AF_UNIX).bind('x' * 104)", "OSError", "socket"),
    ("mx.fast.cuda_kernel(name='x')", "RuntimeError", "mlx"),
    ("mx.set_wired_limit(30 << 30)", "ValueError", None),
    ("mx.new_stream(mx.gpu)", "", None),
    ("subprocess.run(['ps', '--sort', 'rss'], capture_output=True)", "", "option"),
    ("subprocess.run(['sed', '-i', 's/a/b/'], capture_output=True)", "", "option"),
    ("subprocess.run(['true'], env={'LD_PRELOAD': 'x'}, executable='/bin/sh')", "", "variable"),
]  # fmt: skip
TRY = """
import ctypes, fcntl, json, os, pathlib, resource, select, signal, socket, subprocess, sys, time
import mlx.core as mx
import psutil
for statement in json.loads(sys.argv[1]):
    try:
        exec(compile(statement, "/x/src/allhands/tried.py", "exec"))
        print("")
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_request_for_linux_fails_as_on_a_mac_and_is_written_down(mac: Mac) -> None:
    statements = [statement for statement, _, _ in LINUX]
    raised = mac.python("-c", TRY, json.dumps(statements)).splitlines()
    expected = [(statement, error) for statement, error, _ in LINUX]
    assert list(zip(statements, raised, strict=True)) == expected
    kinds = [kind for _, _, kind in LINUX if kind is not None]
    assert [request["kind"] for request in mac.requests()] == kinds
    assert {request["where"] for request in mac.requests()} == {"tried.py:1"}


# --- what no command here reaches -----------------------------------------------------------------


def test_names_of_linux_are_used_where_their_absence_is_heeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that uses such a name asks ``hasattr`` or for the platform, or expects the error."""
    monkeypatch.syspath_prepend(DOUBLE)
    mac_system = importlib.import_module("mac_system")
    lines = [line.split() for line in mac_system.LINUX_ONLY.strip().splitlines()]
    names = {f"{module}.{name}" for module, *found in lines for name in found}
    heeded = re.compile(r"hasattr|sys\.platform|ON_MAC|AttributeError")
    used = list[str]()
    unheeded = list[str]()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            found = {
                ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)
            }
            for name in sorted(found & names):
                used.append(name)
                if not heeded.search(ast.get_source_segment(text, function) or ""):
                    unheeded.append(f"{path.name}:{function.lineno} {name}")
    assert "os.sched_getaffinity" in used
    assert unheeded == []


# --- the accelerator, its limits, and what follows from them --------------------------------------

FACTS = """
import json
from allhands.distributed.mesh import Mesh
from allhands.kernels.selection import BY_RULE, FORMS
from allhands.run.expecting import Device
from allhands.runtime import accelerator, blas, memory
found = accelerator.detect()
sizing = found.sizing(None, compiled=False)
print(json.dumps({
    "kind": found.kind,
    "name": found.name,
    "memory": found.memory_bytes,
    "rooms": [
        Device(found, Mesh(0, count, 0, count), 0).room for count in (1, 2)
    ],
    "native": found.runs_natively("auto"),
    "sizing": [sizing.max_tokens, sizing.overhead_tokens, sizing.few_shapes],
    "forms": {name: BY_RULE.select(name, "metal", 9) for name in FORMS if "metal" in FORMS[name]},
    "blas": blas.preload_blas().state,
    "cache": str(blas.cache_dir({})),
    "limit": memory.memory_limit(),
    "peak": memory.peak_rss_bytes(),
}))
"""


def test_limits_of_a_mac_follow_from_what_metal_says(mac: Mac, tmp_path: Path) -> None:
    found = json.loads(mac.python("-c", FACTS))
    assert (found["kind"], found["name"], found["memory"]) == ("metal", "Apple M1 Pro", 32 << 30)
    # Two thirds of 32 GiB, which macOS recommends, and not three quarters; ranks share them.
    assert found["rooms"] == [22906503168, 22906503168 // 2]
    assert found["native"] is False
    assert found["sizing"] == [16384, 256, False]
    assert found["forms"] == {"quantized_linear": "plain", "loss_chunk": "512MB"}
    assert found["blas"] == "not needed"
    assert found["cache"] == str(tmp_path / "Library" / "Caches" / "allhands")
    assert found["limit"] is None
    # In bytes, not in kilobytes. Linux counts the process that started this one, too.
    started_by = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 20e6 < found["peak"] < 2e9 + started_by
    assert mac.requests() == []


# --- commands -------------------------------------------------------------------------------------


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] in ("train", "valid")]


@pytest.fixture(scope="module")
def linux_losses(tmp_path_factory: pytest.TempPathFactory, inputs: Sequence[str]) -> list[float]:
    """Losses of the same training on this computer, by its own kernels."""
    run = tmp_path_factory.mktemp("linux") / "run"
    done = run_allhands("train", *inputs, *TRAINING, "--adapter-path", run)
    assert done.returncode == 0, done.stderr
    return losses(run)


@pytest.fixture(scope="module")
def inputs(tiny_model: Path, tiny_data: Path) -> Sequence[str]:
    return ("--model", str(tiny_model), "--data", str(tiny_data))


@pytest.mark.slow
def test_a_training_and_the_commands_about_it(
    mac: Mac, inputs: Sequence[str], tmp_path: Path, linux_losses: list[float]
) -> None:
    run, (_, model, _, data) = tmp_path / "run", inputs
    said = mac.allhands("train", *inputs, *TRAINING, "--adapter-path", run, "-v")
    assert "device: metal (Apple M1 Pro)" in said
    assert losses(run) == pytest.approx(linux_losses, rel=1e-4)
    commands = [
        ("generate", "--model", model, "--adapter-path", run, "--prompt", "a", "--max-tokens", "3"),
        ("compare", *inputs, "--adapter-path", run, "--max-tokens", "3"),
        ("model", "check", model, "--data", data),
        ("eval", *inputs, "--adapter-path", run, "--split", "test"),
        ("plan", *inputs, *TRAINING, "--json", "--adapter-path", tmp_path / "planned"),
        ("data", "check", data, "--model", model),
        ("monitor", run, "--once"),
        ("env", "--json"),
        ("version",),
        ("report", run, "--out", tmp_path / "report.html"),
        ("plot", run, "--out", tmp_path / "loss.png"),
        ("checkpoint", "list", run),
        ("fuse", "--model", model, "--adapter-path", run, "--save-path", tmp_path / "fused"),
    ]
    spoken = json.dumps([[str(word) for word in words] for words in commands])
    codes = mac.python("-c", IN_TURN, spoken).splitlines()[-1]
    assert json.loads(codes) == [0] * len(commands)
    plan = (tmp_path / "planned" / "plan.json").read_text()
    assert "22906503168" in plan
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert mac.requests() == []


# One process for all: most of a command's time is Python's start.
IN_TURN = """
import json, sys
from allhands.cli.main import main
codes = []
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        codes.append(ended.code)
    else:
        codes.append(0)
print()
print(json.dumps(codes))
"""


@pytest.mark.slow
def test_two_ranks_over_the_ring(
    mac: Mac, inputs: Sequence[str], tmp_path: Path, linux_losses: list[float]
) -> None:
    run = tmp_path / "run"
    own = ("--cores-per-rank", "1")  # which macOS cannot keep apart, and which is no error there
    mac.allhands("train", *inputs, *TRAINING, "--adapter-path", run, "-n", "2", *own)
    assert losses(run) == pytest.approx(linux_losses, rel=1e-4)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    started = next(event for event in events if event["event"] == "started")
    assert (started["backend"], started["num_ranks"]) == ("ring", 2)
    assert started["versions"]["platform"].startswith("macOS")
    assert mac.requests() == []


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [
        *("--strategy zero1", "--strategy pipeline", "--strategy fsdp", "--tp 2", "--cp 2"),
        *("--compress int8", "--sync-every 2", "--sync-delay 1", "--fine-tune-type full"),
    ],
)
def test_other_ways_of_two_ranks(
    mac: Mac, inputs: Sequence[str], tmp_path: Path, linux_losses: list[float], way: str
) -> None:
    run = tmp_path / "run"
    mac.allhands("train", *inputs, *TRAINING, "--adapter-path", run, "-n", "2", *way.split())
    exact = way.startswith(("--strategy", "--tp", "--cp"))
    if exact:
        assert losses(run) == pytest.approx(linux_losses, rel=1e-4)
    else:
        assert losses(run)[0] == pytest.approx(linux_losses[0], rel=1e-4)
    assert mac.requests() == []


@pytest.mark.long
def test_pretraining_that_is_resumed(mac: Mac, inputs: Sequence[str], tmp_path: Path) -> None:
    _, model, _, data = inputs
    shape = "--shape llama --layers 2 --dims 32 --mlp-dims 64 --heads 2 --kv-heads 2"
    words = ("pretrain", "--data", data, "--tokenizer", model, *shape.split(), "--block-size", "32")
    words = (*words, "--batch-size", "4", "--val-batches", "1", "--adapter-path", tmp_path / "run")
    mac.allhands(*words, "--iters", "4")
    mac.allhands(*words, "--iters", "6", "--resume")
    assert len(losses(tmp_path / "run")) >= 2
    assert mac.requests() == []


def test_four_bits_recomputed_blocks_and_a_compiled_step(
    mac: Mac, tiny_data: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", bits=4)
    words = ("--model", model, "--data", tiny_data, *TRAINING, "--grad-checkpoint", "-v")
    said = mac.allhands("train", *words, "--compile", "on", "--adapter-path", tmp_path / "run")
    assert "dense products: 21 quantised layers" in said  # three blocks of seven
    assert "step: compiled" in said
    assert mac.requests() == []
