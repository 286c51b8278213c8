"""Each error has a code that is the same in every version, and that goes along wherever the error goes."""

from __future__ import annotations

import json
import pickle
import re
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import error_codes
import pytest

import allhands
from allhands.cluster.environment import LaunchPlace
from allhands.cluster.frames import FROM_AGENT
from allhands.cluster.runfiles import RunFiles
from allhands.cluster.worker import WorkerContext
from allhands.data.outcome import LeftOut
from allhands.errors import AllhandsError, ConfigError, DataError, StorageError, behind_import
from allhands.infer.dialogue import RemoteConversation, Wire, answer
from allhands.io.files import storage_error

_WELL_FORMED = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+){0,4}")


@pytest.mark.slow
def test_each_error_of_the_source_has_a_code() -> None:
    found = error_codes.constructions()
    assert len(found) > 700
    assert [one.place for one in found if not one.has_code] == []


def test_ctrl_c_within_an_import_is_no_error_of_it() -> None:
    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises((RuntimeError, KeyboardInterrupt)) as raised:
        type("Made", (), {"field": Field()})  # Python 3.12 raises what it was
    assert isinstance(behind_import(raised.value), KeyboardInterrupt)
    other = RuntimeError("caused by another error")
    other.__cause__ = ValueError()
    assert behind_import(other) is other


def test_codes_are_a_few_words_with_hyphens() -> None:
    codes = {code for one in error_codes.constructions() for code in one.codes}
    assert 150 < len(codes) < 350
    assert [code for code in sorted(codes) if not _WELL_FORMED.fullmatch(code)] == []


def test_each_code_has_one_exit_code() -> None:
    kinds, exits = error_codes.exit_codes(), dict[str, dict[int, str]]()
    for one in error_codes.constructions():
        for code in one.codes:
            exits.setdefault(code, {})[kinds[one.kind]] = one.place
    assert {code: places for code, places in exits.items() if len(places) > 1} == {}


def test_what_makes_an_error_without_a_code_is_found(tmp_path: Path) -> None:
    """The three tests above can fail."""
    (tmp_path / "module.py").write_text(
        "class Own(DataError):\n"
        "    def __init__(self):\n"
        "        super().__init__('it is empty', code='data-empty')\n"
        "def f(problem, code):\n"
        "    what = f'{problem} is wrong'\n"
        "    raise ConfigError(what, where='--x')\n"
        "def g(x, code):\n"
        "    raise Own()\n"
        "    raise ModelError('a' if x else f'b {x} cd', code='one' if x else 'two')\n"
        "    raise DataError(x.message, code=code)\n"
    )
    found = error_codes.constructions(tmp_path)
    assert [(one.place, one.kind, one.codes, one.has_code) for one in found] == [
        ("module.py:3", "Own", ("data-empty",), True),
        ("module.py:6", "ConfigError", (), False),
        ("module.py:9", "ModelError", ("one",), True),
        ("module.py:9", "ModelError", ("two",), True),
        ("module.py:10", "DataError", (), True),
    ]
    assert found[1].message == "... is wrong"


def test_errors_keep_their_code_between_processes() -> None:
    error = DataError("it is empty", code="data-empty", where="train.jsonl:3", hint="fill it")
    other = pickle.loads(pickle.dumps(error))
    assert vars(other) == vars(error)
    assert (type(other), str(other)) == (DataError, str(error))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("it is empty", code="data-empty", where="data", hint="fill it"), "data-empty"),
        (ValueError("a defect"), None),
    ],
)
def test_the_error_file_of_a_rank_has_the_code(
    tmp_path: Path, error: Exception, code: str | None
) -> None:
    launch = LaunchPlace("allhands", 1, 2, 1, 2, "ring", "a test")
    WorkerContext(launch, tmp_path, tmp_path)._write_error_file(error, 3)
    written = json.loads((tmp_path / "error-rank-1.json").read_text())
    assert written["code"] == code
    # The supervisor takes it from there.
    read = RunFiles(tmp_path, tmp_path, counters=[]).error(1)
    assert read is not None
    assert read["code"] == code


def test_agents_send_the_code_of_an_error() -> None:
    frame = {"type": "ConfigError", "message": "no", "code": "path-missing", "where": None}
    assert FROM_AGENT["refused"]({**frame, "hint": None})
    assert not FROM_AGENT["refused"]({**frame, "code": None, "hint": None})


def test_a_row_that_is_left_out_has_the_code(tmp_path: Path) -> None:
    with (tmp_path / "left-out.jsonl").open("wb") as file:
        LeftOut(file).add(DataError("no role", code="role-unknown", where="a.jsonl:2"), {"x": 1})
    assert json.loads((tmp_path / "left-out.jsonl").read_bytes())["code"] == "role-unknown"


def test_the_dialogue_of_ranks_hands_on_the_code() -> None:
    class Refusing:
        def ask(self, text: str) -> Generator[str]:
            yield text[:0]
            raise ConfigError("too long", code="prompt-too-long", where="--prompt")

        def reset(self) -> None: ...

    here, there = map(Wire, socket.socketpair())
    try:
        answer(Refusing(), "hello", there, lambda: False)
        with pytest.raises(AllhandsError) as caught:
            list(RemoteConversation(here).ask("hello"))
    finally:
        here.close()
        there.close()
    assert (caught.value.code, caught.value.where) == ("prompt-too-long", "--prompt")
    assert caught.value.exit_code == ConfigError.exit_code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"iters": 10, "epochs": 1.0}, "options-conflict"),
        ({"pp_split": "1,2"}, "option-without-effect"),
        ({"itres": 10}, "option-unknown"),
        ({"batch_size": 0}, "value-out-of-range"),
        ({"batch_size": "many"}, "value-of-wrong-type"),
        ({"optimizer": "adm"}, "value-unknown"),
        ({"num_layers": 0}, "value-invalid"),
        ({"lora_parameters": {"rnk": 8}}, "option-unknown"),
        ({"data": "no-such-directory"}, "data-missing"),
    ],
)
def test_what_finetune_raises_has_a_code(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, options: Any, code: str
) -> None:
    given = {"model": str(tiny_model), "data": str(tiny_data), "adapter_path": str(tmp_path / "a")}
    with pytest.raises(AllhandsError) as caught:
        allhands.finetune(**{**given, **options})
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("number", "code", "exit_code"),
    [
        (28, "disk-full", 5),
        (13, "permission-denied", 5),
        (17, "place-taken", 2),
        (5, "file-not-written", 5),
    ],
)
def test_errors_of_the_system_have_codes(number: int, code: str, exit_code: int) -> None:
    error = storage_error(Path("out"), OSError(number, "why"))
    assert (error.code, error.exit_code) == (code, exit_code)
    assert isinstance(error, StorageError)
