"""The files for GitHub: workflows that name what exists, issue forms, and notes of a release."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [
    path
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if path.name != "config.yml"
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")
SCRIPT = re.compile(r"(?<![\w./-])((?:scripts|tests|\.ci)/[\w./-]*)")


def name_of(path: Path) -> str:
    return path.name


def content(path: Path) -> dict[str, Any]:
    """A YAML file; its key ``on`` is read as ``True``, so it is looked up by that."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in content(path)["jobs"].values():
        yield from job.get("steps", [])


def commands(path: Path) -> str:
    return "\n".join(step["run"] for step in steps(path) if "run" in step)


def test_there_are_the_workflows_that_a_project_needs() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"ci", "nightly", "release"}
    runners = {job.get("runs-on", "") for job in content(WORKFLOWS[0])["jobs"].values()}
    assert any(runner.startswith("ubuntu-") for runner in runners)
    assert any(re.fullmatch(r"macos-(1[4-9]|[2-9]\d)", runner) for runner in runners)


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_make_targets_and_files_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = TARGET.findall(commands(path))
    assert called
    assert set(called) <= targets
    for name in SCRIPT.findall(commands(path)):
        assert (ROOT / name).exists(), name
    for step in steps(path):
        if named := step.get("with", {}).get("cache-dependency-path"):
            assert (ROOT / named).exists()
    for job in content(path)["jobs"].values():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_workflows_have_few_rights_and_an_end(path: Path) -> None:
    workflow = content(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or 0 < job["timeout-minutes"] <= 360, name
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40}", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    # What a stranger can choose never reaches a shell as text.
    assert "${{" not in commands(path)


def test_the_versions_of_python_are_those_that_the_project_names() -> None:
    named = [
        found[1]
        for line in PROJECT["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
    ]
    jobs = [job for path in WORKFLOWS for job in content(path)["jobs"].values()]
    tested: set[str] = set()
    for job in jobs:
        tested |= set(job.get("strategy", {}).get("matrix", {}).get("python", []))
        given = [step.get("with", {}).get("python-version", "") for step in job.get("steps", [])]
        tested |= {version for version in given if version and "{" not in version}
    assert all(isinstance(version, str) for version in tested)
    assert tested <= set(named)
    assert {named[0], named[-1]} <= tested
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_actionlint_finds_nothing_and_finds_a_fault(tmp_path: Path) -> None:
    actionlint = shutil.which("actionlint", path=str(Path(sys.executable).parent))
    assert actionlint is not None, "actionlint is missing: make install"

    def check(*paths: Path) -> subprocess.CompletedProcess[str]:
        argv = [actionlint, "-no-color", *map(str, paths)]
        return subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    done = check(*WORKFLOWS)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "ci.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("matrix.python", "matrix.pithon"))
    assert check(broken).returncode == 1


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_issue_forms_have_what_github_asks_for(path: Path) -> None:
    form = content(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in fields)


def test_dependabot_looks_after_actions_and_packages() -> None:
    updates = content(ROOT / ".github" / "dependabot.yml")["updates"]
    assert {entry["package-ecosystem"] for entry in updates} == {"github-actions", "pip"}


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    home = PROJECT["urls"]["Homepage"]
    files = [
        "CITATION.cff",
        "CODE_OF_CONDUCT.md",
        "SECURITY.md",
        ".github/ISSUE_TEMPLATE/config.yml",
    ]
    texts = [*PROJECT["urls"].values(), *((ROOT / name).read_text() for name in files)]
    for text in texts:
        found = re.findall(r"https://github\.com/[\w-]+/allhands\b", text)
        assert set(found) == {home}
    citation = content(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["license"]


def test_links_of_the_pages_for_github_lead_somewhere() -> None:
    for name in ("SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "examples/README.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name} links to {target}"


# --- notes of a release ---------------------------------------------------------------------------


def release_notes(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(ROOT / "scripts" / "release_notes.py"), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_the_notes_are_the_section_of_the_tag(tmp_path: Path) -> None:
    done = release_notes("v0.1.0")
    assert done.returncode == 0
    assert "allhands train" in done.stdout
    assert "\n## " not in f"\n{done.stdout}"
    for tag in ("v99.0.0", "vUnreleased"):
        assert release_notes(tag).returncode == 1
    (tmp_path / "allhands-0.1.0-py3-none-any.whl").touch()
    assert release_notes("v0.1.0", tmp_path).returncode == 1
    (tmp_path / "allhands-0.1.0.tar.gz").touch()
    assert release_notes("v0.1.0", tmp_path).returncode == 0
    (tmp_path / "allhands-0.1.0.tar.gz").rename(tmp_path / "allhands-0.1.1.dev1.tar.gz")
    assert release_notes("v0.1.0", tmp_path).returncode == 1
