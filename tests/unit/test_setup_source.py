"""Where set-up takes allhands from, and the wheel that it packs: pip installs it, and every byte is
there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import allhands
from allhands.cluster.setup.pack import pack
from allhands.cluster.setup.source import find_source
from allhands.errors import ConfigError
from allhands.runtime.versions import fingerprint

PACKAGE = Path(allhands.__file__).parent
VERSION = importlib.metadata.version("allhands")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheels") / f"allhands-{VERSION}-py3-none-any.whl"
    pack(path)
    return path


def package_bytes() -> dict[str, bytes]:
    files = [
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    return {str(path.relative_to(PACKAGE.parent)): path.read_bytes() for path in files}


def test_the_wheel_holds_what_runs_here(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        content = {name: archive.read(name) for name in archive.namelist()}
    assert {
        name: data for name, data in content.items() if name.startswith("allhands/")
    } == package_bytes()
    assert f"Version: {VERSION}" in content[f"allhands-{VERSION}.dist-info/METADATA"].decode()


def test_the_same_files_give_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    pack(tmp_path / "again" / wheel.name)
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()
    assert (tmp_path / "again").stat().st_mode & 0o077 == 0


def test_pip_installs_it_and_its_fingerprint_is_the_same_everywhere(
    wheel: Path, tmp_path: Path
) -> None:
    argv = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        tmp_path / "there",
    ]
    subprocess.run([*argv, wheel], check=True, capture_output=True)
    expected = fingerprint(str(PACKAGE))
    assert fingerprint(str(tmp_path / "there" / "allhands")) == expected
    assert find_source(str(wheel), tmp_path).fingerprint == expected
    code = "import allhands.__main__; print(allhands.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "there"), "ALLHANDS_BLAS": "off"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.strip() == str(tmp_path / "there" / "allhands" / "__init__.py")
    (tmp_path / "there" / "allhands" / "errors.py").write_text("")
    assert fingerprint(str(tmp_path / "there" / "allhands")) != expected


def test_the_fingerprint_by_hand(tmp_path: Path) -> None:
    (tmp_path / "b" / "__pycache__").mkdir(parents=True)
    for name in ("b/c.py", "a.py", "b/__pycache__/c.pyc", "stray.pyc"):
        (tmp_path / name).write_text(name)
    sums = "".join(
        f"{hashlib.sha256(name.encode()).hexdigest()} {name}\n" for name in ("a.py", "b/c.py")
    )
    assert fingerprint(str(tmp_path)) == hashlib.sha256(sums.encode()).hexdigest()


def test_a_checkout_is_packed_unless_it_is_a_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Found:
        version = "9.8"

        def __init__(self, url: str | None) -> None:
            self._url = url

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self._url

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Found(None))
    release = find_source(None, tmp_path)
    assert (release.version, release.wheel, release.fingerprint, release.made_by) == (
        "9.8",
        None,
        None,
        (),
    )
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: Found('{"url": "file:///here"}')
    )
    own = find_source(None, tmp_path)
    assert own.wheel == tmp_path / "allhands-9.8-py3-none-any.whl"
    assert own.made_by == (sys.executable, "-m", "allhands.cluster.setup.pack", str(own.wheel))
    assert own.fingerprint == fingerprint(str(PACKAGE))
    assert list(tmp_path.iterdir()) == []


def test_what_the_person_names(wheel: Path, tmp_path: Path) -> None:
    assert find_source("0.4.0", tmp_path).version == "0.4.0"
    assert find_source("1.0rc1", tmp_path).version == "1.0rc1"
    found = find_source(str(wheel), tmp_path)
    assert (found.version, found.wheel, found.size, found.made_by) == (
        VERSION,
        wheel,
        wheel.stat().st_size,
        (),
    )
    root = tmp_path / "checkout"
    (root / "src" / "allhands").mkdir(parents=True)
    (root / "src" / "allhands" / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text('[project]\nname = "allhands"\nversion = "7.0"\n')
    checkout = find_source(str(root), tmp_path / "store")
    assert (checkout.version, checkout.wheel) == (
        "7.0",
        tmp_path / "store" / "allhands-7.0-py3-none-any.whl",
    )
    assert checkout.made_by[-3:] == ("--wheel-dir", str(tmp_path / "store"), str(root))
    code = fingerprint(str(root / "src" / "allhands"))
    assert checkout.fingerprint == code
    # Without a version in the file: the wheel is named after its code.
    (root / "pyproject.toml").write_text('[project]\nname = "allhands"\ndynamic = ["version"]\n')
    checkout = find_source(str(root), tmp_path / "store")
    assert checkout.version == f"0+source.{code[:12]}"
    assert checkout.made_by[:2] == (
        "env",
        f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_ALLHANDS={checkout.version}",
    )


def test_what_is_no_source(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "other.whl").write_bytes(b"")
    broken = tmp_path / wheel.name
    broken.write_bytes(wheel.read_bytes()[:1000])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "1"\n')
    for text in (
        "latest",
        "git+https://a.b",
        "-r x",
        "",
        *map(str, tmp_path.iterdir()),
        str(tmp_path / "none.whl"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_source(text, tmp_path)
        assert (caught.value.where or "").startswith("--from")
