"""Who is to blame where computers disagree, as tables: what each has, who is named, and what is to
be done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from computers import cluster, facts, host
from twins import run_ranks

from allhands.cluster.doctor.run import findings_of
from allhands.cluster.setup import plan
from allhands.cluster.setup.state import Installed, SetupHostState, SetupSource, WantedSetup
from allhands.distributed.agree import Witness, agree
from allhands.distributed.blame import (
    SOFTWARE,
    BlameVerdict,
    Circumstances,
    MisfitError,
    Statement,
    init_command,
    judge,
)
from allhands.runtime.versions import SOURCE, merely_different, required, unequal

HAVE = {
    "python": "3.11.7",
    "allhands": "0.1.0",
    SOURCE: "5" * 64,
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
}
GIVEN = Circumstances("a", "--hostfile hosts.json", "models/m", "data/d")
SUM, OTHER, THIRD = "a" * 64, "b" * 64, "c" * 64


def computer(
    name: str, weights: str = SUM, train: str = SUM, rank: int = 8, **software: str
) -> Statement:
    have = {**HAVE, **{key.replace("_", "-"): value for key, value in software.items()}}
    facts: dict[str, Any] = {
        "config": {"lora_parameters": {"rank": rank}},
        "parameters": {"q": [rank]},
        "model": {"weights": weights, "config": {"rope_theta": 10000}},
        "data": {"train": train, "valid": None},
        SOFTWARE: required(have),
    }
    files = {
        "model/model.safetensors": weights,
        "model/config.json": SUM,
        "data/train.jsonl": train,
    }
    return Statement(name, facts, files, {"model": f"/{name}/m", "data": f"/{name}/d"}, have)


def verdict(*statements: Statement, given: Circumstances = GIVEN) -> BlameVerdict:
    found = judge(statements, given)
    assert found is not None
    return found


def test_who_has_the_same_fits() -> None:
    assert judge([computer("a"), computer("b"), computer("c")], GIVEN) is None
    # Another patch of Python, and other libraries that make the same tokens.
    assert (
        judge(
            [computer("a"), computer("b", python="3.11.2", transformers="4.9", numpy="1.0")], GIVEN
        )
        is None
    )


@pytest.mark.parametrize("odd", ["a", "b", "c"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": OTHER}, "model.safetensors"),
        ({"train": OTHER}, "train.jsonl"),
        ({"rank": 16}, "config.lora_parameters.rank"),
        ({"mlx": "0.31.0"}, "mlx 0.31.0"),
        ({"mlx_lm": "0.31.0"}, "mlx-lm 0.31.0"),
        ({"mlx_cpu": "0.31.0"}, "mlx-cpu 0.31.0"),
        ({"python": "3.12.7"}, "Python 3.12.7"),
        ({"allhands_source": OTHER}, "allhands 0.1.0"),
    ],
)
def test_the_minority_is_named_whoever_it_is(changes: dict[str, Any], words: str, odd: str) -> None:
    found = verdict(*(computer(name, **(changes if name == odd else {})) for name in "abc"))
    assert found.misfits == (odd,)
    assert found.message.startswith(f"{odd} does not match ")
    assert words in found.message
    assert "; " not in found.message  # the parameters only follow


def test_what_is_to_be_done() -> None:
    assert verdict(computer("a"), computer("b", OTHER), computer("c")).hint == (
        "allhands cluster sync --hostfile hosts.json --model models/m"
    )
    assert verdict(computer("a"), computer("b", train=OTHER), computer("c")).hint.endswith(
        "--data data/d"
    )
    assert (
        verdict(computer("a"), computer("b", mlx="1"), computer("c")).hint
        == "allhands cluster init --hosts b"
    )
    # From the computer at which the person sits the wrong copy would go to all, and to it the
    # environment cannot come.
    assert verdict(computer("a", OTHER), computer("b"), computer("c")).hint == (
        "scp -p b:/b/m/model.safetensors /a/m/model.safetensors"
    )
    assert (
        verdict(computer("a", mlx="1"), computer("b"), computer("c")).hint
        == "allhands cluster init --hosts b,c"
    )
    both = verdict(computer("a"), computer("b", OTHER, mlx="1"), computer("c", train=OTHER)).hint
    assert both == (
        "allhands cluster init --hosts b; allhands cluster sync --hostfile hosts.json --model models/m --data data/d"
    )
    assert (
        init_command(["b"], "--hostfile lab.json")
        == "allhands cluster init --hosts b --hostfile lab.json"
    )


def test_other_tokens_of_the_same_data_are_the_libraries_doing() -> None:
    one = computer("a", transformers="5.0")
    other = computer("b", train=OTHER, transformers="4.9", executable="/b/python")
    files = {"data/train.jsonl": SUM, "tokenizer/tokenizer.json": SUM}
    statements = [
        Statement(s.name, s.facts, files, s.places, s.software) for s in (one, other, computer("c"))
    ]
    statements[2] = Statement("c", one.facts, files, one.places, one.software)
    found = verdict(*statements)
    assert found.misfits == ("b",)
    assert "transformers 4.9" in found.message
    assert found.hint == "ssh b '/b/python -m pip install transformers==5.0'"
    made = [{**files, "tokenizer/tokenizer.json": one.facts["data"]["train"]} for one in statements]
    found = verdict(
        *(
            Statement(one.name, one.facts, hashes)
            for one, hashes in zip(statements, made, strict=True)
        )
    )
    assert "b's tokenizer.json" in found.message
    assert found.hint.endswith("--model models/m")


@pytest.mark.parametrize(
    "statements",
    [
        [computer("a"), computer("b", OTHER)],
        [computer("a"), computer("b"), computer("c", OTHER), computer("d", OTHER)],
        [computer("a"), computer("b", OTHER), computer("c", THIRD)],
    ],
)
def test_where_no_value_is_the_most_frequent_nobody_is_blamed(statements: list[Statement]) -> None:
    found = verdict(*statements)
    assert found.misfits == ()
    assert "do not match" in found.message
    for one in statements:
        assert one.name in found.message
        assert one.files["model/model.safetensors"][:8] in found.message
    # The launcher's side is what would be sent.
    assert found.hint == "allhands cluster sync --hostfile hosts.json --model models/m"


def test_computers_may_differ_in_several_things() -> None:
    found = verdict(
        computer("a"),
        computer("b", OTHER, OTHER),
        computer("c"),
        computer("d", rank=4),
        computer("e"),
    )
    assert found.misfits == ("b", "d")
    assert "b and d do not match a, c and e" in found.message
    # One thing is settled, another is not: without b the others still disagree.
    found = verdict(
        computer("a", OTHER), computer("b", train=OTHER), computer("c"), computer("d", OTHER)
    )
    assert found.misfits == ()
    # Of five, two have the same and three each another one.
    weights = dict(zip("abcde", (SUM, OTHER, THIRD, SUM, "d" * 64), strict=True))
    found = verdict(*(computer(name, value) for name, value in weights.items()))
    assert found.misfits == ("b", "c", "e")


def test_who_has_trained_together_is_right_also_against_more() -> None:
    trusted = Circumstances("a", "--hostfile hosts.json", trusted=frozenset({"a"}))
    found = verdict(computer("a"), computer("b", OTHER), computer("c", OTHER), given=trusted)
    assert found.misfits == ("b", "c")
    # Unless they do not agree themselves any more.
    trusted = Circumstances("a", "--hostfile hosts.json", trusted=frozenset({"a", "b"}))
    assert verdict(
        computer("a"), computer("b", OTHER), computer("c", OTHER), given=trusted
    ).misfits == ("a",)


# --- by ranks -------------------------------------------------------------------------------------


def told(
    computers: list[str], facts: list[dict[str, Any]], leads: list[bool] | None = None
) -> MisfitError:
    firsts = leads or [computers.index(name) == rank for rank, name in enumerate(computers)]

    def work(communicator: Any) -> None:
        rank = communicator.rank
        agree(
            communicator,
            facts[rank],
            Witness(computers[rank], firsts[rank], lambda sections: {"files": {}}),
        )

    errors = run_ranks(len(facts), work)
    assert all(isinstance(error, MisfitError) and error.exit_code == 7 for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], MisfitError)
    return errors[0]


def test_the_ranks_of_a_computer_have_one_voice() -> None:
    # Three ranks of one computer are no majority over one each of two others.
    error = told(["a", "a", "a", "b", "c"], [{"seed": 1}] * 3 + [{"seed": 2}] * 2)
    assert error.misfits == (0, 1, 2)
    assert "a does not match b and c" in error.message
    error = told(["a", "a", "b", "b"], [{"seed": 1}] * 2 + [{"seed": 2}] * 2)
    assert error.misfits == ()
    assert "a and b do not match" in error.message


def test_ranks_are_told_apart_where_computers_do_not() -> None:
    assert (
        "the ranks disagree"
        in told(["a", "a", "a"], [{"seed": 1}, {"seed": 2}, {"seed": 1}]).message
    )
    error = told(["a", "a", "b"], [{"seed": 1}, {"seed": 2}, {"seed": 1}])
    assert error.misfits == (1,)
    assert "2 on rank 1 on a" in error.message
    # Two computers of one name.
    error = told(["a", "a", "a"], [{"seed": 1}, {"seed": 2}, {"seed": 1}], leads=[True] * 3)
    assert error.misfits == (1,)


# --- the rule -------------------------------------------------------------------------------------


RULE: list[tuple[dict[str, str], list[str], list[str]]] = [
    ({}, [], []),
    ({"python": "3.11.2"}, [], ["python"]),
    ({"python": "3.12.7"}, ["python"], []),
    ({SOURCE: OTHER}, ["allhands"], []),
    ({"allhands": "0.0.9"}, [], []),
    ({"mlx": "0.31.0"}, ["mlx"], []),
    ({"mlx-cpu": "0.31.0"}, ["mlx"], []),
    ({"mlx-lm": "0.31.0"}, ["mlx-lm"], []),
    ({"transformers": "4.9"}, [], ["transformers"]),
    ({"numpy": "1.0"}, [], []),
]


@pytest.mark.parametrize(("changes", "forbidden", "noted"), RULE)
def test_what_must_be_equal(
    changes: dict[str, str], forbidden: list[str], noted: list[str]
) -> None:
    one, other = HAVE | {"transformers": "5.0"}, {**HAVE, "transformers": "5.0", **changes}
    assert unequal(one, other) == unequal(other, one) == forbidden
    assert merely_different(one, other) == noted
    # A back-end that another computer's device needs.
    assert unequal(one, {**other, "mlx-metal": other["mlx"]}) == forbidden


@pytest.mark.parametrize(("changes", "forbidden", "noted"), RULE)
def test_init_check_and_train_go_by_one_rule(
    changes: dict[str, str], forbidden: list[str], noted: list[str]
) -> None:
    usual = {**HAVE, "mlx-cpu": "0.32.4", "transformers": "5.0", "numpy": "2.0"}
    other = {**usual, **changes}
    # init: is an interpreter that is there taken as it is?
    packages = {
        name: version
        for name, version in usual.items()
        if name not in ("python", SOURCE, "allhands", "mlx-cpu")
    }
    wanted = WantedSetup(
        SetupSource("0.1.0", Path("a.whl"), usual[SOURCE]), (3, 11), versions=packages
    )
    there = {name: version for name, version in other.items() if name not in ("python", SOURCE)}
    numbers = tuple(map(int, other["python"].split(".")))
    state = SetupHostState(
        "node2",
        home="/me",
        env_dir="/me/env",
        installed=(Installed("/own/python", numbers, there, other[SOURCE]),),
    )
    assert (plan.fitting(state, wanted) is None) == bool(forbidden)
    # check: does it stop training, or is it a note?
    told = [
        {"python_version": have["python"], "python_path": "/own/python", "versions": have}
        for have in (usual, other, usual)
    ]
    found = findings_of(cluster(*(host(i, facts(i, python=one)) for i, one in enumerate(told, 1))))
    expected = ["stop"] * len(forbidden) + ["note"] * len(noted)
    assert [(one.check, one.severity, one.hosts) for one in found] == [
        ("versions", s, ("node2",)) for s in expected
    ]
    # train, before anything is loaded.
    statements = [
        Statement(name, {SOFTWARE: required(have)}, software=have)
        for name, have in zip("abc", (usual, other, usual), strict=True)
    ]
    verdict = judge(statements, GIVEN)
    assert (verdict is not None and verdict.misfits == ("b",)) == bool(forbidden)
