"""Words that the command line does not understand: one message of one form, with what to do."""

from __future__ import annotations

import pytest
from command_line import call_allhands, parse

from allhands.errors import ConfigError

WRONG = [
    (("train", "--no-such-flag"), "option-unknown", "--no-such-flag"),
    (("train", "-x"), "option-unknown", "-x"),
    (("train", "-iters", "3"), "option-unknown", "-iters"),
    (("demo", "--iters", "1"), "value-out-of-range", "--iters"),
    (("--no-such-flag",), "option-unknown", "--no-such-flag"),
    (("cluster", "--no-such-flag"), "option-unknown", "--no-such-flag"),
    (("train", "--batch-size"), "value-missing", "--batch-size"),
    (("train", "--batch_size"), "value-missing", "--batch-size"),
    (("train", "-n"), "value-missing", "-n"),
    (("train", "--mask-prompt=3"), "value-unexpected", "--mask-prompt"),
    (("train", "--batch-size", "many"), "value-of-wrong-type", "--batch-size"),
    (("train", "-n", "many"), "value-of-wrong-type", "--num-ranks"),
    (("train", "--learning-rate", "1e"), "value-of-wrong-type", "--learning-rate"),
    (("generate", "--prompt", "a", "--temp", "-1"), "value-out-of-range", "--temp"),
    (("generate", "--prompt", "a", "--top-p", "2"), "value-out-of-range", "--top-p"),
    (("export", "--to", "foo", "--out", "x"), "value-unknown", "--to"),
    (("train", "stray"), "argument-unknown", "stray"),
    (("monitor", "run", "stray"), "argument-unknown", "stray"),
    (("generate",), "option-missing", "--prompt"),
    (("plot",), "argument-missing", "RUN"),
    (("trian",), "command-unknown", "trian"),
    (("model", "gte"), "command-unknown", "model gte"),
]


@pytest.mark.parametrize(("words", "code", "where"), WRONG, ids=[" ".join(one[0]) for one in WRONG])
def test_words_that_are_not_understood_have_a_code_a_place_and_a_hint(
    words: tuple[str, ...], code: str, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert (caught.value.code, caught.value.where) == (code, where)


@pytest.mark.parametrize(
    "words",
    [*(one[0] for one in WRONG), ("model", "get"), ("model", "get", "a", "--model", "b")],
    ids=" ".join,
)
def test_what_is_not_understood_ends_in_one_message_and_code_2(words: tuple[str, ...]) -> None:
    done = call_allhands(*words)
    first, second, *more = done.stderr.splitlines()
    assert (done.returncode, done.stdout, more) == (2, "", [])
    assert first.startswith("allhands: error: ")
    assert second.startswith("  what to do: ")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("train", "--itres", "3"), "--iters"),
        (("train", "-iters", "3"), "--iters"),
        (("train", "--no-mask-promp"), "--no-mask-prompt"),
        (("train", "--batch-sise", "3"), "--batch-size"),
        (("train", "iters", "3"), "--iters"),
        (("generate", "--prompt", "a", "--adaptor-path", "x"), "--adapter-path"),
        (("export", "--to", "pft", "--out", "x"), "peft"),
        (("train", "--optimizer", "adm"), "adam"),
        (("trian",), "train"),
    ],
    ids=str,
)
def test_a_near_miss_gets_one_suggestion(words: tuple[str, ...], meant: str) -> None:
    hint = call_allhands(*words).stderr.splitlines()[1]
    assert hint.split("did you mean ")[1].strip("?`").removeprefix("allhands ") == meant


def test_a_flag_unlike_any_gets_no_suggestion() -> None:
    assert "did you mean" not in call_allhands("plot", "run", "--iters", "3").stderr


def test_a_group_alone_shows_its_verbs() -> None:
    done = call_allhands("data")
    assert "prepare" in done.stdout + done.stderr
    assert done.returncode == 2
