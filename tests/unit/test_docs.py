"""Generated pages are those of the code, and the page about files names the files of a run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from tiny import run_allhands

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
OPTIONS = "--iters 4 --save-every 2 --val-batches 1 --num-layers 2 --batch-size 4 -n 2"


def test_configuration_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "write_configuration_docs.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, (
        "run scripts/write_configuration_docs.py"
    )


def test_reference_pages_are_up_to_date() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "write_reference_docs.py"))["PAGES"]
    for name, page in pages.items():
        assert (REFERENCE / name).read_text() == page(), "run scripts/write_reference_docs.py"


def test_the_page_about_files_names_every_file_of_a_run(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    options = ["--model", tiny_model, "--data", tiny_data, "--adapter-path", "run"]
    done = run_allhands("train", "--train", *options, *OPTIONS.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (REFERENCE / "files.md").read_text() + (
        ROOT / "docs" / "concepts" / "checkpoints.md"
    ).read_text()
    named = {_numberless(name) for name in re.findall(r"`([^`\n]+)`", page)}
    run = tmp_path / "run"
    files = {_numberless(str(path.relative_to(run))) for path in run.rglob("*") if path.is_file()}
    inner = {name for name in files if name.startswith(("checkpoints/", "best/"))}
    assert "metrics.jsonl" in files
    assert files - inner - named == set()
    assert {name.rpartition("/")[2] for name in inner} - named == set()


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "N", name)
