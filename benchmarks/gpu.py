"""How fast a training step is on this computer's GPU: allhands, mlx_lm, PyTorch with and without
torch.compile.

    python benchmarks/gpu.py --python mlx=python3,torch=python3

Everybody computes the same work (a model of one shape with random weights, as many random tokens,
bfloat16, AdamW), one after the other, each in a process of its own. See README.md in this
directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    peer_list,
    positive,
    python_path,
    pythons,
    run_benchmark,
    run_measured,
    say,
    versions,
)
from records import make_record, read_records, results_directory, same
from rounds import ROUND

HERE = Path(__file__).resolve().parent
PACKAGES = ("allhands", "mlx", "mlx-cuda-13", "mlx-lm", "torch", "transformers", "peft", "numpy")
_AT_ONCE = 4
_LEAST_S = 10.0  # nothing is begun with less
PEERS = ("allhands", "allhands-lazy", "mlx_lm", "torch", "torch-compiled")
TITLES = {
    "allhands": "allhands",
    "allhands-lazy": "allhands, --compile off",
    "mlx_lm": "mlx_lm",
    "torch": "PyTorch (+ PEFT), eager",
    "torch-compiled": "PyTorch (+ PEFT), torch.compile",
}
MISTRAL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SMOL = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
TINY = {
    **SMOL,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512}
# bits: 4 for a quantised model (PyTorch gets it in bfloat16: it cannot read MLX's); rank: of LoRA,
# 0 for full training.
WORKS: dict[str, dict[str, Any]] = {
    "qlora": {"shape": MISTRAL, "bits": 4, "rank": 8, "layers": 8, "batch": 4, "length": 512},
    "lora": {"shape": LLAMA, "bits": 0, "rank": 8, "layers": 16, "batch": 8, "length": 1024},
    "uneven": {"shape": LLAMA, "bits": 0, "rank": 8, "layers": 16, "batch": 8, "length": 1000},
    "qwen": {"shape": QWEN, "bits": 0, "rank": 8, "layers": 28, "batch": 8, "length": 1024},
    "full": {"shape": LLAMA, "bits": 0, "rank": 0, "layers": 16, "batch": 8, "length": 1024},
    "large": {
        "shape": LLAMA,
        "bits": 0,
        "rank": 0,
        "layers": 16,
        "batch": 32,
        "length": 1024,
    },  # of gpu_many.py
    "smol": {"shape": SMOL, "bits": 0, "rank": 0, "layers": 30, "batch": 32, "length": 512},
    "tiny": {
        "shape": TINY,
        "bits": 0,
        "rank": 4,
        "layers": 2,
        "batch": 2,
        "length": 64,
    },  # to try the script itself
}
WORK_TITLES = {
    "qlora": "QLoRA: Mistral-7B shape, 4 bits, rank 8 on the last 8 layers, 4 x 512 tokens",
    "lora": "LoRA: 1.24B Llama shape, rank 8 on all layers, 8 x 1024",
    "uneven": "LoRA: 1.24B Llama shape, rank 8 on all layers, 8 x 1000",
    "qwen": "LoRA: Qwen3-0.6B shape, rank 8 on all layers, 8 x 1024",
    "full": "full: 1.24B Llama shape, 8 x 1024",
    "large": "full: 1.24B Llama shape, 32 x 1024",
    "smol": "full: 135M SmolLM shape, 32 x 512",
    "tiny": "a try",
}


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ("qlora", "lora", "uneven", "qwen", "full", "smol")
    parser.add_argument(
        "--works",
        type=partial(peer_list, tuple(WORKS)),
        default=default,
        help="comma-separated, of: %(default)s, tiny",
    )
    parser.add_argument(
        "--peers",
        type=partial(peer_list, PEERS),
        default=PEERS,
        help="comma-separated, of: %(default)s",
    )
    parser.add_argument(
        "--python", type=pythons, default={}, help="mlx=PATH,torch=PATH; default: this one"
    )
    parser.add_argument("--steps", type=positive, default=30, help="that count (%(default)s)")
    parser.add_argument(
        "--built",
        action="store_true",
        help="take a step of everything side by side first: kernels are then built, and first steps those of a later "
        "process (the GPU must hold four at once)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="show the kernels that take longest (needs PyTorch)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for one peer at one work"
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds for all of it; default: none"
    )
    parser.add_argument("--scratch", type=Path, help="a directory for logs")
    parser.add_argument(
        "--add",
        action="store_true",
        help="take over the works that are complete in the last record of this code on such a machine",
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/gpu-DATE.json"
    )
    return parser.parse_args()


def measure(options: argparse.Namespace, directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """All works by all peers."""
    record = {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": {**facts, "gpu": gpu()},
        "settings": {"built": options.built},
        "steps": options.steps,
    }
    found: dict[str, dict[str, Any]] = taken_over(options, record) if options.add else {}
    began = time.monotonic()
    works = [work for work in options.works if work not in found]
    if options.built:
        build_all(options, works, directory)
    for work in works:
        for peer in options.peers:
            say(f"{work}: {TITLES[peer]}")
            log = directory / f"{work}-{peer}.log"
            left = options.limit - (time.monotonic() - began)
            if left < _LEAST_S:
                found.setdefault(work, {})[peer] = {
                    "error": "left out: the time of --limit is over"
                }
                continue
            try:
                run_measured(
                    command(options, work, peer, options.steps),
                    log,
                    clean_environ(PYTHONPATH=python_path()),
                    min(options.timeout, left),
                )
                one = found.setdefault(work, {})[peer] = json.loads(
                    log.read_text().splitlines()[-1]
                )
                say(f"  {one['tokens_per_s']:,.0f} tokens/s, {one['peak_bytes'] / 1e9:.1f} GB")
            except BenchmarkError as error:
                say(f"  {error}")
                found.setdefault(work, {})[peer] = {"error": str(error).splitlines()[-1]}
            if options.profile:
                say(log.read_text())
    return {
        **record,
        "versions": {
            kind: versions(
                Path(options.python.get(kind, sys.executable)), PACKAGES, PYTHONPATH=python_path()
            )
            for kind in ("mlx", "torch")
        },
        "works": {work: WORKS[work] for work in WORKS if work in found},
        "results": {work: found[work] for work in WORKS if work in found},
    }


def taken_over(options: argparse.Namespace, now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results by work and peer, of works that all peers in ``options`` have done, in the last
    record like ``now``.
    """
    told = make_record("gpu", now, ())
    for record in reversed(read_records(results_directory())):
        if (
            record["name"] == "gpu"
            and same(record, told)
            and record["details"]["steps"] == now["steps"]
        ):
            results = record["details"]["results"].items()
            whole = {
                w: by
                for w, by in results
                if all(p in by and "error" not in by[p] for p in options.peers)
            }
            say(f"taken over: {', '.join(whole) or 'nothing'} ({record['date']} {record['time']})")
            return whole
    return {}


def command(options: argparse.Namespace, work: str, peer: str, steps: int) -> list[str]:
    """What measures a peer at a work."""
    asked = {"peer": peer, "work": WORKS[work], "steps": steps, "profile": options.profile}
    kind = "torch" if peer.startswith("torch") else "mlx"
    return [
        options.python.get(kind, sys.executable),
        str(HERE / f"gpu_{kind}.py"),
        json.dumps(asked),
    ]


def build_all(options: argparse.Namespace, works: list[str], directory: Path) -> None:
    """Let every process build its kernels, a few at once; what fails does so again when it is
    measured.
    """
    say("building kernels")
    environ = clean_environ(PYTHONPATH=python_path())

    def build(job: tuple[str, str]) -> None:
        with suppress(BenchmarkError):
            run_measured(
                command(options, *job, 1),
                directory / f"build-{'-'.join(job)}.log",
                environ,
                options.timeout,
            )

    jobs = [(work, peer) for work in works for peer in options.peers]
    # No more at once than a large GPU's memory holds.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(build, jobs))


def gpu() -> str:
    """The name of the first GPU."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def report(record: dict[str, Any]) -> str:
    """A table a work."""
    built = "; kernels were built before" if record["settings"]["built"] else ""
    lines = [
        f"{record['machine']['gpu']}; {record['steps']} steps, median of rounds of {ROUND}{built}",
        "",
    ]
    for work, peers in record["results"].items():
        lines += [
            WORK_TITLES[work],
            "",
            "| | tokens/s | step (best to worst) | peak memory | first step | loss, first and last |",
        ]
        lines.append("|---|---:|---:|---:|---:|---:|")
        for peer, found in peers.items():
            if "error" in found:
                lines.append(f"| {TITLES[peer]} | {found['error'][:60]} | | | | |")
                continue
            step = {name: f"{1e3 * value:.1f}" for name, value in found["step_s"].items()}
            lines.append(
                f"| {TITLES[peer]} | {found['tokens_per_s']:,.0f} "
                f"| {step['median']} ms ({step['best']} to {step['worst']}) "
                f"| {found['peak_bytes'] / 1e9:.1f} GB | {found['first_step_s']:.1f} s "
                f"| {found['losses'][0]:.3f}, {found['losses'][1]:.3f} |"
            )
        ours = peers.get("allhands", {}).get("tokens_per_s")
        if ours:
            ratios = [
                f"{ours / other['tokens_per_s']:.2f} times {TITLES[name]}"
                for name, other in peers.items()
                if name != "allhands" and "tokens_per_s" in other
            ]
            lines += ["", f"allhands is {', '.join(ratios)}" if ratios else ""]
        lines.append("")
    lines.append(
        "; ".join(
            f"{kind}: " + ", ".join(f"{n} {v}" for n, v in found.items())
            for kind, found in record["versions"].items()
        )
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_benchmark("gpu", parse(), measure, report))
