"""Versions of software, and the rule for which versions the computers of a run must share.

Every command that compares computers uses this rule: ``cluster init``, ``cluster check``, and
``train`` before it starts. Software that changes the numbers must be equal (:data:`MUST_BE_EQUAL`):
Python by major and minor version, allhands by the content of its files, MLX with its back-end, and
mlx_lm. A difference in other software is worth a note at most (:data:`MAY_DIFFER`): the tokens that
it makes are compared instead.

The text of this module is also sent to computers without allhands. So it uses only the standard
library of Python 3.8, and only ASCII.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.metadata import Distribution

# The version of code that is not installed, and of a copy of the directory without its git tags.
UNKNOWN = "0.0.0"

MUST_BE_EQUAL = ("python", "allhands", "mlx", "mlx-lm")
TOKEN_MAKERS = ("tokenizers", "transformers", "jinja2")
MAY_DIFFER = ("python", *TOKEN_MAKERS)
# Packages with MLX's back-ends; the device decides which of them is installed.
MLX_BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
PACKAGES = ("allhands", "mlx", "mlx-lm", "numpy", *TOKEN_MAKERS, *MLX_BACKENDS)
SOURCE = "allhands-source"
_MISSING = "missing"
# Names' ends of files that Python, editors and file managers leave in a directory.
_NO_SOURCE = (".pyc", "~", ".tmp", ".orig", ".rej", ".swp")


def version_of(name: str) -> str | None:
    """Return the version of a package; ``None`` if it is not installed here.

    The version of allhands is that of the running code. This code may not be installed, or another
    version may be: then it is :data:`UNKNOWN`.
    """
    import importlib.metadata  # slow to import, and this module is part of `import allhands`

    if name == "allhands":
        own = (one for one in importlib.metadata.distributions(name=name) if _is_this(one))
        return next((one.version for one in own), UNKNOWN)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_this(found: Distribution) -> bool:
    """True if the running code belongs to the installation ``found``: it is in its place, or in the
    checkout of an editable installation.
    """
    import json
    from urllib.parse import unquote, urlsplit

    package = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    try:
        origin = cast("dict[str, Any]", json.loads(found.read_text("direct_url.json") or "{}"))
    except ValueError:
        origin = dict[str, Any]()
    places = [str(found.locate_file("allhands"))]
    if origin.get("dir_info", {}).get("editable"):
        url: str = origin.get("url", "")
        checkout = unquote(urlsplit(url).path)
        places.append(os.path.join(checkout, "src", "allhands"))
    return package in map(os.path.realpath, places)


def versions_of(*names: str) -> dict[str, str]:
    """Return the versions of packages by name; packages that are not installed are left out."""
    return {name: found for name in names if (found := version_of(name)) is not None}


# --- the software of a computer -------------------------------------------------------------------


def software_here() -> dict[str, str]:
    """Return :func:`software` of this interpreter, and its path as ``executable``."""
    have = software(
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))), versions_of(*PACKAGES)
    )
    return {**have, "executable": sys.executable}


def software(root: str | None, versions: Mapping[str, str]) -> dict[str, str]:
    """Return versions of this interpreter's software by name, for comparisons.

    Args:
        root: the directory of its package allhands; ``None``: it has none.
        versions: versions of its packages, with all of :data:`PACKAGES` that it has.
    """
    found = dict(versions)
    found["python"] = ".".join(str(part) for part in sys.version_info[:3])
    if root is not None:
        found[SOURCE] = fingerprint(root)
    return found


def fingerprint(root: str) -> str:
    """Return the SHA-256 over names and contents of a package's source files."""
    total = hashlib.sha256()
    for name in package_files(root):
        with open(os.path.join(root, name), "rb") as stream:
            total.update(file_line(name, stream.read()))
    return total.hexdigest()


def file_line(name: str, content: bytes) -> bytes:
    """Return the line of one file in the hashed text of :func:`fingerprint`."""
    return f"{hashlib.sha256(content).hexdigest()} {name}\n".encode()


def is_source(name: str) -> bool:
    """True if a file belongs to its package, and was not left by Python, an editor or a file
    manager.

    ``name``: relative to the package, with slashes.
    """
    parts = name.split("/")
    hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    return not (hidden or parts[-1] == "" or name.endswith(_NO_SOURCE))


def package_files(root: str) -> list[str]:
    """Return the names of a package's source files relative to it, with slashes, sorted."""
    found: list[str] = []
    for place, _, names in os.walk(root):
        inner = os.path.relpath(place, root).replace(os.sep, "/")
        found += [name if inner == "." else f"{inner}/{name}" for name in names]
    return sorted(name for name in found if is_source(name))


# --- the rule -------------------------------------------------------------------------------------


def required(have: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that must be the same on all computers of a run, by the names of
    :data:`MUST_BE_EQUAL`.
    """
    mlx = have.get("mlx", _MISSING)
    others = [f"{name} {have[name]}" for name in MLX_BACKENDS if name in have and have[name] != mlx]
    return {
        "python": ".".join(have.get("python", _MISSING).split(".")[:2]),
        "allhands": have.get(SOURCE) or have.get("allhands", _MISSING),
        "mlx": " with ".join([mlx, *others]),
        "mlx-lm": have.get("mlx-lm", _MISSING),
    }


def unequal(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of :data:`MUST_BE_EQUAL` in which two interpreters differ.

    They cannot train together if there are any.
    """
    first, second = required(one), required(other)
    return [name for name in MUST_BE_EQUAL if first[name] != second[name]]


def merely_different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of :data:`MAY_DIFFER` in which two interpreters differ although they may
    train together.
    """
    forbidden = unequal(one, other)
    return [
        name for name in MAY_DIFFER if one.get(name) != other.get(name) and name not in forbidden
    ]


def described(name: str, have: Mapping[str, str], other: Mapping[str, str] | None = None) -> str:
    """Return name and version of an interpreter's software, for people: ``Python 3.12.1``, ``numpy
    missing``.

    Args:
        other: the software of another interpreter, which is shown beside this one. MLX's back-end
            is named only if both have the same version of MLX.
    """
    if name == "allhands" and have.get(SOURCE):
        return f"allhands {have.get('allhands', '')} (source {have[SOURCE][:8]})"
    version = have.get(name, _MISSING)
    if name == "mlx" and (other is None or other.get(name) == version):
        version = required(have)["mlx"]
    return f"{'Python' if name == 'python' else name} {version}"


def difference(name: str, own: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return how an interpreter's software differs from the ``wanted`` one, for people: ``mlx
    0.32.3 and not 0.32.4``.
    """
    there, here = own.get(name, _MISSING), wanted.get(name, _MISSING)
    if name == "allhands" and there == here:
        return "other code of the same version of allhands"
    if name == "python":
        here = required(wanted)["python"] if name in unequal(own, wanted) else here
    if name == "mlx" and there == here:  # then it is the back-end
        there, here = required(own)["mlx"], required(wanted)["mlx"]
    title = "Python" if name == "python" else name
    return f"{title} {there}" + ("" if there == _MISSING else f" and not {here}")


def harmless(name: str) -> str:
    """Return the reason why a difference in a name of :data:`MAY_DIFFER` does not stop training,
    for people.
    """
    if name in TOKEN_MAKERS:
        return "it makes tokens, which are compared when training starts"
    return "no number depends on it"
