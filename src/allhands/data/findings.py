"""Words for the findings about data, and their remedies."""

from __future__ import annotations

from typing import Any

from allhands.data.check import DataFinding
from allhands.data.heard import WORDS as UNHEARD
from allhands.io.formatting import counted

# The message of each kind of finding, and its remedy. Findings of errors have their own words.
WORDS: dict[str, tuple[str, str]] = {
    "answers-lost": (
        "nothing of the answer is left within {limit}",
        "raise --max-seq-length (the longest has {longest}), or shorten the prompts",
    ),
    "answers-cut": (
        "the answer is cut off at {limit}",
        "raise --max-seq-length (the longest has {longest}), or split these records",
    ),
    "cut": (
        "cut off at {limit}; {cut_tokens} lost",
        "raise --max-seq-length (the longest has {longest}), split the texts (allhands data prepare "
        "--documents blank-line), or pack (--packing)",
    ),
    "nothing-trained": (
        "left out, because no token is trained",
        "look at one with --row LINE",
    ),
    "no-end-of-turn": (
        "no end-of-turn token is trained, so the model does not learn to stop",
        "use a model whose chat template ends each answer with a special token",
    ),
    "end-not-eos": (
        "the answer ends with {end}, at which the model itself does not stop",
        "generate, chat and serve stop there where the chat template says so, and fuse and export write it "
        "into eos_token_id; elsewhere, add that token to eos_token_id in the model's config.json",
    ),
    "empty-answers": (
        "the answer has no words",
        "fill it in or delete the record",
    ),
    "bos-twice": (
        "the begin-of-text token is there twice",
        "take it out of the data: it is added to each example",
    ),
    "special-text": (
        "special tokens are spelled out in the words: {special}",
        "take them out of the data: they open or end turns, and the template writes its own",
    ),
    "own-tokens": (
        "the words contain special tokens that the chat template does not write: {own}",
        "right where the model knows them; if they are new, LoRA on these keys leaves their rows in the "
        "embedding as they are: add model.embed_tokens (and lm_head, where it is not tied to it) to the keys of "
        "--lora-parameters, or train in full (--fine-tune-type full, all layers)",
    ),
    "vocabulary": (
        "token ids up to {largest:,}, but the model has {vocab_size:,}",
        "use the tokenizer that belongs to the model",
    ),
    **UNHEARD,
    "weights-unused": (
        "a message of weight 0 is trained nevertheless, because prompts are not masked",
        "add --mask-prompt, under which such messages are left out of the loss",
    ),
    "dated": (
        "the chat template writes the current date: {dates}",
        "usually nothing: a run keeps the date on which it began, also when it is resumed",
    ),
    "short-answers": (
        "the answer has only one or two tokens",
        "right for labels; for conversation, check that the answers are whole",
    ),
    "repeats": (
        "identical to an earlier one of the split",
        "allhands data prepare --dedupe exact drops them",
    ),
    "in-train": (
        "also in the training set, so the loss here says little",
        "take them out of one of the two, or let allhands data prepare split the data",
    ),
    "near-train": (
        "nearly the same as one in the training set",
        "look at them; allhands data prepare keeps similar examples in one split",
    ),
    "same-answer": (
        "the answer is one and the same",
        "right for labels; else thin these records out",
    ),
    "no-examples": (
        "no example can be trained on",
        "see the other findings",
    ),
    "no-split": (
        "there is no {split} set",
        "allhands data prepare makes one of a part of the data",
    ),
    "held-out": (
        "kept for validation, and never trained on",
        "right if that was meant; else move some to the training set, or prepare them with --valid 0 --test 0",
    ),
    "few-validation": (
        "{examples}: too few for a reliable loss, and this loss decides which weights are best",
        "hold more out (allhands data prepare --valid {enough}), or judge the model by its answers to "
        "your own questions",
    ),
    "many-epochs": (
        "each example is trained on {epochs:,.0f} times ({iters:,} batches of {batch_size}): a model "
        "memorises so few examples",
        "set the length in passes over the data: --epochs 3; or add examples",
    ),
    "beyond-positions": (
        "rows of up to {tokens}, but the model has {positions:,} positions",
        "--max-seq-length {positions} cuts there",
    ),
    "few-examples": (
        "{examples} for batches of {batch_size}: every batch is the whole set",
        "lower --batch-size, or add examples",
    ),
    "all-texts": (
        "plain texts have no prompt that --mask-prompt could mask",
        "leave --mask-prompt out, or give the data as prompt and completion, or as messages",
    ),
    "some-texts": (
        "plain text without a prompt, so all of it is trained",
        "right if texts and chats are mixed; else write them as prompt and completion",
    ),
    "mask-prompt-off": (
        "prompts are trained too; {share:.0%} of the trained tokens are theirs",
        "add --mask-prompt to train on the answers only",
    ),
    "no-generation-prompt": (
        "the chat template does not open an answer with {header!r} when asked for a prompt",
        "repair add_generation_prompt in the model's chat template",
    ),
    "other-generation-prompt": (
        "the chat template opens generated answers with {header!r}, the trained ones do not",
        "begin the data's answers with it, or generate with a template that does not write it",
    ),
    "read-as": (
        "{note}",
        "",
    ),
    "no-row": (
        "no record that can be shown begins in line {rows}",
        "look at the file, and at the rows that are bad",
    ),
}
# Details that are numbers, and their nouns.
_NOUNS = {
    "limit": "token",
    "longest": "token",
    "cut_tokens": "token",
    "examples": "example",
    "tokens": "token",
}


def words_of(finding: DataFinding) -> tuple[str, str]:
    """Return the finding as a sentence, which begins with its count, and the remedy; the remedy is
    empty if none is known.
    """
    if "message" in finding.details:
        message = f"{counted(finding.count, 'row')}: {finding.details['message']}"
        return message, finding.details["hint"] or ""
    details = {name: _word(name, value) for name, value in finding.details.items()}
    message, remedy = (text.format(split=finding.split, **details) for text in WORDS[finding.code])
    if finding.count:
        message = f"{finding.count:,} of {counted(finding.total, 'example')}: {message}"
    return message, remedy


def _word(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType]
    return counted(value, _NOUNS[name]) if name in _NOUNS else value
