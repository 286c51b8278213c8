"""``allhands demo``: teach a small model to talk like a pirate, and measure the result."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console

from allhands.cli.compare import show_comparison, show_speed
from allhands.cli.verbs_runs import Demo
from allhands.cluster.training import supervise_training
from allhands.config.command_line import arguments, command_line
from allhands.config.schema import TrainConfig, build_config
from allhands.data.demo import write_demo_data
from allhands.errors import AllhandsError, ConfigError
from allhands.infer.comparing import (
    SCORED,
    AnswersCompared,
    answers,
    held_out_prompts,
    save_comparison,
)
from allhands.io.files import make_directory, write_whole
from allhands.io.formatting import counted
from allhands.io.paths import require_directory_name
from allhands.io.pictures import DRAWN_HERE
from allhands.io.terminal import console_for
from allhands.model.load import get_model
from allhands.observe.metrics import ANSWERS_FILE, RunHistory, read_metrics
from allhands.observe.plots import plot_losses
from allhands.observe.times import largest_gap, times_markdown, times_table
from allhands.runtime.blas import allowed_cores
from allhands.runtime.gpus import nvidia_gpus

NUM_PROMPTS = 16
MAX_TOKENS = 50
# The files that are written into --out itself, each with a mark by which our own files are known.
_WRITTEN = {"loss.png": DRAWN_HERE, "times.md": b"| seconds per step |", ANSWERS_FILE: SCORED}


def demo(asked: Demo) -> None:
    """Run the verb."""
    console = console_for()
    started = time.perf_counter()
    require_directory_name(asked.out)
    for name, mark in _WRITTEN.items():
        if (asked.out / name).exists() and mark not in (asked.out / name).read_bytes():
            raise ConfigError(
                f"there is another {name}",
                code="place-taken",
                where=f"--out {asked.out}",
                hint="choose another directory",
            )
    make_directory(asked.out)

    _title(
        console, "1. Model: SmolLM2-135M-Instruct, a small chat model", "allhands model get demo"
    )
    model = str(place := asked.out / "model")
    if not place.exists():
        get_model("demo", place, report=lambda line: console.print(line, soft_wrap=True))
    console.print(f"model: {model}", soft_wrap=True)

    _title(console, "2. Data: everyday questions, answered in pirate English", "allhands data demo")
    counts = write_demo_data(asked.out / "data")
    console.print(
        f"{asked.out / 'data'}: " + ", ".join(f"{name} {number}" for name, number in counts.items())
    )

    _title(
        console,
        "3. Baseline: the model answers questions outside the training data",
        "allhands generate",
    )
    prompts = held_out_prompts(str(asked.out / "data"), NUM_PROMPTS)
    before, speed = answers(model, None, prompts, MAX_TOKENS)
    show_speed(console, "baseline", speed)
    console.print(f"asked:    {prompts[0]}\nanswered: {before[0]}")

    # Each "computer" has half of this machine's cores in both runs, so that two have twice as many.
    cores = max(1, allowed_cores() // 2)
    histories = [_training(console, asked, model, ranks, cores) for ranks in (1, 2)]

    _title(console, "5. One computer against two", "allhands plot RUN RUN")
    _show_times(console, asked.out, histories, cores)

    _title(console, "6. The same questions again, before and after", "allhands compare")
    adapter = asked.out / "two-processes"
    after, speed = answers(model, adapter, prompts, MAX_TOKENS)
    show_speed(console, "with adapter", speed)
    comparison = AnswersCompared(prompts, before, after)
    show_comparison(console, comparison, 4, MAX_TOKENS, scored=True)
    save_comparison(comparison, asked.out / ANSWERS_FILE)
    console.print(
        f"\nthe demo took {time.perf_counter() - started:.0f} s and is in {asked.out}",
        soft_wrap=True,
    )
    console.print("ask it yourself:", soft_wrap=True)
    console.print(
        f'  allhands generate --model {model} --adapter-path {adapter} --prompt "How do I make tea?"',
        soft_wrap=True,
    )


def _title(console: Console, title: str, command: str) -> None:
    console.print()
    console.rule(title, align="left", style="bold")
    console.print(f"the command for this step: {command}", style="dim")


def demo_config(
    out: Path, model: str, ranks: int, cores: int, iters: int, seed: int
) -> TrainConfig:
    """Return the demo's training; only the number of processes differs between both runs."""
    name = {1: "one-process", 2: "two-processes"}[ranks]
    return build_config(
        {
            "model": model,
            "train": True,
            "data": str(out / "data"),
            "num_layers": 8,
            "batch_size": 8,
            "iters": iters,
            "learning_rate": 5e-4,
            "lr_schedule": "cosine",
            "warmup_steps": min(5, iters - 1),
            "max_grad_norm": 1.0,
            "mask_prompt": True,
            "lora_parameters": {"rank": 8, "scale": 10.0},
            "val_batches": 4,
            "steps_per_report": 5,
            "steps_per_eval": max(10, iters // 3),
            "save_every": iters,
            "seed": seed,
            "num_ranks": ranks,
            "cores_per_rank": cores,
            "adapter_path": str(out / name),
        }
    )


def _training(console: Console, asked: Demo, model: str, ranks: int, cores: int) -> RunHistory:
    config = demo_config(asked.out, model, ranks, cores, asked.iters, asked.seed)
    words = "one process" if ranks == 1 else "two processes"
    _title(
        console,
        f"4. Training on {words}, {counted(cores, 'core')} each",
        command_line(config),
    )
    console.print(hardware_line(cores).replace(" had ", " has "), soft_wrap=True)
    code = supervise_training(config, [sys.executable, "-m", "allhands", *arguments(config)])
    if code:
        error = AllhandsError(
            f"the training on {words} failed",
            code="training-failed",
            where=config.adapter_path,
            hint="see its logs there",
        )
        error.exit_code = code  # type: ignore[misc]
        raise error
    return read_metrics(config.adapter_path)


def _show_times(console: Console, out: Path, histories: list[RunHistory], cores: int) -> None:
    graph = plot_losses(
        histories, out / "loss.png", title="A chat model learns to talk like a pirate"
    )
    table = out / "times.md"
    write_whole(table, lambda temporary: temporary.write_text(times_markdown(histories)))
    console.print(hardware_line(cores), soft_wrap=True)
    console.print(times_table(histories))
    gap = largest_gap(histories)
    console.print(f"largest difference between the two runs' training losses: {gap:.2g}")
    console.print(f"graph: {graph}\ntable: {table}", soft_wrap=True)


def hardware_line(cores: int) -> str:
    """Return a line about the hardware of each process, which explains the speed-up."""
    line = f"each process had {counted(cores, 'core')} in both runs"
    gpus = nvidia_gpus()
    if gpus == 1 or sys.platform == "darwin":
        return f"{line}; this machine has one GPU, which two processes share: expect no speed-up from the second"
    return f"{line} and a GPU of its own" if gpus else line
