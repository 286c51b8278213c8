"""Records to a store: the same as rendering one by one, whoever renders, and what becomes of
errors.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from allhands.data import tokenise
from allhands.data.records import Record
from allhands.data.render import Rendered
from allhands.data.store import StoredTokens, TokenSetReport, open_store
from allhands.data.tokenise import (
    Rendering,
    every_core,
    fill_store,
    num_helpers,
    tokenizer_facts,
    vocabulary_of,
)
from allhands.data.tokens import TokenSet
from allhands.errors import ConfigError, DataError

VOCABULARY = 259
NOON = datetime(2026, 3, 1, 12)
WORDS = [
    "ahoy",
    "matie",
    "the",
    "sea",
    "is",
    "wide",
    "and",
    "the",
    "rum",
    "is",
    "gone",
    "café",
    "漢字",
    "🏴",
]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import write_tokenizer  # not where helpers import this module: it needs MLX

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


def load(path: Path | str) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(path))


def load_and_note(path: str, notes: str) -> Any:
    """In a helper: the tokenizer, and a file that says who has loaded it."""
    (Path(notes) / str(os.getpid())).touch()
    return load(path)


def load_dated(path: str, notes: str) -> Any:
    """The tokenizer with a template that writes the time."""
    tokenizer = load_and_note(path, notes)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M:%S') }}" + tokenizer.chat_template
    return tokenizer


def killed(_path: str, parent: int) -> Any:
    """A helper that the system ends, as it does when memory is short."""
    assert os.getpid() != parent
    os.kill(os.getpid(), signal.SIGKILL)


def chat(line: int, **answer: Any) -> Record:
    question = " ".join(WORDS[(line + i) % len(WORDS)] for i in range(line % 9 + 1))
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": question[::-1], **answer},
    ]
    return Record("chat", messages=messages, source="train.jsonl", line=line)


def mixed(count: int) -> list[Record]:
    """Chats and completions in turn, some of them with an answer that trains nothing."""
    records: list[Record] = []
    for line in range(1, count + 1):
        if line % 3 == 0:
            records.append(
                Record(
                    "completion",
                    prompt=WORDS[line % 5],
                    completion="aye",
                    source="t.jsonl",
                    line=line,
                )
            )
        else:
            records.append(chat(line, **({"weight": 0} if line % 7 == 0 else {})))
    return records


def stored(
    records: list[Record], rendering: Rendering, progress: Any = tokenise.no_progress
) -> StoredTokens:
    return open_store(
        uuid.uuid4().hex,
        VOCABULARY,
        lambda writer: fill_store(records, rendering, writer, progress),
    )


def examples_of(made: StoredTokens) -> list[tuple[list[int], list[bool]]]:
    return [
        (ids.tolist(), mask.tolist())
        for ids, mask in map(made.tokens.example, range(len(made.tokens)))
    ]


def one_by_one(records: list[Record], rendering: Rendering) -> list[Rendered]:
    renderer = rendering.renderer()
    return [renderer.render(record) for record in records]


def assert_as_one_by_one(made: StoredTokens, records: list[Record], rendering: Rendering) -> None:
    every = one_by_one(records, rendering)
    kept = [one for one in every if one.mask.any()]
    left_out = [
        record.where for record, one in zip(records, every, strict=True) if not one.mask.any()
    ]
    assert examples_of(made) == [(one.tokens.tolist(), one.mask.tolist()) for one in kept]
    report = made.report
    assert (report.num_records, report.num_examples, report.num_dropped) == (
        len(records),
        len(kept),
        len(left_out),
    )
    assert report.dropped == tuple(left_out[:5])
    assert report.num_truncated == sum(one.truncated > 0 for one in kept)
    assert report.num_truncated_tokens == sum(one.truncated for one in kept)
    assert report.num_tokens == sum(len(one.tokens) for one in kept)
    assert report.num_trained_tokens == sum(int(one.mask.sum()) for one in kept)
    assert report.build_s > 0


@pytest.mark.parametrize("limit", [None, 1000, 60])
@pytest.mark.parametrize("mask_prompt", [True, False])
def test_as_rendering_one_by_one(
    tokenizer_path: Path, mask_prompt: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "CHUNK_RECORDS", 7)
    rendering = Rendering(load(tokenizer_path), mask_prompt, "assistant", limit)
    records = mixed(60)
    told: list[tuple[int, int]] = []
    made = stored(records, rendering, lambda done, tokens: told.append((done, tokens)))
    assert_as_one_by_one(made, records, rendering)
    # What the cases are there for.
    assert (made.report.num_dropped > 5) == mask_prompt
    assert (made.report.num_truncated > 0) == (limit == 60)
    assert [done for done, _ in told] == [*range(7, 57, 7), 60]
    assert told == sorted(told)
    assert told[-1][1] == made.report.num_tokens


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers from the second chunk on, and small chunks."""
    monkeypatch.setattr(tokenise, "ALONE_S", 0)
    monkeypatch.setattr(tokenise, "CHUNK_RECORDS", 7)
    monkeypatch.setattr(tokenise, "num_helpers", lambda: 2)


def helper_processes() -> list[psutil.Process]:
    """Those that live; the library keeps a small process that removes what they leave."""
    return [
        process
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE
        and any("popen_loky" in part for part in process.cmdline())
    ]


@pytest.mark.slow
def test_helpers_give_the_same_in_the_same_order(
    helpers: None, tokenizer_path: Path, tmp_path: Path
) -> None:
    reload = (load_and_note, (str(tokenizer_path), str(tmp_path)))
    rendering = Rendering(load(tokenizer_path), True, "assistant", 60, reload)
    records = mixed(150)
    made = stored(records, rendering)
    noted = {int(path.name) for path in tmp_path.iterdir()}
    assert noted
    assert os.getpid() not in noted
    assert_as_one_by_one(made, records, rendering)
    assert helper_processes() == []


@pytest.mark.parametrize("with_helpers", [False, True])
def test_an_error_names_its_line(helpers: None, with_helpers: bool, tokenizer_path: Path) -> None:
    reload = (load, (str(tokenizer_path),)) if with_helpers else None
    rendering = Rendering(load(tokenizer_path), True, "assistant", 60, reload)
    records = mixed(80)
    records[40] = chat(41, weight=0.5)
    records[60] = chat(61, weight="x")
    with pytest.raises(DataError) as wanted:
        rendering.renderer().render(records[40])
    with pytest.raises(DataError, match="0\\.5") as caught:
        stored(records, rendering)
    assert caught.value.where == "train.jsonl:41"
    assert str(caught.value) == str(wanted.value)
    assert helper_processes() == []


def test_helpers_that_are_killed_are_not_needed(helpers: None, tokenizer_path: Path) -> None:
    reload = (killed, (str(tokenizer_path), os.getpid()))
    rendering = Rendering(load(tokenizer_path), True, "assistant", 60, reload)
    records = mixed(60)
    assert_as_one_by_one(stored(records, rendering), records, rendering)
    assert helper_processes() == []


def test_plain_text_needs_no_helper(helpers: None, tokenizer_path: Path) -> None:
    # It would be ended at once: the tokenizer library uses all cores by itself.
    rendering = Rendering(
        load(tokenizer_path), False, "all", None, (killed, (str(tokenizer_path), os.getpid()))
    )
    records = [
        Record("text", text=" ".join(WORDS[: i % 11 + 1]), source="t.jsonl", line=i)
        for i in range(1, 41)
    ]
    assert_as_one_by_one(stored(records, rendering), records, rendering)


def test_nothing_to_train_on(tokenizer_path: Path) -> None:
    rendering = Rendering(load(tokenizer_path), True, "assistant", 1000)
    with pytest.raises(DataError, match="none of the 2 examples") as caught:
        stored([chat(7, weight=0), chat(8, weight=0)], rendering)
    assert caught.value.where == "train.jsonl:7"
    with pytest.raises(DataError, match="none of the 0 examples"):
        stored([], rendering)


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 9), st.integers(1, 100))
def test_chunks_are_the_records(sizes: list[int], most: int, characters: int) -> None:
    records = [Record("text", text="x" * size, source="t", line=i) for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise, "CHUNK_RECORDS", most)
        patch.setattr(tokenise, "CHUNK_CHARACTERS", characters)
        chunks = list(tokenise._chunks(iter(records)))
    assert [record for chunk in chunks for record in chunk] == records
    for chunk in chunks:
        assert 1 <= len(chunk) <= most
        # Full only with its last record.
        assert sum(len(record.text or "") for record in chunk[:-1]) < characters


# --- facts ----------------------------------------------------------------------------------------


def test_facts_are_those_of_the_tokenizer(tokenizer_path: Path) -> None:
    facts = tokenizer_facts(load(tokenizer_path), NOON)
    assert tokenizer_facts(load(tokenizer_path), NOON) == facts
    assert json.loads(json.dumps(facts)) == facts
    assert vocabulary_of(load(tokenizer_path)) == VOCABULARY


def changed_template(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template + " "


def named_templates(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}


def no_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None


def other_end(tokenizer: Any) -> None:
    tokenizer.eos_token = "<|endoftext|>"


def other_pad(tokenizer: Any) -> None:
    # A template may write any of the special tokens.
    tokenizer.pad_token = "<|im_end|>"


def new_token(tokenizer: Any) -> None:
    tokenizer.add_tokens(["ahoy"])


def cut(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_truncation(5)


CHANGES = [changed_template, named_templates, no_template, other_end, other_pad, new_token, cut]


def test_facts_change_with_what_changes_tokens(tokenizer_path: Path) -> None:
    seen = [tokenizer_facts(load(tokenizer_path), NOON)]
    for change in CHANGES:
        tokenizer = load(tokenizer_path)
        change(tokenizer)
        seen.append(tokenizer_facts(tokenizer, NOON))
    texts = [json.dumps(facts, sort_keys=True) for facts in seen]
    assert len(set(texts)) == len(CHANGES) + 1


# (template, whether another second of the same day makes other tokens)
DATED = [
    ("{{ strftime_now('%d %b %Y') }}", False),
    (
        '{% if strftime_now is defined %}{% set day = strftime_now("%d %b %Y") %}{{ day }}{% endif %}',
        False,
    ),
    ("{{ strftime_now('%H:%M:%S') }}", True),
    # What is written cannot be read off the template: it counts as the time itself.
    ("{% set form = '%d %b' %}{{ strftime_now(form) }}", True),
    ("{% set now = strftime_now %}{{ now('%H') }}", True),
]


@pytest.mark.parametrize(("dated", "by_the_second"), DATED)
def test_facts_hold_the_date_only_of_templates_that_write_it(
    tokenizer_path: Path, dated: str, by_the_second: bool
) -> None:
    def facts(written: str, moment: datetime) -> dict[str, Any]:
        tokenizer = load(tokenizer_path)
        tokenizer.chat_template = written + tokenizer.chat_template
        return Rendering(tokenizer, True, "assistant", 60, moment=moment).facts()

    later = [NOON + timedelta(seconds=1), NOON + timedelta(days=1, hours=1)]
    assert all(facts("", NOON) == facts("", moment) for moment in later)
    assert facts(dated, NOON) == facts(dated, NOON)
    assert (facts(dated, NOON) != facts(dated, later[0])) == by_the_second
    assert facts(dated, NOON) != facts(dated, later[1])


def test_helpers_write_the_date_of_the_run(
    helpers: None, tokenizer_path: Path, tmp_path: Path
) -> None:
    reload = (load_dated, (str(tokenizer_path), str(tmp_path)))
    tokenizer = load_dated(str(tokenizer_path), str(tmp_path))
    rendering = Rendering(tokenizer, True, "assistant", 1000, reload, moment=NOON)
    records = mixed(60)
    made = stored(records, rendering)
    assert len(list(tmp_path.iterdir())) > 1
    assert all("01 Mar 2026 12:00:00" in tokenizer.decode(ids) for ids, _ in examples_of(made))
    assert_as_one_by_one(made, records, rendering)


@pytest.mark.parametrize(
    "other", [{"mask_prompt": False}, {"train_on": "last"}, {"max_seq_length": None}]
)
def test_facts_of_a_rendering(tokenizer_path: Path, other: dict[str, Any]) -> None:
    values: dict[str, Any] = {"mask_prompt": True, "train_on": "assistant", "max_seq_length": 60}
    tokenizer = load(tokenizer_path)
    base = Rendering(tokenizer, **values).facts()
    assert Rendering(tokenizer, **values, reload=(load, ("x",))).facts() == base
    assert Rendering(tokenizer, **(values | other)).facts() != base


# --- cores ----------------------------------------------------------------------------------------


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This thread on one core of those that it may use, as a rank of several is; tells the others."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores that can be chosen")
    every = os.sched_getaffinity(0)
    monkeypatch.setenv("ALLHANDS_HOST_CORES", ",".join(map(str, sorted(every))))
    os.sched_setaffinity(0, {min(every)})
    yield every
    os.sched_setaffinity(0, every)


def leave_with(error: Exception | None) -> None:
    with every_core():
        if error:
            raise error


def test_every_core_is_for_the_block(one_core: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_helpers() == 1
    with every_core():
        assert os.sched_getaffinity(0) == one_core
        assert num_helpers() == min(
            len(one_core), psutil.virtual_memory().available // tokenise.HELPER_BYTES
        )
    assert os.sched_getaffinity(0) == {min(one_core)}
    with pytest.raises(KeyError):
        leave_with(KeyError())
    assert os.sched_getaffinity(0) == {min(one_core)}
    for nonsense in ("", "x", "99999", "-1"):
        monkeypatch.setenv("ALLHANDS_HOST_CORES", nonsense)
        leave_with(None)
        assert os.sched_getaffinity(0) == {min(one_core)}, nonsense


def test_tokenising_gives_the_cores_back(one_core: set[int], tokenizer_path: Path) -> None:
    seen: list[set[int]] = []
    rendering = Rendering(load(tokenizer_path), True, "assistant", 1000)
    stored([chat(1)], rendering, lambda _done, _tokens: seen.append(os.sched_getaffinity(0)))
    assert seen == [one_core]
    assert os.sched_getaffinity(0) == {min(one_core)}
    with pytest.raises(DataError):
        stored([chat(1, weight=9)], rendering)
    assert os.sched_getaffinity(0) == {min(one_core)}


def test_texts_in_a_mixture_are_counted_and_nothing_but_texts_cannot_be_masked(
    tokenizer_path: Path,
) -> None:
    masking = Rendering(load(tokenizer_path), True, "assistant", 64)
    texts = [Record("text", text="ahoy matie", source="t.jsonl", line=n) for n in (1, 2)]
    made = stored([*mixed(4), *texts], masking)
    assert (made.report.num_texts, made.report.num_records) == (2, 6)
    _, mask = made.tokens.example(len(made.tokens) - 1)
    assert mask.tolist() == [False] + [True] * (len(mask) - 1)
    with pytest.raises(ConfigError) as caught:
        stored(texts, masking)
    assert caught.value.code == "option-without-effect"
    assert caught.value.where == "--mask-prompt"
    assert len(stored(texts, Rendering(load(tokenizer_path), True, "all", 64)).tokens) == 2


@pytest.mark.slow
def test_helpers_leave_no_warning_behind_an_error(tiny_model: Path, tmp_path: Path) -> None:
    """Enough chats that helpers have begun."""
    from tiny import run_allhands

    row = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "aye"}]}\n'
    with (tmp_path / "train.jsonl").open("w") as file:
        file.writelines(row % line for line in range(40_000))
        file.write("{\n")
        file.writelines(row % line for line in range(40_000))
    done = run_allhands("train", "--model", tiny_model, "--data", tmp_path, "--iters", 1)
    assert done.returncode == 3
    assert "train.jsonl:40001" in done.stderr
    assert "Warning" not in done.stderr


HELPED = """
import os, time
from loky import ProcessPoolExecutor
from allhands.data.tokenise import _end_with
pool = ProcessPoolExecutor(1, initializer=_end_with, initargs=(os.getpid(),))
print(pool.submit(os.getpid).result(), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_helper_ends_with_the_process_that_it_helps_however_that_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HELPED], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        helper = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.wait()
        helper.wait(timeout=20)
    assert not helper.is_running()


@pytest.mark.parametrize(("bos", "targets"), [(0, 5), (None, 7), (9, 7)])
def test_a_begin_token_is_never_predicted_and_has_no_bytes(
    tmp_path: Path, bos: int | None, targets: int
) -> None:
    """Two texts of 11 bytes; the other first tokens have bytes of their text."""
    tokens = np.array([0, 5, 6, 1, 0, 7, 1], dtype=np.int32)
    mask = np.array([0, 1, 1, 1, 0, 1, 1], dtype=bool)
    made = TokenSet.of(tokens, mask, np.array([0, 4, 7]))
    report = TokenSetReport(2, 2, 2, 0, 0, 0, (), 7, 5, 0.0, num_text_bytes=11)
    stored_tokens = StoredTokens(made, report, "", tmp_path, built=True)
    assert stored_tokens.targets_per_byte(bos) == pytest.approx(targets / 11)


def test_empty_texts_are_left_out_and_counted(tokenizer_path: Path) -> None:
    texts = ["ahoy there", "", "  \n", "a ship", ""]
    records = [
        Record("text", text=text, source="t.parquet", line=line)
        for line, text in enumerate(texts, start=1)
    ]
    rendering = Rendering(load(tokenizer_path), False, "assistant", None)
    made = stored(records, rendering)
    assert examples_of(made) == examples_of(stored([records[0], records[3]], rendering))
    report = made.report
    assert (report.num_records, report.num_examples, report.num_dropped) == (5, 2, 3)
    assert report.dropped == ("t.parquet:2", "t.parquet:3", "t.parquet:5")
    assert report.num_text_bytes == len("ahoy there" + "a ship")
    assert report.tokens_per_byte == pytest.approx(report.num_tokens / 16)
    with pytest.raises(DataError, match="none of the 2 examples has a token to train on") as caught:
        stored(records[1:3], rendering)
    assert caught.value.hint == "check that the texts are not empty"
