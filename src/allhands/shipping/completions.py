"""What a request for a completion may say: read, bounded and checked field by field, before the model is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from allhands.data.messages import ROLES
from allhands.data.render import rendering_options
from allhands.errors import in_our_words

MOST_BYTES = 16 * 2**20
_MOST_DEPTH = 64
_MOST_MESSAGES = 10_000
_MOST_STOPS = 16
# mlx_lm's own name for whatever it was started with.
_DEFAULT_MODEL = "default_model"
_LEAST_TEMPERATURE = 1e-4


class Refused(Exception):
    """A request that cannot be answered: HTTP status, one sentence, and OpenAI's word for it where there is one."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


@dataclass(frozen=True)
class Served:
    """The model that answers: its name, its adapter, and how many tokens it knows."""

    model: str
    adapter: str | None
    vocabulary: int


_Text = Annotated[str, Field(min_length=1, max_length=1000)]
_Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-100, le=100)]
_Object = dict[str, Any]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


class _Fields(BaseModel):
    """The fields that mlx_lm's server reads, and those of OpenAI's whose other values it would pass over in silence."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    adapters: str | None = None
    draft_model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Share | None = None
    xtc_probability: _Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_context_size: _Whole | None = None
    presence_context_size: _Whole | None = None
    frequency_context_size: _Whole | None = None
    num_draft_tokens: _Whole | None = None
    logit_bias: dict[str, _Penalty] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=11)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    tools: list[_Object] | None = None
    tool_choice: str | _Object | None = None
    response_format: _Object | None = None
    role_mapping: dict[str, str] | None = None
    chat_template_kwargs: _Object | None = None
    user: str | None = None


def read_request(raw: bytes, path: str, served: Served) -> dict[str, Any]:
    """The body of a request, with every field as mlx_lm's server takes it; fields that are null are left out.

    Raises:
        Refused: it is none that could be answered.
    """
    content = _parsed(raw)
    stop = content.pop("stop", None)
    try:
        fields = _Fields.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(one) for one in first["loc"][:3])
        raise Refused(f"{place[:100]} {in_our_words(first['msg'])}") from None
    given = {name: value for name, value in fields.model_dump().items() if value is not None}
    if (stops := _stops(stop)) is not None:
        given["stop"] = stops
    if path.endswith("/chat/completions"):
        _check_messages(given)
    else:
        _check_prompt(given)
    _check_model(given, served)
    _check_template_arguments(given.get("chat_template_kwargs", {}))
    return _settled(given, served)


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        content: Any = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
        too_deep = _is_deeper(content, _MOST_DEPTH)
        # Halves of a character that JSON can write, and no tokenizer can read.
        json.dumps(content, ensure_ascii=False).encode("utf-8") if not too_deep else None
    except UnicodeError:
        raise Refused("the body is not valid Unicode (UTF-8)") from None
    except ValueError as error:
        raise Refused(f"Invalid JSON in request body: {str(error)[:200]}") from None
    except RecursionError:
        too_deep, content = True, None
    if too_deep:
        raise Refused(f"the body is nested deeper than {_MOST_DEPTH} levels")
    if not isinstance(content, dict):
        raise Refused("the body must be a JSON object")
    return cast("dict[str, Any]", content)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON's")


def _is_deeper(value: Any, most: int) -> bool:
    level: list[Any] = [value]
    for _ in range(most):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in cast("list[Any]", values) if isinstance(inner, dict | list)]


def _stops(stop: Any) -> list[str] | None:
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in cast("list[Any]", stops)):
        raise Refused("stop must be a text or a list of texts")
    texts = cast("list[str]", stops)
    if len(texts) > _MOST_STOPS or not all(0 < len(text) <= 1000 for text in texts):
        raise Refused(f"stop takes up to {_MOST_STOPS} texts of 1 to 1000 characters")
    return texts


def _check_model(given: dict[str, Any], served: Served) -> None:
    """Only what is served is asked: neither a path nor a name makes this computer load or fetch anything."""
    asked = given.get("model", served.model)
    if asked not in (served.model, _DEFAULT_MODEL):
        message = f"the model {asked[:200]!r} does not exist here: {served.model!r} is served"
        raise Refused(message, 404, "model_not_found")
    if given.get("adapters") not in (None, served.adapter):
        told = "no adapter" if served.adapter is None else repr(served.adapter)
        raise Refused(f"the adapter {given['adapters'][:200]!r} does not exist here: {told} is served", 404)
    if given.get("draft_model") not in (None, _DEFAULT_MODEL):
        raise Refused("draft_model: no draft model is served", 404, "model_not_found")


def _check_prompt(given: dict[str, Any]) -> None:
    if "prompt" not in given:
        raise Refused("Request did not contain a prompt")
    if not isinstance(given["prompt"], str):
        raise Refused("prompt must be a text")


def _check_messages(given: dict[str, Any]) -> None:
    if "messages" not in given:
        raise Refused("Request did not contain messages")
    messages = given["messages"]
    if not isinstance(messages, list):
        raise Refused('messages must be a list, as in [{"role": "user", "content": "Hello"}]')
    if not messages:
        raise Refused("messages is empty: at least one is needed")
    if len(cast("list[Any]", messages)) > _MOST_MESSAGES:
        raise Refused(f"messages has more than {_MOST_MESSAGES} messages")
    for place, message in enumerate(cast("list[Any]", messages)):
        if wrong := _wrong_message(message):
            raise Refused(f"messages[{place}]{wrong}")
        # What mlx_lm makes of it for chat templates, and would not where there is none.
        content: Any = message.get("content")
        message["content"] = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _wrong_message(message: Any) -> str | None:
    if not isinstance(message, dict):
        return ' must be an object, as in {"role": "user", "content": "Hello"}'
    known = cast("dict[str, Any]", message)
    content = known.get("content")
    if not isinstance(known.get("role"), str):
        return " has no role: give user, assistant or system"
    if known["role"] not in ROLES:
        return f".role {str(known['role'])[:100]!r} is unknown: give one of {', '.join(ROLES)}"
    if content is None and not (known["role"] == "assistant" and known.get("tool_calls")):
        return " has no content"
    if not isinstance(content, str | list | None):
        return ".content must be a text or a list of parts"
    # Of an image mlx_lm fetches the address, whichever it is, in this computer's own network, too.
    for part in cast("list[Any]", content) if isinstance(content, list) else ():
        kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            return f".content has a part of type {str(kind)[:100]}: only text is read here"
        if not isinstance(part.get("text"), str):
            return ".content has a part of type text without a text"
    calls = known.get("tool_calls")
    if calls is not None and not _are_calls(calls):
        return '.tool_calls must be a list of {"function": {"name": ..., "arguments": ...}}'
    return None


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(one, dict)
        and isinstance(function := cast("dict[str, Any]", one).get("function"), dict)
        and isinstance(cast("dict[str, Any]", function).get("name"), str)
        for one in cast("list[Any]", calls)
    )


def _check_template_arguments(arguments: dict[str, Any]) -> None:
    """Variables for the model's template; neither another template nor how it is called."""
    if taken := rendering_options() & set(arguments):
        raise Refused(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}")


def _settled(given: dict[str, Any], served: Served) -> dict[str, Any]:
    """Values that mean the same to mlx_lm, and that it can compute with."""
    for name in ("adapters", "draft_model"):
        given.pop(name, None)
    given["model"] = served.model
    if 0 < given.get("temperature", 0) < _LEAST_TEMPERATURE:
        given["temperature"] = 0.0  # the limit; its reciprocal is beyond float32
    if not 0 < given.get("top_k", 0) < served.vocabulary:
        given.pop("top_k", None)
    if given.get("top_logprobs", 0) >= served.vocabulary:
        raise Refused(f"top_logprobs must be below the {served.vocabulary} tokens of the model")
    if "seed" in given:
        given["seed"] %= 2**64
    for token in given.get("logit_bias", {}):
        if not (token.isascii() and token.isdigit() and len(token) < 12 and int(token) < served.vocabulary):
            raise Refused(f"logit_bias has {token[:100]!r}, which is no token: they are 0 to {served.vocabulary - 1}")
    return given
