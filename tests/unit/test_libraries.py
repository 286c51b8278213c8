"""Commands neither wait for PyTorch, which transformers imports where it is installed, nor pass on
warnings of models that transformers does not know.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_model

from allhands.model.tokenizer import load_tokenizer
from allhands.runtime.libraries import errors_only

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
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def ran(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environ, capture_output=True, text=True, timeout=100
    )


def test_transformers_takes_it_for_not_installed_and_nobody_else_does(
    with_torch: dict[str, str],
) -> None:
    found = ran(
        with_torch,
        "-c",
        f"import allhands.runtime.libraries as it; it.leave_torch_out(){AFTER}",
    )
    assert (found.stdout, found.stderr.strip()[-18:]) == (
        "False True __init__.py\n",
        "torch was imported",
    )


def test_programs_that_import_allhands_are_left_alone(with_torch: dict[str, str]) -> None:
    found = ran(with_torch, "-c", f"import allhands{AFTER}")
    assert (found.stdout, found.stderr.strip()[-18:]) == ("", "torch was imported")


@pytest.mark.slow
def test_commands_do_without_it(with_torch: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("Once upon a time there was a dragon. " * 50)
    out = str(tmp_path / "tokenizer")
    made = ran(
        with_torch,
        "-m",
        "allhands",
        "tokenizer",
        "train",
        "--data",
        str(tmp_path / "train.txt"),
        "--out",
        out,
    )
    assert made.returncode == 0, made.stderr
    words = f"pretrain --data {tmp_path / 'train.txt'} --tokenizer {out} --shape llama --layers 1 --dims 16 --heads 2"
    words += (
        f" --mlp-dims 16 --block-size 16 --batch-size 2 --iters 1 --adapter-path {tmp_path / 'run'}"
    )
    trained = ran(with_torch, "-m", "allhands", *words.split())
    assert (trained.returncode, trained.stderr) == (0, ""), trained.stderr


def test_a_model_that_only_mlx_lm_knows_is_loaded_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_model(tmp_path / "model")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "model_type": "mimo"}))
    said = list[logging.LogRecord]()
    handler, logger = logging.Handler(), logging.getLogger("transformers")
    monkeypatch.setattr(handler, "emit", said.append)
    logger.addHandler(handler)
    try:
        load_tokenizer(str(place))
        assert not said
        logging.getLogger("transformers.models").warning("the level is as before")
        assert len(said) == 1
    finally:
        logger.removeHandler(handler)


def test_a_library_logs_as_before_after_the_last_of_several_threads() -> None:
    logger = logging.getLogger("a library of two threads")
    logger.setLevel(logging.WARNING)
    first, second = errors_only(logger.name), errors_only(logger.name)
    with first:
        second.__enter__()
    assert logger.level == logging.ERROR
    second.__exit__(None, None, None)
    assert logger.level == logging.WARNING


def test_a_library_that_logs_less_than_errors_is_left_so() -> None:
    logger = logging.getLogger("a library that is silent")
    logger.setLevel(logging.CRITICAL)
    with errors_only(logger.name):
        assert logger.level == logging.CRITICAL
    assert logger.level == logging.CRITICAL
