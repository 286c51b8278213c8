"""A model divided among two computers: memory and waiting of each rank, and speed beside other
ways.

    python benchmarks/pipeline.py --write

Two network namespaces on one bridge, a core and a rank in each, and a cable of limited speed
between them, as in ``slow_links.py``. A Llama of random weights in float32 is trained with LoRA in
three ways: one process with one core, data parallel with two, and a pipeline of two stages. Three
bars, and the exit code is 1 where one is missed:

- **memory** of each rank at its peak, as MLX counts it, within 10 % of two formulas. The one from
  first principles has the bytes of the arrays of its own blocks in the model's files (the first
  rank has the table of tokens besides, the last one the final norm and the head); five numbers of 4
  bytes for each trained one (itself, its gradient added up and of one micro-batch, and Adam's two);
  for each micro-batch in the pipeline what it has received and is to send (2 x tokens x width x 4
  bytes); and one micro-batch's backward pass, for which a CPU computes the forward pass anew: the
  results of all operations of its blocks (4 bytes x tokens x blocks x (6 widths + 5 queries + 5
  keys + 3 MLP widths)) and the gradients of one block's MLP (4 bytes x tokens x (2 widths + 3 MLP
  widths)). The other is the one that allhands itself expects (``run/training_memory.py``), for a
  model of as many blocks.
- **waiting** of each rank for the other one, without a limit, at most (p - 1) / m + 5 % of the time
  in which it computes, with p stages and m micro-batches.
- **micro-batches** in the pipeline at most p on every rank.

Tokens a second have no bar: they are what the cable and the cores allow.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, conditions, peer_list, positive, run_benchmark, say
from records import Row, row_of
from slow_links import LINKS, NAMES, PACKAGES, WARM_UP, computers, events_of, train

STAGES = 2
WAYS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "data parallel": ("--rank-weights", "equal"),
    "pipeline": ("--strategy", "pipeline"),
}
MOST_OFF, MOST_MORE = 0.10, 0.05
TARGETS = "self_attn.q_proj", "self_attn.v_proj"
RANK = 8  # of the adapters


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description="A pipeline of two computers: memory, waiting, speed."
    )
    links = ("none", "1gbit", "100mbit")
    parser.add_argument("--links", type=partial(peer_list, tuple(LINKS)), default=links)
    parser.add_argument("--ways", type=partial(peer_list, tuple(WAYS)), default=tuple(WAYS))
    parser.add_argument("--steps", type=positive, default=6, help="that are counted (%(default)s)")
    parser.add_argument(
        "--repeat", type=positive, default=1, help="runs of each, in turn (%(default)s)"
    )
    parser.add_argument("--layers", type=positive, default=7)
    parser.add_argument(
        "--split", default="auto", help="blocks of each stage, such as 3,4 (%(default)s)"
    )
    parser.add_argument(
        "--hidden", type=positive, default=512, help="width of the model (%(default)s)"
    )
    parser.add_argument("--tokens", type=positive, default=128, help="of a row (%(default)s)")
    parser.add_argument(
        "--batch-size", type=positive, default=16, help="rows of a step (%(default)s)"
    )
    parser.add_argument(
        "--micro-batches", type=positive, default=8, help="of a step of a pipeline (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a run may take")
    parser.add_argument("--scratch", type=Path, help="a directory for runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    if options.batch_size % options.micro_batches:
        parser.error("--micro-batches must divide --batch-size")
    return options


# --- what is trained ------------------------------------------------------------------------------


def write_inputs(options: argparse.Namespace, work: Path) -> None:
    """A model of random weights with a token for each byte, and rows of equal lengths."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny import write_model

    write_model(work / "model", layers=options.layers, hidden=options.hidden, tied=False)
    write_rows(
        work / "data",
        options.tokens,
        {"train": 40 * options.batch_size, "valid": options.batch_size},
    )


def write_rows(directory: Path, tokens: int, counts: Mapping[str, int]) -> None:
    """So many rows of each split, of this length for a tokenizer of bytes: their end is a token,
    too.
    """
    draw = random.Random(1)
    directory.mkdir()
    for split, count in counts.items():
        texts = ("".join(draw.choices("abcdefgh ", k=tokens - 1)) for _ in range(count))
        (directory / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )


def words_of(options: argparse.Namespace, work: Path, way: str, directory: Path) -> list[str]:
    """One run; the micro-batches of all ways are those of the pipeline."""
    tokens = options.batch_size * options.tokens // options.micro_batches
    adapters = json.dumps({"rank": RANK, "scale": 2.0, "dropout": 0.0, "keys": TARGETS})
    text = (
        f"train --train --model {work / 'model'} --data {work / 'data'} --num-layers -1 --batch-size "
        f"{options.batch_size} --micro-batch-tokens {tokens} --max-seq-length {options.tokens} --learning-rate 1e-4 "
        f"--iters {WARM_UP + options.steps} --seed 1 --keep-last 0 --gradient-check off --no-keep-best "
        f"--val-batches 0 --steps-per-report 1 --cores-per-rank 1 --adapter-path {directory}"
    )
    split = ["--pp-split", options.split] if _noted(way) else []
    return [*text.split(), "--lora-parameters", adapters, *WAYS[way], *split]


def run(
    options: argparse.Namespace, where: Any, work: Path, link: str, way: str, number: int
) -> dict[str, Any]:
    """Tokens a second and losses of one way over one cable; of a pipeline what each rank has noted."""
    name = f"{'-'.join(way.split())}-{link}-{number}"
    words = words_of(options, work, way, work / name)
    ranks = 1 if way == "one process" else STAGES
    worker = str(Path(__file__).with_name("pipeline_worker.py"))
    of_rank = [
        [sys.executable, worker, str(work / f"{name}-{place}.json"), *words]
        for place in range(ranks)
    ]
    left = train(options, where, of_rank, work, name)
    reports = events_of(work / name, "train")
    counted = reports[WARM_UP:]
    seconds = sum(each["step_time_s"] for each in counted)
    tokens = sum(each["tokens_per_s"] * each["step_time_s"] for each in counted)
    noted = (
        [json.loads((work / f"{name}-{place}.json").read_text()) for place in range(ranks)]
        if _noted(way)
        else []
    )
    found = {
        "tokens_per_s": tokens / seconds,
        "losses": [each["loss"] for each in reports],
        "ranks": noted,
    }
    say(f"    {way}: {found['tokens_per_s']:,.0f} tokens/s")
    return {**found, "cable_bytes": left / len(reports)}


def _noted(way: str) -> bool:
    return way == "pipeline"


# --- what it should take --------------------------------------------------------------------------


def own_bytes(sizes: dict[str, int], rank: int, blocks: range) -> int:
    """Bytes of a rank's arrays in the model's files, whose sizes are ``sizes`` by name."""
    mine = [f"layers.{number}." for number in blocks]
    mine += ["embed_tokens."] if rank == 0 else ["model.norm.", "lm_head."]
    return sum(size for name, size in sizes.items() if any(word in name for word in mine))


def formula(width: int, weights: int, blocks: range, noted: dict[str, Any]) -> int:
    """Bytes of a rank's peak from first principles, as the text above says; ``weights``: of its
    arrays.
    """
    values, mlp, tokens = width // 2, 2 * width, noted["tokens"]
    trained = len(blocks) * RANK * ((width + width) + (width + values))
    passing = 2 * tokens * width * noted["alive"]
    kept = tokens * len(blocks) * (6 * width + 5 * width + 5 * values + 3 * mlp)
    back = tokens * (2 * width + 3 * mlp)
    return weights + 4 * (5 * trained + passing + kept + back)


def expectation(width: int, weights: int, blocks: range, noted: dict[str, Any]) -> int:
    """Bytes of a rank's peak as allhands expects it of a model of as many blocks."""
    from allhands.parallel.costs import Work
    from allhands.run.training_memory import DecoderShape, on_cpu

    trained = 4 * len(blocks) * RANK * (2 * width + width + width // 2)
    work = Work(
        method="lora",
        tokens=noted["tokens"],
        trained_layers=len(blocks),
        weights_bytes=trained + weights,
        trained_bytes=trained,
        optimizer="adam",
        accumulated=True,
    )
    expected = on_cpu(DecoderShape(len(blocks), width, 2 * width, width, width // 2, 0), work)
    return expected.arrays + 4 * 2 * noted["tokens"] * width * noted["alive"]


def judged(options: argparse.Namespace, work: Path, runs: dict[str, Any]) -> dict[str, Any]:
    """Each rank's figures beside the bars, and what is missed, in words."""
    import mlx.core as mx

    opened: Any = mx.load(str(work / "model" / "model.safetensors"))
    sizes = {name: array.nbytes for name, array in opened.items()}
    ranks, missed = list[dict[str, Any]](), list[str]()
    link = options.links[0]
    for rank in range(STAGES) if "pipeline" in options.ways else ():
        noted = [each["ranks"][rank] for each in runs[link]["pipeline"]]
        last = noted[-1]
        peak = max(each["peak_bytes"] for each in noted)
        steps = [step for each in noted for step in each["steps"][WARM_UP:]]
        blocks = range(last["blocks"][0][0], last["blocks"][-1][1])
        weights = own_bytes(sizes, rank, blocks)
        waiting = statistics.median(
            step["waited"] / (step["seconds"] - step["waited"]) for step in steps
        )
        bar = (STAGES - 1) / options.micro_batches + MOST_MORE
        found = {
            "peak_bytes": peak,
            "formula_bytes": formula(options.hidden, weights, blocks, last),
            "expected_bytes": expectation(options.hidden, weights, blocks, last),
            "waiting": waiting,
            "bar": bar,
            "alive": last["alive"],
            "blocks": len(blocks),
        }
        ranks.append(found)
        for key in ("formula_bytes", "expected_bytes"):
            if abs(off := peak / found[key] - 1) > MOST_OFF:
                missed.append(
                    f"memory of rank {rank}: {off:+.1%} against {key.replace('_bytes', '')}"
                )
        if waiting > bar and link == "none":
            missed.append(f"waiting of rank {rank}: {waiting:.1%}, at most {bar:.1%}")
        if last["alive"] > STAGES:
            missed.append(f"rank {rank} holds {last['alive']} micro-batches")
    return {"ranks": ranks, "missed": missed, "apart": _apart(runs[link])}


def _apart(ways: dict[str, Any]) -> float | None:
    """By how much losses differ from those of one process, at most; ``None`` where nothing can be
    compared.
    """
    if not {"one process", "pipeline"} <= ways.keys():
        return None
    one, piped = (ways[way][-1]["losses"] for way in ("one process", "pipeline"))
    return max(abs(a - b) / a for a, b in zip(one, piped, strict=True))


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Every way over every cable, in turn."""
    write_inputs(options, work)
    runs: dict[str, Any] = {link: {way: [] for way in options.ways} for link in options.links}
    for link in options.links:
        with computers(work, link) as where:
            say(NAMES[link])
            for number in range(options.repeat):
                for way in options.ways:
                    runs[link][way].append(run(options, where, work, link, way, number))
    kept = ("steps", "repeat", "layers", "split", "hidden", "tokens", "batch_size", "micro_batches")
    return {
        **conditions(options, kept, facts, PACKAGES),
        "runs": runs,
        **judged(options, work, runs),
    }


# --- what is told ---------------------------------------------------------------------------------


def rows(found: dict[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    for link, ways in found["runs"].items():
        for way, runs in ways.items():
            speeds = [each["tokens_per_s"] for each in runs]
            yield row_of(f"LoRA, {NAMES[link]}", f"allhands, {way}", "tokens/s", speeds, "higher")
    for rank, each in enumerate(found["ranks"]):
        yield row_of(
            f"memory of rank {rank} of a pipeline",
            "allhands",
            "bytes",
            [each["peak_bytes"]],
            "lower",
        )
        yield row_of(
            f"waiting of rank {rank} of a pipeline",
            "allhands",
            "of computing",
            [each["waiting"]],
            "lower",
        )


def report(found: dict[str, Any]) -> str:
    """Speeds, each rank beside its bars, and what is missed."""
    runs, lines = found["runs"], list[str]()
    lines += [
        f"| tokens/s | {' | '.join(NAMES[link] for link in runs)} |",
        f"|---|{'---:|' * len(runs)}",
    ]
    for way in next(iter(runs.values())):
        cells = (
            statistics.median(each["tokens_per_s"] for each in runs[link][way]) for link in runs
        )
        lines.append(f"| {way} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |")
    lines += [
        "",
        "| rank | blocks | memory | by formula | expected | waiting | at most | micro-batches |",
    ]
    lines.append(f"|---|{'---:|' * 7}")
    for rank, each in enumerate(found["ranks"]):
        cells = [
            f"{each[key] / 1e6:.1f} MB" for key in ("peak_bytes", "formula_bytes", "expected_bytes")
        ]
        cells += [f"{each[key]:.1%}" for key in ("waiting", "bar")]
        lines.append(f"| {rank} | {each['blocks']} | {' | '.join(cells)} | {each['alive']} |")
    if found["apart"] is not None:
        lines += [
            "",
            f"Losses differ from those of one process by {found['apart']:.1e} of them at most.",
        ]
    return "\n".join([*lines, "", *(f"MISSED: {each}" for each in found["missed"] or ("nothing",))])


if __name__ == "__main__":
    sys.exit(run_benchmark("pipeline", parse(), measure, report, rows))
