"""Versions, where allhands is installed and where it runs from its source alone."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import allhands
from allhands.cluster.setup.source import find_source
from allhands.errors import ConfigError
from allhands.runtime.versions import UNKNOWN, version_of, versions_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "allhands"


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """allhands on the path, and nothing of it among the installed packages."""
    found = importlib.metadata.Distribution.discover

    def look(*, name: str, **more: Any) -> Iterator[importlib.metadata.Distribution]:
        return iter(()) if name == "allhands" else iter(found(name=name, **more))

    monkeypatch.setattr(importlib.metadata.Distribution, "discover", look)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("allhands")


@pytest.mark.usefixtures("not_installed")
def test_a_source_tree_that_is_not_installed_knows_its_version() -> None:
    from allhands.run.preparing import versions

    assert version_of("allhands") == allhands.__version__ == UNKNOWN
    assert versions()["allhands"] == allhands.__version__


def test_of_others_what_is_installed_counts() -> None:
    assert versions_of("numpy", "no-such-package") == {"numpy": importlib.metadata.version("numpy")}


@pytest.mark.usefixtures("not_installed")
def test_preparing_other_computers_says_what_it_cannot_send(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        find_source(None, tmp_path)
    assert told.value.code == "install-source-invalid"
    assert told.value.where == "--from"


def metadata_at(place: Path, version: str, origin: dict[str, Any] | None = None) -> None:
    info = place / f"allhands-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: allhands\nVersion: {version}\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


def test_the_version_is_that_of_the_code_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata_at(tmp_path / "other", "3.0")
    metadata_at(
        tmp_path / "editable", "4.0", {"url": ROOT.as_uri(), "dir_info": {"editable": True}}
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    assert version_of("allhands") != "3.0"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), str(tmp_path / "editable")])
    assert version_of("allhands") == "4.0"
    (tmp_path / "other" / "allhands").symlink_to(PACKAGE)
    assert version_of("allhands") == "3.0"


# --- the version that a build finds ---------------------------------------------------------------


def git(place: Path, *arguments: str) -> None:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid"]
    argv = ["git", *who, "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false", *arguments]
    subprocess.run(argv, cwd=place, check=True, capture_output=True, timeout=60)


def hatchling(place: Path, *arguments: str, **environ: str) -> str:
    argv = [sys.executable, "-m", "hatchling", *arguments]
    kept = {name: text for name, text in os.environ.items() if "PRETEND_VERSION" not in name}
    env = {**kept, **environ}
    done = subprocess.run(
        argv, cwd=place, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def built(place: Path, kind: str, out: Path) -> Path:
    """The one archive of a kind that the project's files give."""
    hatchling(place, "build", "-t", kind, "-d", str(out))
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the project's files, and the tag of a release."""
    place = tmp_path_factory.mktemp("tagged")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".git_archival.txt", ".gitattributes"):
        shutil.copy(ROOT / name, place / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, place / "src" / "allhands", ignore=ignored)
    git(place, "init", "--quiet")
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", "all")
    git(place, "tag", "v9.8.7")
    return place


def unpacked(archive: Path, place: Path) -> Path:
    """The one directory of an archive."""
    shutil.unpack_archive(archive, place)
    (inner,) = place.iterdir()
    return inner


def test_a_tag_is_the_version_of_the_wheel_and_of_what_it_installs(
    tagged: Path, tmp_path: Path
) -> None:
    assert hatchling(tagged, "version") == "9.8.7"
    wheel = built(tagged, "wheel", tmp_path / "built")
    assert wheel.name == "allhands-9.8.7-py3-none-any.whl"
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    page = next((tmp_path / "site").glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "](https://raw.githubusercontent.com/" in page
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "ALLHANDS_BLAS": "off"}
    done = subprocess.run(
        [sys.executable, "-m", "allhands", "--version"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split()[:2] == ["allhands", "9.8.7"]


def test_source_archives_keep_the_version(tagged: Path, tmp_path: Path) -> None:
    sdist = built(tagged, "sdist", tmp_path / "built")
    assert hatchling(unpacked(sdist, tmp_path / "sdist"), "version") == "9.8.7"
    git(tagged, "archive", "--prefix=allhands/", f"--output={tmp_path / 'archive.zip'}", "HEAD")
    assert hatchling(unpacked(tmp_path / "archive.zip", tmp_path / "zip"), "version") == "9.8.7"


def test_set_up_and_images_give_a_build_its_version(tagged: Path) -> None:
    given = find_source(str(tagged), tagged)
    assert given.made_by[0] == "env"
    name, _, text = given.made_by[1].partition("=")
    assert hatchling(tagged, "version", **{name: text}) == given.version
    assert name in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def test_where_git_has_no_tag_a_build_goes_on(tagged: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth=1", "--no-tags", tagged.as_uri(), "shallow")
    commit = (tagged / ".git" / "refs" / "heads").iterdir()
    found = hatchling(tmp_path / "shallow", "version")
    assert found.startswith("0.0.1.dev")
    assert f"+g{next(commit).read_text()[:7]}" in found
    shutil.copytree(tagged, tmp_path / "copied", ignore=shutil.ignore_patterns(".git"))
    assert hatchling(tmp_path / "copied", "version") == UNKNOWN
