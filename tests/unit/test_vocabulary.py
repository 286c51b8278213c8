"""Tokenizers that are made from a corpus: what they learn, what is written, and who can load it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx_lm.tokenizer_utils
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import sentence, texts, write
from tiny import run_allhands
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from allhands.cli.main import main
from allhands.data.corpus import Corpus
from allhands.data.sources import find_sources
from allhands.data.tokens_shown import cut, load_tokenizer_file
from allhands.data.vocabulary import VocabularyOptions, VocabularyReport, train_tokenizer
from allhands.errors import AllhandsError, DataError, ModelError

AWKWARD = "Once upon a time, héllo 12345 \U0001f600\r\n\n \t don't <|end_of_text|> e\u0301 \u2028x"


def train(names: list[str], out: Path, **options: Any) -> VocabularyReport:
    return train_tokenizer(
        find_sources(names), out, VocabularyOptions(**{"vocabulary": 400, **options})
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tokenizer of 400 tokens."""
    folder = tmp_path_factory.mktemp("small")
    names = write(folder, {"train.jsonl": texts(range(200)), "valid.jsonl": texts(range(200, 220))})
    train(names, folder / "made")
    return folder / "made"


# --- what is learned ------------------------------------------------------------------------------


def test_stories_are_cut_into_few_tokens(shared_data: Path, tmp_path: Path) -> None:
    report = train([str(shared_data / "tinystories")], tmp_path / "made", vocabulary=4096)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    lines = (shared_data / "tinystories" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [json.loads(line)["text"] for line in lines]
    num_bytes = sum(len(text.encode()) for text in held_out)
    num_tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in held_out)
    assert num_bytes / num_tokens > 3.5
    assert report.bytes_per_token == pytest.approx(num_bytes / num_tokens)
    assert (report.held_out, report.documents, len(tokenizer), report.vocabulary) == (
        "the validation split",
        1881,
        4096,
        4096,
    )
    assert all(
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
        for text in held_out[:20]
    )
    # The same files, also from another process with other hashes.
    again = run_allhands(
        *("tokenizer", "train", "--data", shared_data / "tinystories", "--out", tmp_path / "again"),
        env={"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"},
    )
    assert again.returncode == 0, again.stderr
    assert "4096 tokens" in again.stdout
    assert "on the validation split" in again.stdout
    assert files(tmp_path / "again") == files(tmp_path / "made")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_only_the_training_split_is_learned(tmp_path: Path) -> None:
    rows = {
        name: [{"text": f"{word} " * 9}] * 9
        for name, word in (("train", "ab"), ("valid", "xy"), ("test", "zq"))
    }
    train(
        write(tmp_path, {f"{name}.jsonl": lines for name, lines in rows.items()}), tmp_path / "made"
    )
    assert set(joined(tmp_path / "made")) == {"ab", "Ġab"}


def joined(directory: Path) -> list[str]:
    """The tokens that are neither special nor one byte."""
    vocabulary: dict[str, int] = json.loads((directory / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    return [token for token in vocabulary if len(token) > 1 and not token.startswith("<|")]


def test_without_a_validation_split_the_end_is_held_out(tmp_path: Path) -> None:
    names = write(tmp_path, {"a.jsonl": [{"text": "ab " * 4900}, {"text": "xy " * 100}]})
    report = train(names, tmp_path / "made")
    assert (report.held_out, report.held_out_bytes) == ("the end of the text", 300)
    assert set(joined(tmp_path / "made")) == {"ab", "Ġab"}
    # Each x and y alone, and the blank before it.
    assert report.bytes_per_token == pytest.approx(1, abs=0.01)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=5), gap=st.integers(3, 30_000))
def test_nothing_is_lost_between_what_is_trained_and_what_is_held_out(
    lengths: list[int], gap: int
) -> None:
    given_texts = [
        (("a" * (gap - 1) + " ") * (length // gap + 1))[:length] + "." for length in lengths
    ]
    corpus = Corpus([fake_source(given_texts)])
    pieces = [*corpus.training()]
    assert "".join([*pieces, *corpus.held_out]) == "".join(given_texts)
    assert max(map(len, pieces)) <= 1 << 14
    total = sum(map(len, given_texts))
    assert sum(map(len, corpus.held_out)) <= total / 50 + gap
    assert corpus.num_bytes == total


def fake_source(given_texts: list[str]) -> Any:
    from allhands.data.rows import Row
    from allhands.data.sources import Source

    rows = [Row({"text": text}, "fake", line) for line, text in enumerate(given_texts, 1)]
    return Source("fake", None, lambda: iter(rows))


def test_digits(tmp_path: Path) -> None:
    names = write(tmp_path, {"a.jsonl": [{"text": "1234 1234 1234 12 12"}] * 20})
    train(names, tmp_path / "three")
    train(names, tmp_path / "one", split_digits=True)
    assert "123" in joined(tmp_path / "three")
    assert "1234" not in joined(tmp_path / "three")
    assert not [token for token in joined(tmp_path / "one") if len(token.strip("Ġ")) > 1]


@pytest.mark.parametrize("kind", ["parquet", "txt", "chat", "column"])
def test_all_kinds_of_sources(kind: str, tmp_path: Path) -> None:
    told = [sentence(number) for number in range(40)]
    key = "text"
    if kind == "parquet":
        parquet.write_table(pa.table({"text": told}), tmp_path / "a.parquet")
    elif kind == "txt":
        (tmp_path / "a.txt").write_text("<|endoftext|>".join(told))
    elif kind == "chat":
        turns = [
            [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
            for a, b in zip(told[::2], told[1::2], strict=True)
        ]
        write(tmp_path, {"a.jsonl": [{"messages": turn} for turn in turns]})
    else:
        key = "story"
        write(tmp_path, {"a.jsonl": [{"story": text} for text in told]})
    report = train([str(tmp_path)], tmp_path / "made", text_key=key)
    assert report.num_bytes == sum(map(len, told)) + (20 if kind == "chat" else 0)
    assert "Ġquartz" in joined(tmp_path / "made")


# --- what is written ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back_and_transformers_cuts_it_alike(small: Path, text: str) -> None:
    raw = Tokenizer.from_file(str(small / "tokenizer.json"))
    theirs = loaded(small)
    ids = raw.encode(text, add_special_tokens=False).ids
    assert raw.decode(ids, skip_special_tokens=False) == text
    assert theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.decode(ids) == text
    assert theirs.encode(text) == [0, *ids]


@cache
def loaded(directory: Path) -> Any:
    """transformers' tokenizer of a directory."""
    return AutoTokenizer.from_pretrained(directory)


def test_mlx_lm_loads_it_and_streams_its_text(small: Path) -> None:
    tokenizer = mlx_lm.tokenizer_utils.load(small)
    ids = tokenizer.encode(AWKWARD, add_special_tokens=False)
    assert ids == loaded(small).encode(AWKWARD, add_special_tokens=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (0, {1}, 2)
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == AWKWARD


def test_chat_template_and_special_tokens(tmp_path: Path) -> None:
    names = write(tmp_path, {"a.jsonl": texts(range(20))})
    train(names, tmp_path / "made", chat_template="chatml", special=("<|tool|>", "<x>"))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "made")
    expected = ["<|begin_of_text|>", "<|im_end|>", "<|pad|>", "<|im_start|>", "<|tool|>", "<x>"]
    assert tokenizer.convert_ids_to_tokens(range(6)) == expected
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == tuple(expected[:3])
    assert tokenizer.encode("<|tool|>", add_special_tokens=False) == [4]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<|begin_of_text|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    )
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    names = write(tmp_path / "data", {"a.jsonl": texts(range(20))})

    def stop(documents: int, num_bytes: int) -> None:
        if documents == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(find_sources(names), tmp_path / "made", VocabularyOptions(), stop)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"vocabulary": 258}, 2, "give at least 259"),
        ({"vocabulary": 10**11}, 2, "too many"),
        ({"vocabulary": 260, "special": ("<x>", "<y>")}, 2, "5 special ones"),
        ({"special": ("<x>", "<x>")}, 2, "'<x>' cannot be a special token, it is one already"),
        ({"special": ("<|pad|>",)}, 2, "it is one already"),
        ({"special": (" ",)}, 2, "' ' cannot be a special token"),
        ({"chat_template": "alpaca"}, 2, "one of chatml"),
        ({"text_key": "story"}, 3, "none of the rows can be used"),
    ],
)
def test_wrong_options_are_one_clear_error(
    options: dict[str, Any], code: int, words: str, tmp_path: Path
) -> None:
    names = write(tmp_path / "data", {"a.jsonl": texts(range(9))})
    with pytest.raises(AllhandsError) as caught:
        train(names, tmp_path / "made", **options)
    assert (caught.value.exit_code, words in str(caught.value)) == (code, True), caught.value
    assert not (tmp_path / "made").exists()


def test_the_smallest_vocabulary_is_the_bytes(tmp_path: Path) -> None:
    report = train(
        write(tmp_path, {"a.jsonl": texts(range(90))}), tmp_path / "made", vocabulary=259
    )
    assert report.vocabulary == 259
    assert report.bytes_per_token == 1.0


@pytest.mark.parametrize(
    ("file", "lines", "words"),
    [
        ("a.jsonl", [], "the file is empty"),
        ("a.jsonl", [{"text": ""}], "there is nothing to learn"),
        ("a.jsonl", ["{", {"a": 1}], "none of the rows can be used"),
        ("a.jsonl", [{"story": "x"}], "--text-key story"),
        ("valid.jsonl", [{"text": "x"}], "there is no training split"),
    ],
)
def test_data_without_text(file: str, lines: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        train(write(tmp_path / "data", {file: lines}), tmp_path / "made")
    assert words in str(caught.value), caught.value
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_rows_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    names = write(tmp_path, {"a.jsonl": [*texts(range(9)), "{", {"text": "\ud800"}]})
    report = train(names, tmp_path / "made")
    assert report.documents == 9
    assert sorted(place for reason in report.left_out for place in reason.places) == [
        f"{names[0]}:10",
        f"{names[0]}:11",
    ]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    names = write(tmp_path / "data", {"a.jsonl": texts(range(9))})
    train(names, tmp_path / "made")
    with pytest.raises(AllhandsError, match=r"a tokenizer is there already.*\n.*--force") as caught:
        train(names, tmp_path / "made")
    assert caught.value.exit_code == 2
    assert train(names, tmp_path / "made", vocabulary=300, force=True).vocabulary == 300
    assert loaded_size(tmp_path / "made") == 300
    (tmp_path / "made" / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(AllhandsError, match=r"model\.safetensors is there already"):
        train(names, tmp_path / "made", force=True)
    assert (tmp_path / "made" / "model.safetensors").read_bytes() == b"weights"
    with pytest.raises(AllhandsError) as caught:
        train(names, Path(names[0]), force=True)
    assert caught.value.code == "place-taken"


def loaded_size(directory: Path) -> int:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()


# --- showing --------------------------------------------------------------------------------------


def test_pieces_are_readable_and_whole(small: Path) -> None:
    found = cut(load_tokenizer_file(small), "amber é\n<|pad|>")
    assert "".join(found.pieces) == "amber \\xc3\\xa9\\n<|pad|>"
    assert found.pieces[0] == "amber"
    assert found.pieces[-1] == "<|pad|>"
    assert (
        found.ids
        == Tokenizer.from_file(str(small / "tokenizer.json")).encode("amber é\n<|pad|>").ids[1:]
    )
    assert found.num_bytes == 16


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_can_be_shown(small: Path, text: str) -> None:
    found = cut(load_tokenizer_file(small), text)
    assert len(found.pieces) == len(found.ids)
    assert all(piece.isprintable() and piece for piece in found.pieces)


def test_a_tokenizer_that_is_not_of_bytes_is_shown_as_it_is(shared_data: Path) -> None:
    folder = next(
        path.parent for path in sorted((shared_data / "tokenizers").rglob("tokenizer.json"))
    )
    found = cut(load_tokenizer_file(folder), "How are you?")
    assert len(found.pieces) == len(found.ids) > 0


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in arguments])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = write(tmp_path, {"a.jsonl": [*texts(range(90)), "{"]})
    code, out, _ = run(
        capsys, "tokenizer", "train", *names, "--out", tmp_path / "made", "--vocabulary", "5000"
    )
    assert code == 0
    assert "of 5000 requested: the text has no more pairs to merge" in out
    for words in (
        f"tokenizer: {tmp_path / 'made'}",
        "bytes per token: ",
        "learned from 90 texts",
        "left out: 1 x",
    ):
        assert words in out
    assert "sample: [" in out
    code, out, _ = run(capsys, "tokenizer", "show", tmp_path / "made", "amber 7")
    first, pieces, ids = out.splitlines()
    assert code == 0
    assert pieces == "[amber][ ][7]"
    assert first == "3 tokens, 7 bytes: 2.33 bytes a token"
    assert len(ids.split()) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("train", "DATA"), 2, "--out is missing"),
        (("train", "--out", "OUT"), 2, "no source is named"),
        (("train", "--data", "nowhere.txt", "--out", "OUT"), 3, "no such file"),
        (("train", "--data", "DATA", "--out", "OUT", "--vocabulary", "9"), 2, "--vocabulary"),
        (("train", "--data", "DATA", "--out", "DATA"), 2, "this is a file"),
        (("show", "nowhere", "x"), 4, "there is no tokenizer.json"),
    ],
)
def test_exit_codes(
    arguments: tuple[str, ...],
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {
        "DATA": write(tmp_path, {"a.jsonl": texts(range(9))})[0],
        "OUT": str(tmp_path / "made"),
    }
    found, out, err = run(capsys, "tokenizer", *(places.get(word, word) for word in arguments))
    assert (found, words in err) == (code, True), err
    assert "Traceback" not in out + err
    assert not (tmp_path / "made").exists()


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError) as caught:
        load_tokenizer_file(tmp_path)
    assert caught.value.code == "tokenizer-unreadable"
