"""Tool calls and tools as OpenAI's ``tool_calls`` and ``tools``; other spellings are read as those.

Known are OpenAI's older ``function_call`` and ``functions``, ShareGPT's function calls, calls without the object
``function``, strings of JSON in the place of lists and objects (arguments encoded twice as well), and the nulls with
which tables give every object the fields of all others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from allhands.data.values import (
    ValuePlace,
    as_json,
    is_list_of_objects,
    list_of_text,
    parse_json,
    quoted,
    type_name,
    without_nulls,
)

# Roles of messages whose words are a call.
CALL_ROLES = ("function_call", "tool_call")
_CALL_KEYS = ("tool_calls", "function_call", "tool_call")
# How others call the arguments of a call; the first that is there counts.
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_CALL_HINT = 'write {"type": "function", "function": {"name": "...", "arguments": {...}}}'
# In a schema these may be null and mean it.
_NULLABLE = ("default", "const", "example")


def called_function(call: dict[str, Any]) -> dict[str, Any]:
    """The part of a tool call that has name and arguments: the call itself, or what is under ``function``."""
    inner = call.get("function")
    return cast(dict[str, Any], inner) if isinstance(inner, dict) else call


def with_tool_calls(message: dict[str, Any], what: str, place: ValuePlace, *, padded: bool) -> dict[str, Any]:
    """A message whose calls, if it has any, are a list under ``tool_calls``, whatever they were called.

    Args:
        padded: whether nulls among arguments come from a table, and are none.

    Raises:
        DataError: something is no call; two keys name different calls; one who is no assistant calls.
    """
    keys = [key for key in _CALL_KEYS if key in message and (key == "tool_calls" or message.get("role") != "tool")]
    if not keys:
        return message
    found = {key: calls for key in keys if (calls := _calls_under(message[key], f"{what}: {key}", place))}
    rest = {key: value for key, value in message.items() if key not in keys}
    if not found:
        return rest
    first, *others = found
    calls = [_usual_call(call, number, what, place, padded) for number, call in enumerate(found[first], start=1)]
    for key in others:
        same = [_usual_call(call, number, what, place, padded) for number, call in enumerate(found[key], start=1)]
        if _spoken(same) != _spoken(calls):
            place.fail(f'{what} has "{first}" and "{key}", and they call different things', "keep one of the two")
    if first != "tool_calls" and message.get("role") != "assistant":
        place.fail(
            f'{what} has "{first}", but its role is not assistant', "only an assistant calls: remove one of them"
        )
    return rest | {"tool_calls": calls}


def _calls_under(value: Any, what: str, place: ValuePlace) -> list[dict[str, Any]]:
    """The calls that stand under one key; none if there is only padding."""
    value = _decoded(value)
    calls = [_decoded(call) for call in cast(list[Any], value)] if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) or not call for call in calls) or value is False:
        several = what.endswith("s")
        hint = "see the chat format with tools" if several else 'write {"name": "...", "arguments": "{...}"}'
        place.fail(f"{what} must be {'a list of objects' if several else 'an object'}", hint)
    return [call for call in calls if not _is_empty(call)]


def _decoded(value: Any) -> Any:
    """What a string of JSON holds if that is a list or an object; anything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value if not isinstance(value, str) or value.strip() else None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_empty(value: Any) -> bool:
    """Whether there is nothing in it, as in an object that a table has for want of another."""
    if isinstance(value, dict):
        return _is_void({key: item for key, item in cast(dict[str, Any], value).items() if key != "type"})
    return value is None or value == ""


def _is_void(value: Any) -> bool:
    """Whether there are only nulls in it; an object without fields is one that somebody meant."""
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return all(item is None or (item != {} and _is_void(item)) for item in fields.values())
    return value is None


def _usual_call(call: dict[str, Any], number: int, what: str, place: ValuePlace, padded: bool) -> dict[str, Any]:
    """A call as ``{"function": {"name": ..., "arguments": ...}}``, with the other keys that it has."""
    call = without_nulls(call)
    inner = _decoded(call.get("function"))
    if isinstance(inner, dict):
        outer, function = call, without_nulls(cast(dict[str, Any], inner))
    else:
        own = ("name", "function", *_ARGUMENTS)
        outer = {key: value for key, value in call.items() if key not in own} | {"type": "function"}
        # {"function": "f", "arguments": ...} is seen as well.
        function = ({"name": inner} if inner else {}) | {
            key: call[key] for key in own if key in call and key != "function"
        }
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        place.fail(f"{what}: tool call {number} has no name", _CALL_HINT)
    key = next((key for key in _ARGUMENTS if key in function), "arguments")
    arguments = _once_encoded(function.pop(key, {}))
    if not isinstance(arguments, dict | str):
        place.fail(f"{what}: the arguments of tool call {number} are {type_name(arguments)}", _CALL_HINT)
    if padded and isinstance(arguments, dict):
        arguments = _unpadded(cast(dict[str, Any], arguments))
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


def _unpadded(value: Any) -> Any:
    """The value without fields that are null; nulls of lists stay."""
    if isinstance(value, dict):
        return {key: _unpadded(item) for key, item in cast(dict[str, Any], value).items() if item is not None}
    return [_unpadded(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def without_foreign_nulls(messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
    """The messages without arguments that are null and that the called tool does not have.

    Tables give each call the arguments of all others, as nulls.
    """
    functions = map(called_function, tools or ())
    known = {name: _fields(function) for function in functions if isinstance(name := function.get("name"), str)}

    def cleared(call: dict[str, Any]) -> dict[str, Any]:
        function = called_function(call)
        arguments, fields = function.get("arguments"), known.get(str(function.get("name")))
        if fields is None or not isinstance(arguments, dict):
            return call
        kept = {key: item for key, item in cast(dict[str, Any], arguments).items() if item is not None or key in fields}
        return {**call, "function": {**function, "arguments": kept}}

    return [
        {**message, "tool_calls": [cleared(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _fields(function: dict[str, Any]) -> set[str] | None:
    """The names of a tool's arguments; None if it does not say."""
    schema = function.get("parameters")
    fields = cast(dict[str, Any], schema).get("properties") if isinstance(schema, dict) else None
    return set(cast(dict[str, Any], fields)) if isinstance(fields, dict) else None


def _spoken(calls: list[dict[str, Any]]) -> list[Any]:
    """Names and arguments of calls, however they are written."""
    functions = [called_function(call) for call in calls]
    return [(function["name"], _decoded(function.get("arguments"))) for function in functions]


# ShareGPT: the words are the call


def calls_of_words(value: Any, what: str, place: ValuePlace) -> list[Any]:
    """A function call, or a list of them, that stands in the place of a message's words, as OpenAI's tool calls.

    Raises:
        DataError: it is none.
    """
    if isinstance(value, str):
        value = parse_json(value, f"{what}, a function call,", place)
    calls = cast(list[Any], value) if isinstance(value, list) else [value]
    if not calls or not is_list_of_objects(calls):
        place.fail(
            f"{what}, a function call, is {type_name(value)} without a call",
            'write {"name": "...", "arguments": {...}}, or a list of those',
        )
    return [_call_of_words(call, what, place) for call in calls]


def _call_of_words(call: dict[str, Any], what: str, place: ValuePlace) -> dict[str, Any]:
    inner = called_function(call)
    arguments = next((inner[key] for key in _ARGUMENTS if inner.get(key) is not None), None)
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{what}: the arguments of the call", place) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        place.fail(f"{what}: the arguments of the call are {type_name(arguments)}", "write them as an object")
    return {"type": "function", "function": {"name": inner.get("name"), "arguments": cast(dict[str, Any], arguments)}}


# The tools that can be called


def check_tools(value: Any, name: str, place: ValuePlace) -> list[Any] | None:
    """The tools of a record: a list of objects, or the same as a JSON string, as some data sets have it.

    None for no tool. Fields that are null, which no schema has, are left out.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, str):
        value = list_of_text(value, quoted(name), place) if value.strip() else None
    if isinstance(value, list):
        value = [_decoded(tool) for tool in cast(list[Any], value)]
    if value is not None and not is_list_of_objects(value):
        place.fail(f"{quoted(name)} must be a list of objects, this is {type_name(value)}", "write a JSON list")
    tools = as_json(value, quoted(name), place)
    return _unpadded_schemas(tools) if tools else None


def _unpadded_schemas(tools: list[Any]) -> list[Any]:
    kept = _without_void(tools)
    # Where tables have filled up the objects, they have done it to these fields, too.
    return kept if kept == tools else _unpadded(tools)


def _without_void(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value).items()
        return {key: _without_void(item) for key, item in fields if item is not None or key in _NULLABLE}
    return [_without_void(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def read_tools(value: Any, name: str, functions: Any, place: ValuePlace) -> list[Any] | None:
    """The tools under ``name``, or those that stand under OpenAI's older key ``functions``; None if there are none.

    Raises:
        DataError: they are broken, or both are there and differ.
    """
    tools = check_tools(value, name, place)
    if not _are_functions(functions):
        return tools
    older = [_as_tool(one) for one in check_tools(_decoded(functions), "functions", place) or ()]
    if tools and [_as_tool(one) for one in tools] != older:
        place.fail(f'{quoted(name)} and "functions" name different tools', "keep one of the two")
    return tools or older


def _are_functions(value: Any) -> bool:
    """Whether a value is a list of functions with names, or the JSON of one; other data sets call other things so."""
    functions = _decoded(value)
    if not (functions and isinstance(functions, list)):
        return False
    described = [_decoded(one) for one in cast(list[Any], functions)]
    return is_list_of_objects(described) and all(isinstance(called_function(one).get("name"), str) for one in described)


def _as_tool(one: dict[str, Any]) -> dict[str, Any]:
    return one if isinstance(one.get("function"), dict) else wrapped_tool(one)


def wrapped_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function's description as a tool."""
    return {"type": "function", "function": dict(function)}
