"""Wrong input to every verb, in real processes: one message with place and remedy, its exit code,
nothing left.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import changed
from hostile import Job, history, run
from mlx_lm.utils import load_model
from plain_loop import chats, numpy_loss
from tiny import write_chat_data, write_model

from allhands.cluster.mpi import find_mpi

_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="there is no Open MPI")
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def train(*more: str | Path, iters: int = 3) -> list[str | Path]:
    """Arguments of a short training in the directory that :func:`place` prepares."""
    fixed = ["train", "--train", "--model", "model", "--data", "data", "--adapter-path", "out"]
    return changed([*fixed, "--iters", str(iters)], more)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def rewrite(model: Path, change: Callable[[str, mx.array], mx.array]) -> None:
    """Change a model's weights."""
    file = model / "model.safetensors"
    weights = {name: mx.array(change(name, value)) for name, value in mx.load(str(file)).items()}
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good model, good data and a trained adapter, and beside them everything
    that can be wrong.
    """
    here = tmp_path_factory.mktemp("wrong")
    good = write_model(here / "model")
    write_chat_data(here / "data")
    for name in ("torn", "no-tokenizer", "no-config", "nan"):
        shutil.copytree(good, here / name)
    os.truncate(here / "torn/model.safetensors", (good / "model.safetensors").stat().st_size - 1000)
    for file in (here / "no-tokenizer").glob("tokenizer*"):
        file.unlink()
    (here / "no-config/config.json").unlink()
    rewrite(here / "nan", lambda name, w: w * float("nan") if "layers.2.mlp.up" in name else w)
    # A vocabulary of 100 under a tokenizer with 259 tokens.
    write_model(here / "small-vocabulary")
    rewrite(here / "small-vocabulary", lambda name, w: w[:100] if "embed" in name else w)
    config = json.loads((good / "config.json").read_text())
    write(here / "small-vocabulary/config.json", json.dumps(config | {"vocab_size": 100}))
    write_model(here / "wider", hidden=64)

    write(here / "only-valid/valid.jsonl", CHAT)
    write(here / "empty/train.jsonl", "")
    write(here / "not-json/train.jsonl", CHAT, CHAT, "{oops\n")
    write(here / "unknown/train.jsonl", CHAT, '{"foo": 1}\n')
    write(here / "bad-valid/train.jsonl", CHAT)
    write(here / "bad-valid/valid.jsonl", CHAT, "[]\n")
    write(
        here / "long-prompts/train.jsonl",
        json.dumps({"prompt": "y" * 90, "completion": "a"}) + "\n",
    )
    write(here / "bad.yaml", "# options\niters: 3\nbatch_size: many\n")
    write(here / "unknown.yaml", "iters: 3\nitres: 5\n")
    write(here / "broken.yaml", "iters: [3\n")
    write(here / "a-file", "")
    write(here / "no-metrics/metrics.jsonl", "")

    run(*train(), cwd=here)
    for name in ("torn-adapter", "torn-config"):
        shutil.copytree(here / "out", here / name)
    os.truncate(here / "torn-adapter/adapters.safetensors", 300)
    write(here / "torn-config/adapter_config.json", "{")
    return here


def directory_of(key: str) -> str:
    """An adapter path for one case, which holds an earlier run's adapter."""
    return f"out-{zlib.crc32(key.encode())}"


@pytest.fixture(scope="module")
def jobs(place: Path, request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[Job]]]:
    """The commands of all selected cases, two at a time: most of what they take is Python's
    imports.
    """

    def finished(arguments: str | list[str]) -> Job:
        if isinstance(arguments, str):
            job = Job(*arguments.split(), cwd=place)
        else:
            own = directory_of(" ".join(arguments))
            shutil.copytree(place / "out", place / own)
            job = Job(*changed(train("--adapter-path", own), arguments), cwd=place)
        job.finish()
        return job

    mine = [
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    cases = [item.callspec.params.get("arguments") for item in mine]
    with ThreadPoolExecutor(2) as pool:
        wanted = {a if isinstance(a, str) else " ".join(a): a for a in cases if a}
        yield {key: pool.submit(finished, a) for key, a in wanted.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        # Options.
        (["--batch-size", "0"], 2, ["--batch-size", "greater than or equal to 1"]),
        (["--config", "missing.yaml"], 2, ["missing.yaml", "--config"]),
        (["--config", "unknown.yaml"], 2, ["unknown.yaml:2", "'itres'", "did you mean iters?"]),
        (["--config", "bad.yaml"], 2, ["bad.yaml:3", "batch_size", "'many'"]),
        (["--config", "broken.yaml"], 2, ["broken.yaml:", "YAML"]),
        (["--num-layers", "4"], 2, ["--num-layers", "the model has 3", "at most 3"]),
        (["--lora-rank", "8"], 2, ["--lora-rank", "--lora-parameters"]),
        (["--test", "--test-batches", "0"], 2, ["--test-batches"]),
        (["--no-train"], 2, ["--no-train", "nothing to do", "--test"]),
        (["-n", "2", "--backend", "nccl"], 2, ["--backend nccl", "GPU"]),
        (
            ["-n", "2", "--rank-weights", "[1, 2, 3]"],
            2,
            ["--rank-weights", "3 weights for 2 ranks", "[2, 1]"],
        ),
        (["--rank-weights", "[2, 1]"], 2, ["--rank-weights", "2 weights for 1 rank"]),
        (["--packing", "--mask-prompt"], 2, ["--packing", "--mask-prompt"]),
        (["--isolate-documents"], 2, ["--isolate-documents", "--packing"]),
        (["-n", "2", "--cores-per-rank", "1000"], 2, ["--cores-per-rank", "cores"]),
        pytest.param(
            ["-n", "1000"],
            2,
            ["-n", "1000 processes", "wait for each other"],
            marks=pytest.mark.skipif(
                (os.cpu_count() or 1) > 100, reason="so many are no error on this computer"
            ),
        ),
        # Data.
        (["--data", "./nowhere"], 3, ["nowhere", "does not exist", "--data"]),
        (["--data", "a/typo"], 3, ["a/typo", "no such folder"]),
        (["--data", "data/train.jsonl"], 3, ["data/train.jsonl", "a folder is needed"]),
        (["--data", "only-valid"], 3, ["train.jsonl is missing", "valid.jsonl"]),
        (["--data", "empty"], 3, ["empty/train.jsonl", "is empty"]),
        (["--data", "not-json"], 3, ["not-json/train.jsonl:3", "not JSON"]),
        (["--data", "unknown"], 3, ["unknown/train.jsonl:2", "foo", "messages"]),
        (["--data", "bad-valid"], 3, ["bad-valid/valid.jsonl:2", "must be a JSON object"]),
        (
            ["--data", "long-prompts", "--mask-prompt", "--max-seq-length", "32"],
            3,
            ["long-prompts/train.jsonl:1", "none of the 1 examples", "--max-seq-length"],
        ),
        # Models.
        (["--model", "./nowhere"], 4, ["nowhere", "no such directory"]),
        (["--model", "a-file"], 4, ["a-file", "not a model directory"]),
        (["--model", "no-config"], 4, ["no-config", "config.json"]),
        (["--model", "torn"], 4, ["torn/model.safetensors", "torn"]),
        (["--model", "no-tokenizer"], 4, ["no-tokenizer", "tokenizer"]),
        (["--model", "small-vocabulary"], 4, ["small-vocabulary", "ends at 99", "tokenizer"]),
        (["--model", "nan"], 6, ["nan", "before any training", "model"]),
        # Adapters.
        (
            ["--resume-adapter-file", "missing.safetensors"],
            4,
            ["missing.safetensors", "no such file"],
        ),
        (["--resume-adapter-file", "out"], 4, ["out", "a directory", "adapters.safetensors"]),
        (
            ["--resume-adapter-file", "torn-adapter/adapters.safetensors"],
            4,
            ["torn-adapter/adapters.safetensors"],
        ),
        (
            [
                "--resume-adapter-file",
                "out/adapters.safetensors",
                "--lora-parameters",
                '{"rank": 4}',
            ],
            4,
            ["out/adapters.safetensors", "(32, 8) in the file, (32, 4) here", "--lora-parameters"],
        ),
        # Places to write.
        (["--adapter-path", "a-file"], 2, ["a-file", "choose another directory"]),
        (["--adapter-path", "a-file/below"], 2, ["a-file/below", "choose another directory"]),
        pytest.param(
            ["--adapter-path", "/proc/nowhere"],
            5,
            ["/proc/nowhere", "cannot be written"],
            marks=pytest.mark.skipif(
                not sys.platform.startswith("linux"), reason="there is no /proc"
            ),
        ),
    ],
    ids=lambda value: (
        " ".join(value) if isinstance(value, list) and value and value[0].startswith("-") else ""
    ),
)
def test_training(
    place: Path, jobs: Mapping[str, Future[Job]], arguments: list[str], code: int, words: list[str]
) -> None:
    key = " ".join(arguments)
    jobs[key].result().fails(code, *words)
    # An earlier run's adapter in the same directory is untouched.
    for name in ("adapters.safetensors", "adapter_config.json"):
        assert (place / directory_of(key) / name).read_bytes() == (
            place / "out" / name
        ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            "train --test --model model --data data --adapter-path missing",
            2,
            ["--adapter-path", "missing"],
        ),
        (
            "generate --model model --adapter-path missing --prompt a",
            4,
            ["missing", "no such directory"],
        ),
        (
            "generate --model wider --adapter-path out --prompt a",
            4,
            ["does not fit", "(32, 8)", "(64, 8)"],
        ),
        (
            "generate --model model --adapter-path torn-adapter --prompt a",
            4,
            ["torn-adapter/adapters.safetensors"],
        ),
        (
            "generate --model model --adapter-path torn-config --prompt a",
            4,
            ["torn-config/adapter_config.json"],
        ),
        ("generate --model small-vocabulary --prompt a", 4, ["ends at 99"]),
        ("generate --model missing/model/here --prompt a", 4, ["missing/model/here"]),
        (
            "compare --model model --data only-valid --adapter-path out",
            3,
            ["test.jsonl is missing"],
        ),
        ("compare --model model --data data --adapter-path missing", 4, ["missing"]),
        ("plot missing", 3, ["missing", "metrics"]),
        ("plot no-metrics", 3, ["no-metrics/metrics.jsonl", "no training metrics"]),
        ("data demo --out a-file", 2, ["a-file"]),
    ],
)
def test_other_verbs(
    place: Path, jobs: Mapping[str, Future[Job]], arguments: str, code: int, words: list[str]
) -> None:
    jobs[arguments].result().fails(code, *words)
    assert not (place / "missing").exists()


@pytest.mark.parametrize(
    "backend", ["ring", pytest.param("mpi", marks=[_needs_mpi, pytest.mark.long])]
)
def test_what_all_ranks_find_is_said_once(place: Path, backend: str) -> None:
    arguments = train(
        "--data", "not-json", "-n", "2", "--backend", backend, "--adapter-path", backend
    )
    message = Job(*arguments, cwd=place).fails(3, "not-json/train.jsonl:3")
    assert "rank-" not in message
    assert len(message.splitlines()) == 2


@pytest.mark.slow
def test_mpi_without_open_mpi_is_refused_and_auto_takes_the_ring(
    place: Path, tmp_path: Path
) -> None:
    """A copy of the environment in which nothing stands beside Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "lib").symlink_to(Path(sys.prefix) / "lib")
    settings = Path(sys.prefix) / "pyvenv.cfg"
    if not settings.exists():
        pytest.skip("this Python is not in a virtual environment")
    shutil.copy(settings, tmp_path)
    env = {"PATH": "/nowhere"}
    shell = ["/bin/sh", "-c", 'shift; exec "$0" "$@"', str(tmp_path / "bin/python")]
    Job(*train("-n", "2", "--backend", "mpi"), cwd=place, env=env, prefix=shell).fails(
        7, "Open MPI", "--backend ring"
    )
    job = Job(*train("-n", "2", "--adapter-path", "auto"), cwd=place, env=env, prefix=shell)
    assert job.finish() == 0, job.err
    assert "2 (ring)" in job.out


# --- odd, but right -------------------------------------------------------------------------------


def test_a_validation_set_below_a_batch_has_the_right_loss(place: Path) -> None:
    rows = (place / "data/train.jsonl").read_text().splitlines(keepends=True)
    write(place / "few/train.jsonl", *rows)
    write(place / "few/valid.jsonl", *rows[:3])
    run(*train("--data", "few", "--adapter-path", "few-out", "--batch-size", "8"), cwd=place)
    (first, *_) = history(place / "few-out").valid
    model, _ = load_model(place / "model")
    examples = chats(place / "model", place / "few/valid.jsonl")
    assert first.loss == pytest.approx(numpy_loss(model, examples), rel=1e-5)
    assert first.num_tokens == sum(len(ids) - 1 for ids, _ in examples)


def test_mixed_shapes_and_an_endless_example_are_trained(place: Path) -> None:
    """Bytes are tokens here: of 200,000 and an end token, all but 64 are cut."""
    rows = [CHAT, '{"prompt": "a", "completion": "b c"}\n', '{"text": "some text"}\n']
    write(place / "mixed/train.jsonl", *rows, json.dumps({"text": "x" * 200_000}) + "\n")
    job = run(
        *train("--data", "mixed", "--adapter-path", "mixed-out", "--max-seq-length", "64"),
        cwd=place,
    )
    told = " ".join(job.out.split())
    assert "1 of 4 examples are longer than 64 tokens and were cut (199937 tokens lost)" in told
    assert "without validation" in told
    started = history(place / "mixed-out").started
    assert started is not None
    assert started.num_train_examples == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ("--warmup-steps", "50"),
            "the warm-up of 50 updates is not shorter than the training of 3",
        ),
        (("--optimizer-config", '{"adam": {"moment": 1}}'), "adam does not take these arguments"),
        (
            ("--optimizer", "sgd", "--optimizer-config", '{"sgd": {"nesterov": true}}'),
            "sgd does not take these",
        ),
        (("--optimizer-config", '{"adam": {"betas": [0.9]}}'), "adam: betas must be two numbers"),
        (
            ("--lr-schedule", '{"name": "cosine_decay", "arguments": [1e-3, 0]}'),
            "cosine_decay does not take",
        ),
        (
            ("--lr-schedule", '{"name": "exponential_decay", "arguments": [-1, 2]}'),
            "gives update 0 a rate of -1",
        ),
        (
            ("--strategy", "zero1", "-n", "2"),
            "operations are computed one by one on this processor",
        ),
    ],
)
def test_what_is_refused_leaves_the_run_before_as_it_was(
    place: Path, more: tuple[str, ...], words: str
) -> None:
    own = directory_of(" ".join(more))
    shutil.copytree(place / "out", place / own)
    before = {
        path: path.stat().st_mtime_ns
        for path in (place / own).rglob("*")
        if "logs" not in path.parts
    }
    assert len(before) > 5
    Job(*train("--data", "data", "--adapter-path", own), *more, cwd=place).fails(2, words)
    assert before == {path: path.stat().st_mtime_ns for path in before}
