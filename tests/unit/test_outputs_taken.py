"""What a person has is never written over: one rule and one exit code for every verb that writes
something.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
from command_line import call_allhands
from matplotlib.figure import Figure
from tiny import write_adapter, write_chat_data, write_model
from written_runs import write_run, write_samples

matplotlib.use("agg")
TAKEN = 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_adapter(write_model(root / "model"), root / "adapter")
    write_chat_data(root / "data")
    write_samples(write_run(root / "run"), ranks=1)
    return root


_ADAPTER = "--model {}/model --adapter-path {}/adapter"
_DIRECTORIES = {
    "fuse": f"fuse {_ADAPTER} --save-path",
    "model get": "model get {}/model --out",
    "model get, converted": "model get {}/model --dtype bfloat16 --out",
    "export hf": f"export --to hf {_ADAPTER} --out",
    "export peft": f"export --to peft {_ADAPTER} --out",
    "export gguf": f"export --to gguf {_ADAPTER} --out",
    "data prepare": "data prepare {}/data/train.jsonl --out",
    "tokenizer train": "tokenizer train {}/data/train.jsonl --vocabulary 300 --out",
}
_FILES = {
    "plot": "plot {}/run --out",
    "report": "report {}/run --out",
    "compare": f"compare {_ADAPTER} --data {{}}/data --num-prompts 1 --max-tokens 1 --out",
    "plan": "plan --model {}/model --data {}/data --device M4 --picture",
}


def _words(line: str, inputs: Path) -> list[str]:
    return line.replace("{}", str(inputs)).split()


@pytest.mark.parametrize("kind", ["file", "directory", "below a file"])
@pytest.mark.parametrize("verb", _DIRECTORIES)
def test_a_place_that_is_taken_is_refused(
    inputs: Path, tmp_path: Path, verb: str, kind: str
) -> None:
    place = mine = tmp_path / "mine"
    if kind == "directory":
        place.mkdir()
        mine = place / "notes.txt"
    mine.write_text("mine")
    place = place / "deeper" if kind == "below a file" else place
    done = call_allhands(*_words(_DIRECTORIES[verb], inputs), place)
    assert done.returncode == TAKEN, done.stderr
    assert mine.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("verb", ["demo", "data demo", "train"])
def test_so_is_a_file_in_the_place_of_a_directory(inputs: Path, tmp_path: Path, verb: str) -> None:
    place = tmp_path / "mine"
    place.write_text("mine")
    words = {"train": ["train", "--data", inputs / "data", "-n", "2", "--adapter-path"]}
    done = call_allhands(*words.get(verb, [*verb.split(), "--out"]), place)
    assert done.returncode == TAKEN, done.stderr
    assert place.read_text() == "mine"


@pytest.mark.parametrize("verb", _FILES)
def test_a_file_of_somebody_else_is_refused(inputs: Path, tmp_path: Path, verb: str) -> None:
    suffix = {"plot": ".png", "plan": ".png", "report": ".html"}.get(verb, ".json")
    mine, directory = tmp_path / f"mine{suffix}", tmp_path / f"directory{suffix}"
    mine.write_text("mine")
    directory.mkdir()
    for place in (mine, directory):
        done = call_allhands(*_words(_FILES[verb], inputs), place, cwd=tmp_path)
        assert done.returncode == TAKEN, done.stderr
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [directory.name, mine.name]


def test_a_picture_beside_is_refused_unless_it_is_ours(inputs: Path, tmp_path: Path) -> None:
    """Another picture of matplotlib's is not."""
    out, beside = tmp_path / "loss.png", tmp_path / "memory.png"
    words = ["plot", inputs / "run", "--out", out]
    Figure().savefig(beside)
    before = beside.read_bytes()
    assert call_allhands(*words).returncode == TAKEN
    assert (beside.read_bytes(), out.exists()) == (before, False)
    for more in (["--force"], []):  # the second time both are ours
        done = call_allhands(*words, *more)
        assert done.returncode == 0, done.stderr
        assert beside.read_bytes() != before


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_of_ours_is_known_in_every_format(
    inputs: Path, tmp_path: Path, suffix: str
) -> None:
    for _ in range(2):
        done = call_allhands("plot", inputs / "run", "--out", tmp_path / f"loss{suffix}")
        assert done.returncode == 0, done.stderr


def test_answers_are_replaced_by_answers(inputs: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = call_allhands(*_words(_FILES["compare"], inputs), tmp_path / "answers.json")
        assert done.returncode == 0, done.stderr


def test_an_imagined_plan_is_not_laid_beside_a_run(inputs: Path, tmp_path: Path) -> None:
    words = [*_words("plan --model {}/model --data {}/data --device M4 --adapter-path", inputs)]
    for name, begun in (("new", False), ("begun", True)):
        if begun:
            write_run(tmp_path / name)
        done = call_allhands(*words, tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name / "plan.json").exists() != begun
