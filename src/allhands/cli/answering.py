"""Options and notices of the verbs that generate answers, on one process or on several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_data import DataPrepare
from allhands.cli.verbs_models import Chat, Compare, Generate, Serve
from allhands.data.templates import ChatChoice
from allhands.errors import ConfigError
from allhands.io.terminal import tell
from allhands.run.adapter_files import warning_of

if TYPE_CHECKING:
    from allhands.model.load import LoadedModel


def ranks_asked(asked: Generate | Chat | Compare) -> dict[str, Any] | None:
    """Return the options that place the ranks; ``None``: one process has the whole model.

    Raises:
        ConfigError: such options are given without ``--strategy``.
    """
    names = ("num_ranks", "hosts", "hostfile", "backend", "pp_split")
    ranks = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if asked.strategy is not None:
        return {**ranks, "strategy": asked.strategy.value}
    idle = {f"--{name.replace('_', '-')}": value for name, value in ranks.items()}
    refuse_idle(idle, "without --strategy pipeline", "add it, or leave it out")
    return None


def tell_notes(loaded: LoadedModel) -> None:
    """Print a loaded model's notes on standard error."""
    for note in loaded.notes:
        tell(f"allhands: note: {note}")


def tell_harm(adapter_path: Path | None, model: str | None = None) -> None:
    """Warn in one line if training has made the weights worse, because nothing else shows it."""
    if told := warning_of(adapter_path, model):
        tell(f"allhands: warning: {told}")


def chat_choice(asked: Generate | Chat | Serve | DataPrepare) -> ChatChoice:
    """Return the choice of a chat template that the two options make.

    Raises:
        ConfigError: ``--system`` is neither template nor merge.
    """
    if asked.system not in ("template", "merge"):
        raise ConfigError(
            f"{asked.system!r} is not known",
            code="value-unknown",
            where="--system",
            hint="write merge, or leave it out; --system-prompt gives the text of a system message",
        )
    return ChatChoice(asked.chat_template, cast("Any", asked.system))
