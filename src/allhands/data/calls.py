"""Tool calls and tools in OpenAI's form (``tool_calls`` and ``tools``); other forms are converted.

These other forms are known:

- OpenAI's older ``function_call`` and ``functions``;
- ShareGPT's function calls;
- calls without the object ``function``;
- strings of JSON instead of lists and objects, also arguments that were encoded twice;
- nulls, with which tables give every object the fields of all others.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from allhands.data.values import (
    ValuePlace,
    as_json,
    is_list_of_objects,
    list_if_text,
    parse_json,
    quoted,
    type_name,
    without_nulls,
)

Json = dict[str, Any]
# Roles of messages whose words are a call.
CALL_ROLES = ("function_call", "tool_call")
_CALL_KEYS = ("tool_calls", "function_call", "tool_call")
# Keys under which data sets have the arguments of a call; the first one that is there counts.
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_CALL_HINT = 'write {"type": "function", "function": {"name": "...", "arguments": {...}}}'
# Keys of a schema whose null is a value, not padding.
_NULLABLE = ("default", "const", "example")


def called_function(call: Json) -> Json:
    """Return the part of a tool call or tool that has the name: the object under ``function``, or
    else the call itself.
    """
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def with_tool_calls(message: Json, what: str, place: ValuePlace, *, padded: bool) -> Json:
    """Return the message with its calls, if any, as a list under ``tool_calls``.

    Args:
        padded: whether null arguments are a table's padding, and are removed.

    Raises:
        DataError: a value is not a call; two keys hold different calls; a message that is not an
            assistant's has a call under an older key.
    """
    keys = [
        key
        for key in _CALL_KEYS
        if key in message and (key == "tool_calls" or message.get("role") != "tool")
    ]
    found = {
        key: calls
        for key in keys
        if (calls := _calls_under(message[key], f"{what}: {key}", place, padded))
    }
    rest = {key: value for key, value in message.items() if key not in keys}
    if not found:
        return rest
    first, *others = found
    for key in others:
        if _spoken(found[key]) != _spoken(found[first]):
            place.fail(
                f'{what} has "{first}" and "{key}", and they are different calls',
                "keep one of the two",
                code="fields-contradict",
            )
    if first != "tool_calls" and message.get("role") != "assistant":
        place.fail(
            f'{what} has "{first}", but only an assistant can call tools',
            "remove it, or correct the role",
            code="tool-call-invalid",
        )
    return rest | {"tool_calls": found[first]}


def _calls_under(value: Any, what: str, place: ValuePlace, padded: bool) -> list[Json]:
    """Return the calls under one key; none if there is only padding.

    Raises:
        DataError: the value is not a call or a list of calls.
    """
    value = _decoded(value)
    calls = [_decoded(call) for call in value] if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) or not call for call in calls) or value is False:
        place.fail(
            f"{what} must be calls, each an object",
            f"see the chat format with tools: {_CALL_HINT}",
            code="tool-call-invalid",
        )
    kept = [call for call in calls if not _is_void(call)]
    return [
        _usual_call(call, f"{what}: tool call {n}", place, padded)
        for n, call in enumerate(kept, start=1)
    ]


def _decoded(value: Any) -> Any:
    """Return the list or object in a string of JSON, None for a blank string, else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return None if isinstance(value, str) and not value.strip() else value


def _is_void(value: Any) -> bool:
    """Return True if a value holds only nulls, as objects do that a table added as padding."""
    if isinstance(value, dict):
        return all(
            key == "type" or item is None or (item != {} and _is_void(item))
            for key, item in value.items()
        )
    return value is None or value == ""


def _usual_call(call: Json, what: str, place: ValuePlace, padded: bool) -> Json:
    """A call as ``{"function": {"name": ..., "arguments": ...}}``, with the other keys that it has."""
    call = without_nulls(call)
    inner = _decoded(call.get("function"))
    if isinstance(inner, dict):
        outer, function = call, without_nulls(inner)
    else:
        own = ("name", "function", *_ARGUMENTS)
        outer = {key: value for key, value in call.items() if key not in own} | {"type": "function"}
        # {"function": "f", "arguments": ...} is seen as well.
        function = ({"name": inner} if inner else {}) | {
            key: call[key] for key in own if key in call
        }
        function.pop("function", None)
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        place.fail(f"{what} has no name", _CALL_HINT, code="tool-call-invalid")
    arguments = _once_encoded(
        function.pop(next((key for key in _ARGUMENTS if key in function), ""), {})
    )
    if not isinstance(arguments, dict | str):
        place.fail(
            f"the arguments of {what} are {type_name(arguments)}",
            _CALL_HINT,
            code="tool-call-invalid",
        )
    if padded and isinstance(arguments, dict):
        arguments = _unpadded(arguments)
    return {**outer, "function": {**function, "arguments": arguments}}


def _once_encoded(arguments: Any) -> Any:
    """Arguments that were made JSON twice, as if it had happened once."""
    while isinstance(arguments, str) and arguments.lstrip()[:1] == '"':
        try:
            inner = json.loads(arguments)
            json.loads(inner)
        except (ValueError, TypeError, RecursionError):
            break
        arguments = inner
    return arguments


def _unpadded(value: Any, kept: Collection[str] = ()) -> Any:
    """Return the value without null fields, except those named in ``kept``; nulls in lists stay."""
    if isinstance(value, dict):
        return {
            key: _unpadded(item, kept)
            for key, item in value.items()
            if item is not None or key in kept
        }
    return [_unpadded(item, kept) for item in value] if isinstance(value, list) else value


def without_foreign_nulls(messages: list[Json], tools: list[Any]) -> list[Json]:
    """Return the messages without null arguments that the called tool does not have.

    A table gives each call the arguments of all other calls, as nulls.
    """
    known: dict[Any, Any] = {}
    for function in map(called_function, tools):
        schema = function.get("parameters")
        known[str(function.get("name"))] = (
            schema.get("properties") if isinstance(schema, dict) else None
        )

    def cleared(call: Json) -> Json:
        function = called_function(call)
        arguments, fields = function.get("arguments"), known.get(function.get("name"))
        if not isinstance(fields, dict) or not isinstance(arguments, dict):
            return call
        kept = {key: item for key, item in arguments.items() if item is not None or key in fields}
        return {**call, "function": {**function, "arguments": kept}}

    return [
        {**message, "tool_calls": [*map(cleared, message["tool_calls"])]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _spoken(calls: list[Json]) -> list[Any]:
    """Names and arguments of calls, however they are written."""
    return [
        (function["name"], _decoded(function["arguments"]))
        for function in map(called_function, calls)
    ]


def calls_of_words(value: Any, what: str, place: ValuePlace) -> list[Any]:
    """Return the function calls that stand in the place of a message's words (ShareGPT).

    Raises:
        DataError: the value is not a call or a list of calls.
    """
    if isinstance(value, str):
        value = parse_json(value, f"{what}, a function call,", place)
    calls = value if isinstance(value, list) else [value]
    if not calls or not is_list_of_objects(calls):
        place.fail(
            f"{what}, a function call, is {type_name(value)} without a call",
            'write {"name": "...", "arguments": {...}}, or a list of those',
            code="tool-call-invalid",
        )
    made: list[Any] = []
    for inner in map(called_function, calls):
        arguments = next((inner[key] for key in _ARGUMENTS if inner.get(key) is not None), "")
        if isinstance(arguments, str):
            text = arguments if arguments.strip() else "{}"
            arguments = parse_json(text, f"{what}: the arguments of the call", place)
        if not isinstance(arguments, dict):
            place.fail(
                f"{what}: the arguments of the call are {type_name(arguments)}",
                "write them as an object",
                code="tool-call-invalid",
            )
        made.append(
            {"type": "function", "function": {"name": inner.get("name"), "arguments": arguments}}
        )
    return made


def read_tools(value: Any, name: str, functions: Any, place: ValuePlace) -> list[Any] | None:
    """Return the tools under ``name``, or those that stand under OpenAI's older key ``functions``;
    None if there are none.

    Raises:
        DataError: the tools are not a list of objects, or both keys are there and differ.
    """
    tools = _checked_tools(value, name, place)
    # Some data sets have other things under "functions".
    described = (
        [_decoded(one) for one in functions]
        if isinstance(functions := _decoded(functions), list)
        else []
    )
    if not described or not all(
        isinstance(one, dict) and "name" in called_function(one) for one in described
    ):
        return tools
    older = [*map(as_tool, _checked_tools(described, "functions", place) or ())]
    if tools and [*map(as_tool, tools)] != older:
        place.fail(
            f'{quoted(name)} and "functions" name different tools',
            "keep one of the two",
            code="fields-contradict",
        )
    return tools or older


def _checked_tools(value: Any, name: str, place: ValuePlace) -> list[Any] | None:
    """Return the tools, given as a list of objects or as JSON, without null fields.

    Raises:
        DataError: the value is not a list of objects.
    """
    if isinstance(value, str):
        value = list_if_text(value, quoted(name), place)
        value = parse_json(value, quoted(name), place) if isinstance(value, str) else value
    if isinstance(value, list):
        value = [_decoded(tool) for tool in value]
    if value is not None and not is_list_of_objects(value):
        place.fail(
            f"{quoted(name)} must be a list of objects, this is {type_name(value)}",
            "write a JSON list",
            code="field-of-wrong-type",
        )
    tools = as_json(value, quoted(name), place)
    kept = _unpadded(tools, _NULLABLE)
    # A table that has padded the objects has padded the fields of _NULLABLE, too.
    return (kept if kept == tools else _unpadded(tools)) or None


def as_tool(one: Json) -> Json:
    """Return a tool as ``{"type": "function", "function": ...}``, also given its inner part."""
    if isinstance(one.get("function"), dict):
        return one
    return {"type": "function", "function": dict(one)}


def parsed_arguments(arguments: Any) -> Any:
    """Return a call's arguments as an object, read from JSON if need be; else unchanged."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
