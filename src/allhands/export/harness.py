"""Benchmarks of lm-evaluation-harness, through mlx_lm's adapter for it, with an adapter on the
model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allhands.errors import ConfigError, DataError
from allhands.infer.generate import load_for_generation
from allhands.model.sources import first_line


def run_harness(
    tasks: Sequence[str],
    model: str,
    adapter_path: Path | None,
    *,
    batch_size: int,
    limit: int | None,
    num_shots: int | None,
    trust_remote_code: bool,
) -> dict[str, dict[str, Any]]:
    """Results by task, as lm-evaluation-harness names them. It has to be installed.

    Args:
        tasks: names, or YAML files that describe tasks as its own do.
        limit: examples of each task; ``None``: all.
        num_shots: examples shown in each prompt; ``None``: the task's number.

    Raises:
        ConfigError: it cannot be imported, or there is no such task or file.
        DataError: the data of a task cannot be had.
        ModelError: model or adapter cannot be loaded.
    """
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
        from mlx_lm.evaluate import MLXLM
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot be imported ({error})",
            code="package-missing",
            where="--tasks",
            hint="pip install lm_eval, with all that it needs",
        ) from None
    own = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    named = {str(file): _name_in(file) for file in own}
    tasks = [named.get(str(Path(task)), task) for task in tasks]
    folders: list[str | Path] = [*dict.fromkeys(file.resolve().parent for file in own)]
    manager = TaskManager(include_path=folders) if folders else TaskManager()
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known]:
        raise ConfigError(
            f"lm-evaluation-harness has no task {unknown[0]!r}",
            code="value-unknown",
            where="--tasks",
            hint="`lm-eval ls tasks` lists those there are",
        )
    loaded = load_for_generation(model, adapter_path, trust_remote_code=trust_remote_code)

    class Loaded(MLXLM):
        """mlx_lm's adapter, with the model that we have loaded in place of one that it loads."""

        def __init__(self) -> None:
            super(MLXLM, self).__init__()
            self._model: Any = loaded.model
            self.tokenizer = loaded.tokenizer
            self._max_tokens = None
            self._batch_size = batch_size
            self.use_chat_template = getattr(loaded.tokenizer, "chat_template", None) is not None
            self._sampler = None

    taken = Loaded()
    try:
        found: Any = lm_eval.simple_evaluate(
            model=taken,
            tasks=list(tasks),
            task_manager=manager,
            num_fewshot=num_shots,
            limit=limit,
            apply_chat_template=taken.use_chat_template,
        )
    except OSError as error:  # as which the datasets library tells all that has to do with the Hub
        raise DataError(
            f"the tasks' data cannot be fetched: {first_line(error)}",
            code="task-data-unavailable",
            where="--tasks",
            hint="check the connection (and HF_HUB_OFFLINE): the data of most tasks are on the Hub",
        ) from None
    return found["results"]


def _name_in(file: Path) -> str:
    """Return the task's name in a YAML file. The file is not parsed: it names functions, which run
    on reading.
    """
    try:
        found = re.search(
            r"^task:\s*[\"']?([^\s\"'#]+)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"{file}: {reason}",
            code="task-file-invalid",
            where="--tasks",
            hint="give the path of a task's YAML file",
        ) from None
    if found is None:
        raise ConfigError(
            f"{file} has no line `task: NAME`",
            code="task-file-invalid",
            where="--tasks",
            hint="add one",
        ) from None
    return found[1]
