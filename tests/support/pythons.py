"""Pythons as other computers may have them: without allhands, with other releases, old, with a
clock that is off.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

_HERE = Path(sysconfig.get_path("purelib"))
_TAG = "py3-none-any"
# A line of a .pth file that begins with "import" is run: what is installed here, editable packages
# too, can be used.
_BORROW = f"import site; site.addsitedir({str(_HERE)!r})\n"
_OLD = """
import sys
from collections import namedtuple

Version = namedtuple("Version", "major minor micro releaselevel serial")
sys.version_info = Version({major}, {minor}, 4, "final", 0)
sys.version = "{major}.{minor}.4 (main, Jan  1 2022, 00:00:00) [GCC 9.4.0]"
"""
# The clock of the wall alone: no deadline hangs on it.
_OFF = """
import time

right, right_ns = time.time, time.time_ns
time.time = lambda: right() + {seconds}
time.time_ns = lambda: right_ns() + {seconds} * 10**9
"""


def make_python(
    place: Path, versions: Mapping[str, str] | None = None, borrowing: bool = True
) -> Path:
    """Make an environment with pip at ``place`` and return its interpreter.

    Args:
        place: must not exist.
        versions: releases that packages bear, in place of those that are installed here.
        borrowing: whether it has everything that is installed here; if not, it has pip alone.
    """
    venv.create(place, symlinks=True, with_pip=False)
    packages = site_packages(place)
    for name, version in (versions or {}).items():
        _install(packages, name, version)
    if borrowing:
        (packages / "borrowed.pth").write_text(_BORROW)
    else:
        only = place / "only-pip"
        only.mkdir()
        (only / "pip").symlink_to(_HERE / "pip")
        (packages / "pip.pth").write_text(f"{only}\n")
    mpirun = Path(sys.executable).parent / "mpirun"
    if mpirun.exists():  # beside Python it is taken before that of PATH
        (place / "bin" / "mpirun").symlink_to(mpirun)
    return place / "bin" / "python"


def make_old_python(place: Path, major: int, minor: int) -> Path:
    """Make an environment whose Python says that it is that old, and return its interpreter."""
    python = make_python(place)
    (site_packages(place) / "sitecustomize.py").write_text(_OLD.format(major=major, minor=minor))
    return python


def make_python_off(place: Path, seconds: int) -> Path:
    """Make an environment whose Python sees a clock that is ahead by ``seconds``, and return its
    interpreter.
    """
    python = make_python(place)
    (site_packages(place) / "sitecustomize.py").write_text(_OFF.format(seconds=seconds))
    return python


def site_packages(place: Path) -> Path:
    """Where an environment of this Python's release has its packages."""
    return (
        place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    )


def write_index(directory: Path, home: Path, versions: Mapping[str, str]) -> None:
    """Make releases that pip finds in ``home`` without a network; they bring what is installed
    here.
    """
    directory.mkdir(exist_ok=True)
    for name, version in versions.items():
        _write_wheel(directory, name, version)
    settings = home / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    lines = [
        "[global]",
        "no-index = true",
        f"find-links = {directory}",
        "no-cache-dir = true",
        "no-compile = true",
    ]
    settings.write_text(
        "\n".join([*lines, "disable-pip-version-check = true", "root-user-action = ignore"]) + "\n"
    )


def _install(packages: Path, name: str, version: str) -> None:
    """As pip would have left it, so that pip can take it away again."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    (packages / folder).mkdir()
    for file, text in _metadata(name, version).items():
        (packages / folder / file).write_text(text)
    rows = [*(f"{folder}/{file},," for file in _metadata(name, version)), f"{folder}/RECORD,,"]
    (packages / folder / "RECORD").write_text("".join(f"{row}\n" for row in rows))


def _metadata(name: str, version: str) -> dict[str, str]:
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: cpu\n"
    return {
        "METADATA": metadata,
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {_TAG}\n",
    }


def _write_wheel(directory: Path, name: str, version: str) -> None:
    bare = f"{name.replace('-', '_')}-{version}"
    contents = {f"{bare}.dist-info/{file}": text for file, text in _metadata(name, version).items()}
    contents[f"borrowed_by_{name.replace('-', '_')}.pth"] = _BORROW
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    for path, text in contents.items():
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        )
        writer.writerow([path, f"sha256={digest}", len(text.encode())])
    writer.writerow([f"{bare}.dist-info/RECORD", "", ""])
    with zipfile.ZipFile(directory / f"{bare}-{_TAG}.whl", "w") as wheel:
        for path, text in {**contents, f"{bare}.dist-info/RECORD": record.getvalue()}.items():
            wheel.writestr(path, text)
