"""Python calls for the commands ``allhands train`` and ``allhands pretrain``."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from allhands.config.call_words import as_call, named_as_arguments
from allhands.config.options import PretrainOptions, TrainOptions
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import ConfigError, Interrupted
from allhands.io.notebook import NotebookOutput, in_notebook
from allhands.io.terminal import progress_console, tell
from allhands.runtime.command import Echoes

if TYPE_CHECKING:
    from allhands.cluster.environment import LaunchPlace
    from allhands.cluster.pace import Pace
    from allhands.objectives.base import Objective
    from allhands.run.session import FinetuneResult
    from allhands.train.callbacks import Callback


def finetune(
    *,
    config: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
    progress: bool = True,
    **options: Unpack[TrainOptions],
) -> FinetuneResult:
    """Fine-tune a model: the same as ``allhands train`` with the same options.

    Without a launcher it trains in this process. Under a launcher such as ``allhands launch`` every
    process calls it, and the processes train together. ``allhands launch`` also starts the script
    again after a fault, and the run goes on from its last checkpoint.

    Args:
        config: YAML file with options; keyword arguments win over it.
        callbacks: instances of :class:`allhands.Callback`.
        objective: what the model is trained for (``docs/architecture.md``); the next token unless said otherwise.
        progress: show the progress on standard output; in a notebook, as one output that changes.
        **options: fields of :class:`allhands.TrainConfig`, such as ``model="demo"``, ``data="demo"``,
            ``iters=60``; ``train=True`` unless said otherwise.

    Returns:
        The place of the adapter, the end of the training, and the path of the graph.

    Raises:
        Interrupted: stopped by Ctrl-C or SIGTERM after the running step, which is saved.
        AllhandsError: wrong input or a failure; each exit code of the command has its own subclass.

    Examples:
        >>> result = allhands.finetune(model="demo", data="demo", iters=20, adapter_path="adapters")
        >>> result.ended.best_valid_loss
    """
    with named_as_arguments(TrainConfig):
        chosen = build_config({"train": True, **options}, config)
        return _run(chosen, callbacks, progress, objective)


def pretrain(
    *,
    config: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
    progress: bool = True,
    **options: Unpack[PretrainOptions],
) -> FinetuneResult:
    """Train a new model from scratch: the same as ``allhands pretrain`` with the same options.

    In everything else it works like :func:`finetune`.

    Args:
        config: YAML file with options; keyword arguments win over it.
        callbacks: instances of :class:`allhands.Callback`.
        objective: what the model is trained for (``docs/architecture.md``); the next token unless said otherwise.
        progress: show the progress on standard output; in a notebook, as one output that changes.
        **options: fields of :class:`allhands.config.pretrain_schema.PretrainConfig`, such as ``data="stories"``,
            ``tokenizer="tokenizer"``, ``shape="llama-15m"``.

    Returns:
        The place of the run (with the model in its directory ``model``), its end, and the path of the graph.

    Raises:
        Interrupted: stopped by Ctrl-C or SIGTERM after the running step, which is saved.
        AllhandsError: wrong input or a failure; each exit code of the command has its own subclass.

    Examples:
        >>> result = allhands.pretrain(data="stories", tokenizer="tokenizer", shape="llama-15m", epochs=4)
        >>> result.adapter_path / "model"
    """
    from allhands.config.pretrain_schema import PretrainConfig

    with named_as_arguments(PretrainConfig):
        chosen = build_config({"train": True, **options}, config, PretrainConfig)
        return _run(chosen, callbacks, progress, objective)


def _run(
    chosen: TrainConfig, callbacks: Sequence[Callback], progress: bool, objective: Objective | None
) -> FinetuneResult:
    from allhands.cluster.choose import slower_than_ours
    from allhands.cluster.environment import launch_here, recognise_here
    from allhands.cluster.join import join_group, joined_here, mesh_of, surroundings_of, take_device
    from allhands.cluster.pace import Pace
    from allhands.cluster.worker import contact, end_at_errors
    from allhands.objectives.causal_lm import CAUSAL_LM
    from allhands.run.session import RunContext, run_finetune

    # After allhands.init() the process is connected already.
    joined = joined_here()
    launch = launch_here() if joined else recognise_here()
    _check_processes(chosen, launch)
    speaks = progress and launch.rank == 0
    stops = _Stops(Pace(), speaks=speaks)
    in_main_thread = threading.current_thread() is threading.main_thread()
    supervised = in_main_thread and "ALLHANDS_RUN_DIR" in os.environ
    if supervised:
        surroundings = surroundings_of(contact(), launch, chosen)
    else:
        take_device(launch)
        mesh = mesh_of(launch, chosen.given_weights)
        if launch.size > 1:
            end_at_errors(launch, os.environ)
        surroundings = RunContext(
            mesh=mesh,
            connect=lambda: joined or join_group(launch, chosen.start_timeout_s),
            started=stops.started,
            beat=stops.pace.beat,
            stop_requested=stops.requested,
        )
    if speaks:
        if note := slower_than_ours(launch, f"allhands launch -n {launch.size} --"):
            print(f"allhands: note: {note}", file=sys.stderr)
        words = partial(as_call, schema=type(chosen))
        stream: Any = NotebookOutput(words) if in_notebook() else sys.stdout
        surroundings = replace(surroundings, console=progress_console(stream, highlight=False))
    with nullcontext() if supervised or not in_main_thread else stops.heard():
        return run_finetune(chosen, surroundings, callbacks, objective or CAUSAL_LM)


def _check_processes(chosen: TrainConfig, launch: LaunchPlace) -> None:
    """Check that the processes that the options ask for exist, because a call starts none.

    Raises:
        ConfigError: they do not.
    """
    wanted = f"-n {chosen.num_ranks}" if chosen.num_ranks not in (1, launch.size) else ""
    where, words = "num_ranks=", f"num_ranks={chosen.num_ranks}"
    for name in ("hosts", "hostfile"):
        if launch.launcher == "single" and (given := getattr(chosen, name)):
            wanted = f"--{name} {shlex.quote(given)}"
            where, words = f"{name}=", "this asks for other computers"
    if not wanted:
        return
    raise ConfigError(
        f"{words}, but a call starts no processes, and there {'is' if launch.size == 1 else 'are'} {launch.size}",
        code="call-starts-no-processes",
        where=where,
        hint=f"leave it out, or start a script as several processes: allhands launch {wanted} -- python SCRIPT",
    )


class _Stops:
    """Ctrl-C and SIGTERM in a user's own process while it trains: the first signal saves and ends
    the training, and the second has Python's own effect.

    A signal that is ignored, or that has a handler of the user, keeps its effect.
    """

    def __init__(self, pace: Pace, *, speaks: bool) -> None:
        self.pace = pace
        self._speaks = speaks
        self._before: dict[int, Any] = {}
        self._echoes = Echoes()
        self._started = False
        self._signal = 0

    def started(self) -> None:
        """Note that a stop has something to save from now on."""
        self._started = True

    def requested(self) -> int:
        """Return the signal that asked to save and end, or 0."""
        return self._signal

    @contextmanager
    def heard(self) -> Generator[None, None, None]:
        """Receive the signals within the block, which runs in the main thread.

        Raises:
            Interrupted: as the block does; uncaught it ends a script as it ends the command.
        """
        usual = (signal.default_int_handler, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in usual:
                self._before[number] = signal.signal(number, self._hear)
        try:
            yield
        except Interrupted:
            if self._signal:
                _end_quietly(self._signal)
            raise
        finally:
            self._put_back()
        if self._signal:
            signal.raise_signal(
                self._signal
            )  # it came after the last step: the rest of the script must receive it

    def _put_back(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self._echoes.has(number):
            return
        if self._signal or not self._started:
            self._put_back()
            signal.raise_signal(number)
            return
        self._signal = number
        if self._speaks:
            more = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            text = f"allhands: {self.pace.told()}{more}"
            # In a thread of its own, because the signal may have interrupted a print.
            threading.Thread(target=tell, args=(text,), daemon=True).start()


def _end_quietly(number: int) -> None:
    """Let an uncaught :class:`Interrupted` end the script with its message and the signal's code,
    without a traceback.

    Other handlers of uncaught exceptions, such as a notebook's, stay.
    """
    if sys.excepthook is not sys.__excepthook__:
        return

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Interrupted):
            sys.__excepthook__(kind, error, trace)
            return
        tell(f"allhands: {error}")
        raise SystemExit(128 + number)

    sys.excepthook = end
