"""mlx_lm's generator of answers for one model, with cancellation for clients that leave.

A request without a prompt is refused in its own thread, before any computation.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    ModelProvider,
    ResponseGenerator,
    SamplingArguments,
)

from allhands.data.heard import AnswerPart, lost_markers, mark
from allhands.data.messages import INSTRUCTION_ROLES
from allhands.data.render import ChatTemplate
from allhands.data.templates import MERGE, OPTION
from allhands.errors import DataError
from allhands.infer.completions import Refused, Served
from allhands.infer.generate import PromptTooLong, room_for_answer
from allhands.infer.texts import TokenBytes
from allhands.model.load import LoadedModel

# Seconds between two checks of a waiting request whether its client is still connected.
_LOOK_S = 0.2
# Parts of messages that the model must see; thinking of earlier answers is left out on purpose.
_SAID = {
    "system": "its content",
    "question": "its content",
    "result": "its content",
    "call": "its tool_calls",
}


class Provider(ModelProvider):
    """Provider of one model, for any request."""

    def __init__(self, settings: argparse.Namespace, loaded: LoadedModel) -> None:
        super().__init__(settings)
        model: Any = loaded.model
        self.model: Any = model
        self.tokenizer: Any = loaded.tokenizer
        self.model_key: Any = (settings.model, settings.adapter_path, None)
        self.is_batchable: bool = all(hasattr(cache, "merge") for cache in make_prompt_cache(model))
        self.template = ChatTemplate(self.tokenizer) if self.tokenizer.has_chat_template else None
        self.token_bytes = TokenBytes(self.tokenizer)

    def load(
        self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None
    ) -> tuple[Any, Any]:
        """Return the model and its tokenizer."""
        return self.model, self.tokenizer


class ModelFailed(Exception):
    """The thread that generates has ended: memory was too small, or the model failed otherwise."""


class _Left(Exception):
    """The client no longer waits for the answer."""


@dataclass
class Prepared(CompletionRequest):
    """A request whose prompt is known in tokens, and fits.

    Attributes:
        tokenized: what :meth:`ResponseGenerator._tokenize` returns for it.
        left: set when the client no longer waits for the answer.
    """

    tokenized: tuple[Any, ...]
    left: threading.Event


class Asked:
    """An answer that is being generated: iterate over its pieces, and call :meth:`stop` in any
    case.

    Args:
        look: called a few times a second; raises if the client is gone.
        progress: called with the computed and all tokens of the prompt.
    """

    def __init__(
        self, generator: Generator, look: Callable[[], None], progress: Callable[[int, int], None]
    ) -> None:
        self._generator, self._look, self._progress = generator, look, progress
        self._replies: Queue[Any] = Queue()
        self._left = threading.Event()
        self._looked = time.monotonic()
        self.context: Any = None

    def begin(self, request: Prepared, arguments: GenerationArguments) -> None:
        """Wait until the model has taken the request.

        Raises:
            ModelFailed: it cannot.
        """
        request.left = self._left
        if not self._generator.generation_available():
            raise ModelFailed("the model does not answer")
        self._generator.requests.put((self._replies, request, arguments))
        self.context = self._next()

    def __iter__(self) -> Iterator[Any]:
        while (reply := self._next()) is not None:
            if isinstance(reply, tuple):
                self._progress(*reply)
            else:
                yield reply

    def stop(self) -> None:
        """Stop the computation of the answer."""
        self._left.set()
        if self.context is not None:
            self.context.stop()

    def _next(self) -> Any:
        while True:
            if time.monotonic() - self._looked >= _LOOK_S:
                self._looked = time.monotonic()
                self._look()
            try:
                reply = self._replies.get(timeout=_LOOK_S)
            except Empty:
                if not self._generator.generation_available():
                    raise ModelFailed("the model failed in the middle of the answer") from None
                continue
            if isinstance(reply, Exception):
                told = (
                    f"{reply}" if isinstance(reply, _Left) else f"{type(reply).__name__}: {reply}"
                )
                raise ModelFailed(told) from reply
            return reply


class _Watched:
    """The replies of a request that is served alone; only an exception stops the computation of its
    prompt.
    """

    def __init__(self, replies: Queue[Any], is_over: Callable[[], bool]) -> None:
        self._replies, self._is_over = replies, is_over

    def put(self, reply: Any) -> None:
        """Pass on a reply; the last one is always passed on."""
        if self._is_over() and not (reply is None or isinstance(reply, Exception)):
            raise _Left("it was stopped")
        self._replies.put(reply)


class Generator(ResponseGenerator):
    """mlx_lm's generator, with errors in one line, and stop words that end answers anywhere in the
    text.

    Its thread leaves no MLX objects behind: a stream that outlives the thread aborts the process at
    its end.
    """

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self._preparing = threading.Lock()
        super().__init__(provider, LRUPromptCache(provider.cli_args.prompt_cache_size))

    # --- in the thread of a request ---------------------------------------------------------------

    def prepare(
        self, request: CompletionRequest, arguments: GenerationArguments, served: Served
    ) -> Prepared:
        """Return the prompt in tokens; ``arguments`` get at most the remaining positions for the
        answer.

        Raises:
            Refused: the prompt is invalid, or too long for the model.
        """
        with self._preparing:
            try:
                if request.request_type == "chat":
                    self._check_heard(request)
                tokenized = self._tokens(request, arguments)
            except Refused:
                raise
            except Exception as error:  # templates are foreign programs
                raise self._unwritten(request, error) from None
        count = len(tokenized[0])
        if not count:
            raise Refused("the prompt is empty", param=_param(request))
        try:
            arguments.max_tokens = room_for_answer(count, served.positions, arguments.max_tokens)
        except PromptTooLong as error:
            raise Refused(
                f"{error.message}: shorten it",
                code="context_length_exceeded",
                param=_param(request),
            ) from None
        fields = {name: getattr(request, name) for name in CompletionRequest.__dataclass_fields__}
        return Prepared(**fields, tokenized=tokenized, left=threading.Event())

    def _tokens(
        self, request: CompletionRequest, arguments: GenerationArguments
    ) -> tuple[Any, ...]:
        prompt: Any = request.prompt
        if isinstance(prompt, list):
            return prompt, [list[int](prompt)], ["assistant"], "normal", None
        return super()._tokenize(self.provider.tokenizer, request, arguments)

    def _unwritten(self, request: CompletionRequest, error: Exception) -> Refused:
        roles = {message["role"] for message in request.messages}
        template = self.provider.template
        lost = template is not None and roles & set(INSTRUCTION_ROLES) and not template.takes_system
        way_out = (
            f" (it has no place for system messages: start the server with {MERGE})" if lost else ""
        )
        return Refused(
            f"the model's chat template cannot write this: {error}{way_out}", param="messages"
        )

    def _check_heard(self, request: CompletionRequest) -> None:
        """Refuse parts that the chat template would silently leave out."""
        if request.tools:
            self._check_tools(request)
        lost = self._lost(request.messages, request.tools)
        developers = [message for message in request.messages if message["role"] == "developer"]
        if developers and (lost is None or any(part.kind == "system" for part in lost)):
            # OpenAI's newer name of the system message.
            for message in developers:
                message["role"] = "system"
            lost = self._lost(request.messages, request.tools)
        for part in lost or ():
            if part.kind in _SAID:
                role = request.messages[part.index]["role"]
                way = MERGE if part.kind == "system" else f"{OPTION} with another template"
                raise Refused(
                    f"messages[{part.index}]: the model's chat template leaves out {_SAID[part.kind]}: it has no role "
                    f"{role!r} (start the server with {way})",
                    param=f"messages[{part.index}].role",
                )

    def _check_tools(self, request: CompletionRequest) -> None:
        lost = self._lost(request.messages, request.tools) if self.provider.template else None
        code = "unsupported_parameter"
        if self.provider.template is None or any(part.kind == "tool" for part in lost or ()):
            raise Refused(
                "the model's chat template has no place for tools", code=code, param="tools"
            )
        if not self.provider.tokenizer.has_tool_calling:
            raise Refused("the tool calls of this model cannot be parsed", code=code, param="tools")

    def _lost(self, messages: list[Any], tools: list[Any] | None) -> list[AnswerPart] | None:
        """Return the parts of a conversation that the template leaves out; ``None`` if it rejects
        it.
        """
        if self.provider.template is None:
            return []
        marked = mark(messages, tools)
        try:
            text = self.provider.template.text(marked.messages, marked.tools)
        except DataError:
            return None
        return [marked.parts[number] for number in sorted(lost_markers(text, marked))]

    # --- in the thread that generates -------------------------------------------------------------

    def _run_generate(self) -> None:
        try:
            self._generate()
        except Exception as error:
            self._generation_failed = True
            print(
                f"allhands: error: the model failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
        finally:
            mx.clear_streams()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        if request.left.is_set():
            raise _Left
        return request.tokenized

    def _make_state_machine(self, model_key: Any, tokenizer: Any, stop_words: Any) -> Any:
        """Leave stop words out, because they are searched in the text of the answer."""
        return super()._make_state_machine(model_key, tokenizer, [])

    def _serve_single(self, request: Any, stream: Any) -> None:
        replies, prepared, arguments = request
        watched = _Watched(replies, lambda: self._stop or prepared.left.is_set())
        super()._serve_single((watched, prepared, arguments), stream)


def _param(request: CompletionRequest) -> str:
    return "messages" if request.request_type == "chat" else "prompt"


# Fields of a request by mlx_lm's names, with what they are where it does not say; a text: as the
# server was started.
_SAMPLING: dict[str, Any] = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
}
_PENALTIES = {
    f"{kind}_{what}": usual
    for kind in ("repetition", "presence", "frequency")
    for what, usual in (("penalty", 0.0), ("context_size", 20))
}


def completion_of(
    given: dict[str, Any], *, chat: bool, defaults: Any
) -> tuple[CompletionRequest, GenerationArguments]:
    """Return a request that was read, in mlx_lm's words; ``defaults`` holds what the server was
    started with.
    """
    request = CompletionRequest(
        request_type="chat" if chat else "text",
        prompt="" if chat else given["prompt"],
        messages=given["messages"] if chat else [],
        tools=given.get("tools") or None,
        role_mapping=given.get("role_mapping"),
    )
    usual = {
        name: getattr(defaults, at) if isinstance(at, str) else at for name, at in _SAMPLING.items()
    }
    bias = given.get("logit_bias")
    arguments = GenerationArguments(
        model=ModelDescription(model=given["model"], draft="default_model", adapter=None),  # type: ignore[arg-type]
        sampling=SamplingArguments(
            **{name: given.get(name, value) for name, value in usual.items()}
        ),
        logits=LogitsProcessorArguments(
            logit_bias=None
            if bias is None
            else {int(token): float(value) for token, value in bias.items()},
            **{name: given.get(name, value) for name, value in _PENALTIES.items()},
        ),
        stop_words=given.get("stop", []),
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens", defaults.max_tokens)),
        num_draft_tokens=given.get("num_draft_tokens", defaults.num_draft_tokens),
        logprobs=given["logprobs"],
        top_logprobs=given["top_logprobs"],
        seed=given.get("seed"),
        chat_template_kwargs=given.get("chat_template_kwargs"),
    )
    return request, arguments
