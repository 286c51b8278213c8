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
_MOST_STOPS = 4  # as OpenAI
_MOST_TOP = {"chat": 20, "text": 5}
# mlx_lm's own name for whatever it was started with.
_DEFAULT_MODEL = "default_model"
_LEAST_TEMPERATURE = 1e-4


class Refused(Exception):
    """A request that cannot be answered.

    Attributes:
        message: one sentence.
        status: of HTTP.
        code: OpenAI's word for it, where there is one.
        param: the field of the request that is meant.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param


@dataclass(frozen=True)
class Served:
    """The model that answers: its name, its adapter, how many tokens it knows, and how many it can take at once."""

    model: str
    adapter: str | None
    vocabulary: int
    positions: int | None = None


_Text = Annotated[str, Field(min_length=1, max_length=1000)]
_Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Object = dict[str, Any]
# Fields of OpenAI's, and of other servers', whose other values would be passed over: the values that change nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "store": (False,), "modalities": (["text"],)},
    **{"parallel_tool_calls": (True,), "functions": ([],), "function_call": ("none", "auto")},
    **{"tool_choice": ("none", "auto"), "verbosity": ("medium",)},
    **dict.fromkeys(("audio", "web_search_options", "grammar", "json_schema", "structured_outputs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "reasoning_effort"), ()),
}
# OpenAI's words for what pydantic finds.
_CODES = {
    "greater_than_equal": "{}_below_min_value",
    "less_than_equal": "{}_above_max_value",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "too_long": "array_above_max_length",
    "missing": "missing_required_parameter",
}


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
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
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
    logit_bias: dict[str, _Bias] | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=_MOST_TOP["text"])] | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=_MOST_TOP["chat"])] | None = None
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
        raise _refusal(error) from None
    given = {name: value for name, value in fields.model_dump().items() if value is not None}
    _check_done(given)
    if (stops := _stops(stop)) is not None:
        given["stop"] = stops
    is_chat = path.endswith("/chat/completions")
    if is_chat:
        _check_messages(given)
        _check_tools(given)
    else:
        given["prompt"] = _prompt(given, served)
    _check_logprobs(given, is_chat=is_chat)
    _check_model(given, served)
    _check_template_arguments(given.get("chat_template_kwargs", {}))
    return _settled(given, served)


def _refusal(error: ValidationError) -> Refused:
    # Of a field that may be one of several types the message about the last says most.
    found = error.errors(include_url=False, include_context=False)
    first = next(one for one in reversed(found) if one["loc"][0] == found[0]["loc"][0])
    names = [str(one) for one in first["loc"][:3] if not str(one).startswith(("bool", "constrained", "int"))]
    place = ".".join(names)[:100]
    kind = "integer" if isinstance(first["input"], int) else "decimal"
    code = _CODES.get(first["type"], "invalid_type").format(kind)
    return Refused(f"{place} {in_our_words(first['msg'])}", code=code, param=place)


def _check_done(given: dict[str, Any]) -> None:
    """Refuse what would be passed over in silence."""
    for name, without_effect in _NOT_DONE.items():
        value = given.get(name)
        if value is not None and value not in without_effect:
            told = f": only {' or '.join(json.dumps(one) for one in without_effect)}" if without_effect else ""
            message = f"{name} {json.dumps(value)[:60]} is not done here{told}"
            raise Refused(message, code="unsupported_value" if told else "unsupported_parameter", param=name)
    form = given.get("response_format", {}).get("type", "text")
    if form != "text":
        message = f"response_format {json.dumps(form)[:60]} is not done here: answers are text"
        raise Refused(message, code="unsupported_value", param="response_format")


def _check_tools(given: dict[str, Any]) -> None:
    for place, tool in enumerate(given.get("tools", [])):
        function = tool.get("function")
        if not (isinstance(function, dict) and isinstance(cast("dict[str, Any]", function).get("name"), str)):
            message = 'must be {"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise Refused(f"tools[{place}] {message}", code="invalid_type", param=f"tools[{place}]")
    if given.get("tool_choice") == "none":
        given.pop("tools", None)


def _check_logprobs(given: dict[str, Any], *, is_chat: bool) -> None:
    """Both interfaces' ways to ask for likelihoods, as ``logprobs`` and ``top_logprobs``."""
    asked, top = given.pop("logprobs", False), max(given.pop("top_logprobs", 0), 0)
    if is_chat and not isinstance(asked, bool):
        raise Refused("logprobs must be a valid boolean", code="invalid_type", param="logprobs")
    if not isinstance(asked, bool):
        top, asked = asked, True
    given |= {"logprobs": asked or top > 0, "top_logprobs": top}


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
        raise Refused("stop must be a text or a list of texts", code="invalid_type", param="stop")
    texts = cast("list[str]", stops)
    if not 0 < len(texts) <= _MOST_STOPS:
        code = "array_above_max_length" if texts else "empty_array"
        raise Refused(f"stop takes 1 to {_MOST_STOPS} texts, not {len(texts)}", code=code, param="stop")
    if not all(0 < len(text) <= 1000 for text in texts):
        code = "string_above_max_length" if all(texts) else "empty_string"
        raise Refused("stop takes texts of 1 to 1000 characters", code=code, param="stop")
    return texts


def _check_model(given: dict[str, Any], served: Served) -> None:
    """Only what is served is asked: neither a path nor a name makes this computer load or fetch anything."""
    asked = given.get("model", served.model)
    if asked not in (served.model, _DEFAULT_MODEL):
        message = f"the model {asked[:200]!r} does not exist here: {served.model!r} is served"
        raise Refused(message, 404, "model_not_found", param="model")
    if given.get("adapters") not in (None, served.adapter):
        told = "no adapter" if served.adapter is None else repr(served.adapter)
        raise Refused(f"the adapter {given['adapters'][:200]!r} does not exist here: {told} is served", 404)
    if given.get("draft_model") not in (None, _DEFAULT_MODEL):
        raise Refused("draft_model: no draft model is served", 404, "model_not_found")


def _prompt(given: dict[str, Any], served: Served) -> str | list[int]:
    """The prompt: a text, or tokens; OpenAI takes lists of either, of which one is answered here."""
    prompt: Any = given.get("prompt")
    if prompt is None:
        raise Refused("Request did not contain a prompt", code="missing_required_parameter", param="prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(cast("list[Any]", prompt)) > 1:
            raise Refused("prompt has several: one is answered at a time", code="unsupported_value", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, list):
        tokens = cast("list[Any]", prompt)
        if all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < served.vocabulary for one in tokens):
            return tokens
        message = f"prompt must be a text, or tokens: they are 0 to {served.vocabulary - 1}"
        raise Refused(message, code="invalid_type", param="prompt")
    if not isinstance(prompt, str):
        raise Refused("prompt must be a text", code="invalid_type", param="prompt")
    return prompt


def _check_messages(given: dict[str, Any]) -> None:
    if "messages" not in given:
        raise Refused("Request did not contain messages", code="missing_required_parameter", param="messages")
    messages = given["messages"]
    if not isinstance(messages, list):
        message = 'messages must be a list, as in [{"role": "user", "content": "Hello"}]'
        raise Refused(message, code="invalid_type", param="messages")
    if not messages:
        raise Refused("messages is empty: at least one is needed", code="empty_array", param="messages")
    if len(cast("list[Any]", messages)) > _MOST_MESSAGES:
        message = f"messages has more than {_MOST_MESSAGES} messages"
        raise Refused(message, code="array_above_max_length", param="messages")
    for place, message in enumerate(cast("list[Any]", messages)):
        if wrong := _wrong_message(message):
            raise Refused(f"messages[{place}]{wrong}", code="invalid_value", param=f"messages[{place}]")
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
        message = f"chat_template_kwargs cannot set {', '.join(sorted(taken))}"
        raise Refused(message, param="chat_template_kwargs")


def _settled(given: dict[str, Any], served: Served) -> dict[str, Any]:
    """Values that mean the same to mlx_lm, and that it can compute with."""
    for name in ("adapters", "draft_model"):
        given.pop(name, None)
    given["model"] = served.model
    if 0 < given.get("temperature", 0) < _LEAST_TEMPERATURE or given.get("top_p") == 0:
        given["temperature"] = 0.0  # the limit; its reciprocal is beyond float32
    if given.get("top_p") == 0:
        del given["top_p"]  # to mlx_lm it is no limit
    if not 0 < given.get("top_k", 0) < served.vocabulary:
        given.pop("top_k", None)
    if given["top_logprobs"] >= served.vocabulary:
        message = f"top_logprobs must be below the {served.vocabulary} tokens of the model"
        raise Refused(message, code="integer_above_max_value", param="top_logprobs")
    if "seed" in given:
        given["seed"] %= 2**64
    for token in given.get("logit_bias", {}):
        if not (token.isascii() and token.isdigit() and len(token) < 12 and int(token) < served.vocabulary):
            message = f"logit_bias has {token[:100]!r}, which is no token: they are 0 to {served.vocabulary - 1}"
            raise Refused(message, code="invalid_value", param="logit_bias")
    return given
