"""Options and notices of the verbs that answer, on one process or on several."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allhands.errors import ConfigError
from allhands.io.terminal import tell

if TYPE_CHECKING:
    from allhands.model.load import LoadedModel

ModelName = Annotated[str, typer.Option("--model", help="Model directory, Hugging Face repository, or 'demo'.")]
Adapter = Annotated[Path | None, typer.Option("--adapter-path", help="Directory of a training run.")]
SystemPrompt = Annotated[str | None, typer.Option("--system-prompt", help="System message.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of an answer at most.")]
Temperature = Annotated[float, typer.Option("--temp", min=0.0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Allow a model's own Python code.")]


class Divided(StrEnum):
    """How a model is divided among ranks."""

    pipeline = "pipeline"


DividedBy = Annotated[
    Divided | None, typer.Option("--strategy", help="pipeline: each rank has some of the model's blocks.")
]
NumRanks = Annotated[
    int | None, typer.Option("--num-ranks", "-n", min=1, help="With --strategy: processes to start here.")
]
Hosts = Annotated[str | None, typer.Option("--hosts", help="With --strategy: computers, by name.")]
Hostfile = Annotated[str | None, typer.Option("--hostfile", help="With --strategy: file of computers.")]
BackendName = Annotated[str | None, typer.Option("--backend", help="With --strategy: who moves the bytes.")]
Split = Annotated[str | None, typer.Option("--pp-split", help="With --strategy: blocks of each rank, such as 20,12.")]


def ranks_asked(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return those of a verb's ``options`` that place the ranks; ``None``: one process has the whole model.

    Raises:
        ConfigError: some are given without ``strategy``.
    """
    names = ("num_ranks", "hosts", "hostfile", "backend", "pp_split")
    ranks = {name: options[name] for name in names if options[name] is not None}
    if options["strategy"] is not None:
        return {**ranks, "strategy": options["strategy"].value}
    for name in ranks:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError("it has no effect without --strategy pipeline", where=flag, hint="add it, or leave it out")
    return None


def tell_notes(loaded: LoadedModel) -> None:
    """Print a loaded model's notes on standard error."""
    for note in loaded.notes:
        tell(f"allhands: note: {note}")


def tell_harm(adapter_path: Path | None, model: str | None = None) -> None:
    """Warn in one line of weights whose training did harm: nothing else about them looks wrong."""
    from allhands.run.adapter_files import warning_of

    if told := warning_of(adapter_path, model):
        tell(f"allhands: warning: {told}")
