"""Generated pages are those of the code, and the page about files names the files of a run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tiny import run_allhands

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
OPTIONS = "--iters 4 --save-every 2 --val-batches 1 --num-layers 2 --batch-size 4 -n 2"


def test_configuration_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "write_configuration_docs.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, (
        "run scripts/write_configuration_docs.py"
    )


# The page of errors reads every module, and takes ten seconds.
@pytest.mark.parametrize(
    "name", ["api.md", "metrics.md", pytest.param("errors.md", marks=pytest.mark.slow)]
)
def test_reference_pages_are_up_to_date(name: str) -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "write_reference_docs.py"))["PAGES"]
    assert set(pages) == {"api.md", "metrics.md", "errors.md"}
    assert (REFERENCE / name).read_text() == pages[name](), "run scripts/write_reference_docs.py"


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


def test_the_page_about_platforms_names_what_is_there_and_claims_no_mac() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text()
    tests = re.findall(r"`(tests/[^`]+)`", page)
    records = re.findall(r"`([\w-]+\.(?:json|md))`", page)
    assert len(tests) > 40
    assert len(records) > 15
    results = ROOT / "benchmarks" / "results"
    files = [*(ROOT / name for name in tests), *(results / name for name in records)]
    assert [str(path) for path in files if not path.is_file()] == []
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    on_macs = [cells[-1].strip() for cells in rows if cells[-1].strip() != "Mac"]
    known = re.compile(r"not run$|does not apply$|simulated|`tests/\S+` reads texts")
    assert [cell for cell in on_macs if not known.match(cell)] == []
    simulated = (ROOT / "tests" / "unit" / "test_simulated_mac.py").read_text()
    for cells in rows:
        verb = re.match(r" `([a-z]+)", cells[0])
        if verb and cells[-1].strip() == "simulated":
            assert f'"{verb[1]}"' in simulated


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "N", name)
