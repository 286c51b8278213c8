"""Shared fixtures: a tiny model and tiny data, made once for the whole session."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tiny import write_chat_data, write_model

from allhands.runtime.blas import available_cores, limit_cores

# How long one example takes says more of the machine than of the code.
settings.register_profile("allhands", deadline=None)
settings.load_profile("allhands")

# How a terminal is to be used is each test's to say, not that of the place where the tests run.
for _name in ("CI", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR"):
    os.environ.pop(_name, None)


def pytest_collection() -> None:
    """Thousands of tests are millions of objects, through which the garbage collector would look
    again and again.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def heeded_signals() -> None:
    """A shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and what they start
    inherits that.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def caches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Caches of the tests, and of the processes that they start, in place of the person's.

    MLX takes a second to compile a kernel. Processes may share its directory, so all workers use
    the one in ``.pytest_cache``, which the next run of pytest finds again.
    """
    kept = getattr(request.config, "cache", None)  # not there with -p no:cacheprovider
    kernels: Path = tmp_path_factory.mktemp("kernels") if kept is None else kept.mkdir("kernels")
    kernels.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_TOKEN_CACHE", str(tmp_path_factory.mktemp("tokens")))
        patch.setenv("ALLHANDS_KERNEL_CACHE", str(kernels))
        yield


@pytest.fixture(autouse=True)
def own_cores() -> Iterator[None]:
    """A command that runs in this process may limit its cores; what runs after it has all of them
    again.
    """
    variable = "OPENBLAS_NUM_THREADS"
    before, cores = os.environ.get(variable), available_cores()
    yield
    if os.environ.get(variable) != before:
        limit_cores(cores)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random three-layer Llama in float32."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with train, valid and test chats of very unequal lengths."""
    return write_chat_data(tmp_path_factory.mktemp("data") / "chats")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of the real datasets; the test is skipped where they are not at hand."""
    chosen = os.environ.get("ALLHANDS_TEST_DATA")
    path = Path(chosen) if chosen else Path(__file__).parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the real datasets are not here: set ALLHANDS_TEST_DATA to their directory")
    return path
