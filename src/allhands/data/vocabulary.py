"""Training of tokenizers on a corpus (``allhands tokenizer train``); transformers and mlx_lm load
the result.

The tokenizers are byte-level BPE: every text can be encoded and decoded without loss. The
``tokenizers`` library does the work.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.data.corpus import Corpus, Progress
from allhands.data.outcome import Reason
from allhands.data.sources import Source
from allhands.data.tokens_shown import cut
from allhands.errors import ConfigError
from allhands.io.staging import publish, require_place, staging
from allhands.runtime.threads import side_by_side

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_BYTES = 256
_MOST = 10**7  # the trainer sets memory aside for all of them
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEMPLATES = {"chatml": CHATML}
_READS_S = 10.0
OUTPUT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

# Pattern by which Llama 3 cuts words: English endings; letters with one character before them;
# numbers; other signs; line ends; blanks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = 3
_SAMPLE_CHARS = 240
# Maximum length that transformers writes for a tokenizer without a limit.
_NO_LIMIT = int(1e30)


@dataclass(frozen=True)
class VocabularyOptions:
    """Options of ``allhands tokenizer train``, by flag name; checked when made.

    Attributes:
        vocabulary: most tokens, with the 256 bytes and the special tokens.
        special: further special tokens.
        split_digits: every digit is a token of its own, else up to three may be one.
        chat_template: a name of :data:`TEMPLATES`. Texts then end with the token that ends a turn,
            so that a model has the same end for texts and, later, for chats.
        text_key: the column of the text.
        force: replace a tokenizer in the output directory.

    Raises:
        ConfigError: a value cannot work.
    """

    vocabulary: int = 4096
    special: tuple[str, ...] = ()
    split_digits: bool = False
    chat_template: str | None = None
    text_key: str = "text"
    force: bool = False

    def __post_init__(self) -> None:
        if self.chat_template not in (None, *TEMPLATES):
            raise ConfigError(
                f"no chat template {self.chat_template!r}",
                code="chat-template-unknown",
                where="--chat-template",
                hint=f"one of {', '.join(TEMPLATES)}",
            )
        names = self.special_tokens
        for name in self.special:
            if not name.strip() or names.count(name) > 1:
                raise ConfigError(
                    f"{name!r} cannot be a special token, it is {'one already' if name.strip() else 'empty'}",
                    code="value-invalid",
                    where="--special",
                    hint="name each once; for example --special '<|tool|>'",
                )
        least = NUM_BYTES + len(names)
        reason = ""
        if self.vocabulary < least:
            reason = f"few: {NUM_BYTES} bytes and {len(names)} special ones come first"
        elif self.vocabulary > _MOST:
            reason = f"many: this tokenizer has at most {_MOST:,}"
        if reason:
            raise ConfigError(
                f"{self.vocabulary:,} tokens are too {reason}",
                code="value-out-of-range",
                where="--vocabulary",
                hint=f"give at least {least}; usual are 4096 to 50000",
            )

    @property
    def eos(self) -> str:
        """Token that ends a text."""
        return END_OF_TURN if self.chat_template else EOS

    @property
    def special_tokens(self) -> list[str]:
        """All special tokens in the order of their ids, from 0."""
        return [BOS, self.eos, PAD, *([TURN] if self.chat_template else []), *self.special]


@dataclass(frozen=True)
class VocabularyReport:
    """Figures of a tokenizer that was made.

    Attributes:
        vocabulary: number of tokens; fewer than wanted if the text has too few pairs.
        documents: number of documents read for training.
        num_bytes: their UTF-8 bytes.
        bytes_per_token: bytes per token on held-out text; None without such text.
        held_out_bytes: UTF-8 bytes of the held-out text.
        held_out: origin of the held-out text, in words.
        seconds: time for reading and training.
        sample: tokens of a sample text, as people can read them.
        left_out: rows that could not be used, by reasons.
    """

    vocabulary: int
    documents: int
    num_bytes: int
    bytes_per_token: float | None
    held_out_bytes: int
    held_out: str
    seconds: float
    sample: list[str]
    left_out: list[Reason] = field(default_factory=list[Reason])


def train_tokenizer(
    sources: Sequence[Source],
    out: Path,
    options: VocabularyOptions,
    progress: Progress | None = None,
) -> VocabularyReport:
    """Train a tokenizer on the training split of ``sources`` and write it to ``out``.

    ``out`` gets all files or none. The same data and options give the same files, byte by byte.

    Raises:
        ConfigError: ``out`` is in use.
        DataError: there is no text to train on.
        StorageError: ``out`` cannot be written.
    """
    seen = require_place(out, "a tokenizer", OUTPUT, force=options.force)
    corpus = Corpus(sources, options.text_key, progress)
    begun = time.perf_counter()
    with staging(out) as staged:
        tokenizer = _trained(corpus, options)
        seconds = time.perf_counter() - begun
        _write(tokenizer, staged, options)
        publish(staged, out, seen)
    encoded: Any = tokenizer.encode_batch(corpus.held_out, add_special_tokens=False)
    num_tokens = sum(len(one.ids) for one in encoded)
    held_out_bytes = sum(len(text.encode()) for text in corpus.held_out)
    sample = (corpus.held_out or [corpus.first])[0][:_SAMPLE_CHARS]
    return VocabularyReport(
        vocabulary=tokenizer.get_vocab_size(),
        documents=corpus.documents,
        num_bytes=corpus.num_bytes,
        bytes_per_token=held_out_bytes / num_tokens if num_tokens else None,
        held_out_bytes=held_out_bytes,
        held_out="the validation split" if corpus.held_out_is_split else "the end of the text",
        seconds=seconds,
        sample=cut(tokenizer, sample).pieces,
        left_out=corpus.left_out,
    )


def _trained(corpus: Corpus, options: VocabularyOptions) -> Tokenizer:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer: Any = Tokenizer(models.BPE())
    words = Regex(_WORDS % (1 if options.split_digits else _DIGITS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = options.special_tokens
    trainer: Any = trainers.BpeTrainer(
        vocab_size=options.vocabulary,
        min_frequency=2,  # a pair that occurs once is no pattern
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train(tokenizer, corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, names.index(BOS))]
    )
    return tokenizer


def _train(tokenizer: Any, corpus: Corpus, trainer: Any) -> None:
    """Train a tokenizer in a thread, so that Ctrl-C ends the training at once."""
    stopped, read = threading.Event(), threading.Event()

    def texts() -> Iterator[str]:
        try:
            for text in corpus.training():
                if stopped.is_set():
                    break
                yield text
        finally:
            read.set()

    try:
        side_by_side(lambda learns: learns.train_from_iterator(texts(), trainer), [tokenizer])
    finally:
        stopped.set()
        # If the thread still asks for texts when Python exits, the process dies by a signal.
        read.wait(_READS_S)


def _write(tokenizer: Any, directory: Path, options: VocabularyOptions) -> None:
    mapping: dict[str, Any] = {"bos_token": BOS, "eos_token": options.eos, "pad_token": PAD}
    if others := [name for name in options.special_tokens if name not in mapping.values()]:
        mapping["additional_special_tokens"] = others
    config = {
        **mapping,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _NO_LIMIT,
        "clean_up_tokenization_spaces": False,
        **({"chat_template": TEMPLATES[options.chat_template]} if options.chat_template else {}),
    }
    written = (json.dumps(each, indent=2, ensure_ascii=False) for each in (config, mapping))
    for name, content in zip(OUTPUT, (tokenizer.to_str(pretty=True), *written), strict=True):
        (directory / name).write_text(content + "\n", encoding="utf-8")
