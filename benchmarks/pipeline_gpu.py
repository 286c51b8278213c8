"""QLoRA of a model that leaves no room on one GPU of so much memory, on two of them.

    python benchmarks/pipeline_gpu.py --write

A Llama of the 70B shape (80 blocks of width 8,192; random weights in 4 bits, 39 GB) is trained by
rank 8 on its last 16 blocks, in rows of 1,024 tokens, over NCCL:

- **refused**: one process whose GPU seems to have ``--limit`` bytes. Its error must name the
  pipeline.
- **pipeline**: two stages, each on a GPU that seems to have as much. No rank may hold more than
  that, and the bar is ``--least`` tokens a second.
- **one process** and **data parallel**: without a limit, the latter as the ceiling of two GPUs.

The exit code is 1 where a bar is missed. It needs two GPUs of 80 GB, and 45 GB on disk. ``--dims
256 --layers 4 --cpu`` tries the commands on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, BenchmarkError, conditions, peer_list, positive, run_benchmark, say
from pipeline import write_rows
from pipeline_worker import LIMIT
from records import Row, row_of
from slow_links import PACKAGES, WARM_UP, Gpus, events_of, train

WAYS: dict[str, tuple[str, ...]] = {
    "refused": (),
    "pipeline": ("--strategy", "pipeline"),
    "data parallel": (),
    "one process": (),
}
LIMITED = "refused", "pipeline"
ALONE = "refused", "one process"
GROUP, BITS = 64, 4
ROW = 1024  # tokens


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="QLoRA of a 70B shape over two GPUs.")
    parser.add_argument("--ways", type=partial(peer_list, tuple(WAYS)), default=tuple(WAYS))
    parser.add_argument("--layers", type=positive, default=80)
    parser.add_argument(
        "--dims", type=positive, default=8192, help="width of the model (%(default)s)"
    )
    parser.add_argument("--vocabulary", type=positive, default=32000)
    parser.add_argument(
        "--trained", type=positive, default=16, help="of the last blocks (%(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=8, help="rows of a step of two GPUs (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=8, help="that are counted (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=40e9, help="bytes that a GPU seems to have (%(default).0e)"
    )
    parser.add_argument(
        "--least", type=float, default=6100.0, help="tokens a second of the pipeline (%(default)s)"
    )
    parser.add_argument(
        "--micro-batch-rows",
        type=positive,
        default=2,
        help="that a stage computes at once (%(default)s)",
    )
    parser.add_argument(
        "--pp-split", default="auto", help="blocks of each stage, such as 56,24 (%(default)s)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="two processes on this processor over a ring; no bars"
    )
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds that a run may take")
    parser.add_argument("--scratch", type=Path, help="a directory for the model, runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


# --- what is trained ------------------------------------------------------------------------------


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The model's configuration: Llama 2 of 70 billion parameters at the usual options."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": options.dims,
        "num_hidden_layers": options.layers,
        "intermediate_size": options.dims * 7 // 2,
        "num_attention_heads": max(1, options.dims // 128),
        "num_key_value_heads": max(1, options.dims // 1024),
        "rms_norm_eps": 1e-5,
        "vocab_size": options.vocabulary,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "quantization": {"group_size": GROUP, "bits": BITS},
    }


def arrays_of(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arrays of each of the model's files, made one file after the other: in 4 bits, or in
    bfloat16 where the configuration has no ``quantization``.
    """
    import mlx.core as mx

    width, mlp = config["hidden_size"], config["intermediate_size"]
    values = width // config["num_attention_heads"] * config["num_key_value_heads"]
    mx.random.seed(1)

    def packed(name: str, out: int, into: int) -> dict[str, Any]:
        step = (
            0.1 / into**0.5
        )  # 16 numbers about 0, as large as those of a linear layer that has been drawn
        words = mx.random.randint(0, 2**31 - 1, (out, into * BITS // 32)).astype(mx.uint32)
        scales = mx.full((out, into // GROUP), step, mx.bfloat16)
        return {
            f"{name}.weight": words,
            f"{name}.scales": scales,
            f"{name}.biases": scales * -(2**BITS - 1) / 2,
        }

    def drawn(name: str, out: int, into: int) -> dict[str, Any]:
        return {f"{name}.weight": mx.random.normal((out, into), mx.bfloat16, scale=0.02)}

    matrix = packed if "quantization" in config else drawn
    ones = mx.ones((width,), mx.bfloat16)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        arrays = {
            f"{at}.input_layernorm.weight": ones,
            f"{at}.post_attention_layernorm.weight": ones,
        }
        for name, out in (("q", width), ("k", values), ("v", values), ("o", width)):
            arrays |= matrix(f"{at}.self_attn.{name}_proj", out, width)
        for name, out, into in (("gate", mlp, width), ("up", mlp, width), ("down", width, mlp)):
            arrays |= matrix(f"{at}.mlp.{name}_proj", out, into)
        yield f"model-{number:05}.safetensors", arrays
    ends = {"model.norm.weight": ones, **matrix("model.embed_tokens", config["vocab_size"], width)}
    yield "model-ends.safetensors", ends | matrix("lm_head", config["vocab_size"], width)


def write_inputs(options: argparse.Namespace, work: Path) -> None:
    """The model with a token for each byte, and rows of equal lengths."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import mlx.core as mx
    from tiny import write_tokenizer

    config, model = config_of(options), work / "model"
    model.mkdir()
    placed: dict[str, str] = {}
    for file, arrays in arrays_of(config):
        mx.save_safetensors(str(model / file), arrays, metadata={"format": "mlx"})
        placed |= dict.fromkeys(arrays, file)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    (model / "config.json").write_text(json.dumps(config))
    write_tokenizer(model)
    write_rows(work / "data", ROW, {"train": 16 * options.batch_size, "valid": options.batch_size})


def words_of(options: argparse.Namespace, work: Path, way: str) -> list[str]:
    """One run; one GPU has half of the rows."""
    rows = options.batch_size // 2 if way in ALONE else options.batch_size
    text = (
        f"train --train --model {work / 'model'} --data {work / 'data'} --num-layers {options.trained} "
        f"--batch-size {rows} --max-seq-length {ROW} --learning-rate 1e-5 --iters {WARM_UP + options.steps} --seed 1 "
        f"--compile on --keep-last 0 --gradient-check off --no-keep-best --val-batches 0 --steps-per-report 1 "
        f"--adapter-path {work / _slug(way)}"
    )
    tokens = str(options.micro_batch_rows * ROW)
    divided = (
        ["--pp-split", options.pp_split, "--micro-batch-tokens", tokens]
        if way == "pipeline"
        else []
    )
    return [*text.split(), *WAYS[way], *divided]


def _slug(way: str) -> str:
    return way.replace(" ", "-")


def run(options: argparse.Namespace, work: Path, way: str) -> dict[str, Any]:
    """Tokens a second and memory of one way; of a refusal what was said."""
    name, worker = _slug(way), str(Path(__file__).with_name("pipeline_worker.py"))
    words, ranks = words_of(options, work, way), 1 if way in ALONE else 2
    limit = ["env", f"{LIMIT}={options.limit:.0f}"] if way in LIMITED else ["env"]
    of_rank = [
        [*limit, sys.executable, worker, str(work / f"{name}-{rank}.json"), *words]
        for rank in range(ranks)
    ]
    where = Gpus(32500, (0, 0)) if options.cpu else Gpus(32500)
    try:
        train(options, where, of_rank, work, name)
    except BenchmarkError as error:
        if way != "refused":
            raise
        say(f"    {way}: {error}")
        return {"refused": str(error)}
    reports = events_of(work / name, "train")
    counted = reports[WARM_UP:]
    speed = statistics.median(each["tokens_per_s"] for each in counted)
    noted = [json.loads(file.read_text()) for file in sorted(work.glob(f"{name}-?.json"))]
    found = {
        "tokens_per_s": speed,
        "peak_bytes": counted[-1]["peak_mlx_bytes"],
        "blocks": [len(range(each["blocks"][0][0], each["blocks"][-1][1])) for each in noted],
        "losses": [each["loss"] for each in reports],
    }
    say(
        f"    {way}: {speed:,.0f} tokens/s, {', '.join(f'{peak / 1e9:.1f} GB' for peak in found['peak_bytes'])}"
    )
    return found


# --- what is told ---------------------------------------------------------------------------------


def missed_by(options: argparse.Namespace, runs: dict[str, Any]) -> list[str]:
    """Which bars are missed, in words."""
    missed = list[str]()
    if "refused" in runs and "--strategy pipeline" not in runs["refused"].get("refused", ""):
        missed.append("one process with a limit was not sent to --strategy pipeline")
    if piped := runs.get("pipeline"):
        if piped["tokens_per_s"] < options.least:
            missed.append(f"{piped['tokens_per_s']:,.0f} tokens/s, at least {options.least:,.0f}")
        if max(piped["peak_bytes"]) > options.limit:
            missed.append(f"a stage held {max(piped['peak_bytes']) / 1e9:.1f} GB")
    return missed


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Every way, one after the other."""
    say(f"a model of {options.layers} blocks of width {options.dims}")
    write_inputs(options, work)
    runs = {way: run(options, work, way) for way in options.ways}
    kept = ("layers", "dims", "vocabulary", "trained", "batch_size", "steps", "limit", "least")
    kept += ("micro_batch_rows", "pp_split")
    return {
        **conditions(options, kept, facts, PACKAGES),
        "runs": runs,
        "missed": [] if options.cpu else missed_by(options, runs),
    }


def rows(found: dict[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    for way, each in found["runs"].items():
        if "tokens_per_s" in each:
            yield row_of(
                "QLoRA of a 70B shape",
                f"allhands, {way}",
                "tokens/s",
                [each["tokens_per_s"]],
                "higher",
            )
            yield row_of(
                "QLoRA of a 70B shape, memory",
                f"allhands, {way}",
                "bytes",
                [float(max(each["peak_bytes"]))],
                "lower",
            )


def report(found: dict[str, Any]) -> str:
    """A line for each way, and what is missed."""
    lines = ["| | tokens/s | memory of each rank | blocks |", "|---|---:|---:|---:|"]
    for way, each in found["runs"].items():
        if "tokens_per_s" not in each:
            lines.append(f"| {way} | - | {each['refused'].splitlines()[-1]} | |")
            continue
        memory = ", ".join(f"{peak / 1e9:.1f} GB" for peak in each["peak_bytes"])
        lines.append(
            f"| {way} | {each['tokens_per_s']:,.0f} | {memory} | {', '.join(map(str, each['blocks']))} |"
        )
    return "\n".join([*lines, "", *(f"MISSED: {each}" for each in found["missed"] or ("nothing",))])


if __name__ == "__main__":
    sys.exit(run_benchmark("pipeline_gpu", parse(), measure, report, rows))
