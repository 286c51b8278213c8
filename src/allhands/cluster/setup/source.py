"""The source of allhands for other computers: a release, a wheel, a checkout, or this installation,
packed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path

from allhands.cluster.setup.state import SetupSource
from allhands.errors import ConfigError
from allhands.runtime.versions import file_line, fingerprint, is_source

_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.dev|\.post)\d+)*")
_WHEEL = re.compile(r"allhands-[A-Za-z0-9_.!+]+-[A-Za-z0-9_.]+-[A-Za-z0-9_]+-[A-Za-z0-9_]+\.whl")
_HINT = "give a version such as 0.1.0, a wheel allhands-*.whl, or the directory of a checkout; or leave it out"


def find_source(text: str | None, store: Path) -> SetupSource:
    """Return the source that ``text`` means (``--from``); without it, this installation.

    Args:
        store: the directory for wheels that are made; nothing is written here.

    Raises:
        ConfigError: it is none of these, or cannot be read.
    """
    if text is None:
        return _own(store)
    path = Path(os.path.expanduser(text))
    if path.suffix == ".whl":
        return _wheel(path.resolve())
    if text and path.is_dir():
        return _checkout(path.resolve(), store)
    if _VERSION.fullmatch(text):
        return SetupSource(text)
    raise ConfigError(
        f"{text!r} is no version, wheel or checkout",
        code="install-source-invalid",
        where="--from",
        hint=_HINT,
    )


def package_root() -> Path:
    """Return the directory of the package allhands that runs here."""
    spec = find_spec("allhands")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _own(store: Path) -> SetupSource:
    """Return the release that is installed here, or a wheel of this installation if it is none."""
    try:
        found = importlib.metadata.distribution("allhands")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "allhands runs here without being installed",
            code="install-source-invalid",
            where="--from",
            hint="give the directory of its checkout, or a version: --from",
        ) from None
    if found.read_text("direct_url.json") is None:
        return SetupSource(found.version, code=fingerprint(str(package_root())))
    wheel = store / f"allhands-{found.version}-py3-none-any.whl"
    argv = (sys.executable, "-m", "allhands.cluster.setup.pack", str(wheel))
    return SetupSource(found.version, wheel, fingerprint(str(package_root())), argv)


def _wheel(path: Path) -> SetupSource:
    if not _WHEEL.fullmatch(path.name):
        raise ConfigError(
            f"{path.name} is no wheel of allhands",
            code="install-source-invalid",
            where="--from",
            hint=_HINT,
        )
    total = hashlib.sha256()
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            version = HeaderParser().parsestr(archive.read(metadata).decode())["Version"]
            inner = [
                name.removeprefix("allhands/")
                for name in names
                if name.startswith("allhands/") and is_source(name)
            ]
            for name in sorted(inner):
                total.update(file_line(name, archive.read(f"allhands/{name}")))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no wheel"
        raise ConfigError(
            f"cannot be read: {reason}",
            code="install-source-invalid",
            where=f"--from {path}",
            hint=_HINT,
        ) from None
    return SetupSource(str(version), path, total.hexdigest(), size=size)


def _checkout(path: Path, store: Path) -> SetupSource:
    try:
        project = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        name, version = project["name"], project.get("version")
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        name = version = None
    package = path / "src" / "allhands"
    if name != "allhands" or not package.is_dir():
        raise ConfigError(
            "this is no checkout of allhands",
            code="install-source-invalid",
            where=f"--from {path}",
            hint=_HINT,
        )
    code = fingerprint(str(package))
    settings: tuple[str, ...] = ()
    if not isinstance(version, str):  # git knows it, but the wheel's name is needed before that
        version = f"0+source.{code[:12]}"
        settings = ("env", f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_ALLHANDS={version}")
    wheel = store / f"allhands-{version}-py3-none-any.whl"
    argv = (
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--wheel-dir"),
    )
    if find_spec("pip") is None and (uv := shutil.which("uv")):  # uv makes environments without pip
        argv = (uv, "build", "--quiet", "--wheel", "--out-dir")
    return SetupSource(version, wheel, code, (*settings, *argv, str(store), str(path)))


def wheel_store() -> Path:
    """Return the directory for wheels that shown commands make."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "allhands" / "wheels"
