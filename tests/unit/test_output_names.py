"""Names of what commands write: a form that they have, or a message that names the forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import call_allhands
from written_runs import write_run

from allhands.errors import ConfigError
from allhands.infer.comparing import place_of_answers


def left(*words: str | Path, cwd: Path) -> tuple[int, str, set[str]]:
    """The exit code, the message, and the names of what is there afterwards."""
    done = call_allhands(*words, cwd=cwd, env={"ALLHANDS_LOG_LEVEL": "verbose"})
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr, {path.name for path in cwd.iterdir()} - {"run", "rows"}


@pytest.mark.parametrize(
    ("out", "written"),
    [
        ("page.html", {"page.html", "page.md"}),
        ("page.HTM", {"page.HTM", "page.md"}),
        ("page.md", {"page.html", "page.md"}),
        ("page", {"page.html", "page.md"}),
    ],
)
def test_a_report_is_written_as_its_name_says(tmp_path: Path, out: str, written: set[str]) -> None:
    write_run(tmp_path / "run")
    code, _, there = left("report", "run", "--out", out, cwd=tmp_path)
    assert (code, there) == (0, written)
    in_html = next(tmp_path.glob("page.[hH]*")).read_text()
    assert "<html" in in_html
    assert "<html" not in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("out", ["p.png", "p.PNG", "p.svg", "p.pdf", "p"])
def test_a_picture_is_written_as_its_name_says(tmp_path: Path, out: str) -> None:
    write_run(tmp_path / "run")
    code, _, there = left("plot", "run", "--out", out, cwd=tmp_path)
    file = out if "." in out else f"{out}.png"
    assert code == 0
    assert file in there
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[file.lower()[-3:]]
    assert (tmp_path / file).read_bytes().startswith(begins)


@pytest.mark.parametrize("verb", ["report", "plot"])
@pytest.mark.parametrize("out", [".", "..", "run", "run/", "page.txt", "page.json", ""])
def test_other_forms_and_directories_are_refused(tmp_path: Path, verb: str, out: str) -> None:
    write_run(tmp_path / "run")
    before = set((tmp_path / "run").iterdir())
    code, said, there = left(verb, "run", "--out", out, cwd=tmp_path)
    assert (code, there) == (2, set())
    assert {"report": ".html", "plot": ".png"}[verb] in said
    assert set((tmp_path / "run").iterdir()) == before


def test_answers_are_written_as_json_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        place_of_answers(tmp_path, tmp_path / "answers.md", force=True)
    assert refused.value.code == "output-name-invalid"
    named = place_of_answers(tmp_path, tmp_path / "answers", force=False)
    assert named == tmp_path / "answers.json"


@pytest.mark.parametrize(
    "words",
    [
        ("data", "prepare", "rows/train.jsonl", "--out", "mine.jsonl"),
        ("data", "demo", "--out", "mine.json"),
        ("tokenizer", "train", "rows/train.jsonl", "--out", "mine.json"),
        ("model", "get", "MODEL", "--out", "mine.safetensors"),
        ("export", "--to", "hf", "--model", "MODEL", "--out", "mine.safetensors"),
        ("export", "--to", "gguf", "--model", "MODEL", "--out", "mine.gguf"),
        ("demo", "--out", "mine.zip"),
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_a_directory_has_no_name_of_a_file(
    tmp_path: Path, tiny_model: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "rows").mkdir()
    rows = [json.dumps({"text": f"the ship number {number} sails"}) for number in range(40)]
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(rows) + "\n")
    said = [str(tiny_model) if word == "MODEL" else word for word in words]
    code, message, there = left(*said, cwd=tmp_path)
    assert (code, there) == (2, set())
    assert said[-1] in message


def test_a_directory_that_is_named_like_a_file_is_still_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.json").mkdir()
    code, _, there = left("data", "demo", "--out", "mine.json", cwd=tmp_path)
    assert (code, there) == (0, {"mine.json"})
    assert (tmp_path / "mine.json" / "train.jsonl").is_file()
