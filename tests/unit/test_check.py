"""What ``allhands data check`` finds, against counts made by hand; how it shows examples; its exit
codes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, THINKING, WORDS, ZEPHYR, load_folder, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from allhands.cli.check import SIGNS, run_text
from allhands.cli.commands import function_of
from allhands.cli.parser import App
from allhands.data.check import (
    CheckOptions,
    DataFinding,
    Examiner,
    SplitReport,
    check,
    template_findings,
)
from allhands.data.findings import WORDS as FINDINGS
from allhands.data.findings import words_of
from allhands.data.records import Record
from allhands.data.render import Renderer
from allhands.data.shapes import Example
from allhands.errors import ConfigError, DataError
from allhands.model.tokenizer import vocabulary_of

# The tiny model's tokenizer has a token a byte; its template writes <|im_start|>user\n,
# <|im_end|>\n and so on.
OVERHEAD = 6 + 2 + 11 + 2
QUESTIONS = ("How?", "Why not?", "Who was it then?", "Where?", "And when exactly?", "What for?")
ANSWERS = (
    "Ahoy.",
    "Because of it all.",
    "Nobody knows, matey!",
    "Over there.",
    "At noon",
    "For the treasure",
)


def chat(question: str, answer: str, line: int = 1) -> Example:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Example("chat", Record("chat", messages=messages, source="train.jsonl", line=line), None)


def weighted(weight: int, line: int) -> Example:
    answer = {"role": "assistant", "content": f"Aye {line}, matey", "weight": weight}
    return Example(
        "chat",
        Record(
            "chat",
            messages=({"role": "user", "content": "Hm?"}, answer),
            source="train.jsonl",
            line=line,
        ),
        None,
    )


def text(words: str, line: int = 1) -> Example:
    return Example("text", Record("text", text=words, source="train.jsonl", line=line), None)


def completion(prompt: str, words: str, line: int = 1) -> Example:
    record = Record("completion", prompt=prompt, completion=words, source="train.jsonl", line=line)
    return Example("completion", record, None)


def chats(number: int = 6) -> list[Example]:
    """Different questions, different answers."""
    return [
        chat(QUESTIONS[i % 6] + str(i), f"{ANSWERS[i % 6]} {i}", line=i + 1) for i in range(number)
    ]


def look(
    items: Iterable[Example | DataError], tokenizer: Any = None, **options: Any
) -> tuple[SplitReport, dict[str, DataFinding]]:
    """The numbers of a training set, and its findings by code."""
    options = {"mask_prompt": True, "batch_size": 2} | options
    examiner = Examiner(tiny(ZEPHYR) if tokenizer is None else tokenizer, CheckOptions(**options))
    (report,), findings = check({"train": items}, examiner)
    return report, {finding.code: finding for finding in findings}


@pytest.fixture
def byte_tokenizer(tiny_model: Path) -> Any:
    return load_folder(tiny_model)


# --- numbers --------------------------------------------------------------------------------------


def test_counts_of_a_set_made_by_hand(byte_tokenizer: Any) -> None:
    # Tokens: 21 + 2 + 3, + 4 + 10, + 40 + 5, + 6 + 30; trained: the answer and its end.
    sizes = [(2, 3), (4, 10), (40, 5), (6, 30)]
    items = [chat("q" * q, "a" * a, line) for line, (q, a) in enumerate(sizes, start=1)]
    report, found = look(items, byte_tokenizer, max_seq_length=50)
    assert (report.lengths.min, report.lengths.max, report.lengths.total) == (
        26,
        66,
        26 + 35 + 66 + 57,
    )
    # Of the third the answer begins after 20 + 40 tokens: lost, so that it is left out. The last
    # keeps 24 of 31.
    assert (report.examples, report.left_out, report.tokens) == (3, 1, 26 + 35 + 50)
    assert (report.trained.min, report.trained.median, report.trained.max) == (4, 11, 50 - 25)
    assert report.trained.total == 4 + 11 + 25
    assert report.trained_share == (4 + 11 + 25) / 111
    assert (report.lengths.over_limit, report.lengths.lost_tokens) == (2, 16 + 7)
    assert report.counts == {"answers-lost": 1, "answers-cut": 1}
    assert report.shapes == {"chat": 4}
    assert (found["answers-lost"].places, found["answers-cut"].places) == (
        ("train.jsonl:3",),
        ("train.jsonl:4",),
    )
    assert "longest has 66 tokens" in words_of(found["answers-cut"])[1]


def test_only_blanks_after_the_end_of_turn_are_cut_without_a_word(byte_tokenizer: Any) -> None:
    report, found = look([chat("qq", "aaa", n) for n in (1, 2)], byte_tokenizer, max_seq_length=25)
    assert (report.lengths.over_limit, report.lengths.lost_tokens) == (2, 2)
    assert "answers-cut" not in found
    _, found = look([chat("qq", "aaa", n) for n in (1, 2)], byte_tokenizer, max_seq_length=24)
    assert found["answers-cut"].count == 2


Sizes = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None, database=None)
@given(Sizes, st.integers(20, 90), st.booleans(), st.sampled_from(["assistant", "last"]))
def test_the_numbers_are_those_of_what_training_renders(
    tiny_model: Path, sizes: Sequence[tuple[int, int]], limit: int, mask_prompt: bool, train_on: Any
) -> None:
    tokenizer = TOKENIZERS.setdefault(tiny_model, load_folder(tiny_model))
    items = [chat("q" * q, "a" * a, n) for n, (q, a) in enumerate(sizes)]
    options: dict[str, Any] = {
        "mask_prompt": mask_prompt,
        "max_seq_length": limit,
        "train_on": train_on,
    }
    renderer = Renderer(tokenizer, **options)
    rendered = [renderer.render(item.record) for item in items if item.record is not None]
    kept = [one for one in rendered if one.mask.any()]
    report, _ = look(items, tokenizer, **options)
    assert report.examples == len(kept)
    assert report.left_out == len(rendered) - len(kept)
    assert report.tokens == sum(len(one.tokens) for one in kept)
    assert report.trained.total == sum(int(one.mask.sum()) for one in kept)
    assert report.lengths.lost_tokens == sum(one.truncated for one in rendered)
    assert report.padding.batches_per_epoch == -(-len(kept) // 2)


TOKENIZERS: dict[Path, Any] = {}


def test_packing_counts_rows_and_cuts_nothing(byte_tokenizer: Any) -> None:
    # 19 + 39 tokens with their ends; one is only an input, 57 are left for rows of 16.
    options: dict[str, Any] = {"packing": True, "mask_prompt": False, "max_seq_length": 16}
    report, found = look([text("a" * 18, 1), text("b" * 38, 2)], byte_tokenizer, **options)
    assert report.tokens == 58
    assert (report.padding.rows, report.padding.batches_per_epoch) == (4, 2)
    assert (report.lengths.over_limit, report.lengths.lost_tokens) == (0, 0)
    assert found == {}


# --- what is found --------------------------------------------------------------------------------


def test_there_is_nothing_to_say_about_a_clean_set() -> None:
    held_out = [
        chat("Something else?", "Quite another answer.", 1),
        chat("A second?", "It is not the same.", 2),
    ]
    examiner = Examiner(
        tiny(ZEPHYR), CheckOptions(mask_prompt=True, vocab_size=500, near_limit=100)
    )
    reports, findings = check({"train": chats(12), "valid": held_out, "test": []}, examiner)
    assert findings == []
    assert [report.examples for report in reports] == [12, 2, 0]
    assert template_findings(tiny(ZEPHYR)) == []


LONG = "wxyz, " * 20
# code: items, options, count, severity, what the message must say
PROVOKED: dict[str, tuple[list[Example], dict[str, Any], int, str, str]] = {
    "answers-cut": (
        [*chats(9), chat("Hm?", LONG, 50)],
        {"max_seq_length": 60},
        1,
        "ruins",
        "cut off at 60 tokens",
    ),
    "answers-lost": (
        [*chats(19), chat(LONG, "Ahoy!", 50)],
        {"max_seq_length": 60},
        1,
        "harms",
        "within 60 tokens",
    ),
    "cut": (
        [text("Ahoy " * 40, 50), text("Ahoy matey")],
        {"mask_prompt": False, "max_seq_length": 30},
        1,
        "harms",
        "30",
    ),
    "special-text": ([*chats(), chat("Say </s>", "No, never, matey.", 50)], {}, 1, "harms", "</s>"),
    "vocabulary": (chats(4), {"vocab_size": 50}, 4, "ruins", "the model has 50"),
    "short-answers": ([*chats(), chat("Yes?", "7", 50)], {}, 1, "note", "one or two"),
    "same-answer": (
        [*chats(8), *(chat(f"Q{n}", "Yo ho ho", n + 50) for n in range(5))],
        {},
        5,
        "harms",
        "the same",
    ),
    "repeats": ([*chats(), chats()[2]], {}, 1, "note", "identical"),
    "bos-twice": ([completion("<s><s>Ahoy", " matey", 50), *chats()], {}, 1, "harms", "twice"),
    "few-examples": (chats(3), {"batch_size": 4}, 0, "harms", "3 examples for batches of 4"),
    "mask-prompt-off": (
        chats(),
        {"mask_prompt": False},
        0,
        "note",
        "of the trained tokens are theirs",
    ),
    "weights-unused": (
        [*chats(), weighted(0, 50), weighted(1, 51)],
        {"mask_prompt": False},
        1,
        "harms",
        "weight 0 is trained",
    ),
    "no-examples": ([], {}, 0, "ruins", "no example"),
}


@pytest.mark.parametrize("code", PROVOKED)
def test_each_finding_is_provoked(code: str) -> None:
    items, options, count, severity, words = PROVOKED[code]
    _, found = look(items, **options)
    assert (found[code].count, found[code].severity) == (count, severity)
    assert words in words_of(found[code])[0]
    assert words_of(found[code])[1]
    if count:
        assert len(found[code].places) == min(count, 3)
        assert words_of(found[code])[0].startswith(f"{count} of {len(items)} examples: ")
    if any(item.record is not None and item.record.line == 50 for item in items):
        assert found[code].places[0] == "train.jsonl:50"


@pytest.mark.parametrize(
    ("code", "items", "options"),
    [
        ("answers-cut", [*chats(9), chat("Hm?", LONG, 50)], {"max_seq_length": 600}),
        (
            "special-text",
            [text("Say </s> and go on"), text("Something else")],
            {"mask_prompt": False},
        ),
        ("vocabulary", chats(4), {"vocab_size": 500}),
        ("weights-unused", [*chats(), weighted(0, 50)], {}),
        ("short-answers", [*chats(20), chat("Yes?", "7")], {}),
        ("same-answer", [*chats(16), *(chat(f"Q{n}", "Yo ho ho") for n in range(4))], {}),
        ("repeats", [*chats(30), chats()[2]], {}),
        ("few-examples", chats(4), {"batch_size": 4}),
        ("mask-prompt-off", chats(), {"mask_prompt": True, "train_on": "all"}),
        ("mask-prompt-off", [text("Ahoy matey"), text("Something")], {"mask_prompt": False}),
    ],
)
def test_each_finding_stays_away(code: str, items: list[Example], options: dict[str, Any]) -> None:
    assert code not in look(items, **options)[1]


def test_a_tenth_of_the_answers_is_what_ruins() -> None:
    for clean, severity in ((18, "ruins"), (19, "harms")):
        items = [*chats(clean), chat("Hm?", LONG), chat("Oh?", LONG + "!")]
        _, found = look(items, max_seq_length=60)
        assert (found["answers-cut"].count, found["answers-cut"].severity) == (2, severity)


def test_the_end_of_an_answer_must_be_trained_and_stop_generation() -> None:
    def codes(tokenizer: Any, **options: Any) -> set[str]:
        return set(look(chats(), tokenizer, **options)[1]) - {"mask-prompt-off"}

    assert codes(tiny(ZEPHYR)) == set()
    assert codes(tiny(WORDS)) == {"no-end-of-turn"}
    assert codes(tiny(CHATML)) == {"end-not-eos"}
    # Whether or not prompts are trained too.
    assert codes(tiny(WORDS), mask_prompt=False) == {"no-end-of-turn"}
    assert codes(tiny(ZEPHYR), mask_prompt=False) == set()
    _, found = look(chats(), tiny(CHATML))
    assert (found["end-not-eos"].count, found["end-not-eos"].total) == (6, 6)
    assert "'" not in words_of(found["end-not-eos"])[0]
    assert "<|im_end|>" in words_of(found["end-not-eos"])[0]


def test_what_the_template_leaves_out_is_said() -> None:
    deaf = "{% for m in messages %}{% if m.role != 'system' %}{{ '<|' + m.role + '|>' + m.content + eos_token }}"
    deaf += "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    instructed = chat("Hm?", "Aye, matey, aye", 50)
    assert instructed.record is not None
    told = ({"role": "system", "content": "Be brief."}, *instructed.record.turns)
    record = replace(
        instructed.record, messages=told, tools=[{"type": "function", "function": {"name": "f"}}]
    )
    items = [*chats(), replace(instructed, record=record)]
    _, found = look(items, tiny.__wrapped__(deaf))
    assert [found[code].places for code in ("system-dropped", "tools-dropped")] == [
        ("train.jsonl:50",)
    ] * 2
    # Zephyr's takes any role.
    assert "system-dropped" not in look(items)[1]


def test_a_template_that_opens_generated_answers_otherwise_is_named() -> None:
    (found,) = template_findings(tiny(THINKING))
    assert found.code == "other-generation-prompt"
    assert found.details["header"] == "<think>"
    silent = tiny.__wrapped__(ZEPHYR.partition("{% if add_generation_prompt %}")[0])
    (found,) = template_findings(silent)
    assert (found.code, found.details["header"]) == ("no-generation-prompt", "<|assistant|>")
    assert "'<|assistant|>'" in words_of(found)[0]
    assert template_findings(tiny(CHATML)) == template_findings(tiny(None)) == []


def test_rows_that_training_refuses_are_grouped_and_the_rest_is_counted() -> None:
    def bad(line: int, message: str, hint: str) -> DataError:
        return DataError(message, code="any-fault", where=f"train.jsonl:{line}", hint=hint)

    items = [
        *chats(),
        *(bad(line, f"not JSON at column {line}", "repair it") for line in (11, 12, 13, 14)),
        bad(15, '"completion" is empty: there is nothing to learn', "fill it in"),
    ]
    report, found = look(items)
    assert (report.examples, report.bad_rows) == (6, 5)
    assert words_of(found["bad-rows"])[0] == "4 rows: not JSON at column …"
    assert found["bad-rows"].places == ("train.jsonl:11", "train.jsonl:12", "train.jsonl:13")
    assert words_of(found["bad-rows"])[1] == "repair it"
    assert found["empty-rows"].places == ("train.jsonl:15",)
    assert {finding.severity for finding in found.values()} == {"ruins"}


def test_texts_among_chats_are_trained_as_a_whole_and_nothing_but_texts_is_a_mistake() -> None:
    report, found = look([*chats(), text("no prompt here", 16)])
    assert (report.examples, report.bad_rows) == (7, 0)
    assert (found["some-texts"].severity, found["some-texts"].count) == ("note", 1)
    _, alone = look([text("no prompt here", n) for n in range(1, 7)])
    assert (alone["all-texts"].severity, alone["all-texts"].count) == ("ruins", 6)
    assert "--mask-prompt" in words_of(alone["all-texts"])[0]
    _, unmasked = look([*chats(), text("no prompt here", 16)], mask_prompt=False)
    assert not {"some-texts", "all-texts"} & set(unmasked)


def test_a_tokenizer_without_chat_template_cannot_take_chats() -> None:
    report, found = look(chats(), tiny(None))
    assert (report.examples, report.bad_rows) == (0, 6)
    assert found["model-cannot"].count == 6
    assert "no chat template" in words_of(found["model-cannot"])[0]


def test_overlap_with_the_training_set_is_exact_or_near() -> None:
    sentence = "the quick brown fox jumps over the lazy dog while the old pirate counts all of his golden coins twice"
    train = [*chats(), chat("Tell me a tale of the sea", sentence, 7)]
    valid = [
        chat("HOW?0", "ahoy.  0", 1),  # the same but for case and blanks
        chat("Tell me a tale of the sea", sentence + " again", 2),
        *(chat(f"New question {n}", f"New and other answer {n * 7}", n) for n in range(3, 9)),
    ]
    for limit, near in ((100, 1), (0, 0)):
        examiner = Examiner(tiny(ZEPHYR), CheckOptions(mask_prompt=True, near_limit=limit))
        reports, findings = check({"train": train, "valid": valid}, examiner)
        found = {finding.code: finding for finding in findings}
        assert reports[1].counts == {"in-train": 1} | ({"near-train": 1} if near else {})
        assert (found["in-train"].split, found["in-train"].severity) == ("valid", "ruins")
        assert found["in-train"].places == ("train.jsonl:1",)


def test_a_missing_validation_set_is_noted() -> None:
    _, findings = check(
        {"train": chats(), "valid": [], "test": []}, Examiner(tiny(ZEPHYR), CheckOptions())
    )
    assert [words_of(f)[0] for f in findings if f.code == "no-split"] == ["there is no valid set"]


def test_every_finding_has_words_and_a_remedy() -> None:
    assert {code for code, words in FINDINGS.items() if not all(words)} == {"read-as"}


def test_a_line_without_a_record_is_said(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", CLEAN, VALID)
    _, out = run(
        folder, "--model", tiny_model, "--mask-prompt", "--row", 99, "--row", 2, "--row", 77
    )
    assert "no record that can be shown begins in line 77, 99\n" in out
    assert "--- train.jsonl:2: " in out


# --- the command ----------------------------------------------------------------------------------


def write(folder: Path, train: Sequence[Any], valid: Sequence[Any] = ()) -> Path:
    folder.mkdir()
    for name, rows in (("train", train), ("valid", valid)):
        if rows:
            lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
            (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def row(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def run(*arguments: Any, env: dict[str, str] | None = None) -> tuple[int, str]:
    app = App(rich_markup_mode=None)
    app.command("check")(function_of("training.DataCheck check:check"))
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "80", **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


CLEAN = [
    row(f"{q} {n}", f"{a} {n}") for n, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
]
VALID = [row("And now?", "Now we sail."), row("So what?", "So be it, lad.")]
ESCAPES = re.compile(r"\x1b\[([0-9;]*)m")


def styled(output: str, style: str) -> list[str]:
    """What is printed between an escape sequence with this style and the next one."""
    parts = ESCAPES.split(output)
    return [words for code, words in zip(parts[1::2], parts[2::2], strict=True) if code == style]


def test_a_clean_set_ends_well_on_80_columns(tmp_path: Path, tiny_model: Path) -> None:
    rows = [row(f"{QUESTIONS[n % 6]} {n}", f"{ANSWERS[n % 6]} {n}") for n in range(34)]
    folder = write(tmp_path / "data", rows[:24], rows[24:])
    code, out = run(folder, "--model", tiny_model, "--mask-prompt", "--epochs", 3, "--strict")
    assert code == 0, out
    assert out.splitlines()[0] == "train: 24 examples (chat 24)"
    assert "no problems found" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    total = sum(
        OVERHEAD + len(m["messages"][0]["content"]) + len(m["messages"][1]["content"])
        for m in rows[:24]
    )
    assert re.search(rf"^  tokens .* {total:,}$", out, re.MULTILINE)


def test_without_colours_the_trained_text_stands_in_signs(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", CLEAN, VALID)
    _, out = run(folder, "--model", tiny_model, "--mask-prompt", "--show", 6, env={"NO_COLOR": "1"})
    trained = re.findall(r"\{\+(.*?)\+\}", out, re.DOTALL)
    assert trained == ["trained", *(f"{a} {n}<|im_end|>" for n, a in enumerate(ANSWERS))]
    assert "\x1b" not in out
    assert "<|im_start|>user\nWhere? 3<|im_end|>\n<|im_start|>assistant\n{+Over there. 3" in out


def test_in_colour_exactly_the_trained_text_is_green(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", CLEAN, VALID)
    options = (folder, "--model", tiny_model, "--mask-prompt", "--row", 4)
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": ""}
    _, out = run(*options, env=colours)
    # Special tokens stand out: underlined among what is trained, in magenta elsewhere.
    assert styled(out, "1;32") == ["trained", "Over there. 3"]
    assert styled(out, "1;4;32") == ["<|im_end|>"]
    assert styled(out, "35") == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert styled(out, "2;9") == ["cut off"]
    assert "{+" not in out
    # 27 tokens come before the answer.
    _, out = run(*options, "--max-seq-length", 35, env=colours)
    assert styled(out, "1;32") == ["trained", "Over the"]
    assert styled(out, "2;9") == ["cut off", "re. 3"]
    assert styled(out, "2;9;35") == ["<|im_end|>"]


def test_what_is_cut_is_shown_as_cut(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", CLEAN, VALID)
    _, out = run(folder, "--model", tiny_model, "--mask-prompt", "--row", 4, "--max-seq-length", 35)
    assert "assistant\n{+Over the+}[-re. 3<|im_end|>\n-]" in out


def test_a_long_stretch_is_shortened_in_its_middle() -> None:
    words = "a" * 5000 + "b" * 5000
    shown = run_text("trained", words, [], coloured=False).plain
    assert shown == "{+" + "a" * 600 + " [... 8,800 characters ...] " + "b" * 600 + "+}"
    assert set(SIGNS) == {"trained", "masked", "cut"}


def test_bad_rows_are_named_and_the_rest_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    rows = [
        *CLEAN,
        "not json",
        {"messages": 1},
        {"prompt": "a", "completion": " "},
        {"chosen": "a", "rejected": "b"},
    ]
    folder = write(tmp_path / "data", rows, VALID)
    code, out = run(folder, "--model", tiny_model, "--mask-prompt", "--epochs", 3)
    assert code == 0
    assert "train: 6 examples" in out
    for line in (7, 8, 9, 10):
        assert f"train.jsonl:{line}\n" in out
    assert out.count("what to do: ") == 4 + 1, "of each, and of the validation set of two"
    assert max(len(line) for line in out.splitlines()) <= 80
    assert run(folder, "--model", tiny_model, "--mask-prompt", "--strict")[0] == 3
    # A note or a warning is no reason.
    assert run(folder, "--model", tiny_model, "--split", "valid", "--strict")[0] == 0


def test_json_has_numbers_findings_and_what_is_shown(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", [*CLEAN, "{"], VALID)
    code, out = run(folder, "--model", tiny_model, "--mask-prompt", "--json", "--row", 1)
    found = json.loads(out)
    assert code == 0
    assert set(found) == {"splits", "findings", "ruined", "shown"}
    assert set(found["splits"]) == {"train", "valid", "test"}
    train = found["splits"]["train"]
    assert set(train) == {"trained_share", *SplitReport.__dataclass_fields__}
    assert (train["examples"], train["bad_rows"], train["shapes"]) == (6, 1, {"chat": 6})
    assert train["padding"]["batches_per_epoch"] == 2
    assert [one["code"] for one in found["findings"]] == [
        "bad-rows",
        "few-validation",
        "many-epochs",
    ]
    finding = found["findings"][0]
    assert set(finding) == {"message", "remedy", *DataFinding.__dataclass_fields__}
    assert (finding["code"], finding["severity"], finding["places"]) == (
        "bad-rows",
        "ruins",
        ["train.jsonl:7"],
    )
    assert found["ruined"] is True
    (shown,) = found["shown"]
    assert shown["where"] == "train.jsonl:1"
    assert [run["text"] for run in shown["runs"] if run["kind"] == "trained"] == [
        "Ahoy. 0<|im_end|>"
    ]


def test_the_yaml_file_of_the_run_is_read_and_flags_win(tmp_path: Path, tiny_model: Path) -> None:
    rows = [
        {"question": q, "reply": f"{a} {n}"}
        for n, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
    ]
    folder = write(tmp_path / "data", rows, rows[:1])
    lines = [f"model: {tiny_model}", f"data: {folder}", "batch_size: 3", "prompt_feature: question"]
    lines += [
        "completion_feature: reply",
        "train: true",
        "learning_rate: 1e-4",
        "mask_prompt: true",
    ]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    _, out = run("--config", tmp_path / "run.yaml", "--json")
    train = json.loads(out)["splits"]["train"]
    assert (train["examples"], train["shapes"], train["padding"]["batches_per_epoch"]) == (
        6,
        {"completion": 6},
        2,
    )
    _, out = run("--config", tmp_path / "run.yaml", "--json", "--batch-size", 1)
    assert json.loads(out)["splits"]["train"]["padding"]["batches_per_epoch"] == 6


def test_wrong_input_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        run(tmp_path / "nowhere", "--model", "no/such/model")
    assert caught.value.code == "data-missing"
    with pytest.raises(ConfigError) as caught:
        run("demo", "--split", "training")
    assert caught.value.code == "value-unknown"
    with pytest.raises(ConfigError, match="--packing"):
        run("demo", "--packing", "--mask-prompt")


def test_the_vocabulary_is_read_from_the_models_config() -> None:
    for values, size in (
        ({"vocab_size": 7}, 7),
        ({"text_config": {"vocab_size": 9}}, 9),
        ({"text_config": 1}, None),
    ):
        assert vocabulary_of(values) == size
