"""Write docs/performance.md and README.md's table from benchmarks/results; ``--check`` only compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from records import (  # noqa: E402
    OURS,
    Row,
    device_of,
    environment_lines,
    gpus_of,
    is_ours,
    machine_of,
    not_measured_since,
    oldest_first,
    read_records,
    rows_in,
)
from roofline import utilisation  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
# Between lines like these README.md has the last record's figures of a benchmark.
FROM, TO = "<!-- {}, by scripts/write_performance_docs.py: -->\n", "<!-- until here. -->\n"
# Less than this is no finding.
CLOSE = 0.05
Record = Mapping[str, Any]

INTRODUCTION = """# Performance

After this page you know how fast allhands is beside other programs, and can repeat each measurement. Each table is of
one run of a script in `benchmarks/`, which measured all programs one after the other on the same machine with the same
work ([how](../benchmarks/README.md)). `python scripts/write_performance_docs.py` makes this page from the records in
`benchmarks/results`.

How to read it:

- A figure is the median of its repeats, with the lowest and the highest in brackets.
- The last column says how many times as good allhands is: above 1 it is ahead, **in bold below 1 the peer is**. For
  times and memory less is better, for speeds more.
- Ratios hold on other machines of the same kind; absolute figures of a shared machine do not.
- `make bench` repeats the tables of a CPU, `benchmarks/h200.sh` those of NVIDIA GPUs. `benchmarks/regressions.py` names
  each ratio and each count of instructions that is more than 5 % worse than in the record before.
"""

# Name of the benchmark: heading, and what one must know. In the order of the page.
TABLES = {
    "gpu": (
        "Training on one GPU",
        "Random tokens and weights, bfloat16, AdamW. `qlora`: the shape of Mistral-7B in 4 bits, rank 8 on the last 8 "
        "layers, 4 x 512 tokens; PyTorch has the weights in bfloat16, because it cannot read MLX's 4 bits. `lora` and "
        "`full`: a Llama of 1.24 billion, 8 x 1024. `smol`: the shape of SmolLM-135M, all of it, 32 x 512. The first "
        "step includes the building of kernels that were not there yet.",
    ),
    "gpu_many": (
        "Training on several GPUs",
        "Data parallel over NCCL, beside PyTorch's DistributedDataParallel on the same machine: the works of the table "
        "above, with the same batch for each GPU (weak scaling), or *the batch of one* divided among them (strong); "
        "`large`: `full` with 32 x 1024. "
        "Per cents are of N times the peer's own speed on one GPU. Memory is that of the fullest rank; the exchange is "
        "what a step still waits for when its passes are done and no rank is late: what it takes from the passes that "
        "it goes on beside is in their time.",
    ),
    "pretrain": (
        "Pre-training",
        "A new model of SmolLM2-135M's shape on real text, beside a loop in PyTorch after nanoGPT with the same shape, "
        "tokens and rates. *All of the training* has validations, what is compiled and, of allhands, checkpoints. "
        "[The curves](pretraining.md#on-gpus).",
    ),
    "cpu_lora": (
        "LoRA on a Linux CPU",
        "Rank 8 on the last 8 layers of SmolLM2-135M-Instruct, 4 bits, batches of 4; float32 everywhere, the same "
        "batches for everybody. `mlx_lm` is what pip installs.",
    ),
    "cpu_scaling": (
        "Processes on one computer",
        "The demo's fine-tuning, the same global batch for everybody, runs in turn. Times are those of the same turn.",
    ),
    "startup": (
        "From the command to the first step",
        "With everything that the system keeps in memory already there.",
    ),
    "data": (
        "Data",
        "Generated text and chats. mlx_lm gets a tenth of the text, which is why memory is given for a token. Its "
        "batches and random ones stand beside those of allhands on a CPU and on a GPU.",
    ),
    "process_memory": (
        "Memory, process by process",
        "A Llama of 2 million that learns from the same tokens on 1, 2 and 4 processes, with every page of the corpus "
        "in use; each page counts once. [The picture, and how to read it](pretraining.md#memory-process-by-process).",
    ),
    "backends": (
        "Bytes between processes of one computer",
        "float32, summed over two processes. The program is the same; what differs is who starts it.",
    ),
    "sync": (
        "A model to every computer",
        "From one host to three others by cables of 200 Mbit/s, in network namespaces of one computer. `allhands` is "
        "the tree that it takes by itself: each that has everything sends to the next.",
    ),
    "recovery": (
        "Faults and checkpoints",
        "The demo model on two ranks of one computer; no peer does this. "
        "[What happens at a fault](reliability.md) says more.",
    ),
    "instructions": (
        "Instructions",
        "In user space, for pieces of allhands' own work: figures that do not depend on what else the machine does.",
    ),
}

LIMIT = """## The limit

No step can be faster than its matrix products. The fastest ones that were measured on the machine, by anybody:
"""

UTILISATION = """The FLOPs of the model are 2 for each weight that is multiplied and each token, in the forward pass,
again for the gradient of each input that is needed and again for the gradient of each weight that is trained; attention
counts the half that is not masked ([the formula](../benchmarks/roofline.py)). Recomputation and padding do not count.
Held against the fastest matrix product of the same type:
"""

LEFT = """The rest goes into what is no matrix product (norms, softmax, cross-entropy, the optimizer), into products
smaller than that of the ceiling, and into reading weights; `allhands train --profile` shows how a step's time is split.
"""


def page(directory: Path = ROOT / "benchmarks" / "results") -> str:
    """The whole page."""
    # What is compared for its rightness has no place here.
    records = [one for one in newest(read_records(directory)) if one["name"] in {*TABLES, "ceilings"}]
    parts = [INTRODUCTION]
    for name, (heading, text) in TABLES.items():
        of_name = [record for record in records if record["name"] == name]
        if of_name:
            parts.append(f"## {heading}\n\n{text}\n")
            parts += [section(record) for record in of_name]
    if not any(gpus_of(record["environment"]["machine"]) for record in records):
        parts.append("There is no record of a GPU yet.\n")
    parts += limit(records)
    parts.append(behind(records))
    return "\n".join(parts)


def newest(records: Sequence[Record]) -> list[Record]:
    """The last record of each benchmark's works on each machine, the oldest first."""
    histories: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        histories.setdefault((record["name"], machine_of(record)), []).append(record)
    return oldest_first(record for history in histories.values() for _, record in not_measured_since(history))


def section(record: Record) -> str:
    """One record: where and when, and its table."""
    told = "\n".join(f"- {line}" for line in environment_lines(record))
    failed = [
        f"{peer} has no figure for {work}: {one['error']}"
        for work, peers in record["details"].get("results", {}).items()
        for peer, one in peers.items()
        if "error" in one
    ]
    return f"{told}\n\n{table(rows_in(record))}\n" + "".join(f"\n{text}\n" for text in failed)


def table(rows: Sequence[Row]) -> str:
    """A line for each figure, a column for each who was measured, ours first; then the ratios."""
    who = sorted(dict.fromkeys(row.who for row in rows), key=lambda name: (name != OURS, not is_ours(name)))
    compared = any(row.ratios for row in rows)
    head = ["", *who, *(["allhands is"] if compared else [])]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * len(who)}{'---|' if compared else ''}"]
    for name, unit in dict.fromkeys((row.name, row.unit) for row in rows):
        by_who = {row.who: row for row in rows if (row.name, row.unit) == (name, unit)}
        cells = [f"{name}, {unit}", *(cell(by_who.get(one)) for one in who)]
        if compared:
            cells.append(ratios(by_who[OURS]) if OURS in by_who else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: Row | None) -> str:
    """The median, and the spread where there is one."""
    if row is None:
        return ""
    if row.repeats == 1:
        return number(row.median)
    return f"{number(row.median)} ({number(row.least)} to {number(row.most)})"


def number(value: float) -> str:
    """With three digits that count, and all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratios(row: Row) -> str:
    """Against each peer; those that are ahead in bold."""
    told = [f"{factor(ratio)} {who}" for who, ratio in row.ratios.items()]
    return ", ".join(
        text if ratio >= 1 else f"**{text}**" for text, ratio in zip(told, row.ratios.values(), strict=True)
    )


def factor(ratio: float) -> str:
    """Times, with digits enough to tell 0.98 from 1."""
    return f"{ratio:,.0f} x" if ratio >= 100 else f"{ratio:.1f} x" if ratio >= 10 else f"{ratio:.2f} x"


def readme(text: str, directory: Path = ROOT / "benchmarks" / "results") -> str:
    """``text`` of README.md with the figures of the last records."""
    records = {record["name"]: record for record in newest(read_records(directory))}
    for name, write in (("cpu_lora", lora_lines), ("gpu", gpu_lines)):
        if name not in records:
            continue
        record, begin = records[name], FROM.format(name)
        file = f"benchmarks/results/{name}-{record['date'][:10]}.json"
        told = f"({device_of(record)}; medians, [recorded]({file}) with everything else about them.)"
        block = "\n".join([*write(rows_in(record)), "", told])
        found = re.compile(f"{re.escape(begin)}.*?{re.escape(TO)}", re.DOTALL)
        text = found.sub(lambda _, block=begin + block + "\n" + TO: block, text)
    return text


def lora_lines(rows: Sequence[Row]) -> list[str]:
    """LoRA on a CPU: a line for each peer, the slowest first."""
    speeds = {row.who: row for row in rows if row.name == "speed"}
    memory = {row.who: row for row in rows if row.name == "peak memory"}
    lines = ["| | tokens/s | times mlx_lm | peak memory |", "|---|---:|---:|---:|"]
    for who, row in sorted(speeds.items(), key=lambda one: one[1].median):
        times = factor(row.median / speeds["mlx_lm"].median).removesuffix(" x")
        lines.append(f"| {who} | {number(row.median)} | {times} | {number(memory[who].median)} {memory[who].unit} |")
    return lines


def gpu_lines(rows: Sequence[Row]) -> list[str]:
    """One GPU: a line for each work, speed and memory of each peer."""
    who = sorted({row.who for row in rows}, key=lambda name: (name != OURS, name))
    lines = [f"| | {' | '.join(who)} | allhands is |", f"|---|{'---:|' * len(who)}---|"]
    for name in (row.name for row in rows if row.who == OURS and row.name.endswith(": speed")):
        work = name.removesuffix(": speed")
        found = {(row.name, row.who): row for row in rows if row.name in (name, f"{work}: peak memory")}
        cells = []
        for peer in who:
            speed, memory = found.get((name, peer)), found.get((f"{work}: peak memory", peer))
            told = [f"{number(row.median)} {row.unit}" for row in (speed, memory) if row is not None]
            cells.append(", ".join(told))
        lines.append(f"| {work} | {' | '.join(cells)} | {ratios(found[name, OURS])} |")
    return lines


def devices_of(record: Record) -> str:
    """The device that computes, and how many of them the machine has."""
    count = len(gpus_of(record["environment"]["machine"]))
    return f"{count} x {device_of(record)}" if count > 1 else device_of(record)


def limit(records: Sequence[Record]) -> list[str]:
    """Ceilings, and what part of them training reaches."""
    ceilings = [record for record in records if record["name"] == "ceilings"]
    if not ceilings:
        return ["## The limit\n\nThe ceilings of a machine are measured by `benchmarks/ceilings.py`; no record yet.\n"]
    parts = [LIMIT, *(section(record) for record in ceilings)]
    lines = ["| on | work | who | model FLOP/s | of the fastest product |", "|---|---|---|---:|---:|"]
    for record in records:
        for row, rate, part in utilisation(record, records):
            work = f"{record['name']}, {row.name.removesuffix('speed').rstrip(': ')}".rstrip(", ")
            flops = f"{rate / 1e12:,.0f} T" if rate >= 1e13 else f"{rate / 1e9:,.0f} G"
            lines.append(f"| {devices_of(record)} | {work} | {row.who} | {flops} | {100 * part:.0f} % |")
    if len(lines) > 2:
        parts += [UTILISATION, "\n".join(lines) + "\n", LEFT]
    return parts


def behind(records: Sequence[Record]) -> str:
    """Every figure in which a peer is ahead, the furthest first; those that are close in a line each benchmark."""
    far: list[tuple[float, str]] = []
    close: dict[str, list[str]] = {}
    for record in records:
        heading = "The limit" if record["name"] == "ceilings" else TABLES[record["name"]][0]
        place = f"{heading} ({devices_of(record)})"
        for row in rows_in(record):
            for who, ratio in row.ratios.items():
                if ratio < 1 - CLOSE:
                    far.append((ratio, f"- {place}, {row.name}: {who}; allhands is {factor(ratio)} as good."))
                elif ratio < 1:
                    close.setdefault(place, []).append(f"{row.name} ({who})")
    lines = [line for _, line in sorted(far)]
    lines += [f"- By less than {100 * CLOSE:.0f} %: {place}: {', '.join(names)}." for place, names in close.items()]
    return f"## Where a peer is ahead, and what is left\n\n{chr(10).join(lines) or 'In none of the figures above.'}\n"


def main() -> int:
    """Write both, or tell which is out of date."""
    old = README.read_text(encoding="utf-8")
    for path, text in ((PAGE, page()), (README, readme(old))):
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is out of date: run {sys.argv[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
