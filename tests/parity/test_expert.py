"""Ranks that divide experts against one process: gradients of every family, and whole trainings."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ring_ranks import run_ring
from tiny import run_allhands, write_chat_data, write_model, write_tokenizer
from trained import assert_same, assert_same_samples, told, train, write_poisoned

from allhands.parallel.experts import HAVE_EXPERTS

Case = tuple[str, str, str]
SUPPORT = Path(__file__).parents[1] / "support"
RING, MPI = ("--backend", "ring"), ("--backend", "mpi")
DIVIDED = ("-n", "2", *RING, "--ep", "2")
DROPPING = ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}')
ADAM = ("--fine-tune-type", "full", "--optimizer", "adamw", "--learning-rate", "0.001")
FAMILIES: list[Case] = [
    *(
        ("mixtral", "full", "native"),
        ("mixtral", "full", "nothing"),
        ("mixtral", "full", "balanced"),
    ),
    *(("mixtral", "lora", "native"), ("mixtral~linear", "quantised", "nothing")),
    *(
        ("qwen3_moe", "full", "plain"),
        ("qwen3_moe~yarn", "lora", "native"),
        ("qwen3_moe", "quantised", "native"),
    ),
    *(
        ("gpt_oss", "full", "native"),
        ("gpt_oss~yarn", "lora", "nothing"),
        ("gpt_oss", "quantised", "native"),
    ),
    *(("deepseek_v2", "full", "native"), ("deepseek_v2~groups", "full", "nothing")),
    *(("deepseek_v2", "quantised", "plain"), ("deepseek_v2~groups", "lora", "native")),
]
OTHERS: list[Case] = [("llama", "full", "plain")]
OF_FOUR: list[Case] = [
    ("mixtral", "full", "native"),
    ("gpt_oss", "lora", "nothing"),
    ("deepseek_v2", "full", "plain"),
]
WITH_TENSOR: list[Case] = [
    *(("mixtral", "full", "balanced experts"), ("mixtral", "quantised", "native experts")),
    *(("qwen3_moe", "full", "experts"), ("qwen3_moe", "lora", "native experts")),
    *(("gpt_oss", "lora", "experts"), ("gpt_oss", "quantised", "native experts")),
    *(("deepseek_v2", "full", "native experts"), ("deepseek_v2~groups", "lora", "experts")),
    ("llama", "full", "experts"),
]


def said_by(program: str, ranks: int, cases: list[Case], each: int) -> dict[Case, Any]:
    """What all ranks of a program in ``tests/support`` have found, in groups of ``each``."""
    done = run_ring([[sys.executable, SUPPORT / program, json.dumps(cases), str(each)]] * ranks)
    assert all(one.returncode == 0 for one in done), done[0].stderr[-2000:]
    assert len({one.stdout for one in done}) == 1
    return dict(zip(cases, json.loads(done[0].stdout), strict=True))


def assert_right(found: list[float], held: float | None = None) -> None:
    loss, gradients, squares, *more = found
    assert (loss < 1e-6, gradients < 5e-6, squares < 2e-5) == (True, True, True), found
    assert held is None or more[0] == held


@pytest.fixture(scope="module")
def of_two() -> dict[Case, Any]:
    return said_by("expert_ranks.py", 2, [*FAMILIES, *OTHERS], 2)


@pytest.fixture(scope="module")
def with_tensor() -> dict[Case, Any]:
    return said_by("tensor_ranks.py", 2, WITH_TENSOR, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=" ".join)
def test_gradients_are_those_of_the_whole_model_for_all_rows(
    of_two: dict[Case, Any], case: Case
) -> None:
    """Rows and numbers of micro-batches differ between ranks; a rank holds half of the experts."""
    assert_right(of_two[case], held=1 / 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=" ".join)
def test_a_rank_sends_what_its_costs_say(of_two: dict[Case, Any], case: Case) -> None:
    """The choices of routers and the agreements come on top."""
    assert 1 < of_two[case][-1] < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("case", WITH_TENSOR[:-1], ids=" ".join)
def test_ranks_that_divide_matrices_have_whole_experts(
    with_tensor: dict[Case, Any], case: Case
) -> None:
    assert_right(with_tensor[case])


@pytest.mark.slow
@pytest.mark.parametrize("each", [4, 2], ids=["one group", "two groups"])
def test_four_ranks_divide_experts_too(each: int) -> None:
    for found in said_by("expert_ranks.py", 4, OF_FOUR, each).values():
        assert_right(found, held=1 / each)


def test_every_family_is_compared() -> None:
    for cases in (FAMILIES, WITH_TENSOR[:-1]):
        assert {name.partition("~")[0] for name, _, _ in cases} == HAVE_EXPERTS


@pytest.mark.slow
def test_what_has_no_experts_to_divide_is_named(
    of_two: dict[Case, Any], with_tensor: dict[Case, Any]
) -> None:
    assert "kind llama" in of_two[OTHERS[0]]
    assert "no block of this model has experts" in with_tensor[WITH_TENSOR[-1]]
    assert (
        "switch_mlp.gate_proj has 4 experts"
        in said_by("expert_ranks.py", 3, OF_FOUR[:1], 3)[OF_FOUR[0]]
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert")
    write_model(folder / "model", layers=3, hidden=64, experts=4)
    write_model(folder / "quantised", layers=3, hidden=64, experts=4, bits=4)
    write_chat_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    train(place, "alone", "--fine-tune-type", "full", "--iters", "20", "--learning-rate", "0.01")
    return place / "alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        DIVIDED,
        ("-n", "2", "--ep", "2", "--tp", "2"),
        ("-n", "4", *MPI, "--ep", "2"),
        pytest.param(
            ("-n", "4", *RING, "--ep", "2", "--rank-weights", "[1, 2, 4, 1]"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("-n", "4", *RING, "--ep", "4", "--micro-batch-tokens", "96"), marks=pytest.mark.long
        ),
        # Its kernels may have to be built, which takes a minute.
        pytest.param((*DIVIDED, "--compile", "on"), marks=pytest.mark.long),
        pytest.param(
            ("-n", "2", "--ep", "2", "--tp", "2", "--compile", "on"), marks=pytest.mark.long
        ),
    ],
    ids=[
        "ring",
        "matrices too",
        "two groups",
        "on a ring",
        "four",
        "in a graph",
        "matrices too, in a graph",
    ],
)
def test_ranks_train_as_one_process(place: Path, alone: Path, more: tuple[str, ...]) -> None:
    name = "-".join(more).translate({ord(each): None for each in ",[] "})
    train(
        place, name, "--fine-tune-type", "full", "--iters", "20", "--learning-rate", "0.01", *more
    )
    assert_same(alone, place / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more", "ranks"),
    [
        ("quantised", DROPPING, DIVIDED),
        ("model", (*DROPPING, "--grad-checkpoint", "--micro-batch-tokens", "64"), DIVIDED),
        (
            "model",
            ("--fine-tune-type", "full", "--grad-accumulation-steps", "2", "--batch-size", "3"),
            DIVIDED,
        ),
        ("quantised", (*DROPPING, "--batch-size", "1", "--num-layers", "2"), DIVIDED),
        (
            "model",
            ("--packing", "--isolate-documents", "--max-seq-length", "64", "--grad-checkpoint"),
            ("-n", "2", *MPI, "--ep", "2"),
        ),
        ("model", DROPPING, ("-n", "2", "--ep", "2", "--tp", "2")),
        pytest.param(
            *(
                "model",
                ("--fine-tune-type", "full", "--batch-size", "1", "--compile", "on"),
                DIVIDED,
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        "quantised, dropout",
        "recomputed",
        "few rows",
        "one row",
        "packed documents",
        "matrices",
        "graph, one row",
    ],
)
def test_every_way_of_training_does(
    place: Path, model: str, more: tuple[str, ...], ranks: tuple[str, ...]
) -> None:
    name = "".join(
        each for each in "-".join((model, *more, *ranks)) if each.isalnum() or each == "-"
    )
    train(place, f"one{name}", *more, model=model)
    train(place, f"two{name}", *more, *ranks, model=model)
    assert_same(place / f"one{name}", place / f"two{name}")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A training of one process with Adam; ``half`` and ``half-alone`` stopped after two steps of
    it, with divided experts and without.
    """
    train(place, "adam", *ADAM)
    train(place, "half", *ADAM, *DIVIDED, "--iters", "2")
    train(place, "half-alone", *ADAM, "--iters", "2")
    return place / "adam"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "way"),
    [
        ("half", DIVIDED),
        ("half", ()),
        ("half", ("-n", "2", *RING)),
        ("half", ("-n", "2", "--tp", "2")),
        ("half", ("-n", "2", "--tp", "2", "--ep", "2")),
        ("half", ("-n", "2", "--strategy", "fsdp")),
        ("half", ("-n", "4", *RING, "--ep", "4")),
        ("half-alone", DIVIDED),
    ],
    ids=["again", "none", "copies", "matrices", "both", "sharded", "four", "from none"],
)
def test_checkpoints_are_those_of_any_other_division(
    place: Path, whole: Path, saved: str, way: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    run = place / f"{request.node.name} resumed"
    shutil.copytree(place / saved, run)
    train(place, run.name, *ADAM, *way, "--resume", "auto")
    assert_same(whole, run)


@pytest.mark.slow
def test_samples_and_the_loss_of_a_test_are_those_of_one_process(place: Path) -> None:
    assert_same_samples(place, DIVIDED)
    losses: list[float] = []
    for ranks in ((), DIVIDED, ("-n", "2", "--ep", "2", "--tp", "2")):
        words = ("--adapter-path", place / "samples-2", "--batch-size", "3", "--json", *ranks)
        done = run_allhands("eval", "--model", place / "model", "--data", place / "data", *words)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)


@pytest.mark.slow
def test_examples_that_ruin_an_update_are_named_as_by_one_process(place: Path) -> None:
    write_poisoned(place, experts=4)
    more = ("--data", str(place / "with-z"), "--non-finite", "skip", "--val-batches", "0")
    found: list[Any] = []
    for name, ranks in (
        ("skipped-1", ()),
        ("skipped-2", DIVIDED),
        ("skipped-4", ("-n", "4", *MPI, "--ep", "2")),
    ):
        train(place, name, *more, *ranks, model="poisoned")
        found.append(told(place / name, "skipped", "step", "examples"))
    assert found[0] == found[1] == found[2]
    assert {each for examples in found[0][1::2] for each in examples} == {5, 12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("-n", "3", "--ep", "2"), "--ep 2"),
        (("-n", "3", "--ep", "3"), "has 4 experts"),
        (("-n", "2", "--ep", "2", "--optimizer", "muon"), "--ep 2"),
        (("-n", "2", "--ep", "2", "--strategy", "pipeline"), "--tp 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(place: Path, more: tuple[str, ...], words: str) -> None:
    assert words in train(place, "refused", *more, code=2)


@pytest.mark.slow
def test_each_rank_holds_its_part_of_the_experts(place: Path) -> None:
    """Weights, gradients and Adam's two numbers of experts are divided; all else is whole."""
    write_tokenizer(place / "tokenizer")
    (place / "texts").mkdir()
    (place / "texts" / "train.jsonl").write_text(json.dumps({"text": "hello you " * 3}) + "\n")
    shape = "--shape mixtral --experts 8 --experts-per-token 2 --layers 4 --dims 128 --mlp-dims 512 --heads 4"
    words = f"{shape} --kv-heads 4 --block-size 16 --batch-size 2 --iters 3 --val-batches 0 --steps-per-report 1"
    words += " --keep-last 0 --compile off --no-keep-best"
    peaks: list[float] = []
    for name, more in (("whole", ()), ("parts", ("--ep", "2"))):
        places = [
            "--data",
            place / "texts",
            "--tokenizer",
            place / "tokenizer",
            "--adapter-path",
            place / name,
        ]
        done = run_allhands("pretrain", *places, *words.split(), "-n", "2", *RING, *more)
        assert done.returncode == 0, done.stderr
        lines = [
            json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()
        ]
        peaks.append(max(max(line["peak_mlx_bytes"]) for line in lines if line["event"] == "train"))
    experts, rest = 4 * 4 * 8 * 3 * 128 * 512, 4 * (4 * 4 * 128**2 + 2 * 259 * 128)
    assert peaks[0] > 4 * experts
    # What belongs to experts is half of it; all else is there four times, and twice more in its sum
    # over ranks.
    assert peaks[1] < (peaks[0] + 6 * rest) / 2
