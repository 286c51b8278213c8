"""What it costs to get data to a model: allhands, Hugging Face datasets and mlx_lm, in one run.

    python benchmarks/data.py

Tokenises generated text, opens it again, holds it in several processes, and looks at the batches of
chat sets. Every figure is measured in this run, each peer in processes of its own. See README.md in
this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_memory import Peak, pss_bytes
from data_text import write_documents
from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    num_cores,
    peer_list,
    positive,
    run_benchmark,
    say,
    versions,
)
from records import OURS, Row, row_of

HERE = Path(__file__).resolve().parent
PEERS = ("allhands", "hugging_face", "mlx_lm")
TITLES = {"allhands": "allhands", "hugging_face": "Hugging Face datasets", "mlx_lm": "mlx_lm"}
WAYS = {
    "mlx_lm": "mlx_lm",
    "random": "random batches",
    "allhands_cpu": "allhands, CPU",
    "allhands_gpu": "allhands, GPU",
    "allhands_gpu_ladder": "allhands, GPU, few shapes",
}
PACKAGES = ("allhands", "mlx-lm", "datasets", "pyarrow", "tokenizers", "transformers", "numpy")
NUM_PROCESSES = 4
NUM_OPENINGS = 3
# Without options, mlx_lm gets this part of the text: it has no other way than one document after
# the other.
MLX_LM_PART = 10
MLX_LM_LEAST_MB = 5
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
# Gives the demo model's directory, made if need be, without MLX in the process that measures.
RESOLVE = "import sys; from allhands.model.sources import resolve; print(resolve(sys.argv[1]))"


@dataclass(frozen=True)
class Text:
    """A folder with a ``train.jsonl`` of generated documents."""

    folder: Path
    num_documents: int
    num_bytes: int


@dataclass(frozen=True)
class Run:
    """Where everything is."""

    options: argparse.Namespace
    work: Path
    tokenizer: Path
    full: Text
    part: Text

    def text(self, peer: str) -> Text:
        """What the peer tokenises."""
        return self.part if peer == "mlx_lm" else self.full

    def command(self, peer: str, action: str, kept: Path | None = None) -> list[str]:
        """Of a worker; ``kept`` is where it keeps what it has tokenised, if not where the others
        look for it.
        """
        command = [
            sys.executable,
            str(HERE / "data_worker.py"),
            peer,
            action,
            "--work",
            str(kept or self.work),
        ]
        command += ["--data", str(self.text(peer).folder), "--tokenizer", str(self.tokenizer)]
        command += ["--cores", str(num_cores()), "--first-documents", str(self.part.num_documents)]
        return [*command, "--step-ms", str(self.options.step_ms)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenise, open, share and batch: allhands against its peers."
    )
    parser.add_argument(
        "--megabytes", type=positive, default=1000, help="of generated text (%(default)s)"
    )
    parser.add_argument(
        "--mlx-lm-megabytes", type=positive, help="of it for mlx_lm (a tenth, at least 5)"
    )
    parser.add_argument(
        "--peers",
        type=partial(peer_list, PEERS),
        default=PEERS,
        help=f"comma-separated: {','.join(PEERS)}",
    )
    parser.add_argument(
        "--chat",
        type=Path,
        action="append",
        help="a folder with a chat train.jsonl; may be repeated",
    )
    parser.add_argument("--batch-sizes", default="4,8,32", help="for the chat sets (%(default)s)")
    parser.add_argument(
        "--tokenizer", default="demo", help="'demo' or a directory with a tokenizer's files"
    )
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="length of a step that data are waited for in"
    )
    parser.add_argument("--repeat", type=positive, default=3, help="of tokenising (%(default)s)")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds a process may take")
    parser.add_argument(
        "--scratch", type=Path, help="a directory with room for three times the text"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    if options.mlx_lm_megabytes is None:
        options.mlx_lm_megabytes = max(MLX_LM_LEAST_MB, options.megabytes // MLX_LM_PART)
    options.mlx_lm_megabytes = min(options.mlx_lm_megabytes, options.megabytes)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if sys.platform != "linux":
        say("error: memory that processes share can only be told apart on Linux")
        return 1
    return run_benchmark("data", options, measure, report, rows)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, one after the other."""
    run = prepare(options, work)
    peers = {peer: measure_peer(run, peer) for peer in options.peers}
    same_tokens(peers)
    loader = None
    if "allhands" in peers:
        say("allhands: loader")
        loader = told(run.command("allhands", "loader"), run)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions(Path(sys.executable), PACKAGES),
        "settings": {
            "tokenizer": Path(options.tokenizer).name,
            "megabytes": options.megabytes,
            "mlx_lm_megabytes": options.mlx_lm_megabytes,
            "num_processes": NUM_PROCESSES,
        },
        "peers": peers,
        "chat": measure_chat(run),
        "loader": loader,
    }


def prepare(options: argparse.Namespace, work: Path) -> Run:
    say(f"writing {options.megabytes} MB of text")
    tokenizer = copy_tokenizer(options.tokenizer, work / "tokenizer")
    texts: list[Text] = []
    for name, megabytes in (("full", options.megabytes), ("part", options.mlx_lm_megabytes)):
        folder = work / name
        count = write_documents(folder / "train.jsonl", megabytes * 10**6)
        texts.append(Text(folder, count, (folder / "train.jsonl").stat().st_size))
    return Run(options, work, tokenizer, *texts)


def copy_tokenizer(source: str, target: Path) -> Path:
    """The tokenizer's files alone, with the ``config.json`` that each peer asks for."""
    command = [sys.executable, "-c", RESOLVE, source]
    done = subprocess.run(
        command, env=environ(online=True), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"no tokenizer: {done.stderr.strip()[-300:]}")
    target.mkdir(parents=True)
    for pattern in TOKENIZER_FILES:
        for file in Path(done.stdout.strip()).glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
    if not (target / "config.json").exists():
        (target / "config.json").write_text('{"model_type": "llama"}')
    return target


def environ(*, online: bool = False, **added: str) -> dict[str, str]:
    values = clean_environ(**added)
    # Each peer decides itself about its threads.
    del values["TOKENIZERS_PARALLELISM"]
    if online:
        del values["HF_HUB_OFFLINE"]
    return values


# --- one peer -------------------------------------------------------------------------------------


def measure_peer(run: Run, peer: str) -> dict[str, Any]:
    text = run.text(peer)
    say(f"{TITLES[peer]}: tokenising {text.num_bytes / 1e6:.0f} MB")
    with Worker(run.command(peer, "build"), run) as child, Peak(child.pid) as peak:
        built = answer(child, run)
    times = [built["build_s"], *(build_again(run, peer) for _ in range(run.options.repeat - 1))]
    openings = [NUM_OPENINGS, 0][peer == "mlx_lm"]
    say(f"{TITLES[peer]}: opening and holding")
    opened = [told(run.command(peer, "open"), run)["open_s"] for _ in range(openings)]
    one, many = held_bytes(run, peer, 1), held_bytes(run, peer, NUM_PROCESSES)
    return {
        "num_bytes": text.num_bytes,
        "num_documents": text.num_documents,
        **built,
        "build_s": statistics.median(times),
        "build_times_s": times,
        "peak_pss_bytes": peak.bytes,
        "open_s": statistics.median(opened) if opened else None,
        "open_times_s": opened,
        "one_process_bytes": one,
        "all_processes_bytes": many,
        # With a small text the data can drown in what the allocator does.
        "processes_ratio": many / one if one > 0 else None,
    }


def build_again(run: Run, peer: str) -> float:
    """Seconds for the same once more, from the start."""
    kept = run.work / "again"
    try:
        return told(run.command(peer, "build", kept), run)["build_s"]
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def held_bytes(run: Run, peer: str, count: int) -> int:
    """Memory of the data in ``count`` processes together: with them, less that of as many without."""
    return waiting_bytes(run, peer, "hold", count) - waiting_bytes(run, peer, "empty", count)


def waiting_bytes(run: Run, peer: str, action: str, count: int) -> int:
    """Memory of ``count`` processes when each has done its work and waits."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(Worker(run.command(peer, action), run)) for _ in range(count)
        ]
        for child in children:
            answer(child, run)
        return pss_bytes([child.pid for child in children])


class Worker:
    """A worker process, ended when the block is left: by the end of its input, or by force after
    the time limit.
    """

    def __init__(self, command: Sequence[str], run: Run) -> None:
        self._command, self._run = command, run

    def __enter__(self) -> subprocess.Popen[str]:
        self._log = tempfile.TemporaryFile("w+", dir=self._run.work)
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environ(ALLHANDS_TOKEN_CACHE=str(self._run.work / "allhands")),
        )
        self._limit = threading.Timer(self._run.options.timeout, self._child.kill)
        self._limit.start()
        return self._child

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: Any
    ) -> None:
        child = self._child
        with suppress(OSError):
            assert child.stdin is not None
            child.stdin.close()
        if kind is not None and not isinstance(error, BenchmarkError):
            child.kill()
        code = child.wait()
        self._limit.cancel()
        assert child.stdout is not None
        child.stdout.close()
        self._log.seek(0)
        tail = "\n".join(self._log.read().splitlines()[-15:])
        self._log.close()
        if code and (kind is None or isinstance(error, BenchmarkError)):
            raise BenchmarkError(f"{' '.join(self._command[1:4])} ended with code {code}:\n{tail}")


def answer(child: subprocess.Popen[str], run: Run) -> dict[str, Any]:
    """The next ``@`` line of a worker."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("@"):
            return json.loads(line[1:])
    raise BenchmarkError(f"{' '.join(map(str, child.args[1:4]))} has told nothing")


def told(command: Sequence[str], run: Run) -> dict[str, Any]:
    """What a worker says that runs to its end."""
    with Worker(command, run) as child:
        return answer(child, run)


def same_tokens(peers: dict[str, dict[str, Any]]) -> None:
    """Refuse to compare different things: the documents that all have tokenised must have as many
    tokens.
    """
    counts = {peer: figures["first"] for peer, figures in peers.items()}
    if len(set(counts.values())) > 1:
        raise BenchmarkError(f"the peers do not have the same tokens: {counts}")


# --- chat sets ------------------------------------------------------------------------------------


def measure_chat(run: Run) -> dict[str, Any]:
    """Padding of each chat set by name."""
    folders: dict[str, Path] = {path.name: path for path in run.options.chat or ()}
    if not folders:
        folders["demo"] = run.work / "demo"
        command = [sys.executable, "-m", "allhands", "data", "demo", "--out", str(folders["demo"])]
        subprocess.run(command, env=environ(), check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        say(f"batches of {name}")
        command = [sys.executable, str(HERE / "data_padding.py"), "--data", str(folder)]
        found[name] = told(
            [*command, "--tokenizer", str(run.tokenizer), "--batch-sizes", run.options.batch_sizes],
            run,
        )
    return found


# --- the table ------------------------------------------------------------------------------------


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures that are kept."""
    found: list[Row] = []
    for peer, one in record["peers"].items():
        who, megabytes = {**TITLES, "allhands": OURS}[peer], one["num_bytes"] / 1e6
        speeds = [megabytes / time for time in one["build_times_s"]]
        found.append(row_of("tokenise text", who, "MB/s", speeds, "higher"))
        found.append(
            row_of("peak memory of that", who, "MiB", [one["peak_pss_bytes"] / 2**20], "lower")
        )
        if opened := one["open_times_s"]:
            found.append(
                row_of("open it again", who, "ms", [1e3 * time for time in opened], "lower")
            )
        each = (
            [one["one_process_bytes"] / one["num_tokens"]],
            [one["all_processes_bytes"] / one["num_tokens"]],
        )
        found.append(row_of("memory of a token in one process", who, "bytes", each[0], "lower"))
        found.append(
            row_of(
                f"memory of a token in {NUM_PROCESSES} processes", who, "bytes", each[1], "lower"
            )
        )
    for name, figures in record["chat"].items():
        for size, ways in figures["batches"].items():
            for way, one in ways.items():
                who = WAYS[way].removesuffix(", CPU")
                padding = [100 * one["padding"]]
                found.append(
                    row_of(f"padding of {name}, batches of {size}", who, "%", padding, "lower")
                )
    if loader := record["loader"]:
        for start in (0, 1_000_000):
            name = f"a batch of 8 from step {start:,}"
            found.append(row_of(name, OURS, "ms", [loader[f"mean_ms_from_{start}"]], "lower"))
        found.append(row_of("a step waits for its batch", OURS, "ms", [loader["wait_ms"]], "lower"))
    return found


def report(record: dict[str, Any]) -> str:
    """The figures as Markdown, with what one must know to read them."""
    settings = record["settings"]
    lines = [
        f"generated text, tokenizer {settings['tokenizer']}",
        "",
        *peer_table(record["peers"]),
        "",
        "tokenise: wall time without imports (fastest to slowest); peak: the whole process tree, shared pages once;",
        "open: in a fresh process, after imports, with the files in the page cache;",
        f"one, {NUM_PROCESSES} processes: memory of the data in all together, when each has read every example.",
    ]
    if "mlx_lm" in record["peers"] and settings["mlx_lm_megabytes"] < settings["megabytes"]:
        lines.append(
            f"mlx_lm has only the first {settings['mlx_lm_megabytes']} MB of the text; nothing is scaled."
        )
    for name, figures in record["chat"].items():
        lines += ["", *chat_table(name, figures)]
    if record["loader"]:
        lines += ["", *loader_lines(record["loader"])]
    return "\n".join(lines)


def peer_table(peers: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        f"| | text | tokenise | MB/s | peak | open | one process | {NUM_PROCESSES} processes | ratio | bytes a token |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for peer, figures in peers.items():
        opened = (
            "tokenises again" if figures["open_s"] is None else f"{1000 * figures['open_s']:.0f} ms"
        )
        cells = (
            TITLES[peer],
            f"{figures['num_bytes'] / 1e6:.0f} MB",
            f"{figures['build_s']:.1f} s{_spread(figures.get('build_times_s', []))}",
            f"{figures['num_bytes'] / 1e6 / figures['build_s']:.1f}",
            f"{figures['peak_pss_bytes'] / 2**20:.0f} MiB",
            opened,
            f"{figures['one_process_bytes'] / 2**20:.1f} MiB",
            f"{figures['all_processes_bytes'] / 2**20:.1f} MiB",
            "-" if figures["processes_ratio"] is None else f"{figures['processes_ratio']:.2f}",
            f"{figures['one_process_bytes'] / figures['num_tokens']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(times: Sequence[float]) -> str:
    return f" ({min(times):.1f} to {max(times):.1f})" if len(times) > 1 else ""


def chat_table(name: str, figures: dict[str, Any]) -> list[str]:
    """Padding and shapes of one chat set."""
    sizes = list(figures["batches"])
    lines = [
        f"padding, {name} ({figures['num_examples']} examples, {figures['num_inputs']} tokens), one epoch:",
        "",
        "| | " + " | ".join(f"batches of {size}" for size in sizes) + " |",
        "|---|" + "---:|" * len(sizes),
    ]
    for way in figures["batches"][sizes[0]]:
        each = [figures["batches"][size][way] for size in sizes]
        cells = [f"{100 * one['padding']:.1f} % ({one['shapes']} shapes)" for one in each]
        lines.append(f"| {WAYS[way]} | {' | '.join(cells)} |")
    return lines


def loader_lines(figures: dict[str, float]) -> list[str]:
    return [
        f"a batch of 8: {figures['mean_ms_from_0']:.2f} ms from the start (the first {figures['first_ms_at_0']:.2f}), "
        f"{figures['mean_ms_from_1000000']:.2f} ms from step 1,000,000 (the first "
        f"{figures['first_ms_at_1000000']:.2f})",
        f"a step of {figures['step_ms']:.0f} ms waits {figures['wait_ms']:.3f} ms for its data "
        f"(at most {figures['longest_wait_ms']:.3f})",
    ]


if __name__ == "__main__":
    sys.exit(main())
