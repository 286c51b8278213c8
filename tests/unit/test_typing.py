"""Type checkers know the options of calls, and the types of batches and gradients."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter

import allhands
from allhands.config.options import PretrainOptions, TrainOptions
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig, build_config

ROOT = Path(__file__).parents[2]

# Each line with an error ends in a comment that says so.
WRONG = """
import allhands

allhands.finetune(modle="demo")  # error
allhands.finetune(iters="many")  # error
allhands.finetune(strategy="zero9")  # error
allhands.finetune(tokenizer="tokenizer")  # error
allhands.pretrain(data="stories", shpae="llama-15m")  # error
for numbers in allhands.DistributedLoader([1, 2, 3], 2):
    text: str = numbers[0]  # error
for count, name in allhands.DistributedLoader([1], 1, collate=lambda some: (len(some), "a")):
    number: int = name  # error
gradients: dict[str, float] = allhands.average_gradients(["no", "dict"])  # error
"""
RIGHT = """
from pathlib import Path
from typing import assert_type

import mlx.core as mx

import allhands

result = allhands.finetune(
    model="demo",
    data=Path("data"),
    iters=20,
    learning_rate=5e-4,
    lr_schedule="cosine",
    lora_parameters={"rank": 8, "scale": 20.0, "dropout": 0.0},
    rank_weights=[2, 1],
    compile=True,
    epochs=None,
    progress=False,
)
assert_type(result.adapter_path, Path)
allhands.pretrain(data="stories", tokenizer="tokenizer", shape="llama", layers=2, batch_size=4)
for numbers in allhands.DistributedLoader([1, 2, 3], 2):
    assert_type(numbers, list[int])
pairs = allhands.DistributedLoader(["a"], 1, collate=lambda texts: (len(texts), texts[0]))
for count, name in pairs.endless():
    assert_type(count, int)
    assert_type(name, str)
gradients = {"weight": mx.zeros(2)}
assert_type(allhands.average_gradients(gradients, num_tokens=3), dict[str, mx.array])
assert_type(allhands.__version__, str)
"""
# Packages that are not looked into, because a check would take half a minute.
MYPY_SETTINGS = """
[mypy]
strict = true
[mypy-datasets.*,huggingface_hub.*,matplotlib.*,mlx_lm.*,pyarrow.*,pydantic.*,rich.*,transformers.*]
follow_imports = skip
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "mypy.ini").write_text(MYPY_SETTINGS)
    return tmp_path


EXPECTED = {
    ("wrong.py", number)
    for number, line in enumerate(WRONG.splitlines(), 1)
    if line.endswith("# error")
}


def run(place: Path, *arguments: str) -> str:
    argv = [sys.executable, "-m", *arguments, "wrong.py", "right.py"]
    done = subprocess.run(argv, cwd=place, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_pyright_finds_wrong_options_and_knows_the_types(sources: Path) -> None:
    found = json.loads(run(sources, "pyright", "--outputjson", "--pythonpath", sys.executable))
    errors = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in found["generalDiagnostics"]
        if one["severity"] == "error"
    }
    assert errors == EXPECTED


@pytest.mark.slow
def test_mypy_finds_wrong_options_and_knows_the_types(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYPYPATH", str(Path(allhands.__file__).parents[1]))
    told = run(sources, "mypy", "--config-file", "mypy.ini", "--cache-dir", ".cache")
    errors = {
        (file, int(line))
        for file, line in re.findall(r"^(\S+\.py):(\d+): error", told, re.MULTILINE)
    }
    assert errors == EXPECTED


def test_the_package_says_that_it_has_types() -> None:
    assert (Path(allhands.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("options", "schema"), [(TrainOptions, TrainConfig), (PretrainOptions, PretrainConfig)]
)
def test_the_types_are_those_of_the_schema(
    options: type[TrainOptions], schema: type[TrainConfig]
) -> None:
    hints = get_type_hints(options)
    assert set(hints) == set(schema.model_fields) - {"config"}
    for name, hint in hints.items():
        default = schema.model_fields[name].get_default(call_default_factory=True)
        TypeAdapter(hint).validate_python(default, strict=True)


def test_what_the_types_allow_the_schema_takes() -> None:
    """The alternatives that a validator adds to the type of its field."""
    chosen: TrainOptions = {
        "data": Path("data"),
        "compile": True,
        "lr_schedule": "cosine",
        "sample_prompts": "Once",
        "clear_cache_threshold": "2GB",
        "lora_parameters": {"rank": 4},
        "rank_weights": (2, 1),
        "hf_dataset": [{"path": "some/texts"}],
    }
    config = build_config(chosen)
    assert (config.compile, config.sample_prompts, config.lora_parameters.rank) == (
        "on",
        ["Once"],
        4,
    )
    assert config.clear_cache_threshold == 2_000_000_000


def test_the_file_of_types_is_made_from_the_schema() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_option_types.py"))
    assert script["FILE"].read_text() == script["source"](), "run scripts/write_option_types.py"
