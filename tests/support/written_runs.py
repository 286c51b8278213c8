"""Run directories written as a training would write them, with curves whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from allhands.observe.metrics import (
    JsonlSink,
    RunEnded,
    RunStarted,
    Sampled,
    TrainReport,
    ValidReport,
    Warned,
)
from allhands.observe.monitor import Sample, encode_sample, monitor_file

BEGAN = 1_795_000_000.0
# Text of a run that would run if it were not escaped, and then say so in the page's title.
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&lt;b|`*"


def write_run(  # noqa: PLR0913 - each one describes the run
    directory: Path,
    *,
    steps: int = 60,
    every: int = 5,
    train: Callable[[int], float] = lambda step: 2 + 2 / (1 + step / 10),
    valid: Callable[[int], float] | None = lambda step: 2.1 + 2 / (1 + step / 10),
    valid_every: int = 10,
    ranks: int = 1,
    step_s: float = 0.5,
    name: str | None = None,
    sampled: Sequence[tuple[str, str]] = (),
    warned: Sequence[str] = (),
    ended: RunEnded | str | None = "finished",
) -> Path:
    """Write ``metrics.jsonl`` and the options; the same steps take ``step_s / ranks``."""
    directory.mkdir(parents=True, exist_ok=True)
    second = step_s / ranks
    sink = JsonlSink(directory / "metrics.jsonl")
    sink.emit(
        RunStarted(
            name=name or directory.name,
            model="models/tiny",
            method="lora",
            num_ranks=ranks,
            backend="ring" if ranks > 1 else "none",
            batch_size=8,
            total_steps=steps,
            trainable_params=1_000,
            total_params=100_000,
            num_train_examples=240,
            cores_per_rank=1,
            versions={"allhands": "0.1.0"},
            time=BEGAN,
        )
    )
    for message in warned:
        sink.emit(Warned(0, message))
    for step in range(steps + 1):
        if valid is not None and step % valid_every == 0:
            sink.emit(ValidReport(step, valid(step), 900, step * second, 0.1, best=True))
            for prompt, text in sampled:
                sink.emit(Sampled(step, prompt, text, 0.5))
        if step and step % every == 0:
            sink.emit(_report(step, train(step), ranks, second))
    if ended is not None:
        sink.emit(
            ended
            if isinstance(ended, RunEnded)
            else RunEnded(steps, "finished", steps * second + 1)
        )
    sink.close()
    options = {
        "model": "models/tiny",
        "batch_size": 8,
        "num_ranks": ranks,
        "data": "data/pirate",
        "mask_prompt": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(options))
    return directory


def _report(step: int, loss: float, ranks: int, second: float) -> TrainReport:
    memory = tuple(600_000_000 + 10_000_000 * rank for rank in range(ranks))
    return TrainReport(
        step=step,
        loss=loss,
        learning_rate=5e-4 * (1 - step / 200),
        grad_norm=1.5 + 0.01 * step,
        tokens_per_s=200 / second,
        trained_tokens_per_s=100 / second,
        trained_tokens=100 * step,
        step_time_s=second,
        data_wait_s=0.01 * second,
        comm_s=0.1 * second if ranks > 1 else 0.0,
        elapsed_s=step * second,
        peak_memory_bytes=memory,
        epoch=step * 8 / 240,
        compute_s=0.7 * second,
        peak_rss_bytes=memory,
        peak_mlx_bytes=memory,
    )


def write_samples(
    directory: Path,
    *,
    ranks: int = 2,
    count: int = 20,
    host: Callable[[int], str] = lambda rank: "mac",
) -> None:
    """Samples of each rank: 300 MB and 10 more each second, an estimate of 600; half computing,
    half reducing.
    """
    (directory / "logs").mkdir(exist_ok=True)
    for rank in range(ranks):
        lines = [_sample(rank, host(rank), place, count) for place in range(count)]
        monitor_file(directory / "logs", "rank", rank).write_text(
            "".join(f"{encode_sample(one)}\n" for one in lines)
        )


def _sample(rank: int, host: str, place: int, count: int) -> Sample:
    resident = 300_000_000 + 10_000_000 * place
    return Sample(
        time=BEGAN + place + 0.01 * rank,
        role="rank",
        rank=rank,
        host=host,
        pid=100 + rank,
        run="job",
        attempt=1,
        every_s=1.0,
        rss_bytes=resident,
        pss_bytes=resident - 50_000_000,
        pss_kind="pss",
        peak_rss_bytes=resident,
        cpu_cores=1.0,
        mlx_active_bytes=100_000_000,
        mlx_cache_bytes=10_000_000,
        mlx_peak_bytes=120_000_000,
        step=place,
        phase="compute",
        phases={"compute": 0.5, "reduce": 0.5},
        estimated_bytes=600_000_000,
        ended=place == count - 1,
    )
