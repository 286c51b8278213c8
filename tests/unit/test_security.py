"""What the code must never do, and what a run must never leave behind: read off the source, and off
a real run.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from allhands.config.schema import TrainConfig, build_config
from allhands.config.yaml_files import read_yaml
from allhands.errors import ConfigError

ROOT = Path(__file__).parents[2]

# --- the source: nothing runs what it reads -------------------------------------------------------

# Formats that run code when they are read, and libraries whose files are made of them.
FORMATS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
}
# Processes that talk in pickles. One is allowed, in one module: see the test about helpers below.
TRANSPORTS = {
    "multiprocessing",
    "loky",
    "concurrent.futures.ProcessPoolExecutor",
    "xmlrpc",
    "Pyro5",
}
HELPERS = ("src/allhands/data/tokenise.py", "loky")
CALLS = {
    *(
        "eval",
        "exec",
        "builtins.eval",
        "builtins.exec",
        "os.system",
        "os.popen",
        "commands.getoutput",
    ),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *(
        "torch.load",
        "torch.save",
        "numpy.save",
        "numpy.savez",
        "numpy.lib.format.read_array",
        "pandas.read_pickle",
    ),
    *(
        "tempfile.mktemp",
        "yaml.unsafe_load",
        "yaml.unsafe_load_all",
        "yaml.full_load",
        "yaml.full_load_all",
    ),
}
# Keywords that switch a guard off, with the only constant that leaves it on.
GUARDS = {"shell": False, "allow_pickle": False, "weights_only": True, "trust_remote_code": False}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader", "yaml.CBaseLoader"}
# A subclass of SafeLoader, made in this module; what it does is tested below.
OWN_LOADER = ("src/allhands/config/yaml_files.py", "_yaml_loader")
SHARED_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")
# Named as the place where tempfile makes a private directory.
PLACES = {
    ("src/allhands/cluster/supervisor.py", "/tmp"),
    ("src/allhands/cluster/processes.py", "/dev/shm"),
    ("src/allhands/cluster/mpi.py", "/dev/shm"),
    ("scripts/soak.py", "/tmp"),
    # Where MLX looks when nobody has said where: nothing is written there by name.
    ("src/allhands/runtime/jit_cache.py", "/tmp"),
}
# The one module that opens files for others to read, and asks the umask.
OWNER_OF_MODES = "src/allhands/io/files.py"


def places_of_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: ``{"np": "numpy", "system": "os.system"}``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= (
                    {alias.asname: alias.name} if alias.asname else {alias.name.split(".")[0]: ""}
                )
        elif isinstance(node, ast.ImportFrom):
            found |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """``numpy.load`` of ``np.load``; empty for what is no plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id) or node.id
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, names)}.{node.attr}"
    return ""


def dangers(source: str, path: str = "some.py") -> list[str]:
    """What is banned in ``source``, in words."""
    tree = ast.parse(source)
    names = places_of_names(tree)
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                found += _imported(node, path)
            case ast.Call():
                found += _called(node, names, path)
            case ast.Constant(value=str(text)):
                shared = text in SHARED_DIRECTORIES or text.startswith(
                    tuple(f"{p}/" for p in SHARED_DIRECTORIES)
                )
                found += [f"the directory {text}"] * (shared and (path, text) not in PLACES)
            case ast.Dict():
                found += [
                    name
                    for key, value in zip(node.keys, node.values, strict=True)
                    if (name := _off(key, value))
                ]
            case ast.keyword(arg=str(name)):
                found += [text] if (text := _off(ast.Constant(name), node.value)) else []
            case ast.FunctionDef() | ast.Lambda():
                found += _defaults(node.args)
    return found


def _imported(node: ast.Import | ast.ImportFrom, path: str) -> list[str]:
    modules = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = [f"{node.module}.{name}" for name in modules]
    banned = [name for name in modules if {name, name.split(".")[0]} & (FORMATS | TRANSPORTS)]
    return [f"import {name}" for name in banned if (path, name.split(".")[0]) != HELPERS]


def _called(node: ast.Call, names: dict[str, str], path: str) -> list[str]:
    name = full_name(node.func, names)
    if name in CALLS:
        return [name]
    if name in ("yaml.load", "yaml.load_all", "yaml.compose", "yaml.parse"):
        loaders = [*node.args[1:2], *(key.value for key in node.keywords if key.arg == "Loader")]
        safe = any(
            full_name(loader, names) in SAFE_LOADERS or _own_loader(loader, path)
            for loader in loaders
        )
        return [] if safe else [f"{name} without a safe loader"]
    if name == "os.open" and "O_CREAT" in ast.unparse(node) and path != OWNER_OF_MODES:
        mode = node.args[2] if len(node.args) > 2 else None
        return (
            []
            if isinstance(mode, ast.Constant) and mode.value == 0o600
            else ["os.open without mode 0600"]
        )
    if name.endswith((".chmod", ".fchmod", ".umask")):
        numbers = [
            arg.value
            for arg in node.args
            if isinstance(arg, ast.Constant) and isinstance(arg.value, int)
        ]
        wide = [
            number for number in numbers if (~number if name.endswith("umask") else number) & 0o077
        ]
        return [f"{name} for others than the owner"] * bool(wide)
    return []


def _own_loader(loader: ast.expr, path: str) -> bool:
    return isinstance(loader, ast.Call) and (path, full_name(loader.func, {})) == OWN_LOADER


def _off(key: ast.expr | None, value: ast.expr) -> str | None:
    """That a guard is switched off by a constant; ``shell`` and ``allow_pickle`` not even by a
    variable.
    """
    name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
    if name not in GUARDS:
        return None
    if isinstance(value, ast.Constant):
        return (
            None if value.value is GUARDS[name] or value.value is None else f"{name}={value.value}"
        )
    return None if name == "trust_remote_code" else f"{name} as a variable"


def _defaults(arguments: ast.arguments) -> list[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(plain[len(plain) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    pairs += [
        (a, default)
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default
    ]
    return [text for argument, value in pairs if (text := _off(ast.Constant(argument.arg), value))]


def files() -> Iterator[tuple[str, str]]:
    for folder in ("src", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_nothing_that_is_read_is_run_and_no_shell_and_no_public_file() -> None:
    found = {path: wrong for path, text in files() if (wrong := dangers(text, path))}
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        *(
            "import pickle",
            "from pickle import loads",
            "import dill as d",
            "import joblib.numpy_pickle",
        ),
        *(
            "from multiprocessing import Pool",
            "import loky",
            "from concurrent.futures import ProcessPoolExecutor",
        ),
        *("eval('1')", "exec(text)", "import os\nos.system(x)", "from os import popen as p\np(x)"),
        *(
            "import subprocess\nsubprocess.run(x, shell=True)",
            "import subprocess as s\ns.getoutput(x)",
        ),
        *(
            "import torch\ntorch.load(f)",
            "import torch\ntorch.jit.load(f, weights_only=False)",
            "run(x, shell=flag)",
        ),
        *("import numpy as np\nnp.load(f, allow_pickle=True)", "import numpy as np\nnp.save(f, x)"),
        *(
            "import yaml\nyaml.load(t)",
            "import yaml\nyaml.load(t, yaml.Loader)",
            "import yaml\nyaml.unsafe_load(t)",
        ),
        *(
            "import yaml\nyaml.load(t, _yaml_loader())",
            "from yaml import load, FullLoader\nload(t, Loader=FullLoader)",
        ),
        *(
            "f(trust_remote_code=True)",
            "f({'trust_remote_code': True})",
            "def f(*, trust_remote_code=True): ...",
        ),
        *(
            "def f(a, trust_remote_code: bool = True): ...",
            "import tempfile\ntempfile.mktemp()",
            "open('/tmp/a')",
        ),
        *(
            "import os\nos.open(p, os.O_CREAT)",
            "import os\nos.open(p, os.O_WRONLY | os.O_CREAT, 0o644)",
        ),
        *("p.chmod(0o644)", "import os\nos.fchmod(1, 0o660)", "import os\nos.umask(0)"),
    ],
)
def test_each_danger_would_be_found(code: str) -> None:
    assert len(dangers(code)) == 1, code


@pytest.mark.parametrize(
    "code",
    [
        *(
            "model.eval()",
            "import mlx.core as mx\nmx.eval(x)",
            "import re\nre.compile(x)",
            "import json\njson.load(f)",
        ),
        *(
            "import numpy as np\nnp.load(f)",
            "import numpy as np\nnp.load(f, allow_pickle=False)",
            "exec.run()",
        ),
        *("import yaml\nyaml.load(t, Loader=yaml.SafeLoader)", "import yaml\nyaml.safe_load(t)"),
        *(
            "f(trust_remote_code=config.trust)",
            "def f(trust_remote_code=False): ...",
            "f(shell=False)",
            "x = 'tmp'",
        ),
        *(
            "import os\nos.open(p, os.O_RDONLY)",
            "import os\nos.open(p, os.O_CREAT, 0o600)",
            "p.chmod(0o700)",
        ),
        *(
            "import os\nos.umask(0o077)",
            "from concurrent.futures import ThreadPoolExecutor",
            "import safetensors",
        ),
    ],
)
def test_what_is_no_danger_is_let_through(code: str) -> None:
    assert dangers(code) == []


def test_helpers_get_pickles_from_their_own_parent_only() -> None:
    """Why loky is allowed, and only there: the helper processes that render chats are children of
    the process that starts them, on one host, of one user. Records and token lists go through pipes
    that only the two have; nothing that was pickled is written to a file, comes from one, or
    crosses a network. What is sent is one function of this package with plain data. It cannot be
    JSON, because records may hold arrays of any kind.
    """
    path, package = HELPERS
    text = (ROOT / path).read_text(encoding="utf-8")
    users = [
        other for other, source in files() if f"import {package}" in dangers(source, "not " + other)
    ]
    users += [other for other, source in files() if f"from {package}" in source]
    assert users == [path]
    submitted = [
        ast.unparse(node.args[0])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pool.submit"
    ]
    assert submitted == ["_render"]


def test_yaml_makes_plain_values_only(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for tag in (
        f"!!python/object/apply:os.mkdir [{mark}]",
        "!!python/name:os.system",
        "!!python/tuple [1]",
    ):
        file = tmp_path / "config.yaml"
        file.write_text(f"model: {tag}\n")
        with pytest.raises(ConfigError):
            read_yaml(file)
    assert not mark.exists()


def test_a_models_own_code_is_not_run_unless_asked_for() -> None:
    assert TrainConfig().trust_remote_code is False
    assert build_config({"train": True, "model": "m", "data": "d"}).trust_remote_code is False


# --- a real run: what it listens on, writes and tells ---------------------------------------------

SECRETS = {
    name: f"secret-of-{name.lower()}-0123456789"
    for name in (
        *("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "SWANLAB_API_KEY"),
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    )
}


@dataclass
class Observed:
    """A run on two ranks that has ended, with an open umask and keys in its environment."""

    place: Path
    output: str = ""
    # Of each connection: status and local and remote address.
    connections: set[tuple[str, str, str]] = field(default_factory=set)
    commands: set[str] = field(default_factory=set)
    scratch_modes: dict[str, int] = field(default_factory=dict)

    def watch(self, process: subprocess.Popen[str]) -> None:
        """Look at the run until it has ended."""
        ended = threading.Event()
        while process.poll() is None:
            self._look(process.pid)
            ended.wait(0.02)

    def _look(self, supervisor: int) -> None:
        try:
            family = [
                psutil.Process(supervisor),
                *psutil.Process(supervisor).children(recursive=True),
            ]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                self.commands.add(" ".join(process.cmdline()))
                for found in process.net_connections(kind="inet"):
                    remote = found.raddr.ip if found.raddr else ""
                    self.connections.add((found.status, found.laddr.ip, remote))
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        for path in ours(self.place / "scratch"):
            try:
                self.scratch_modes[path.name] = path.stat().st_mode & 0o777
            except FileNotFoundError:
                continue


def ours(scratch: Path) -> list[Path]:
    """What there is besides the directory in which MLX keeps the kernels that it compiles for the
    CPU.
    """
    return [path for path in scratch.iterdir() if path.name != "mlx"]


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> Observed:
    seen = Observed(tmp_path_factory.mktemp("run"))
    (seen.place / "scratch").mkdir()
    places = {
        "ALLHANDS_TOKEN_CACHE": str(seen.place / "cache" / "tokens"),
        "TMPDIR": str(seen.place / "scratch"),
    }
    arguments = f"train --train --test --model {tiny_model} --data {tiny_data} --adapter-path {seen.place / 'run'}"
    arguments += " -n 2 --backend ring --cores-per-rank 1 --iters 6 --batch-size 4 --num-layers 2 --save-every 2"
    arguments += " --steps-per-report 1 --steps-per-eval 3 --val-batches 1 --test-batches 1 --log-level verbose"
    before = os.umask(0)
    try:
        with (seen.place / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "allhands", *arguments.split()],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **SECRETS, **places},
            )
    finally:
        os.umask(before)
    try:
        seen.watch(process)
    finally:
        process.terminate()
        process.wait(60)
    seen.output = (seen.place / "output").read_text()
    assert process.returncode == 0, seen.output
    return seen


def modes(place: Path) -> dict[str, str]:
    """Of every file and directory in ``place``, itself included."""
    paths = [place, *place.rglob("*")]
    return {
        str(path.relative_to(place.parent)): f"{path.lstat().st_mode & 0o777:o}" for path in paths
    }


def wrong_modes(place: Path) -> dict[str, str]:
    return {
        name: mode
        for name, mode in modes(place).items()
        if mode != ("700" if (place.parent / name).is_dir() else "600")
    }


@pytest.mark.slow
def test_what_a_run_leaves_is_for_its_owner_alone(observed: Observed) -> None:
    # That it was a whole run, on which nothing was spared.
    names = set(modes(observed.place / "run"))
    expected = {
        "adapters.safetensors",
        "adapter_config.json",
        "metrics.jsonl",
        "events.jsonl",
        "loss.png",
    }
    assert {f"run/{name}" for name in expected} <= names
    assert any(
        name.startswith("run/checkpoints/") and name.endswith("state.json") for name in names
    )
    assert wrong_modes(observed.place / "run") == {}


def test_the_token_cache_is_for_its_owner_alone(observed: Observed) -> None:
    assert any(name.endswith("tokens.bin") for name in modes(observed.place / "cache"))
    assert wrong_modes(observed.place / "cache") == {}


def test_temporary_directories_are_private_and_gone_at_the_end(observed: Observed) -> None:
    assert observed.scratch_modes
    assert {name: oct(mode) for name, mode in observed.scratch_modes.items() if mode & 0o077} == {}
    assert ours(observed.place / "scratch") == []


def test_ranks_listen_on_this_computer_only(observed: Observed) -> None:
    listening = {local for status, local, _ in observed.connections if status == psutil.CONN_LISTEN}
    joined = {
        remote for status, _, remote in observed.connections if status == psutil.CONN_ESTABLISHED
    }
    assert joined == {"127.0.0.1"}  # the ring was seen at work
    assert listening <= {"127.0.0.1"}
    assert {local for _, local, _ in observed.connections} == {"127.0.0.1"}


def test_keys_in_the_environment_are_told_to_nobody(observed: Observed) -> None:
    texts: dict[str, Any] = {
        "the terminal": observed.output,
        "a command line": "\n".join(observed.commands),
    }
    for path in observed.place.rglob("*"):
        if path.is_file():
            texts[str(path.relative_to(observed.place))] = path.read_bytes().decode(
                errors="replace"
            )
    assert len(texts) > 10
    assert [
        (name, key)
        for name, text in texts.items()
        for key, value in SECRETS.items()
        if value in text
    ] == []
    # Nor are they told by their names, as a dump of the whole environment would.
    assert [name for name, text in texts.items() if "AWS_SECRET_ACCESS_KEY" in text] == []
