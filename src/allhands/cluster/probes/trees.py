"""Models and data on this computer: names, sizes and SHA-256."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

BLOCK = 4 << 20
MOST_FILES = 20000
# The files that loading reads from a model directory; others, such as a licence, may differ.
MODEL_FILES = (".json", ".safetensors", ".py", ".model", ".tiktoken", ".jinja", ".txt")
# The demo's directory in the cache of allhands; it ends with the release of the conversion.
DEMO_MODEL = "SmolLM2-135M-Instruct-4bit-*"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def tree_fact(
    role: str, source: str, hashed: bool, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Return the path and the files of ``source``.

    Args:
        role: ``model`` or ``data``.
        source: a path, a repository of the Hub, or ``demo``.
        hashed: read the contents.
        progress: called with the bytes read so far, at most every 4 MiB.
    """
    fact: dict[str, Any] = {
        "role": role,
        "source": source,
        "path": None,
        "error": None,
        "files": [],
    }
    try:
        path = located(role, source)
        fact["path"] = path
        if path is not None:
            fact["files"] = listed(path, MODEL_FILES if role == "model" else None)
            if hashed:
                add_digests(path, fact["files"], progress)
    except OSError as error:
        fact["error"] = f"{error.filename or source}: {error.strerror or error}"
    except ValueError as error:
        fact["error"] = str(error)
    return fact


def located(role: str, source: str) -> str | None:
    """Return the path of ``source`` on this computer; ``None`` if it is not here."""
    path = os.path.abspath(os.path.expanduser(source))
    if os.path.exists(path):
        return path
    if role == "model" and source == "demo":
        return max(glob.glob(os.path.join(glob.escape(cache_place()), DEMO_MODEL)), default=None)
    return hub_directory(role, source) if HUB_NAME.fullmatch(source) else None


def cache_place() -> str:
    """Return the cache directory of allhands."""
    chosen = os.environ.get("ALLHANDS_CACHE")
    if chosen:
        return os.path.expanduser(chosen)
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches/allhands")
    return os.path.join(
        os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "allhands"
    )


def hub_place() -> str:
    """Return the cache directory of the Hub's client."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return os.path.expanduser(chosen or os.path.join(home, "hub"))


def hub_directory(role: str, name: str) -> str | None:
    """Return the snapshot of a Hub repository that a program would open."""
    kind = "models" if role == "model" else "datasets"
    repository = os.path.join(hub_place(), f"{kind}--{name.replace('/', '--')}")
    try:
        with open(os.path.join(repository, "refs", "main"), encoding="ascii") as stream:
            revision = stream.read(200).strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = os.path.join(repository, "snapshots", revision)
    return snapshot if re.fullmatch(r"\w+", revision) and os.path.isdir(snapshot) else None


def listed(path: str, suffixes: tuple[str, ...] | None) -> list[dict[str, Any]]:
    """Return the files below ``path`` with their sizes, sorted and without hidden ones.

    A single file is a tree of one file, whose name is empty.

    Raises:
        OSError: something cannot be read.
        ValueError: there are more than ``MOST_FILES``.
    """
    if os.path.isfile(path):
        return [{"name": "", "size": os.stat(path).st_size, "sha256": None}]
    found: list[dict[str, Any]] = []
    for directory, below, names in os.walk(path, onerror=refuse_directory):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or (suffixes and not name.endswith(suffixes)):
                continue
            file = os.path.join(directory, name)
            found.append(
                {"name": os.path.relpath(file, path), "size": os.stat(file).st_size, "sha256": None}
            )
            if len(found) > MOST_FILES:
                raise ValueError(f"{path} has more than {MOST_FILES} files")
    return sorted(found, key=lambda entry: entry["name"])


def refuse_directory(error: OSError) -> None:
    """Raise an error that os.walk would ignore.

    Raises:
        OSError: always.
    """
    raise error


def add_digests(path: str, files: list[dict[str, Any]], progress: Callable[[int], None]) -> None:
    """Read every file and note its SHA-256.

    Raises:
        OSError: one cannot be read.
    """
    done = 0
    for entry in files:
        digest = hashlib.sha256()
        with open(os.path.join(path, entry["name"]) if entry["name"] else path, "rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                done += len(block)
                progress(done)
        entry["sha256"] = digest.hexdigest()
