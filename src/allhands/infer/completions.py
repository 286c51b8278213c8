"""Requests for completions, with limited size, checked field by field before the model computes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from allhands.data.messages import ROLES
from allhands.data.render import rendering_options
from allhands.data.values import without_nulls
from allhands.errors import in_our_words

MOST_BYTES = 16 * 2**20
_MOST_DEPTH = 64
_MOST_MESSAGES = 10_000
_MOST_STOPS = 4  # as OpenAI
# mlx_lm's own name for the model of its start.
_DEFAULT_MODEL = "default_model"
_LEAST_TEMPERATURE = 1e-4


class Refused(Exception):
    """A refused request.

    Attributes:
        message: one sentence.
        status: HTTP status.
        code: OpenAI's code, if there is one.
        param: the field of the request at fault.
    """

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, *, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param


@dataclass(frozen=True)
class Served:
    """The served model: its name, its adapter, the size of its vocabulary, and its number of
    positions.
    """

    model: str
    adapter: str | None
    vocabulary: int
    positions: int | None = None


_Text = Annotated[str, Field(min_length=1, max_length=1000)]
_Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Object = dict[str, Any]
# Fields of OpenAI's and other servers' interfaces that are not supported, with the values that
# change nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
    **dict.fromkeys(
        ("audio", "web_search_options", "grammar", "json_schema", "structured_outputs"), ()
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "reasoning_effort"), ()
    ),
}
# OpenAI's words for pydantic's errors.
_CODES = {
    "greater_than_equal": "{}_below_min_value",
    "less_than_equal": "{}_above_max_value",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "missing": "missing_required_parameter",
    "string_pattern_mismatch": "invalid_value",
    "value_error": "invalid_value",
}


_BRANCH = re.compile(
    r"str|bool|int|list\[.*\]|constrained.*"
)  # of a field that may be of several types


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _TextPart(_Checked):
    # Images are refused: mlx_lm fetches any address, in this computer's own network, too.
    type: Literal["text"]
    text: str


class _Function(_Checked):
    name: str


class _ToolCall(_Checked):
    """A call of a function, or a function that may be called."""

    function: _Function


class _Message(_Checked):
    role: Annotated[str, Field(pattern=f"^({'|'.join(ROLES)})$")]
    content: str | list[_TextPart] | None = None
    tool_calls: list[_ToolCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> _Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("has no content")
        # mlx_lm joins the parts for chat templates, but not where there is none.
        joined = (
            "".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content
        )
        self.content = joined or ""
        return self


class _StreamOptions(_Checked):
    include_usage: bool = False


class _Fields(_Checked):
    """The fields that mlx_lm's server reads, and OpenAI's fields that it would silently ignore."""

    model: str | None = None
    adapters: str | None = None
    draft_model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MOST_MESSAGES)] | None = (
        None
    )
    stop: (
        Annotated[
            list[_Text],
            Field(min_length=1, max_length=_MOST_STOPS),
            BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        ]
        | None
    ) = None
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
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=5)] | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=20)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    tools: list[_ToolCall] | None = None
    tool_choice: str | _Object | None = None
    response_format: _Object | None = None
    role_mapping: dict[str, str] | None = None
    chat_template_kwargs: _Object | None = None
    user: str | None = None


def read_request(raw: bytes, path: str, served: Served) -> _Object:
    """Return the body of a request in the form of mlx_lm's server, without fields that are null.

    Raises:
        Refused: the request cannot be answered.
    """
    content = _parsed(raw)
    try:
        fields = _Fields.model_validate(content).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise _refusal(error) from None
    given = without_nulls(fields)
    if "messages" in given:
        given["messages"] = [without_nulls(message) for message in given["messages"]]
    _check_effects(given)
    needed = "messages" if path.endswith("/chat/completions") else "prompt"
    if needed not in given:
        raise Refused(
            f"Request did not contain {needed}", code="missing_required_parameter", param=needed
        )
    if needed == "prompt":
        given["prompt"] = _prompt(given["prompt"], served)
    elif not isinstance(given.get("logprobs", False), bool):
        raise Refused("logprobs must be a valid boolean", code="invalid_type", param="logprobs")
    _check_model(given, served)
    if taken := rendering_options() & set(given.get("chat_template_kwargs", {})):
        # Variables for the model's template; neither another template nor how it is called.
        raise Refused(
            f"chat_template_kwargs cannot set {', '.join(sorted(taken))}",
            param="chat_template_kwargs",
        )
    return _settled(given, served)


def _check_effects(given: _Object) -> None:
    """Refuse values that would be silently ignored."""
    for name, without_effect in _NOT_DONE.items():
        if (value := given.get(name)) is not None and value not in without_effect:
            told = (
                f": only {' or '.join(map(json.dumps, without_effect))}" if without_effect else ""
            )
            raise Refused(
                f"{name} {json.dumps(value)[:60]} is not supported{told}",
                code="unsupported_value" if told else "unsupported_parameter",
                param=name,
            )
    if (form := given.get("response_format", {}).get("type", "text")) != "text":
        raise Refused(
            f"response_format {json.dumps(form)[:60]} is not supported: answers are text",
            code="unsupported_value",
            param="response_format",
        )


def _refusal(error: ValidationError) -> Refused:
    found = error.errors(include_url=False, include_context=False)
    # For a field of several types the message about the last one says most, but for a part that is
    # no text.
    same = [one for one in found if one["loc"][0] == found[0]["loc"][0]]
    first = next((one for one in same if one["type"] == "literal_error"), same[-1])
    names = [str(one) for one in first["loc"] if not _BRANCH.fullmatch(str(one))]
    if names[0] in ("messages", "tools"):
        names[:2] = [f"{names[0]}[{names[1]}]"] if names[1:] else names[:1]
    elif names[0] not in ("logit_bias", "stream_options", "role_mapping"):
        del names[1:]
    kind = "integer" if isinstance(first["input"], int) else "decimal"
    code = _CODES.get(first["type"], "invalid_type").format(kind)
    told = re.sub(
        r" after validation|a valid dictionary or instance.*|(?<=^)(List|String) ",
        lambda found: "an object" if "dictionary" in found[0] else "",
        first["msg"],
    )
    param = names[0] if names[0].endswith("]") else ".".join(names)
    return Refused(f"{'.'.join(names)[:200]} {in_our_words(told)}", code=code, param=param[:100])


def _parsed(raw: bytes) -> _Object:
    try:
        content: Any = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
        too_deep = _is_deep(content, _MOST_DEPTH)
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
    return cast("_Object", content)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON's")


def _is_deep(value: Any, left: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inside = cast("list[Any]", list(value.values()) if isinstance(value, dict) else value)
    return left == 0 or any(_is_deep(one, left - 1) for one in inside)


def _check_model(given: _Object, served: Served) -> None:
    """Refuse any model but the served one: no name or path makes this computer load or fetch a
    model.
    """
    for name, known in (
        ("model", (served.model, _DEFAULT_MODEL)),
        ("adapters", (served.adapter,)),
        ("draft_model", (_DEFAULT_MODEL,)),
    ):
        asked = given.pop(name, known[0])
        if asked not in known:
            raise Refused(
                f"the {name} {repr(asked)[:200]} does not exist here: {known[0]!r} is served",
                404,
                "model_not_found",
                param=name,
            )
    given["model"] = served.model


def _prompt(prompt: Any, served: Served) -> str | list[int]:
    """Return the prompt: a text, or tokens; of OpenAI's lists of prompts only lists of one are
    accepted.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(cast("list[Any]", prompt)) > 1:
            raise Refused(
                "prompt has several: one is answered at a time",
                code="unsupported_value",
                param="prompt",
            )
        prompt = prompt[0]
    tokens = cast("list[Any]", prompt) if isinstance(prompt, list) else [None]
    if isinstance(prompt, str) or all(
        type(one) is int and 0 <= one < served.vocabulary for one in tokens
    ):
        return cast("str | list[int]", prompt)
    raise Refused(
        f"prompt must be a text, or tokens: they are 0 to {served.vocabulary - 1}",
        code="invalid_type",
        param="prompt",
    )


def _settled(given: _Object, served: Served) -> _Object:
    """Return equivalent values that mlx_lm can compute with."""
    if given.get("tool_choice") == "none":
        given.pop("tools", None)
    # Both interfaces' ways to ask for likelihoods.
    asked, top = given.get("logprobs", False), max(given.get("top_logprobs", 0), 0)
    if not isinstance(asked, bool):
        top, asked = asked, True
    if top >= served.vocabulary:
        raise Refused(
            f"top_logprobs must be below the {served.vocabulary} tokens of the model",
            code="integer_above_max_value",
            param="top_logprobs",
        )
    given |= {"logprobs": asked or top > 0, "top_logprobs": top}
    if 0 < given.get("temperature", 0) < _LEAST_TEMPERATURE or given.get("top_p") == 0:
        given["temperature"] = 0.0  # below this limit the reciprocal is beyond float32
    if given.get("top_p") == 0:
        del given["top_p"]  # to mlx_lm it is no limit
    if not 0 < given.get("top_k", 0) < served.vocabulary:
        given.pop("top_k", None)
    if "seed" in given:
        given["seed"] %= 2**64
    for token in given.get("logit_bias", {}):
        _check_token(token, served)
    return given


def _check_token(token: str, served: Served) -> None:
    if not (
        token.isascii() and token.isdigit() and len(token) < 12 and int(token) < served.vocabulary
    ):
        raise Refused(
            f"logit_bias has {repr(token)[:100]}, which is no token: they are 0 to {served.vocabulary - 1}",
            code="invalid_value",
            param="logit_bias",
        )
