"""How fast LoRA fine-tuning is on this computer's processor: allhands, mlx_lm, PyTorch + PEFT, in
one run.

    python benchmarks/cpu_lora.py

Every peer trains the same model (the demo model: SmolLM2-135M-Instruct, 4 bits) on the same batches
in the same order, from the same adapter, with the same optimizer, one after the other and again,
each in a process and an environment of its own with all cores of the machine. See README.md in this
directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    Measured,
    clean_environ,
    git_commit,
    make_environment,
    num_cores,
    peer_list,
    run_benchmark,
    run_measured,
    say,
    versions,
)
from records import Row, row_of

HERE = Path(__file__).resolve().parent
# mlx_lm first: what the others are compared with.
PEERS = ("mlx_lm", "mlx_lm-blas", "peft", "allhands")
DEFAULT_PEERS = ("mlx_lm", "peft", "allhands")
TITLES = {
    "mlx_lm": "mlx_lm.lora as pip installs it",
    "mlx_lm-blas": "mlx_lm.lora with allhands' BLAS",
    "peft": "PyTorch + PEFT",
    "allhands": "allhands",
}
SHORT = {**TITLES, "mlx_lm": "mlx_lm", "mlx_lm-blas": "mlx_lm with allhands' BLAS"}
SPEED_BAR = 25.0
# What of a model's config.json says how much there is to compute.
SHAPE = (
    *(
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("vocab_size", "tie_word_embeddings"),
)
PACKAGES = (
    "allhands",
    "mlx",
    "mlx-cpu",
    "mlx-lm",
    "numpy",
    "scipy-openblas32",
    "torch",
    "transformers",
    "peft",
)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# PyPI's own Linux wheel brings gigabytes of CUDA: only if the CPU builds cannot be had.
PEFT_ATTEMPTS = (
    ("torch==2.13.0+cpu", "transformers", "peft"),
    ("torch", "transformers", "peft", "--extra-index-url", TORCH_CPU_INDEX),
)
MLX_LM_ATTEMPTS = ((f"mlx{'[cpu]' if sys.platform == 'linux' else ''}", "mlx-lm"),)


@dataclass(frozen=True)
class Step:
    """One update of one peer; ``places`` counts its own padding too."""

    loss: float
    time_s: float
    tokens: int
    places: int


@dataclass(frozen=True)
class Result:
    """One peer's runs. The first ``warmup`` steps of each are not in any figure of speed.

    Attributes:
        rounds: the steps of each run.
        measured: the largest figures of all runs.
    """

    peer: str
    command: list[str]
    versions: dict[str, str]
    warmup: int
    rounds: list[list[Step]]
    measured: Measured

    @property
    def counted(self) -> list[Step]:
        return [step for steps in self.rounds for step in steps[self.warmup :]]

    def speeds(self) -> list[float]:
        """Tokens/s of each step that counts."""
        return [step.tokens / step.time_s for step in self.counted]

    def places_per_s(self) -> float:
        return statistics.median(step.places / step.time_s for step in self.counted)


@dataclass(frozen=True)
class Plan:
    """The prepared run: where everything is, and how many steps each peer makes."""

    options: argparse.Namespace
    run: Path
    manifest: dict[str, Any]

    def num_steps(self, peer: str) -> tuple[int, int]:
        """Warm-up steps and steps that count."""
        if peer == "mlx_lm":
            return self.options.mlx_lm_warmup, self.options.mlx_lm_steps
        return self.options.warmup, self.options.steps

    def python(self, peer: str) -> Path:
        """Of the peer's environment, made if need be."""
        if peer in ("allhands", "mlx_lm-blas"):
            return Path(sys.executable)
        attempts = MLX_LM_ATTEMPTS if peer == "mlx_lm" else PEFT_ATTEMPTS
        return make_environment(self.options.cache / f"{peer}-env", attempts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="LoRA fine-tuning on a CPU: allhands against its peers."
    )
    parser.add_argument("--steps", type=positive, default=20, help="steps that count (%(default)s)")
    parser.add_argument("--warmup", type=count, default=3, help="steps before them (%(default)s)")
    parser.add_argument(
        "--mlx-lm-steps",
        type=positive,
        default=2,
        help="of mlx_lm as installed: it takes a minute a step",
    )
    parser.add_argument("--mlx-lm-warmup", type=count, default=1)
    parser.add_argument(
        "--rounds", type=positive, default=3, help="runs in turn, but for mlx_lm (%(default)s)"
    )
    parser.add_argument(
        "--peers",
        type=partial(peer_list, PEERS),
        default=DEFAULT_PEERS,
        help=f"comma-separated: {','.join(PEERS)}",
    )
    parser.add_argument(
        "--model", default="demo", help="as for allhands train; a plain Llama for PEFT"
    )
    parser.add_argument(
        "--data", default="demo", help="'demo' or a directory with a chat train.jsonl"
    )
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--num-layers", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=8)
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument(
        "--max-seq-length", type=positive, default=256, help="longer examples are not chosen"
    )
    parser.add_argument("--mask-prompt", action="store_true", help="train on the answers only")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a peer may take")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "allhands" / "benchmarks"
    )
    parser.add_argument("--scratch", type=Path, help="a directory for data, adapters and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    options.cache = options.cache.expanduser().resolve()
    return options


def positive(text: str) -> int:
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_benchmark("cpu_lora", parse(arguments), measure, report, rows)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, one peer after the other, and those that are not too slow for it again and again
    in turn.
    """
    plan = prepare(options, work)
    # Environments first: pip's work must not be near a measurement.
    pythons = {peer: plan.python(peer) for peer in options.peers}
    runs: dict[str, list[Result]] = {peer: [] for peer in pythons}
    for number in range(options.rounds):
        for peer, python in pythons.items():
            if number == 0 or peer != "mlx_lm":
                runs[peer].append(run_peer(plan, peer, python))
    results = [together(each) for each in runs.values()]
    expected = expect(plan, pythons["peft"]) if "peft" in pythons else None
    record = make_record(options, datetime.date.today().isoformat(), facts, results, expected)
    return {**record, "work": work_of(plan)}


def work_of(plan: Plan) -> dict[str, Any]:
    """What a step computes, as ``roofline.py`` wants it."""
    config = json.loads((Path(plan.manifest["model"]) / "config.json").read_text(encoding="utf-8"))
    examples = [
        len(example["tokens"]) for step in plan.manifest["steps"] for example in step["examples"]
    ]
    return {
        "shape": {name: config[name] for name in SHAPE},
        "rank": plan.options.rank,
        "layers": plan.options.num_layers,
        "batch": plan.options.batch_size,
        "mean_length": round(statistics.mean(examples)),
        "dtype": "float32",
    }


def prepare(options: argparse.Namespace, run: Path) -> Plan:
    """Make data, start and PyTorch's copy of the model in a process of its own: see ``harness.py``
    for why.
    """
    say("preparing model and data")
    total = max(options.warmup + options.steps, options.mlx_lm_warmup + options.mlx_lm_steps)
    command = [
        sys.executable,
        str(HERE / "cpu_lora_prepare.py"),
        "--out",
        str(run),
        "--steps",
        str(total),
    ]
    for name in ("model", "data", "batch_size", "max_seq_length", "num_layers", "rank", "scale"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--mask-prompt"] if options.mask_prompt else []
    if "peft" in options.peers:
        command += ["--torch-models", str(options.cache)]
    run_measured(command, run / "prepare.log", clean_environ(), options.timeout)
    return Plan(options, run, json.loads((run / "manifest.json").read_text()))


def run_peer(plan: Plan, peer: str, python: Path) -> Result:
    """Train with one peer and read what it reports."""
    warmup, counted = plan.num_steps(peer)
    say(f"{TITLES[peer]}: {warmup} + {counted} steps")
    record = plan.run / f"{peer}.jsonl"
    record.unlink(missing_ok=True)  # of the round before
    command, environ, read = COMMANDS[peer](plan, python, record, warmup + counted)
    measured = run_measured(command, plan.run / f"{peer}.log", environ, plan.options.timeout)
    steps = read(plan, record)
    if len(steps) != warmup + counted:
        raise BenchmarkError(f"{peer} reported {len(steps)} steps, not {warmup + counted}")
    shown = [shorten(argument, plan) for argument in command]
    return Result(peer, shown, versions(python, PACKAGES), warmup, [steps], measured)


def together(runs: Sequence[Result]) -> Result:
    """Of one peer."""
    largest = [max(values) for values in zip(*(astuple(run.measured) for run in runs), strict=True)]
    return replace(
        runs[0], rounds=[steps for run in runs for steps in run.rounds], measured=Measured(*largest)
    )


def shorten(argument: str, plan: Plan) -> str:
    """A command's argument without the places of this machine."""
    places = (
        (plan.run, "RUN"),
        (plan.manifest["model"], "MODEL"),
        (plan.options.cache, "CACHE"),
        (HERE, "benchmarks"),
    )
    for path, name in places:
        argument = argument.replace(str(path), name)
    return "python" if argument == sys.executable or argument.endswith("/bin/python") else argument


Reader = Callable[[Plan, Path], list[Step]]
Invocation = tuple[list[str], dict[str, str], Reader]


def common_flags(plan: Plan, data: str, steps: int) -> list[str]:
    """What allhands and mlx_lm.lora both understand."""
    options = plan.options
    flags = [
        "--model",
        plan.manifest["model"],
        "--train",
        "--data",
        str(plan.run / f"{data}-data"),
        "--optimizer",
        "adam",
    ]
    flags += ["--num-layers", str(options.num_layers), "--batch-size", str(options.batch_size)]
    flags += ["--iters", str(steps), "--save-every", str(steps), "--steps-per-report", "1"]
    flags += ["--seed", str(plan.manifest["seed"])]
    flags += ["--learning-rate", str(options.learning_rate), "--val-batches", "0"]
    flags += ["--resume-adapter-file", str(plan.run / "start.safetensors")]
    return flags + (["--mask-prompt"] if options.mask_prompt else [])


def adapter_shape(plan: Plan) -> dict[str, Any]:
    return {"rank": plan.options.rank, "scale": plan.options.scale, "dropout": 0.0}


# PyTorch's Adam has no other way; MLX's leaves the correction out unless told.
ADAM = {"adam": {"bias_correction": True}}


def allhands_command(plan: Plan, python: Path, record: Path, steps: int) -> Invocation:
    run = record.with_suffix("")
    command = [str(python), "-m", "allhands", "train", *common_flags(plan, "allhands", steps)]
    command += ["--adapter-path", str(run), "--lora-parameters", json.dumps(adapter_shape(plan))]
    command += ["--optimizer-config", json.dumps(ADAM)]
    return command, clean_environ(), lambda plan, _: read_allhands(plan, run / "metrics.jsonl")


def mlx_lm_command(
    plan: Plan, python: Path, record: Path, steps: int, blas: bool = False
) -> Invocation:
    config = record.with_suffix(".yaml")
    # JSON is YAML.
    config.write_text(
        json.dumps({"lora_parameters": adapter_shape(plan), "optimizer_config": ADAM})
    )
    program = ["-c", WITH_BLAS] if blas else ["-m", "mlx_lm"]
    command = [
        str(python),
        *program,
        "lora",
        *common_flags(plan, "mlx_lm", steps),
        "--config",
        str(config),
    ]
    command += [
        "--adapter-path",
        str(record.with_suffix("")),
        "--report-to",
        "wandb",
        "--project-name",
        "benchmark",
    ]
    environ = clean_environ(PYTHONPATH=str(HERE / "recorder"), BENCHMARK_RECORD=str(record))
    return command, environ, read_mlx_lm


# allhands prepares its BLAS and malloc on import, before MLX; the rest is mlx_lm's own.
WITH_BLAS = (
    "import allhands, runpy; runpy.run_module('mlx_lm', run_name='__main__', alter_sys=True)"
)


def mlx_lm_blas_command(plan: Plan, python: Path, record: Path, steps: int) -> Invocation:
    return mlx_lm_command(plan, python, record, steps, blas=True)


def peft_command(plan: Plan, python: Path, record: Path, steps: int) -> Invocation:
    options = plan.options
    command = [str(python), str(HERE / "cpu_lora_peft.py"), "--model", plan.manifest["torch_model"]]
    command += [
        "--manifest",
        str(plan.run / "manifest.json"),
        "--adapter",
        str(plan.run / "start.safetensors"),
    ]
    command += ["--out", str(record), "--steps", str(steps), "--threads", str(num_cores())]
    for name in ("num_layers", "rank", "scale", "learning_rate"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return command, clean_environ(), read_peft


COMMANDS: dict[str, Callable[[Plan, Path, Path, int], Invocation]] = {
    "allhands": allhands_command,
    "mlx_lm": mlx_lm_command,
    "mlx_lm-blas": mlx_lm_blas_command,
    "peft": peft_command,
}


def expect(plan: Plan, python: Path) -> dict[str, float]:
    """PyTorch's figure for the first batch's loss, by each definition."""
    record = plan.run / "expected.jsonl"
    command, environ, _ = peft_command(plan, python, record, 1)
    run_measured([*command, "--expect"], plan.run / "expected.log", environ, plan.options.timeout)
    return json.loads(record.read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise BenchmarkError(f"there is no {path.name}: the peer has reported nothing")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_allhands(plan: Plan, path: Path) -> list[Step]:
    reports = [line for line in read_lines(path) if line["event"] == "train"]
    batches = plan.manifest["steps"]
    for report, batch in zip(reports, batches, strict=False):
        # It counts inputs; what comes after the last trained token is not computed.
        inputs = report["tokens_per_s"] * report["step_time_s"]
        same_batch(
            "allhands",
            report["step"],
            round(inputs),
            sum(last_target(e) for e in batch["examples"]),
        )
    return [
        make_step(plan, i, "allhands", r["loss"], r["step_time_s"]) for i, r in enumerate(reports)
    ]


def last_target(example: dict[str, Any]) -> int:
    return max(place for place, trained in enumerate(example["trained"]) if trained)


def read_mlx_lm(plan: Plan, path: Path) -> list[Step]:
    reports = [line for line in read_lines(path) if "train_loss" in line]
    seen = 0
    for report, batch in zip(reports, plan.manifest["steps"], strict=False):
        # Its count of tokens takes in one place of padding an example: see README.md.
        expected = sum(
            len(example["tokens"]) + 1 - example["mlx_lm_from"] for example in batch["examples"]
        )
        same_batch("mlx_lm", report["iteration"], report["trained_tokens"] - seen, expected)
        seen = report["trained_tokens"]
    return [
        make_step(plan, i, "mlx_lm", r["train_loss"], 1.0 / r["iterations_per_second"])
        for i, r in enumerate(reports)
    ]


def same_batch(peer: str, step: int, reported: float, expected: int) -> None:
    """Refuse to compare different things."""
    if int(reported) != expected:
        raise BenchmarkError(
            f"{peer} reports {reported} tokens in step {step}; the batch has {expected}"
        )


def read_peft(plan: Plan, path: Path) -> list[Step]:
    return [
        make_step(plan, i, "peft", r["loss"], r["time_s"]) for i, r in enumerate(read_lines(path))
    ]


def make_step(plan: Plan, index: int, padding: str, loss: float, time_s: float) -> Step:
    batch = plan.manifest["steps"][index]
    return Step(loss, time_s, batch["tokens"], batch["places"][padding])


def make_record(
    options: argparse.Namespace,
    today: str,
    facts: dict[str, Any],
    results: Sequence[Result],
    expected: dict[str, float] | None,
) -> dict[str, Any]:
    """Everything measured, for the file."""
    settings = {
        k: v for k, v in vars(options).items() if k not in ("cache", "scratch", "write", "timeout")
    }
    for name in ("model", "data"):
        settings[name] = Path(settings[name]).name
    peers = {result.peer: {**asdict(result), **summary(result)} for result in results}
    return {
        "date": today,
        "commit": git_commit(),
        "machine": facts,
        "versions": {result.peer: result.versions for result in results},
        "settings": settings,
        "expected_first_loss": expected,
        "peers": peers,
    }


def summary(result: Result) -> dict[str, float]:
    speeds = result.speeds()
    return {
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_min": min(speeds),
        "tokens_per_s_max": max(speeds),
        "places_per_s": result.places_per_s(),
        "peak_rss_mib": result.measured.peak_rss_bytes / 2**20,
    }


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures that are kept."""
    found: list[Row] = []
    for result in map(_read_result, record["peers"].values()):
        who, work = SHORT[result.peer], record.get("work")
        found.append(row_of("speed", who, "tokens/s", result.speeds(), "higher", work=work))
        peak = summary(result)["peak_rss_mib"]
        found.append(row_of("peak memory", who, "MiB", [peak], "lower", work=work))
    return found


def _read_result(values: dict[str, Any]) -> Result:
    kept = {name: values[name] for name in ("peer", "command", "versions", "warmup")}
    rounds = [[Step(**step) for step in steps] for steps in values["rounds"]]
    return Result(**kept, rounds=rounds, measured=Measured(**values["measured"]))


def report(record: dict[str, Any]) -> str:
    """The table, as Markdown, with what one must know to read it."""
    results, expected = (
        [_read_result(values) for values in record["peers"].values()],
        record["expected_first_loss"],
    )
    settings = record["settings"]
    lines = [
        f"LoRA rank {settings['rank']} on the last {settings['num_layers']} layers, batch {settings['batch_size']}, "
        f"model {settings['model']}, data {settings['data']}"
        + (
            ", trained on the answers only"
            if settings["mask_prompt"]
            else ", trained on every token"
        ),
        "",
        *table(results),
        "",
        "tokens/s: tokens of the examples (prompt and answer, no padding), median of the steps (lowest to highest);",
        "with padding: the same, counting the padding that each peer adds; memory: the process's peak.",
        *losses(results, expected),
        *verdict(results),
    ]
    return "\n".join(lines)


def table(results: Sequence[Result]) -> list[str]:
    base = next((r for r in results if r.peer == "mlx_lm"), None)
    lines = [
        "| | tokens/s | with padding | times mlx_lm | peak memory | steps |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        figures = summary(result)
        spread = f"{figures['tokens_per_s_min']:.1f} to {figures['tokens_per_s_max']:.1f}"
        times = f"{figures['tokens_per_s'] / summary(base)['tokens_per_s']:.1f}" if base else "-"
        cells = (
            TITLES[result.peer],
            f"{figures['tokens_per_s']:.1f} ({spread})",
            f"{figures['places_per_s']:.1f}",
            times,
            f"{figures['peak_rss_mib']:.0f} MiB",
            f"{len(result.rounds)} x {len(result.rounds[0]) - result.warmup} after {result.warmup}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def losses(results: Sequence[Result], expected: dict[str, float] | None) -> list[str]:
    """Losses of the first steps, which show that all compute the same thing."""
    lines = ["", "loss of steps 1, 2, 3:"]
    lines += [
        f"  {TITLES[r.peer]}: " + ", ".join(f"{step.loss:.4f}" for step in r.rounds[0][:3])
        for r in results
    ]
    if expected:
        lines.append(
            f"  step 1 by PyTorch's forward pass: {expected['exact']:.4f}; "
            f"with the padding token that mlx_lm counts in: {expected['mlx_lm']:.4f}"
        )
    return lines


def verdict(results: Sequence[Result]) -> list[str]:
    by_peer = {result.peer: summary(result) for result in results}
    if not {"allhands", "mlx_lm"} <= by_peer.keys():
        return [""]
    ours, theirs = by_peer["allhands"], by_peer["mlx_lm"]
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    less = ours["peak_rss_mib"] <= theirs["peak_rss_mib"]
    return [
        "",
        f"speed: {ratio:.1f} times mlx_lm (the mark is {SPEED_BAR:g}): {'met' if ratio >= SPEED_BAR else 'MISSED'}",
        f"memory: {ours['peak_rss_mib']:.0f} against {theirs['peak_rss_mib']:.0f} MiB "
        f"(no higher is the mark): {'met' if less else 'MISSED'}",
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
