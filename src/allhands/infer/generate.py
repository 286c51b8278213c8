"""Ask a model: one prompt as a stream, or many at once, with or without a trained adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import psutil
from mlx_lm.generate import batch_generate, generation_stream, stream_generate, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.utils import load_adapters

from allhands.data.render import ChatTemplate, has_chat_template
from allhands.data.templates import ChatChoice
from allhands.data.token_roles import stop_at_answers
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.model.adapters import unfit
from allhands.model.load import (
    LoadedModel,
    load_model,
    load_tokenizer,
    require_in_vocabulary,
    require_numbers,
)
from allhands.model.passes import PassContext, apply_passes
from allhands.model.quantized import is_quantized
from allhands.model.tokenizer import positions_of
from allhands.run.adapter_files import check_adapter
from allhands.run.expecting import Device, dense_form_fits, packed_note, require_room_for_weights
from allhands.runtime.accelerator import Accelerator, detect, peak_memory_bytes

ALONE = Mesh()
_AT_ONCE = 16  # prompts of a batch


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token; temperature 0 takes the most likely one."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class PromptTooLong(ConfigError):
    """A prompt that leaves no position for an answer."""


@dataclass(frozen=True)
class AnswerSpeed:
    """The cost of an answer, in the words of ``mlx_lm.generate``; memory in bytes, rates in tokens
    a second.
    """

    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory_bytes: int


def load_for_generation(
    model: str,
    adapter_path: Path | None,
    *,
    trust_remote_code: bool = False,
    chat: ChatChoice | None = None,
    cut: Callable[[LoadedModel], object] | None = None,
    mesh: Mesh = ALONE,
) -> LoadedModel:
    """Load a model with an adapter on it, if there is one, and make it fast on this device.

    Generation stops where the chat template ends an answer, also if the model's own files do not
    say so.

    Args:
        chat: the chat template, if it is neither the model's own nor the one beside the adapter.
        cut: reduces the model to a part of it, before its weights are read.
        mesh: this rank's place among the ranks with the other parts.

    Raises:
        ConfigError: there is no such chat template.
        ModelError: the model or the adapter is missing, they do not match, there is no memory for
            them, or their outputs are not finite.
    """
    if adapter_path is not None:
        check_adapter(adapter_path)
    accelerator = detect()
    chosen = replace(chat or ChatChoice(), kept=adapter_path)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code, chat=chosen)
    stop, notes = stop_at_answers(tokenizer.tokenizer), tokenizer.notes
    if stop is not None:
        notes += (
            f"answers end at {stop}, as in the chat template: the model itself would not stop there",
        )
    if cut is None:
        require_room_for_weights(tokenizer.path, accelerator, mesh)
    how: Any = {"trust_remote_code": trust_remote_code, "lazy": cut is not None}
    loaded = load_model(str(tokenizer.path), tokenizer=tokenizer.tokenizer, **how)
    loaded = replace(loaded, notes=notes)
    if adapter_path is not None:
        put_on(loaded.model, adapter_path)
    if cut is not None:
        cut(loaded)
        mx.eval(loaded.model.parameters())
    loaded.model.eval()
    # After the adapter, which needs to see that the model is quantised; and in evaluation mode, so
    # that probes do not meet the adapter's dropout.
    short = False
    if accelerator.kind == "cpu" and is_quantized(loaded.model):
        mx.eval(loaded.model.parameters())
        device = Device(accelerator, mesh, psutil.Process().memory_info().rss)
        short = not dense_form_fits(loaded.model, device)
        loaded = replace(loaded, notes=(*notes, packed_note(device.room))) if short else loaded
    apply_passes(loaded.model, PassContext(accelerator, "generate", short=short))
    if cut is None:
        _require_numbers(loaded.model, adapter_path or tokenizer.path)
    return loaded


def _require_numbers(model: Any, weights: Path) -> None:
    """Compute one token, because weights that are not numbers would give answers of one token
    only.
    """
    logits = model(mx.array([[0]]), cache=make_prompt_cache(model))
    require_numbers(np.array(logits.astype(mx.float32)), weights)


def put_on(model: Any, adapter_path: Path) -> None:
    """Give ``model`` the adapter's layers and weights.

    Raises:
        ModelError: they do not match.
    """
    try:
        load_adapters(model, str(adapter_path))
    except (ValueError, KeyError, RuntimeError, AttributeError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise unfit(" ".join(lines[:2]) or type(error).__name__, adapter_path) from None


def prompt_tokens(
    loaded: LoadedModel, prompt: str, *, system_prompt: str | None = None, use_template: bool = True
) -> list[int]:
    """Token ids of ``prompt`` as the user's turn of a conversation, or as plain text.

    Raises:
        ConfigError: a system prompt without a chat template.
        DataError: the template rejects the conversation.
        ModelError: the tokenizer belongs to another model.
    """
    tokenizer: Any = loaded.tokenizer
    if use_template and has_chat_template(tokenizer):
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        tokens = ChatTemplate(tokenizer).prompt_tokens(
            [*messages, {"role": "user", "content": prompt}]
        )
    elif system_prompt:
        raise ConfigError(
            "a prompt that does not go through a chat template has no place for a system message",
            code="system-prompt-without-template",
            where="--system-prompt",
            hint="write it into --prompt, drop --ignore-chat-template, name a chat template (--chat-template), or "
            "choose a chat model",
        )
    else:
        tokens = list(tokenizer.encode(prompt))
    require_in_vocabulary(loaded, max(tokens, default=0))
    return tokens


def room_for_answer(
    count: int, positions: int | None, wanted: int, what: str = "the prompt"
) -> int:
    """Return the tokens that an answer to a prompt of ``count`` tokens may have, at most
    ``wanted``.

    Args:
        positions: of the model, see :func:`positions_of`; ``None`` if there is no bound.
        what: the prompt, in the message.

    Raises:
        PromptTooLong: there is no room for a token.
    """
    if positions is None:
        return wanted
    if count >= positions:
        raise PromptTooLong(
            f"{what} has {count} tokens; prompt and answer together may have {positions}, the positions of this model",
            code="prompt-too-long",
            where="--prompt",
            hint="shorten it, or choose a model with more positions",
        )
    return min(wanted, positions - count)


def stream_answer(
    loaded: LoadedModel, tokens: Sequence[int], max_tokens: int, sampling: Sampling
) -> Iterator[tuple[str, AnswerSpeed]]:
    """Yield pieces of the answer as they are generated, each with the speed so far.

    Raises:
        PromptTooLong: for this model.

    """
    max_tokens = room_for_answer(len(tokens), positions_of(loaded.config), max_tokens)
    mx.random.seed(sampling.seed)
    sampler = make_sampler(
        temp=sampling.temperature, top_p=sampling.top_p if sampling.top_p < 1 else 0.0
    )
    model, accelerator = cast("Any", loaded.model), detect()
    for part in stream_generate(
        model, loaded.tokenizer, list(tokens), max_tokens=max_tokens, sampler=sampler
    ):
        yield part.text, _speed(part, accelerator)


def _speed(told: Any, accelerator: Accelerator) -> AnswerSpeed:
    figures = (told.prompt_tokens, told.prompt_tps, told.generation_tokens, told.generation_tps)
    return AnswerSpeed(*figures, peak_memory_bytes(accelerator))


def answer_all(
    loaded: LoadedModel, prompts: Sequence[str], max_tokens: int
) -> tuple[list[str], AnswerSpeed]:
    """Return greedy answers to ``prompts``, several at a time, for a score in seconds.

    Raises:
        PromptTooLong: one of them, for this model.
    """
    batch = [prompt_tokens(loaded, prompt) for prompt in prompts]
    most = positions_of(loaded.config)
    shown = [f"the prompt {prompt[:40]!r}" for prompt in prompts]
    room = [
        room_for_answer(len(tokens), most, max_tokens, what)
        for tokens, what in zip(batch, shown, strict=True)
    ]
    model: Any = loaded.model
    sizes: dict[str, Any] = dict.fromkeys(("completion_batch_size", "prefill_batch_size"), _AT_ONCE)
    with wired_limit(model, cast("Any", [generation_stream])):
        response = batch_generate(
            model, cast("Any", loaded.tokenizer), batch, max_tokens=room, **sizes
        )
    return [text.strip() for text in response.texts], _speed(response.stats, detect())
