"""From the options of a run to its tokens: what is refused, what is noticed, what is told."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import build_config
from allhands.data import store
from allhands.data.splits import RecordSource
from allhands.errors import ConfigError, DataError
from allhands.model.load import load_tokenizer
from allhands.run import datasets
from allhands.run.datasets import find_splits, load_data, open_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLHANDS_TOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, *texts: str, name: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    return folder


def hub(
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    splits: tuple[str, ...] = ("train",),
) -> list[str]:
    """A stand-in for the ``datasets`` library, whose every split has ``rows``; gives the splits
    that are loaded.
    """
    module, loaded = types.ModuleType("datasets"), list[str]()
    module.load_dataset = lambda *_, split, **__: (loaded.append(split), rows)[1]  # type: ignore[attr-defined]
    module.get_dataset_split_names = lambda path: list(splits)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")  # nobody is asked whether the Hub answers
    return loaded


def text_of(data: Any, tokenizer: Any) -> str:
    return tokenizer.decode(data.stored["train"].tokens.tokens.tolist())


def test_data_that_change_while_they_are_read_are_not_stored(
    tiny_model: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "data", "the first version")
    config = build_config(
        {"model": str(tiny_model), "data": str(folder), "train": True, "val_batches": 0}
    )
    tokenizer = load_tokenizer(str(tiny_model))
    sources = find_splits(config)
    plain = sources["train"]

    def records() -> Any:
        write(folder, "another version")
        return plain.records()

    with pytest.raises(DataError) as caught:
        open_data(config, {"train": RecordSource(plain.identity, records)}, tokenizer)
    assert caught.value.code == "data-changed"
    write(folder, "the first version")
    data = open_data(config, find_splits(config), tokenizer)
    assert data.stored["train"].built
    assert "the first version" in text_of(data, tokenizer.tokenizer)


def test_a_split_that_a_hub_dataset_lacks_is_said_before_training(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, [{"text": "some words"}])
    config = build_config(
        {"model": str(tiny_model), "data": "owner/name", "train": True, "test": True}
    )
    with pytest.raises(DataError) as caught:
        find_splits(config)
    assert caught.value.code == "split-missing"
    assert "test_split" in (caught.value.hint or "")


def test_columns_are_heeded_for_a_hub_dataset_named_by_data(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, [{"text": "not this", "story": "once upon a time"}])
    flags = {
        "model": str(tiny_model),
        "data": "owner/name",
        "train": True,
        "val_batches": 0,
        "text_feature": "story",
    }
    tokenizer = load_tokenizer(str(tiny_model)).tokenizer
    assert "once upon a time" in text_of(load_data(build_config(flags)), tokenizer)


@pytest.mark.parametrize(
    ("splits", "loaded"),
    [
        (("train", "validation"), ["train", "validation"]),
        (("train", "dev", "test"), ["train", "dev", "test"]),
        (("train",), ["train[:80%]", "train[-10%:]"]),
        (("train", "test"), ["train[:80%]", "train[-10%:]", "test"]),
    ],
)
def test_a_hub_dataset_named_by_data_is_taken_by_its_own_splits(
    splits: tuple[str, ...], loaded: list[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hub(monkeypatch, [{"text": "some words"}], splits)
    sources = find_splits(
        build_config(
            {
                "model": str(tiny_model),
                "data": "owner/name",
                "train": True,
                "test": "test" in splits,
            }
        )
    )
    assert found == loaded
    assert list(sources) == ["train", "valid", *(["test"] if "test" in splits else [])]


@pytest.mark.parametrize("where", [{"data": "demo"}, {"hf_dataset": {"path": "owner/name"}}])
def test_columns_without_effect_are_refused(where: dict[str, Any], tiny_model: Path) -> None:
    config = build_config(
        {"model": str(tiny_model), "train": True, "text_feature": "story", **where}
    )
    with pytest.raises(ConfigError) as caught:
        find_splits(config)
    assert caught.value.where == "--text-feature"


def test_places_in_notes_are_those_of_the_file_that_was_read(
    tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "a" * 90, "completion": "b"}, {"prompt": "a", "completion": "b"}]
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "model": str(tiny_model),
        "data": str(folder),
        "train": True,
        "mask_prompt": True,
        "max_seq_length": 60,
    }
    notes = [note for note in load_data(build_config(flags)).notes if "left out" in note]
    assert [note.rpartition(": ")[2] for note in notes] == ["train.jsonl:1", "valid.jsonl:1"]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("train.txt", "", "data/train.txt"),
        ("train.parquet", "no", "data/train.parquet"),
        ("train-1.csv", 'text\na\n"b\n', "data/train-1.csv:3"),
        ("train/one.txt", "", "data/train/one.txt"),
        ("train.jsonl", '{"text": "a"}\nb\n', "data/train.jsonl:2"),
    ],
)
def test_an_error_gives_the_path_as_the_person_did(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str,
    where: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / name).parent.mkdir(parents=True)
    (tmp_path / "data" / name).write_text(content)
    config = build_config(
        {"train": True, "model": str(tiny_model), "data": "./data", "packing": True}
    )
    with pytest.raises(DataError) as caught:
        load_data(config)
    assert caught.value.where == where
    assert "leave it out" not in (caught.value.hint or "")


def test_pretraining_takes_one_file(tiny_model: Path, tmp_path: Path) -> None:
    def pretraining(file: Path, **options: Any) -> PretrainConfig:
        given = {
            "train": True,
            "data": str(file),
            "tokenizer": str(tiny_model),
            "max_seq_length": 8,
            **options,
        }
        return build_config(given, None, PretrainConfig)

    file = tmp_path / "stories.txt"
    file.write_text("Once there was a dog. " * 20)
    sources = find_splits(pretraining(file))
    assert list(sources) == ["train"]
    assert [record.text for record in sources["train"].records()] == [file.read_text()]
    data = open_data(pretraining(file), sources, load_tokenizer(str(tiny_model)))
    assert data.train is not None
    assert len(data.train) > 1
    assert data.notes == ("no valid.jsonl: training goes on without validation",)
    file.write_text("")
    with pytest.raises(DataError) as caught:
        list(sources["train"].records())
    assert caught.value.code == "data-empty"
    assert caught.value.where == str(file)
    with pytest.raises(DataError) as caught:
        find_splits(pretraining(file, test=True))
    assert caught.value.code == "data-not-directory"
    with pytest.raises(DataError) as caught:
        find_splits(pretraining(tiny_model / "model.safetensors"))
    assert caught.value.code == "file-type-unsupported"


@pytest.mark.parametrize(("more", "noted"), [(0, True), (1, False)])
def test_a_text_shorter_than_a_row_is_noted(
    tiny_model: Path, tmp_path: Path, more: int, noted: bool
) -> None:
    file = tmp_path / "train.txt"
    file.write_text("Hi there.")
    tokenizer = load_tokenizer(str(tiny_model))
    count = len(tokenizer.tokenizer.encode("Hi there.")) + 1  # the end of the text
    given = {
        "train": True,
        "data": str(tmp_path),
        "model": str(tiny_model),
        "packing": True,
        "val_batches": 0,
    }
    data = load_data(build_config({**given, "max_seq_length": count - more}))
    assert data.train is not None
    assert len(data.train) == 1
    said = f"train: {count} tokens, less than a row: each step trains on all"
    assert data.notes == ((said,) if noted else ())


@pytest.mark.parametrize(("rows", "noted"), [(3, True), (30, False)])
def test_one_long_text_is_as_many_examples_as_rows(
    tiny_model: Path, tmp_path: Path, rows: int, noted: bool
) -> None:
    for name, count in (("train", 200), ("valid", rows)):
        (tmp_path / f"{name}.txt").write_text("Once upon. " * count)
    given = {
        "train": True,
        "data": str(tmp_path),
        "model": str(tiny_model),
        "packing": True,
        "max_seq_length": 11,
    }
    assert any(note.startswith("valid: ") for note in load_data(build_config(given)).notes) == noted


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_validation_examples_that_are_trained_on_are_counted(
    tiny_model: Path, tmp_path: Path, shared: int
) -> None:
    words = ["one", "two", "three", "four", "five", "six"]
    folder = write(tmp_path / "data", *words[:3])
    write(folder, *words[3 - shared : 6 - shared], name="valid")
    flags = {"model": str(tiny_model), "data": str(folder), "train": True, "batch_size": 1}
    data = load_data(build_config(flags))
    notes = data.notes
    assert data.seen == pytest.approx(shared / 3)
    assert any(note.startswith(f"{shared} of 3 validation") for note in notes) == (shared > 0)
    # Only what is held out is said to be: half of six examples.
    assert any(note.startswith("3 of 6 examples") for note in notes) == (shared == 0)


def test_another_name_of_the_validation_file_is_noticed(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(write(tmp_path / "data", "some words"), "more words", name="eval")
    flags = {"model": str(tiny_model), "data": str(folder), "train": True}
    assert any(
        "eval.jsonl: call it valid.jsonl" in note for note in load_data(build_config(flags)).notes
    )


def test_the_tokenizers_files_are_part_of_the_key(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "some words")
    flags = {"model": str(tiny_model), "data": str(folder), "train": True, "val_batches": 0}
    assert load_data(build_config(flags)).stored["train"].built
    assert not load_data(build_config(flags)).stored["train"].built
    other = tmp_path / "model"
    other.mkdir()
    for file in tiny_model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert not load_data(build_config({**flags, "model": str(other)})).stored["train"].built
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "new_setting": 1}))
    assert load_data(build_config({**flags, "model": str(other)})).stored["train"].built


def test_a_rank_that_does_not_lead_waits_for_the_one_that_does(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def noted(*arguments: Any, patience_s: float) -> Any:
        asked.append(patience_s)
        return store.open_store(*arguments, patience_s=0.0)

    monkeypatch.setattr(datasets, "open_store", noted)
    flags = {
        "model": str(tiny_model),
        "data": str(write(tmp_path / "data", "words")),
        "train": True,
        "val_batches": 0,
    }
    config, tokenizer = build_config(flags), load_tokenizer(str(tiny_model))
    for leads in (True, False):
        open_data(config, find_splits(config), tokenizer, leads=leads)
    assert asked == [0.0, datasets.PATIENCE_S]


@pytest.mark.parametrize(("batch", "noted"), [(2, False), (3, True)])
def test_a_batch_of_more_than_all_examples_is_noted(
    tiny_model: Path, tmp_path: Path, batch: int, noted: bool
) -> None:
    folder = write(tmp_path / "data", "some words", "more words")
    flags = {
        "model": str(tiny_model),
        "data": str(folder),
        "train": True,
        "val_batches": 0,
        "batch_size": batch,
    }
    said = "train: 2 examples, less than a batch: each step trains on all"
    assert load_data(build_config(flags)).notes == ((said,) if noted else ())


def test_a_folder_with_the_name_of_a_split_is_no_matter_of_rights(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "data" / "train.jsonl").mkdir(parents=True)
    config = build_config(
        {"model": str(tiny_model), "data": str(tmp_path / "data"), "train": True, "val_batches": 0}
    )
    with pytest.raises(DataError) as caught:
        open_data(config, find_splits(config), load_tokenizer(str(tiny_model)))
    assert caught.value.code == "data-unreadable"
    assert caught.value.where == str(tmp_path / "data" / "train.jsonl")
    assert caught.value.hint == "a file is needed here, this is a folder"


@pytest.mark.parametrize("template", ["{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"])
def test_what_the_template_leaves_out_is_noted_at_every_start(
    tiny_model: Path, tmp_path: Path, template: str
) -> None:
    model, folder = tmp_path / "model", tmp_path / "data"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + template + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder.mkdir()
    thoughts = ["", *(f"<think>\nIt is {n}.\n</think>\n\n" for n in range(5))]
    rows = [
        [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": f"{one}Aye."}]
        for one in thoughts
    ]
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    )
    flags = {
        "model": str(model),
        "data": str(folder),
        "train": True,
        "val_batches": 0,
        "mask_prompt": True,
    }
    # Opened the second time.
    for _ in range(2):
        said = [note for note in load_data(build_config(flags)).notes if "leaves out" in note]
        if "split" not in template:
            assert said == []
            continue
        (note,) = said
        assert note.startswith("train: 5 of 6 examples: ")
        for words in (
            '"It is 0."',
            "(train.jsonl:2, train.jsonl:3, train.jsonl:4, ...)",
            "what to do: ",
        ):
            assert words in note
