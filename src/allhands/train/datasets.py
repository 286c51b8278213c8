"""The splits that a run needs: records first, without a model, then tokens."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from allhands.config import TrainConfig
from allhands.data.records import ColumnNames, Record
from allhands.data.render import Renderer
from allhands.data.splits import load_hf_dataset, load_split
from allhands.data.tokens import TokenSet, TokenSetReport, build_token_set
from allhands.errors import AllhandsError, DataError
from allhands.model.load import LoadedModel


@dataclass(frozen=True)
class Datasets:
    """Tokenised splits; ``valid`` and ``test`` may be absent."""

    train: TokenSet | None
    valid: TokenSet | None
    test: TokenSet | None
    notes: tuple[str, ...]

    def fingerprints(self) -> dict[str, str | None]:
        """sha256 of each split's tokens and masks."""
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: tokens.fingerprint() if tokens else None for name, tokens in splits.items()}


def load_data(config: TrainConfig, loaded: LoadedModel) -> Datasets:
    """:func:`read_splits`, then :func:`tokenised`."""
    return tokenised(config, read_splits(config), loaded)


def read_splits(config: TrainConfig) -> dict[str, list[Record]]:
    """The records of the splits that ``config`` needs, by name; an optional split that is absent is left out.

    Raises:
        DataError: missing, malformed or empty data.
    """
    splits: dict[str, list[Record]] = {}
    if config.train:
        splits["train"] = _records(config, "train", True)
    if config.train and config.val_batches != 0:
        splits["valid"] = _records(config, "valid", False)
        if not splits["valid"] and config.early_stopping_patience is not None:
            raise DataError("early stopping needs validation data", where=config.data, hint="add valid.jsonl")
    if config.test:
        splits["test"] = _records(config, "test", True)
    return {name: records for name, records in splits.items() if records}


def tokenised(config: TrainConfig, splits: Mapping[str, list[Record]], loaded: LoadedModel) -> Datasets:
    """Render and tokenise ``splits``.

    Raises:
        DataError: nothing to train on in one of them, or a record that cannot be rendered.
    """
    renderer = Renderer(
        cast("Any", loaded.tokenizer),
        mask_prompt=config.mask_prompt,
        max_seq_length=config.max_seq_length,
        train_on=config.train_on,
    )
    notes: list[str] = []
    sets: dict[str, TokenSet] = {}
    for split, records in splits.items():
        with _full_places(config, split):
            sets[split], report = build_token_set(records, renderer)
        notes.extend(_data_notes(split, report, config.max_seq_length))
    if config.train and config.val_batches != 0 and "valid" not in sets:
        notes.append("no valid.jsonl: training goes on without validation")
    return Datasets(sets.get("train"), sets.get("valid"), sets.get("test"), tuple(notes))


@contextmanager
def _full_places(config: TrainConfig, split: str) -> Generator[None, None, None]:
    """Put the folder before a ``train.jsonl:12`` that an error names."""
    try:
        yield
    except AllhandsError as error:
        if error.where and error.where.startswith(f"{split}.json"):
            error.where = str(Path(config.data) / error.where)
        raise


def _records(config: TrainConfig, split: str, required: bool) -> list[Record]:
    with _full_places(config, split):
        return _unplaced_records(config, split, required)


def _unplaced_records(config: TrainConfig, split: str, required: bool) -> list[Record]:
    columns = ColumnNames.from_options(config.model_dump())
    if config.hf_dataset is not None:
        specs = config.hf_dataset if isinstance(config.hf_dataset, list) else [config.hf_dataset]
        return load_hf_dataset([spec.model_dump(exclude_none=True) for spec in specs], split)
    if config.data == "demo":
        from allhands.data.demo import demo_records

        return demo_records(split)
    path = Path(config.data).expanduser()
    if not path.exists() and config.data.count("/") == 1 and not config.data.startswith((".", "/", "~")):
        try:
            return load_hf_dataset({"path": config.data}, split)
        except DataError as error:
            message = f"there is no such folder here, and as a dataset of the Hub: {error.message}"
            raise DataError(message, where=config.data, hint=f"check the path; or {error.hint}") from error
    return load_split(path, split, columns, required=required)


def _data_notes(split: str, report: TokenSetReport, limit: int) -> list[str]:
    notes: list[str] = []
    if report.num_truncated:
        notes.append(
            f"{split}: {report.num_truncated} of {report.num_examples} examples are longer than {limit} tokens "
            f"and were cut ({report.num_truncated_tokens} tokens lost); --max-seq-length changes the limit"
        )
    if report.dropped:
        shown = ", ".join(report.dropped[:3]) + (", ..." if len(report.dropped) > 3 else "")
        notes.append(f"{split}: {len(report.dropped)} examples left out, no token of them is trained: {shown}")
    return notes
