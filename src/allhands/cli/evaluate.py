"""``allhands eval``: loss and perplexity of a split, on one process or on several, and public
benchmarks.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_training import Eval
from allhands.cluster.answering import evaluate_on_ranks
from allhands.config.eval_schema import EvalConfig
from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.io.terminal import print_json, tell
from allhands.runtime.blas import preload_blas

if TYPE_CHECKING:
    from allhands.run.evaluating import Evaluation


def evaluate(asked: Eval) -> None:
    """Run the verb."""
    if asked.tasks is not None:
        _run_tasks(asked, asked.tasks)
        return
    idle = {"--limit": asked.limit, "--num-shots": asked.num_shots}
    refuse_idle(idle, "without --tasks", "for less data give --test-batches")
    raise typer.Exit(evaluate_on_ranks(asked.flags, partial(_show, asked.as_json)))


def _show(as_json: bool, config: EvalConfig, found: Evaluation) -> None:
    for note in found.notes:
        tell(f"note: {note}")
    print(_as_json(config, found) if as_json else "\n".join(_as_lines(config, found)), flush=True)


def _as_json(config: EvalConfig, found: Evaluation) -> str:
    values = asdict(found)
    del values["notes"]
    named = {
        "model": config.model,
        "adapter_path": config.adapter_path or None,
        "data": config.data,
    }
    return json.dumps({**named, "split": config.split, **values})


def _as_lines(config: EvalConfig, found: Evaluation) -> list[str]:
    count = (
        f"{counted(config.test_batches, 'batch', 'batches')} of {counted(config.batch_size, 'row')}"
    )
    if found.num_examples is not None:
        count = counted(found.num_examples, "example")
    about = f"{config.split} split of {config.data}: {count}, {counted(found.num_tokens, 'token')} counted"
    lines = [about, f"loss {found.loss:.4f}  perplexity {found.perplexity:.3f}"]
    if found.bits_per_byte is not None:
        lines[1] += f"  {found.bits_per_byte:.4f} bits per byte"
    return lines


def _run_tasks(asked: Eval, tasks: str) -> None:
    """Run benchmarks of lm-evaluation-harness on this process."""
    flags, known = asked.flags, {"model", "adapter_path", "batch_size", "trust_remote_code"}
    idle = {f"--{name.replace('_', '-')}": flags[name] for name in flags if name not in known}
    refuse_idle(idle, "with --tasks", "leave one of the two out")

    if find_spec("lm_eval") is None:
        raise ConfigError(
            "benchmarks need lm-evaluation-harness, which is not installed",
            code="package-missing",
            where="--tasks",
            hint="pip install lm_eval",
        )
    preload_blas()
    from allhands.export.harness import run_harness

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(
            "it names no task",
            code="value-empty",
            where="--tasks",
            hint="give names, as in arc_easy,piqa",
        )
    adapter = flags.get("adapter_path")
    results = run_harness(
        names,
        flags.get("model", "demo"),
        Path(adapter) if adapter else None,
        batch_size=flags.get("batch_size", 8),
        limit=asked.limit,
        num_shots=asked.num_shots,
        trust_remote_code=flags.get("trust_remote_code", False),
    )
    if asked.as_json:
        print_json(results, default=str, indent=None)
        return
    for task, values in results.items():
        for name, value in values.items():
            if isinstance(value, float):
                print(f"{task}  {name} {value:.4f}")
