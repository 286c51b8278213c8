"""Datasets of the Hugging Face Hub, by the ``datasets`` library, without its log lines; a missing
network is reported at once.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.parse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allhands.errors import DataError
from allhands.runtime.libraries import errors_only

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PROBE_S = 4.0
_NO_NETWORK = "check the network, or fetch the files on another machine and name them here"


def load_hub(path: str, **options: Any) -> Any:
    """``datasets.load_dataset(path, **options)``.

    Raises:
        DataError: the library is not installed, the Hub cannot be reached, or the dataset cannot be
            loaded.
    """
    with _library(path) as datasets:
        return datasets.load_dataset(path, **options)


def split_names(path: str) -> list[str]:
    """Return the names of a dataset's splits.

    Raises:
        DataError: as :func:`load_hub`.
    """
    with _library(path) as datasets:
        return list(datasets.get_dataset_split_names(path))


@contextmanager
def _library(path: str) -> Generator[Any]:
    """Import the ``datasets`` library, silence its client's log, and translate its errors.

    Raises:
        DataError: as :func:`load_hub`.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # slow to import
    except ImportError as error:
        raise DataError(
            "the datasets library is not installed",
            code="data-package-missing",
            where=path,
            hint="pip install datasets",
        ) from error
    if (
        HUB_NAME.fullmatch(path)
        and not Path(path).exists()
        and not _is_cached(path)
        and not _reachable()
    ):
        raise DataError(
            "the Hugging Face Hub cannot be reached",
            code="dataset-hub-unreachable",
            where=path,
            hint=_NO_NETWORK,
        )
    try:
        with errors_only("huggingface_hub"):
            yield datasets
    except (
        Exception
    ) as error:  # the library raises many kinds: of its own, of requests and httpx, built-in ones
        raise hub_error(path, error) from error


def _is_cached(name: str) -> bool:
    """Return True if the cache holds a part of the dataset: the library may need no network."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    made = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
    return (hub / f"datasets--{name.replace('/', '--')}").exists() or (
        made / name.replace("/", "___").lower()
    ).exists()


def _reachable() -> bool:
    """Return True if the Hub answers at all: the library itself would try for half a minute.

    Behind a proxy, or where downloads are switched off, nothing is tried and the answer is True.
    """
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE")
    if offline or any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True
    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def hub_error(name: str, error: Exception) -> DataError:
    """Translate the library's error, with a remedy."""
    text, kind = str(error), type(error).__name__
    choice = ", ".join(re.findall(r"'([^']+)'", text[text.find("[") :])) if "[" in text else ""
    page = f"https://huggingface.co/datasets/{name}"
    one_of = f"is one of: {choice or 'see ' + page}"
    page_hint = f"request it at {page}, then: hf auth login"
    private = "check the name (OWNER/NAME) and, if it is a file, its path; for a private dataset: hf auth login"
    offline = "unset HF_HUB_OFFLINE, or fetch the files on another machine and name them here"
    kinds = " ".join(one.__name__ for one in type(error).__mro__)
    for pattern, found in (
        (
            "(?i)gated dataset|GatedRepo",
            DataError(
                "access to the dataset must be requested", code="dataset-gated", hint=page_hint
            ),
        ),
        (
            "OfflineMode|(?i:offline mode)",
            DataError(
                "the dataset is not here, and downloads are switched off",
                code="dataset-not-downloaded",
                hint=offline,
            ),
        ),
        (
            "^[^:]*(Connect|Timeout|Proxy)",
            DataError(
                "the Hugging Face Hub cannot be reached",
                code="dataset-hub-unreachable",
                hint=_NO_NETWORK,
            ),
        ),
        (
            "(Unknown|Bad) split",
            DataError(
                "the dataset has no such split",
                code="split-missing",
                hint=f"--hub-split {one_of}",
            ),
        ),
        (
            "Config name is missing|BuilderConfig .* not found",
            DataError(
                "it has several configurations",
                code="dataset-configuration-missing",
                hint=f"--hub-config {one_of}",
            ),
        ),
        (
            "^[^:]*(FileNotFound|RepositoryNotFound)",
            DataError(
                "there is no such dataset on the Hub, or it is private",
                code="dataset-missing",
                hint=private,
            ),
        ),
    ):
        if re.search(pattern, f"{kinds}: {text}"):
            found.where = name
            return found
    return DataError(
        f"the dataset cannot be loaded: {kind}: {text.strip().partition(chr(10))[0]}",
        code="dataset-unreadable",
        where=name,
        hint=f"see {page}; you can fetch its files and name them here",
    )
