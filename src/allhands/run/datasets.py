"""Tokenised splits for a run: opened from the token store, or tokenised now."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from allhands.config.eval_schema import evaluated_split
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.data.dates import DATE_KEY, asks_date
from allhands.data.heard import words_of
from allhands.data.records import ColumnNames
from allhands.data.splits import (
    RecordSource,
    full_places,
    has_split,
    own_splits,
    source_of_one_file,
    split_of_folder,
    split_of_hub,
)
from allhands.data.splitting import ENOUGH_VALIDATION, LARGE_PART, MANY_EPOCHS
from allhands.data.store import (
    Build,
    StoredTokens,
    StoreWriter,
    TokenSetReport,
    open_store,
    store_key,
)
from allhands.data.templates import MERGE, OPTION, ChatChoice
from allhands.data.token_roles import unstopped
from allhands.data.tokenise import Rendering, fill_store, tokenizer_files, vocabulary_of
from allhands.data.tokens import PackedRows, TokenSet, Windows
from allhands.errors import ConfigError, DataError
from allhands.io.formatting import counted, format_count, format_duration
from allhands.io.paths import meant
from allhands.model.load import LoadedTokenizer, load_bare_tokenizer, load_tokenizer

COLUMN_OPTIONS = tuple(name for name in TrainConfig.model_fields if name.endswith("_feature"))
# Time in which the ranks of a host usually all come to their data; then any of them may tokenise.
PATIENCE_S = 3.0
_LOOKED_AT = 2_000_000  # tokens of data whose examples are compared before a training
_TELL_EVERY_S = 5.0
# Seconds of tokenising from which on a note reports it.
_TOLD_FROM_S = 2.0

# (split, records done, tokens done)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Datasets:
    """Tokenised splits; ``valid`` and ``test`` may be absent.

    Attributes:
        stored: every split that the run needs, by name, mapped from its store.
        packing: makes packed rows of a split; ``None``: examples are rows.
        notes: notes for the user about the data.
        dated: the moment whose date the chat template writes, in local time; ``None`` if it writes
            no date.
        template: the chat template that was chosen in place of the model's own.
        stop_tokens: tokens that end answers but at which the model does not stop by itself.
        seen: share of the validation examples that are trained on, too.
    """

    stored: dict[str, StoredTokens]
    packing: Callable[[TokenSet], PackedRows] | None
    notes: tuple[str, ...]
    dated: datetime | None = None
    template: str | None = None
    stop_tokens: tuple[str, ...] = ()
    seen: float = 0.0

    @property
    def train(self) -> Windows | None:
        """Rows to train on."""
        return self._windows("train")

    @property
    def valid(self) -> Windows | None:
        """Rows to validate on."""
        return self._windows("valid")

    @property
    def test(self) -> Windows | None:
        """Rows to test on."""
        return self._windows("test")

    @property
    def largest_token(self) -> int:
        """The largest token id of all."""
        return max(one.tokens.largest_token for one in self.stored.values())

    def _windows(self, split: str) -> Windows | None:
        if split not in self.stored:
            return None
        tokens = self.stored[split].tokens
        return self.packing(tokens) if self.packing else tokens

    def fingerprints(self) -> dict[str, str | None]:
        """Return the SHA-256 of each split's tokens and masks; None for an absent split."""
        return {
            name: self.stored[name].fingerprint if name in self.stored else None for name in SPLITS
        }

    def validated(self, config: TrainConfig) -> str | None:
        """Return the examples on which a run validates: fingerprint of the split, ``/``, number of
        rows; ``None`` for none.
        """
        return self._validated(self.fingerprints()["valid"], config.val_batches, config.batch_size)

    def validated_before(self, saved: Mapping[str, Any]) -> str | None:
        """Return what :meth:`validated` was in the run of a checkpoint.

        Args:
            saved: content of its ``state.json``.
        """
        config, data = saved.get("config", {}), saved.get("data", {})
        return self._validated(
            data.get("valid"), config.get("val_batches", 0), config.get("batch_size", 0)
        )

    def _validated(self, fingerprint: str | None, num_batches: int, batch_size: int) -> str | None:
        if fingerprint is None or num_batches == 0 or self.valid is None:
            return None
        rows = len(self.valid)
        return f"{fingerprint}/{rows if num_batches < 0 else min(rows, num_batches * batch_size)}"

    def recorded(self) -> dict[str, str | None]:
        """Return the entries for a checkpoint: the fingerprints, and the moment of dates."""
        return {
            **self.fingerprints(),
            DATE_KEY: None if self.dated is None else self.dated.isoformat(),
        }


SPLITS = ("train", "valid", "test")


def open_data(
    config: TrainConfig,
    sources: Mapping[str, RecordSource],
    tokenizer: LoadedTokenizer,
    progress: Progress = lambda *_: None,
    *,
    leads: bool = True,
    moment: datetime | None = None,
) -> Datasets:
    """Return the splits of ``sources`` as tokens; tokenise them now if need be.

    Args:
        sources: splits from :func:`find_splits`.
        leads: True for the process of a host that should do the work, because its progress is
            shown; others give it ``PATIENCE_S`` to begin.
        moment: moment for a chat template that writes the current date; ``None``: now.

    Raises:
        DataError: malformed or empty data, nothing to train on, or a record that cannot be
            rendered.
        ConfigError: an option has no effect on these data.
        StorageError: the tokens cannot be stored.
    """
    rendering = rendering_of(config, tokenizer, moment)
    notes: list[str] = [*tokenizer.notes]
    stored: dict[str, StoredTokens] = {}
    facts, vocabulary = rendering.facts(), vocabulary_of(tokenizer.tokenizer)
    for split, source in sources.items():
        with full_places(Path(config.data)):
            identity = source.identity()
            stored[split] = open_store(
                store_key({"records": identity, "rendering": facts}),
                vocabulary,
                _builder(source, identity, rendering, partial(progress, split)),
                patience_s=0.0 if leads else PATIENCE_S,
            )
        notes += [f"{split}: {note}" for note in source.notes()]
    shared = _shared(stored) if config.train else 0
    notes += _notes(config, stored, shared)
    _check_chat_template(config, stored)
    stops = _stop_tokens(tokenizer.tokenizer, stored)
    if stops and config.train:
        notes.append(
            f"answers end with {stops[0]}, which is not among the model's end-of-text tokens: generate, chat and serve "
            "stop there all the same, and fuse and export write it into eos_token_id"
        )
    packs = partial(PackedRows, block=config.max_seq_length, isolate=config.isolate_documents)
    dated = rendering.moment if asks_date(tokenizer.tokenizer) else None
    return Datasets(
        stored,
        packs if config.packing else None,
        tuple(notes),
        dated,
        tokenizer.template,
        stops,
        seen=shared / len(stored["valid"].tokens) if shared else 0.0,
    )


def _check_chat_template(config: TrainConfig, stored: Mapping[str, StoredTokens]) -> None:
    """Refuse options about chat templates if all records are plain texts.

    Raises:
        ConfigError: such an option is given.
    """
    flag = (
        f"{OPTION} {config.chat_template}"
        if config.chat_template
        else MERGE
        if config.system == "merge"
        else None
    )
    if (
        flag
        and stored
        and all(one.report.num_texts == one.report.num_records for one in stored.values())
    ):
        hint = "leave it out, or give the data as messages, or as prompt and completion"
        raise ConfigError(
            "all records are plain texts, which go through no chat template",
            code="option-without-effect",
            where=flag,
            hint=hint,
        )


def _stop_tokens(tokenizer: Any, stored: Mapping[str, StoredTokens]) -> tuple[str, ...]:
    """Return the token that ends answers, if generation would not stop there; else ()."""
    answers = any(one.report.num_texts < one.report.num_records for one in stored.values())
    found = unstopped(tokenizer) if answers else None
    return () if found is None else (found[0],)


def chat_of(config: TrainConfig, kept: Path | None = None) -> ChatChoice:
    """Return the chat template that ``config`` asks for.

    Args:
        kept: directory of a run whose template is used if ``config`` names none; for a run that is
            only tested.
    """
    return ChatChoice(config.chat_template, config.system, kept)


def load_data(config: TrainConfig, *names: str) -> Datasets:
    """Find and open the splits of these ``names``, or all, with the tokenizer of the training."""
    found = find_splits(config)
    fresh, trust, chat = pretraining(config), config.trust_remote_code, chat_of(config)
    if fresh is None:
        tokenizer = load_tokenizer(config.model, trust_remote_code=trust, chat=chat)
    else:
        tokenizer = load_bare_tokenizer(fresh.tokenizer, trust_remote_code=trust, chat=chat)
    return open_data(config, {name: found[name] for name in names or found}, tokenizer)


def rendering_of(
    config: TrainConfig, tokenizer: LoadedTokenizer, moment: datetime | None = None
) -> Rendering:
    """Return the options by which ``config`` turns records into tokens.

    ``moment``: see :func:`open_data`.
    """
    return Rendering(
        cast("Any", tokenizer.tokenizer),
        mask_prompt=config.mask_prompt,
        train_on=config.train_on,
        max_seq_length=None if config.packing else config.max_seq_length,
        reload=(_reload, (str(tokenizer.path), config.trust_remote_code, tokenizer.template)),
        files=tokenizer_files(tokenizer.path),
        moment=moment or datetime.now(),
    )


def _reload(path: str, trust_remote_code: bool, template: str | None) -> Any:
    """In a helper process: load the same tokenizer again."""
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code).tokenizer
    if template is not None:
        tokenizer.has_chat_template, tokenizer.chat_template = True, template
    return tokenizer


def find_splits(config: TrainConfig) -> dict[str, RecordSource]:
    """Find the sources of the splits that ``config`` needs, without absent optional splits.

    Raises:
        DataError: the data, or a required split, is missing.
        ConfigError: an option about columns has no effect.
    """
    wanted: dict[str, bool] = {}
    if config.train:
        wanted["train"] = True
    if config.train and config.val_batches != 0:
        wanted["valid"] = False
    if config.test:
        wanted[evaluated_split(config)] = True
    found = find_named(config, wanted)
    if "valid" in wanted and "valid" not in found and config.early_stopping_patience is not None:
        raise DataError(
            "early stopping needs validation data",
            code="split-missing",
            where=config.data,
            hint="add valid.jsonl",
        )
    return found


def find_named(config: TrainConfig, wanted: Mapping[str, bool]) -> dict[str, RecordSource]:
    """Find the sources of splits, without those that are absent and not required.

    Args:
        wanted: names of splits, and whether each is required.

    Raises:
        DataError: the data, or a required split, is missing.
        ConfigError: an option about columns has no effect.
    """
    found: dict[str, RecordSource] = {}
    named = _splits_by_name(config, next(iter(wanted), "train"))
    for split, required in wanted.items():
        with full_places(Path(config.data)):
            source = _source(config, split, required, named)
        if source is not None:
            found[split] = source
        elif required:
            raise DataError(
                f"no {split} split of the dataset is named",
                code="split-missing",
                where=config.data if config.hf_dataset is None else "hf_dataset",
                hint=f'name it: hf_dataset with {split}_split, for example "{split}"',
            )
    return found


def _splits_by_name(config: TrainConfig, split: str) -> dict[str, str] | None:
    """Return the splits of the Hub dataset that ``data`` names; ``None`` if it names none.

    Args:
        split: the split that is needed first; for advice.
    """
    path = Path(config.data)
    # A name with one slash may be a dataset of the Hub, unless its first part is a folder here.
    named = config.data.count("/") == 1 and not config.data.startswith((".", "/", "~"))
    if config.hf_dataset is not None or not named or path.exists() or path.parent.is_dir():
        return None
    with _no_folder_either(config, split):
        return own_splits(config.data)


@contextmanager
def _no_folder_either(config: TrainConfig, split: str) -> Generator[None, None, None]:
    try:
        yield
    except DataError as error:
        fits = partial(has_split, split=split, alone=pretraining(config) is not None)
        message = f"there is no such folder here, and as a dataset of the Hub: {error.message}"
        raise DataError(
            message,
            code="data-missing",
            where=config.data,
            hint=meant(config.data, f"check the path; or {error.hint}", fits),
        ) from error


def _source(
    config: TrainConfig, split: str, required: bool, named: Mapping[str, str] | None
) -> RecordSource | None:
    features = {
        name: value for name in COLUMN_OPTIONS if (value := getattr(config, name)) is not None
    }
    columns = ColumnNames.from_options(features)
    if features:
        _refuse_features(config, next(iter(features)))
    if config.hf_dataset is not None:
        specs = config.hf_dataset if isinstance(config.hf_dataset, list) else [config.hf_dataset]
        return split_of_hub([spec.model_dump(exclude_none=True) for spec in specs], split)
    if config.data == "demo":
        from allhands.data.demo import demo_source

        return demo_source(split)
    if named is not None:
        with _no_folder_either(config, split):
            return split_of_hub({"path": config.data, **named, **features}, split)
    path = Path(config.data)
    alone = pretraining(config) is not None
    if alone and path.is_file():
        if split == "train":
            return source_of_one_file(path, columns)
        if not required:
            return None
    return split_of_folder(path, split, columns, required=required, alone=alone)


def _refuse_features(config: TrainConfig, feature: str) -> None:
    """Refuse an option that names a column, if the data do not use it."""
    if config.hf_dataset is not None:
        what, hint = "hf_dataset", "write it into hf_dataset, where each dataset has its own"
    elif config.data == "demo":
        what, hint = "the demo's data", "leave it out"
    else:
        return
    raise ConfigError(
        f"it has no effect on {what}",
        code="option-without-effect",
        where=f"--{feature.replace('_', '-')}",
        hint=hint,
    )


def _builder(
    source: RecordSource, identity: Any, rendering: Rendering, progress: Callable[[int, int], None]
) -> Build:
    def build(writer: StoreWriter) -> TokenSetReport:
        report = fill_store(source.records(), rendering, writer, progress)
        # Otherwise tokens of the new content would be stored under the key of the old content.
        if source.identity() != identity:
            raise DataError(
                "the data changed while they were read",
                code="data-changed",
                hint="wait until no program writes them, then start again",
            )
        return report

    return build


def _notes(config: TrainConfig, stored: Mapping[str, StoredTokens], shared: int) -> Iterator[str]:
    """Yield notes for the user on each split, and on the splits compared with each other."""
    for split, one in stored.items():
        yield from _data_notes(split, one, config)
    if not config.train or "train" not in stored:
        return
    tokens = stored["train"].tokens
    trained, held = (
        _count(stored[split], config) if split in stored else 0 for split in ("train", "valid")
    )
    if shared:
        yield (
            f"{shared:,} of {len(stored['valid'].tokens):,} validation examples are trained on, too: their loss "
            "says nothing about new data"
        )
    yield from _held_notes(config, trained, held, shared)
    # A row's targets are one token further on.
    count, what, least, whole = len(tokens), "example", config.batch_size - 1, "batch"
    if config.packing:
        count, what, least, whole = len(tokens.tokens), "token", config.max_seq_length, "row"
    if count <= least:
        yield f"train: {counted(count, what)}, less than a {whole}: each step trains on all"


def _count(stored: StoredTokens, config: TrainConfig) -> int:
    """Return the number of examples, or of packed rows if there are more of them."""
    rows = -(-len(stored.tokens.tokens) // config.max_seq_length) if config.packing else 0
    return max(stored.report.num_examples, rows)


def _shared(stored: Mapping[str, StoredTokens]) -> int:
    """Return the number of validation examples that are also trained on.

    Large data are not compared, because it would take long: then 0.
    """
    if not {"train", "valid"} <= stored.keys():
        return 0
    trained, held = stored["train"].tokens, stored["valid"].tokens
    if len(trained.tokens) + len(held.tokens) > _LOOKED_AT:
        return 0
    known = {trained.tokens[a:b].tobytes() for a, b in pairwise(trained.offsets)}
    return sum(held.tokens[a:b].tobytes() in known for a, b in pairwise(held.offsets))


def _held_notes(config: TrainConfig, trained: int, held: int, shared: int) -> Iterator[str]:
    """Yield notes on the number of validation examples, compared with the trained ones."""
    if not shared and held >= LARGE_PART * (held + trained):
        yield f"{held:,} of {held + trained:,} examples are validation, and never trained on"
    if config.val_batches == 0:
        return
    validated = min(
        held, config.val_batches * config.batch_size if config.val_batches > 0 else held
    )
    if not held:
        misnamed = (Path(config.data) / "eval.jsonl").is_file()
        more = " (there is an eval.jsonl: call it valid.jsonl)" if misnamed else ""
        yield f"no valid.jsonl: training goes on without validation{more}"
    elif validated < ENOUGH_VALIDATION:
        told = counted(held, "example")
        if validated < held:
            told = f"{validated} of {told} (--val-batches {config.val_batches})"
        yield f"valid: {told}: too few for a reliable loss"


def size_notes(
    config: TrainConfig, windows: Windows, epochs: float, positions: int | None
) -> list[str]:
    """Return notes on sizes that do not suit each other: data, number of epochs, and model.

    Args:
        windows: rows of the training split.
        epochs: passes over the data.
        positions: the model's maximum number of positions; ``None`` if unknown.
    """
    notes: list[str] = []
    if epochs >= MANY_EPOCHS and config.early_stopping_patience is None:
        notes.append(
            f"each example is trained on {epochs:,.0f} times: a model memorises so few examples; --epochs 3 sets the "
            "length in passes over the data"
        )
    longest = int(windows.work.max(initial=0))
    if positions is not None and longest > positions:
        notes.append(
            f"rows of up to {longest:,} tokens, but the model has {positions:,} positions; --max-seq-length "
            f"{positions} cuts there"
        )
    return notes


def without_effect(config: TrainConfig) -> list[str]:
    """Return notes on options that have no effect in a run with one rank."""
    alone = "one rank exchanges nothing"
    notes: list[str] = []
    if config.compress != "none":
        notes.append(f"--compress {config.compress} has no effect: {alone}")
    if config.rank_weights is not None and config.given_weights is None:
        notes.append(
            f"--rank-weights {config.rank_weights} has no effect: one rank has the whole batch"
        )
    if config.sync_every and config.sync_every > 1:
        notes.append(f"--sync-every {config.sync_every} saves no time: {alone}")
    elif config.sync_delay:
        notes.append(
            f"--sync-delay {config.sync_delay} saves no time and makes each update a step late: {alone}"
        )
    return notes


def _data_notes(split: str, stored: StoredTokens, config: TrainConfig) -> Iterator[str]:
    report, limit = stored.report, config.max_seq_length
    of = counted(report.num_examples, "example")
    if stored.built and report.build_s >= _TOLD_FROM_S:
        told = f"{format_duration(report.build_s)} ({format_count(report.num_tokens)} tokens)"
        yield f"{split}: {of} tokenised in {told}, kept for the next run in {stored.path}"
    if report.num_texts and config.mask_prompt and config.train_on != "all":
        told = f"plain texts: {report.num_texts} of {counted(report.num_records, 'record')}, which have no prompt"
        yield f"{split}: {told}: all of their tokens are trained"
    if report.num_truncated:
        told = f"{report.num_truncated} of {of} are longer than {limit} tokens and were cut"
        yield f"{split}: {told} ({report.num_truncated_tokens} tokens lost); --max-seq-length changes the limit"
    if report.num_dropped:
        first, dropped = (
            _first(report.dropped, report.num_dropped),
            counted(report.num_dropped, "example"),
        )
        yield f"{split}: {dropped} left out, no token of them is trained: {first}"
    for part in report.left_out:
        message, remedy = words_of(part.code, part.sample)
        said = f"{split}: {part.count} of {counted(report.num_records, 'example')}: {message}"
        yield f"{said} ({_first(part.places, part.count)}); what to do: {remedy}"


def _first(places: Sequence[str], count: int) -> str:
    return ", ".join(places[:3]) + ", ..." * (count > 3)


def tell_progress(say: Callable[[str], object]) -> Progress:
    """Return a :data:`Progress` that reports by ``say``, at most every few seconds."""
    told = time.monotonic()

    def tell(split: str, records: int, tokens: int) -> None:
        nonlocal told
        if time.monotonic() > told + _TELL_EVERY_S:
            told = time.monotonic()
            say(
                f"tokenising {split}: {counted(records, 'record')}, {format_count(tokens)} tokens so far"
            )

    return tell
