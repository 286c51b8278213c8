"""What both workers of ``gradients.py`` have in common, without MLX and allhands: rows, a
tokenizer, requests.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

BATCHES = ("short", "long")
Lengths = Sequence[Sequence[int]]
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_END = "<|im_end|>"
_LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;()[]{}+-*/=<>!?#%&|^~_"
)


def texts_of(lengths: Lengths) -> list[list[str]]:
    """The texts of each batch, by their lengths in tokens: one a letter, and one for the end."""
    letters = random.Random(5)
    return [
        ["".join(letters.choice(_LETTERS) for _ in range(n - 1)) for n in batch]
        for batch in lengths
    ]


def tokens_of(lengths: Lengths) -> list[int]:
    """How many tokens are trained in each batch: which identifies it."""
    return [sum(len(text) for text in batch) for batch in texts_of(lengths)]


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*_SPECIAL, *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes, as models have it."""
    _tokenizer().save(str(directory / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _SPECIAL[0],
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(told | {"clean_up_tokenization_spaces": False})
    )


def save_data(directory: Path, lengths: Lengths) -> None:
    """The batches as a data set, for training and validation."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(
        json.dumps({"text": text}) + "\n" for batch in texts_of(lengths) for text in batch
    )
    for split in ("train", "valid"):
        (directory / f"{split}.jsonl").write_text(lines)


def rows_of(lengths: Lengths) -> list[list[list[int]]]:
    """The tokens of each text of each batch."""
    end = _tokenizer().token_to_id(_END)
    return [
        [[*_tokenizer().encode(text).ids, end] for text in batch] for batch in texts_of(lengths)
    ]


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each line of standard input; whatever else is printed goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)
