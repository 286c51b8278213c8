"""Commands do not wait for PyTorch, which transformers imports where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# What follows the import of transformers: PyTorch is there for everybody else.
AFTER = """
from transformers import AutoTokenizer, is_torch_available
import importlib.util, transformers
print(is_torch_available(), importlib.util.find_spec("torch") is not None, transformers.__spec__.loader.path[-11:])
import torch
"""


@pytest.fixture
def with_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which a PyTorch is installed that says so when it is imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def ran(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=100)


def test_transformers_takes_it_for_not_installed_and_nobody_else_does(with_torch: dict[str, str]) -> None:
    found = ran(with_torch, "-c", f"import allhands.runtime.transformers_start as it; it.prepare_transformers(){AFTER}")
    assert (found.stdout, found.stderr.strip()[-18:]) == ("False True __init__.py\n", "torch was imported")


def test_programs_that_import_allhands_are_left_alone(with_torch: dict[str, str]) -> None:
    found = ran(with_torch, "-c", f"import allhands{AFTER}")
    assert (found.stdout, found.stderr.strip()[-18:]) == ("", "torch was imported")


def test_commands_do_without_it(with_torch: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("Once upon a time there was a dragon. " * 50)
    out = str(tmp_path / "tokenizer")
    made = ran(with_torch, "-m", "allhands", "tokenizer", "train", "--data", str(tmp_path / "train.txt"), "--out", out)
    assert made.returncode == 0, made.stderr
    words = f"pretrain --data {tmp_path / 'train.txt'} --tokenizer {out} --shape llama --layers 1 --dims 16 --heads 2"
    words += f" --mlp-dims 16 --block-size 16 --batch-size 2 --iters 1 --adapter-path {tmp_path / 'run'}"
    trained = ran(with_torch, "-m", "allhands", *words.split())
    assert (trained.returncode, trained.stderr) == (0, ""), trained.stderr


# Prints how many files of transformers' models are opened, and the list that its modules get.
READS = """
import hashlib, sys
sys.addaudithook(lambda event, what: event == "open" and "transformers/models" in str(what[0]) and opened.append(what))
opened = []
import transformers, transformers.models
from transformers import AutoTokenizer
from transformers.utils.import_utils import define_import_structure
path = transformers.models.__file__
lists = [define_import_structure(path), define_import_structure(path, "models")]
lists.append(define_import_structure(path.replace("__init__", "llama/__init__")))
told = [sorted((sorted(k), sorted((n, sorted(o)) for n, o in v.items())) for k, v in one.items()) for one in lists]
print(len(opened), hashlib.sha256(repr(told).encode()).hexdigest(), sum(map(len, told)))
"""
QUICK = "from allhands.runtime.transformers_start import prepare_transformers as it; it()\n"


def listed(cache: Path, before: str = QUICK) -> tuple[int, str]:
    done = ran({**os.environ, "ALLHANDS_CACHE": str(cache)}, "-c", before + READS)
    assert done.returncode == 0, done.stderr
    opened, digest, entries = done.stdout.split()
    assert int(entries) > 2
    return int(opened), digest


def test_the_models_are_read_once_and_the_list_is_that_of_transformers(tmp_path: Path) -> None:
    opened, own = listed(tmp_path, "")
    assert opened > 1000
    assert listed(tmp_path)[1] == own
    assert listed(tmp_path) == (pytest.approx(20, abs=30), own)
    (kept,) = (tmp_path / "transformers").iterdir()
    for content in (b"", b"torn", kept.read_bytes()[:5000]):
        kept.write_bytes(content)
        opened, digest = listed(tmp_path)
        assert (opened > 1000, digest) == (True, own)
    assert listed(tmp_path)[0] < 50


def test_another_installation_is_read_again(tmp_path: Path) -> None:
    import transformers

    def installed(copy: Path, version: str) -> str:
        (copy / "transformers-5.dist-info").mkdir(parents=True, exist_ok=True)
        (copy / "transformers-5.dist-info/RECORD").write_text(version)
        return f"{QUICK}import sys; sys.path.insert(0, {str(copy)!r})\n"

    copy = tmp_path / "site"
    shutil.copytree(Path(transformers.__file__).parent, copy / "transformers", symlinks=True)
    cache = tmp_path / "cache"
    first, second = installed(copy, "one"), installed(copy, "another")
    assert first == second
    assert listed(cache, first)[0] > 1000
    assert listed(cache, first)[0] < 50
    installed(copy, "a third")
    assert listed(cache, first)[0] > 1000
    (copy / "transformers-5.dist-info/RECORD").unlink()  # somebody works on this copy
    assert listed(cache, first)[0] > 1000
    assert listed(cache, first)[0] > 1000


def test_a_cache_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert listed(tmp_path / "file")[0] > 1000
