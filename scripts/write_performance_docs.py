"""Write docs/performance.md and README.md's table from benchmarks/results; ``--check`` only
compares.
"""

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

This page compares the speed and memory of allhands with those of other programs. You can repeat each measurement.
Each table comes from one run of a script in `benchmarks/`, which measured all programs one after the other on the same
machine with the same work ([method](../benchmarks/README.md)). `python scripts/write_performance_docs.py` makes this
page from the records in `benchmarks/results`.

How to read the tables:

- A figure is the median of its repeats, with the lowest and the highest in brackets.
- The last column is the ratio to the peer: above 1 allhands is better, **below 1 (in bold) the peer is better**. Lower
  times and memory are better, and higher speeds are better.
- Ratios are also valid on other machines of the same kind; absolute figures of a shared machine are not.
- `make bench` repeats the tables of a CPU, and `benchmarks/h200.sh` those of NVIDIA GPUs. `benchmarks/regressions.py` names
  each ratio and each count of instructions that is more than 5 % worse than in the record before.
"""

# Name of the benchmark: heading, and what one must know. In the order of the page.
TABLES = {
    "gpu": (
        "Training on one GPU",
        "Random tokens and weights, bfloat16, AdamW. `qlora`: the shape of Mistral-7B in 4 bits, rank 8 on the last 8 "
        "layers, 4 x 512 tokens; PyTorch has bfloat16 weights, because it cannot read MLX's 4 bits. `lora` and `full`: "
        "a Llama of 1.24 billion parameters, 8 x 1024. `uneven`: `lora` with 8 x 1000, because attention is fastest "
        "for a multiple of 128. `qwen`: LoRA of Qwen3-0.6B, 8 x 1024. `smol`: full training of SmolLM-135M's shape, "
        "32 x 512. The first step includes the building of missing kernels.",
    ),
    "gpu_many": (
        "Training on several GPUs",
        "Data parallel training over NCCL, compared with PyTorch's DistributedDataParallel on the same machine. The "
        "works are those of the table above, with the same batch for each GPU (weak scaling), or with *the batch of "
        "one* GPU divided among all (strong scaling). `large` is `full` with 32 x 1024. Per cents relate to N times "
        "the program's own speed on one GPU. Memory is that of the rank with the highest peak. The exchange is the "
        "time that a step waits after its passes, if no rank is late. Its cost during the passes is part of their "
        "time. The figures of four and eight GPUs are of 2026-11-22, before the exchange of gradients was rewritten; "
        "they have not been measured again.",
    ),
    "gpu_sharded": (
        "Divided weights on two GPUs",
        "4 x 1,024 random tokens on each GPU, beside PyTorch's FSDP2 with compiled blocks. Full training of the 7B and "
        "13B shapes is in bfloat16 with AdamW; weights, gradients and optimizer state are divided (`--strategy fsdp`, "
        "13B with `--grad-checkpoint`). QLoRA of the 70B shape has 4 bits and trains adapters of the last 16 blocks; "
        "PyTorch cannot read MLX's 4 bits. Memory is that of the GPU that holds most.",
    ),
    "pretrain": (
        "Pre-training",
        "A new model of SmolLM2-135M's shape on real text, compared with a PyTorch loop after nanoGPT with the same "
        "shape, tokens and learning rates. *All of the training* includes validations, compilation and, for allhands, "
        "checkpoints. [The curves](pretraining.md#speed-on-gpus).",
    ),
    "cpu_lora": (
        "LoRA on a Linux CPU",
        "Rank 8 on the last 8 layers of SmolLM2-135M-Instruct, 4 bits, batches of 4. All programs compute in float32 "
        "and get the same batches. `mlx_lm` is the version that pip installs.",
    ),
    "cpu_scaling": (
        "Processes on one computer",
        "The demo's fine-tuning with the same global batch for all programs. Programs run in turn, and a ratio "
        "compares times of the same turn.",
    ),
    "startup": (
        "From the command to the first step",
        "All files are already in the system's file cache.",
    ),
    "data": (
        "Data",
        "Generated text and chats. mlx_lm gets a tenth of the text, so memory is given per token. The batches of "
        "mlx_lm and random batches are compared with those of allhands on a CPU and on a GPU.",
    ),
    "process_memory": (
        "Memory, process by process",
        "A Llama of 2 million parameters that trains on the same tokens with 1, 2 and 4 processes. Every page of the "
        "corpus is in use, and each page counts once. [The picture, and how to read "
        "it](pretraining.md#memory-of-several-processes).",
    ),
    "backends": (
        "Bytes between processes of one computer",
        "float32, summed over two processes. The program is the same; only the launcher differs.",
    ),
    "sync": (
        "A model to every computer",
        "From one host to three others over links of 200 Mbit/s, in network namespaces of one computer. `allhands` "
        "sends along its default tree: each host that has all files sends them to the next one.",
    ),
    "recovery": (
        "Faults and checkpoints",
        "The demo model on two ranks of one computer; no other program does this. [Stop, resume, restart](reliability.md) "
        "describes the reactions to faults.",
    ),
    "instructions": (
        "Instructions",
        "Instructions in user space for parts of allhands' own work. These figures do not depend on the machine's "
        "other work.",
    ),
}

LIMIT = """## The limit

No step can be faster than its matrix products. These are the fastest ones that any program reached on the machine:
"""

UTILISATION = """The FLOPs of the model are counted per token: 2 for each multiplied weight in the forward pass, 2 more
if the gradient of its input is needed, and 2 more if the weight is trained. For attention only the half that is not
masked counts ([the formula](../benchmarks/roofline.py)). Recomputation and padding do not count. The table compares
them with the fastest matrix product of the same type:
"""

LEFT = """The rest of the time goes into other operations than matrix products (norms, softmax, cross-entropy, the
optimizer), into smaller products than the fastest ones, and into reading weights. `allhands train --profile` shows the
parts of a step's time.
"""


def page(directory: Path = ROOT / "benchmarks" / "results") -> str:
    """The whole page."""
    # What is compared for its rightness has no place here.
    records = [
        one for one in newest(read_records(directory)) if one["name"] in {*TABLES, "ceilings"}
    ]
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
    return oldest_first(
        record for history in histories.values() for _, record in not_measured_since(history)
    )


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
    who = sorted(
        dict.fromkeys(row.who for row in rows), key=lambda name: (name != OURS, not is_ours(name))
    )
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
        text if ratio >= 1 else f"**{text}**"
        for text, ratio in zip(told, row.ratios.values(), strict=True)
    )


def factor(ratio: float) -> str:
    """Times, with digits enough to tell 0.98 from 1."""
    return (
        f"{ratio:,.0f} x" if ratio >= 100 else f"{ratio:.1f} x" if ratio >= 10 else f"{ratio:.2f} x"
    )


def readme(text: str, directory: Path = ROOT / "benchmarks" / "results") -> str:
    """``text`` of README.md with the figures of the last records."""
    for name, write in (("cpu_lora", lora_lines), ("gpu", gpu_lines)):
        found = [record for record in newest(read_records(directory)) if record["name"] == name]
        # Works that were measured at other times, too, but on the same machine.
        found = [record for record in found if machine_of(record) == machine_of(found[-1])]
        if not found:
            continue
        begin, rows = FROM.format(name), [row for record in found for row in rows_in(record)]
        told = f"({device_of(found[-1])}; medians. [Versions, settings and all figures](docs/performance.md).)"
        block = begin + "\n".join([*write(rows), "", told, TO])
        old = re.compile(f"{re.escape(begin)}.*?{re.escape(TO)}", re.DOTALL)
        text = old.sub(lambda _, block=block: block, text)
    return text


def lora_lines(rows: Sequence[Row]) -> list[str]:
    """LoRA on a CPU: a line for each peer, the slowest first."""
    speeds = {row.who: row for row in rows if row.name == "speed"}
    memory = {row.who: row for row in rows if row.name == "peak memory"}
    lines = ["| | tokens/s | times mlx_lm | peak memory |", "|---|---:|---:|---:|"]
    for who, row in sorted(speeds.items(), key=lambda one: one[1].median):
        times = factor(row.median / speeds["mlx_lm"].median).removesuffix(" x")
        lines.append(
            f"| {who} | {number(row.median)} | {times} | {number(memory[who].median)} {memory[who].unit} |"
        )
    return lines


def gpu_lines(rows: Sequence[Row]) -> list[str]:
    """One GPU: a line for each work, speed and memory of each peer."""
    who = sorted({row.who for row in rows}, key=lambda name: (name != OURS, name))
    lines = [f"| | {' | '.join(who)} | allhands is |", f"|---|{'---:|' * len(who)}---|"]
    for name in (row.name for row in rows if row.who == OURS and row.name.endswith(": speed")):
        work = name.removesuffix(": speed")
        found = {
            (row.name, row.who): row for row in rows if row.name in (name, f"{work}: peak memory")
        }
        cells = []
        for peer in who:
            speed, memory = found.get((name, peer)), found.get((f"{work}: peak memory", peer))
            told = [
                f"{number(row.median)} {row.unit}" for row in (speed, memory) if row is not None
            ]
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
        return [
            "## The limit\n\nThe ceilings of a machine are measured by `benchmarks/ceilings.py`; no record yet.\n"
        ]
    parts = [LIMIT, *(section(record) for record in ceilings)]
    lines = [
        "| on | work | who | model FLOP/s | of the fastest product |",
        "|---|---|---|---:|---:|",
    ]
    for record in records:
        for row, rate, part in utilisation(record, records):
            work = f"{record['name']}, {row.name.removesuffix('speed').rstrip(': ')}".rstrip(", ")
            flops = f"{rate / 1e12:,.0f} T" if rate >= 1e13 else f"{rate / 1e9:,.0f} G"
            lines.append(
                f"| {devices_of(record)} | {work} | {row.who} | {flops} | {100 * part:.0f} % |"
            )
    if len(lines) > 2:
        parts += [UTILISATION, "\n".join(lines) + "\n", LEFT]
    return parts


def behind(records: Sequence[Record]) -> str:
    """Every figure in which a peer is ahead, the furthest first; those that are close in a line
    each benchmark.
    """
    far: list[tuple[float, str]] = []
    close: dict[str, list[str]] = {}
    for record in records:
        heading = "The limit" if record["name"] == "ceilings" else TABLES[record["name"]][0]
        place = f"{heading} ({devices_of(record)})"
        for row in rows_in(record):
            for who, ratio in row.ratios.items():
                if ratio < 1 - CLOSE:
                    far.append(
                        (ratio, f"- {place}, {row.name}: {who} is better (ratio {factor(ratio)}).")
                    )
                elif ratio < 1:
                    close.setdefault(place, []).append(f"{row.name} ({who})")
    lines = [line for _, line in sorted(far)]
    lines += [
        f"- By less than {100 * CLOSE:.0f} %: {place}: {', '.join(names)}."
        for place, names in close.items()
    ]
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
