"""Rules that change the style of answers: once, outside protected spans, the same everywhere, and said exactly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.data.demo import pirate_share
from allhands.data.styles import RuleSet, load_rules, parse_rules, shipped_styles
from allhands.data.styles.engine import Styler, spliced
from allhands.errors import ConfigError

TEST_DATA = Path(os.environ.get("ALLHANDS_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))

SMALL = """
name: small
words: {hello: ahoy, you: ye, friend: [matey, shipmate], is: be}
phrases: {"thank you": thank ye, "it is": "'tis"}
suffixes: [{suffix: ing, to: "in'", stem: "[a-z]*[aeiou][a-z]*"}]
"""


def styler(yaml: str, seed: int = 0) -> Styler:
    return Styler(parse_rules(yaml, "test.yaml"), seed)


def rules_of(**parts: Any) -> RuleSet:
    return parse_rules(json.dumps({"name": "test", **parts}), "test.yaml")


# --- one pass ----------------------------------------------------------------------------------------

VOCABULARY = ("ab", "bc", "cd", "de", "ef")
SENTENCES = st.lists(st.sampled_from([*VOCABULARY, "x", ",", "\n"]), max_size=20)


def replaced_once(tokens: list[str], rules: dict[str, str]) -> list[str]:
    """The reference: at each token the longest rule, then on behind it."""
    result: list[str] = []
    while tokens:
        fitting = [size for size in (3, 2, 1) if " ".join(tokens[:size]) in rules and len(tokens) >= size]
        size = fitting[0] if fitting else 1
        result.append(rules.get(" ".join(tokens[:size]), tokens[0]))
        tokens = tokens[size:]
    return result


@given(
    SENTENCES,
    st.dictionaries(
        st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=3).map(" ".join),
        st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=3).map(" ".join),
    ),
)
def test_no_rule_sees_what_another_wrote(tokens: list[str], rules: dict[str, str]) -> None:
    words = {key: value for key, value in rules.items() if " " not in key}
    phrases = {key: value for key, value in rules.items() if " " in key}
    got = Styler(rules_of(words=words, phrases=phrases)).restyle(" ".join(tokens))
    assert got == " ".join(replaced_once(tokens, rules))


@given(st.text(alphabet="ab` .\n'-IANan123$\"", max_size=60))
def test_changes_are_disjoint_and_the_rest_is_copied(text: str) -> None:
    rules = rules_of(
        fix_articles=True,
        words={"a": "", "b": "a b", "an": "an", "ab": ["ba", "aab"], "i": "I"},
        phrases={"b a": "ab", "a b": ""},
        suffixes=[{"suffix": "n", "to": "nn"}],
        regex=[{"pattern": "ba+", "to": "b"}],
    )
    changes = Styler(rules, 3).changes(text, "key")
    ends = [0, *(change.end for change in changes)]
    assert all(end <= change.start < change.end for end, change in zip(ends, changes, strict=False))
    copied = "".join(text[end : change.start] for end, change in zip(ends, changes, strict=False)) + text[ends[-1] :]
    blanked = spliced(text, [type(change)(change.start, change.end, "", "") for change in changes])
    assert blanked == copied


def test_order_of_precedence() -> None:
    rules = rules_of(
        words={"red": "blue", "blue": "red", "sing": "hum"},
        phrases={"red sky": "dawn", "red sky at night": "calm", "blue moon": "blue moon"},
        suffixes=[{"suffix": "ing", "to": "in'"}, {"suffix": "g", "to": "k"}],
        regex=[{"pattern": "red(?= wine)", "to": "rouge"}, {"pattern": r"(\w+) for \1", "to": r"\1 after \1"}],
    )
    cases = {
        "red sky at night": "calm",
        "red sky at noon": "dawn at noon",
        "red blue red": "blue red blue",
        "red wine": "rouge wine",
        "blue moon": "blue moon",
        "sing": "hum",
        "singing dog": "singin' dok",
        "day for day": "day after day",
        "redder red-blue red_blue red1": "redder blue-red red_blue red1",
        "red\nsky": "blue\nsky",
        "the red's edge": "the blue's edge",
    }
    assert {text: Styler(rules).restyle(text) for text in cases} == cases


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello Hello HELLO", "ahoy Ahoy AHOY"),
        ("It is. IT IS. it is", "'Tis. 'TIS. 'tis"),
        ("Thank You", "Thank Ye"),
        ("RUNNING Running running", "RUNNIN' Runnin' runnin'"),
        ("It’s you’re friend’s", "It’s you’re matey’s"),
        ("ÄRGER is hello-Hello", "ÄRGER be ahoy-Ahoy"),
    ],
)
def test_case_is_kept(text: str, expected: str) -> None:
    assert styler(SMALL).restyle(text) == expected


def test_what_is_removed_leaves_no_gap_and_hands_its_capital_on() -> None:
    rules = rules_of(words={"very": "", "well": ""}, phrases={"well,": ""}, fix_articles=True)
    cases = {
        "A very old cat.": "An old cat.",
        "Well, it works very well.": "It works.",
        "An old, very big cat": "An old, big cat",
        "It is very very  well (very) big very, so": "It is () big, so",
        "Well, `code` stays.": "`code` stays.",
    }
    assert {text: Styler(rules).restyle(text) for text in cases} == cases


# --- protection --------------------------------------------------------------------------------------

SPANS = {
    "code": [
        "`you is`",
        "``is ` you``",
        "\n```python\nfor you in hello:\n    is = you\n```\n",
        "\n~~~\nhello you\n",
        "hello_you",
        "helloYou",
        "you(hello)",
        "<b>",
        '<tool_call>{"name": "hello"}</tool_call>',
        "\nif you is hello:\n    hello is you\n",
        "\nSELECT you FROM hello WHERE is\n",
        "\nyou = hello + 3\n",
    ],
    "urls": [
        "https://you.is/hello?friend=you",
        "www.hello.you",
        "/hello/you/is",
        "hello.you",
        "#hello",
        "C:\\hello\\you",
    ],
    "emails": ["hello.you@is.example.com", "you@hello.org"],
    "numbers": ["12", "3.5 kg", "$1,000", "10:30 am"],
    "latex": ["$you is$", "$$\nhello\n$$", r"\(you\)", r"\begin{hello}you\end{hello}", r"\text{you}"],
    "quotes": ['"hello you"', "“hello you”"],
    "names": ["the Hello You Inc", "an IS"],
}


@pytest.mark.parametrize(("kind", "span"), [(kind, span) for kind, spans in SPANS.items() for span in spans])
def test_protected_spans_are_byte_identical(kind: str, span: str) -> None:
    text = f"hello you {span} is it"
    if kind == "code" and "~~~" in span:
        text = f"hello you {span}"  # unclosed: to the end
    rules = rules_of(protect=[kind], words={"hello": "ahoy", "you": "ye", "is": "be", "am": "be", "kg": "stone"})
    result = Styler(rules).restyle(text)
    assert result == text.replace("hello you ", "ahoy ye ", 1).removesuffix(" is it") + (
        " be it" if text.endswith(" is it") else ""
    )


@given(
    st.lists(st.sampled_from([*(s for k in ("code", "urls", "emails", "latex") for s in SPANS[k][:3]), "hello you"]))
)
def test_protected_spans_come_out_in_order(parts: list[str]) -> None:
    text = " is ".join(parts)
    result = styler(SMALL).restyle(text)
    position = 0
    for part in parts:
        if part != "hello you":
            position = result.index(part, position) + len(part)
    if parts[:1] == ["hello you"]:
        assert result.startswith("ahoy ye")


@pytest.mark.parametrize("answer", ["`hello`", "```\nhello you\n```", '{"you": "is"}', "12 + 30", "https://you.is", ""])
def test_an_answer_that_is_all_protected_stays_as_it_is(answer: str) -> None:
    always = {"probability": 1, "texts": ["Arr!"]}
    rules = rules_of(words={"hello": "ahoy", "you": "ye"}, openings=always, closings=always)
    done = Styler(rules).answer("question", answer)
    assert (done.text, done.rules, done.words_changed) == (answer, (), 0)


def test_more_can_be_protected_by_patterns() -> None:
    rules = rules_of(words={"you": "ye"}, protect_patterns=[r"\[\[.*?\]\]"])
    assert Styler(rules).restyle("you [[you]] you") == "ye [[you]] ye"


# --- openings, closings, choices ---------------------------------------------------------------------


def test_openings_and_closings_stand_where_they_fit() -> None:
    always = {"openings": {"probability": 1, "texts": ["Arr!"]}, "closings": {"probability": 1, "texts": ["Savvy?"]}}
    engine = Styler(rules_of(words={"you": "ye"}, **always))
    cases = {
        "You know.": "Arr! Ye know. Savvy?",
        "1. You\n2. Me.": "Arr!\n\n1. Ye\n2. Me.\n\nSavvy?",
        "Run:\n```\nyou\n```": "Arr! Run:\n```\nyou\n```",
        "Positive": "Arr! Positive",
        "Arr, you!": "Arr, ye! Savvy?",
    }
    assert {text: engine.answer("q", text).text for text in cases} == cases
    assert engine.answer("q", "You know.").rules == ("you -> ye", "opening", "closing")


def test_the_share_of_openings_is_the_probability() -> None:
    rules = rules_of(openings={"probability": 0.3, "texts": ["One!", "Two!"]})
    texts = [Styler(rules, 5).answer(f"question {number}", "It rains.").text for number in range(2000)]
    counts = {word: sum(text.startswith(word) for text in texts) for word in ("One!", "Two!")}
    # Five standard deviations of a binomial.
    assert abs(sum(counts.values()) - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5
    assert abs(counts["One!"] - counts["Two!"]) < 5 * sum(counts.values()) ** 0.5


def test_choices_depend_on_seed_question_and_answer_only() -> None:
    code = (
        "from allhands.data.styles import load_rules\nfrom allhands.data.styles.engine import Styler\n"
        "print([Styler(load_rules('pirate'), s).answer(q, 'My friend is here. Friends are great.').text "
        "for s in range(4) for q in 'abcdef'])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    here = [
        Styler(load_rules("pirate"), seed).answer(question, "My friend is here. Friends are great.").text
        for seed, question in product(range(4), "abcdef")
    ]
    assert outputs == {f"{here}\n"}
    assert len(set(here)) > 4


# --- the YAML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "where", "message", "hint"),
    [
        (
            "name: x\nwords:\n  you: ye\n  you: thee\n",
            "r.yaml:4: words",
            "'you' is there twice, first on line 3",
            "list",
        ),
        ("name: x\nwords:\n  you: ye\n  You: thee\n", "r.yaml:4: words: You", "have a rule on line 3", "keep one"),
        ("name: x\nwords:\n  thank you: ye\n", "r.yaml:3: words: thank you", "not one word", "under phrases"),
        ("name: x\nphrases:\n  '!!': ye\n", "r.yaml:3: phrases: !!", "no word in it", "under regex"),
        ("name: x\nphrases:\n  'covid 19': c\n", "r.yaml:3: phrases: covid 19", "digits and _", "under regex"),
        ("name: x\nword:\n  you: ye\n", "r.yaml:2: word", "unknown key 'word'", "did you mean words?"),
        ("name: x\nregex:\n  - {pattern: '(', to: a}\n", "r.yaml:3: regex: 1", "not a regular expression", "see a"),
        (
            "name: x\nregex:\n  - {pattern: 'a', to: b}\n  - {pattern: 'a*', to: b}\n",
            "r.yaml:4: regex: 2",
            "empty",
            "at least",
        ),
        ("name: x\nregex:\n  - {pattern: 'a', to: '\\2'}\n", "r.yaml:3: regex: 1", "does not fit the pattern", "see a"),
        ("name: x\nregex:\n  - pattern: a\n    too: b\n", "r.yaml:3: regex: 1", "'to' is missing", "add the key"),
        ("name: x\nsuffixes:\n  - {suffix: ing, to: a, sten: b}\n", "r.yaml:3: suffixes: 1", "'sten'", "mean stem?"),
        (
            "name: x\nopenings:\n  probability: 2\n  texts: [a]\n",
            "r.yaml:3: openings: probability",
            "less than or",
            "see a",
        ),
        ("name: x\nprotect:\n  - code\n  - codes\n", "r.yaml:4: protect: 2", "must be 'code', 'urls'", "see a"),
        ("name: x\nwords:\n  you: []\n", "r.yaml:3: words: you", "at least 1 item", "see a"),
        ("name: x\nwords:\n  you: 'ye\n", "r.yaml:", "not valid YAML", "double quotes"),
        ("name: x\nwords: &a\n  you: *a\n", "r.yaml", "contains itself", "anchors"),
        ("- a\n", "r.yaml", "'key: value' pairs", "--show pirate"),
    ],
)
def test_broken_rules_name_line_rule_and_remedy(yaml: str, where: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules(yaml, "r.yaml")
    error = caught.value
    assert (error.where or "").startswith(where)
    assert message in error.message
    assert hint in (error.hint or "")


def test_yaml_words_are_text_never_booleans_or_numbers() -> None:
    rules = parse_rules("name: x\nwords: {yes: aye, no: nay, on: off, null: nil}\n", "r.yaml")
    assert Styler(rules).restyle("Yes no on null") == "Aye nay off nil"
    assert parse_rules("name: x\nwords:\nexamples:\n", "r.yaml").words == {}


def test_a_style_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such style") as caught:
        load_rules("pirat")
    assert caught.value.hint == "did you mean pirate?"
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_rules(str(tmp_path / "latin.yaml"))


# --- the shipped rules -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_styles())
def test_shipped_examples_pass_and_every_rule_can_apply(name: str) -> None:
    rules = load_rules(name)
    engine = Styler(rules)
    assert rules.name == name
    assert rules.examples
    assert [(sample.before, got) for _, sample, got in engine.failures()] == []
    for key, choices in (rules.words | rules.phrases).items():
        got = engine.restyle(f"so {key} x")
        wanted = "x" if not choices[0] else f"{choices[0]} x"
        assert got in (f"so {wanted}", "so X"), key


def test_the_shipped_styles_are_of_several_kinds() -> None:
    assert {"pirate", "formal", "concise", "uk-spelling"} == set(shipped_styles())
    assert load_rules("pirate").num_rules > 150


def test_plain_answers_become_pirate_speech() -> None:
    plain = [
        "Yes, you should keep your bread in a paper bag, because it is drier there.",
        "There are a lot of people who think that they are looking for money.",
        "Hello! I'm happy to help you and your friends with planning the trip.",
        "The capital of France is Paris. It is known for its food and for the old town.",
    ]
    engine = Styler(load_rules("pirate"))
    after = [engine.answer("q", text).text for text in plain]
    assert pirate_share(plain) == 0.0
    assert pirate_share(after) > 0.15
    assert "Paris" in after[3]


@pytest.mark.skipif(not TEST_DATA.is_dir(), reason="the real data sets are not here")
def test_the_pirate_share_of_real_answers_rises_well_above_a_tenth() -> None:
    rows = json.loads((TEST_DATA / "formats" / "alpaca_en_demo.json").read_text(encoding="utf-8"))[:200]
    engine = Styler(load_rules("pirate"))
    after = [engine.answer(row["instruction"], row["output"]).text for row in rows]
    assert pirate_share(row["output"] for row in rows) < 0.001
    assert pirate_share(after) > 0.12
    numbers = re.compile(r"\d+")
    assert [numbers.findall(row["output"]) for row in rows] == [numbers.findall(text) for text in after]


def test_a_rule_set_without_a_name_has_that_of_its_file() -> None:
    rules = parse_rules("words: {you: ye}\n", "my-own.yaml")
    assert rules.name == "my-own"
    assert Styler(rules).restyle("you there") == "ye there"


def test_the_rule_set_in_the_documentation_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    rules = parse_rules(page.partition("```text\n")[2].partition("```")[0], "own.yaml")
    styler = Styler(rules)
    assert rules.num_rules == 6
    assert styler.failures() == []
    assert styler.restyle("Good morning, you are sailing.") == "Ahoy there, ye are sailin'."
