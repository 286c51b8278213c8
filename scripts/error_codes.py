"""The codes of errors, found in the syntax trees of ``src``: which there are, of which class, and
with which message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from allhands import errors

SRC = Path(__file__).parents[1] / "src" / "allhands"

# What takes a code for an error that is raised elsewhere: the class of that error, and the place of
# the message among the arguments.
CARRIERS = {
    "RefusedOption": ("ConfigError", 0),
    "RowProblem": ("DataError", 2),
    "_Trouble": ("DistributedError", 0),
    "_lost": ("CheckpointError", 1),
    "_refuse": ("ConfigError", 1),
    "_refused": ("ConfigError", 1),
    "_torn": ("ModelError", 1),
    "_wrong": ("ConfigError", 0),
    "fail": ("DataError", 0),
    "kind": ("HostError", 1),
}
# Classes whose first argument is not the message.
_MESSAGE_AT = {"HostError": 1, "UnfitHosts": 1}
# The name of a table whose values are codes, of the only class that its module makes with a code
# from a variable.
_TABLE = "_ERROR_CODES"


@dataclass(frozen=True)
class Construction:
    """A place that makes an error, or says with which code and message it is to be made.

    Attributes:
        place: ``file:line``, below ``src/allhands``.
        kind: the name of the error's class.
        codes: those that are written there; none where the code comes from elsewhere.
        has_code: whether there is a code at all.
        message: what is always the same in the message, with ``...`` for the rest; "" if that is
            nothing.
    """

    place: str
    kind: str
    codes: tuple[str, ...]
    has_code: bool
    message: str


def exit_codes(src: Path = SRC) -> dict[str, int]:
    """The exit code of each class of errors by name, those outside of ``errors`` included."""
    found = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.AllhandsError)
    }
    classes = {
        node.name: [ast.unparse(base) for base in node.bases]
        for tree in _trees(src).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    while True:
        more = {
            name: found[base]
            for name, bases in classes.items()
            for base in bases
            if base in found and name not in found
        }
        if not more:
            return found
        found |= more


def constructions(src: Path = SRC) -> list[Construction]:
    """All places of ``src`` that make errors, by file and line.

    Where a class has a code of its own, that is the one place.
    """
    kinds = set(exit_codes(src))
    found = [
        one
        for path, tree in _trees(src).items()
        for one in _of_module(tree, str(path.relative_to(src)), kinds)
    ]
    own = _with_own_code(src)
    return [one for one in found if one.has_code or one.kind not in own]


def _with_own_code(src: Path) -> set[str]:
    """The classes that are made without a code, because their ``__init__`` has it."""
    return {
        kind.name
        for tree in _trees(src).values()
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef)
        for made in kind.body
        if isinstance(made, ast.FunctionDef) and made.name == "__init__"
        if "code" not in {one.arg for one in made.args.kwonlyargs}
    }


def examples() -> dict[int, dict[str, str]]:
    """For each exit code its codes, in order, with the plainest message of each."""
    kinds, found = exit_codes(), dict[int, dict[str, list[str]]]()
    for one in constructions():
        for code in one.codes:
            found.setdefault(kinds[one.kind], {}).setdefault(code, []).append(one.message)
    return {
        exit_code: {code: _plainest(messages) for code, messages in sorted(by_code.items())}
        for exit_code, by_code in sorted(found.items())
    }


def _plainest(messages: list[str]) -> str:
    said = [message for message in messages if message]

    def plainness(message: str) -> tuple[bool, int, int, str]:
        dots = message.count("...")
        return len(message) < 15 * dots, dots, len(message), message

    return min(said, key=plainness, default="...")


@cache
def _trees(src: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(src.rglob("*.py"))}


def _of_module(tree: ast.Module, name: str, kinds: set[str]) -> Iterator[Construction]:
    handing: dict[str, str] = {}  # classes that are made with a code from a variable: messages
    usual = _usual_codes(tree)
    for scope, call in _calls(tree, None):
        kind, at = _made_by(call, scope, kinds)
        given = (word.value for word in call.keywords if word.arg == "code")
        code = next(given, usual.get(_name(call.func)))
        if kind is None or (_name(call.func) in CARRIERS and code is None):
            continue
        argument, place = call.args[at] if at < len(call.args) else None, f"{name}:{call.lineno}"
        for one, said in _by_case(code, argument):
            message = re.sub(r"(\.\.\.)+", "...", _words(said, scope)).strip()
            plain = message if re.search(r"[a-z]{3}", message) else ""
            yield Construction(place, kind, tuple(_texts(one)), code is not None, plain)
            if isinstance(one, ast.Name):
                handing[kind] = plain
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
            ((kind, message),) = handing.items()
            assert isinstance(node.value, ast.Dict)
            codes = tuple(text for value in node.value.values for text in _texts(value))
            yield Construction(f"{name}:{node.lineno}", kind, codes, True, message)


def _usual_codes(tree: ast.Module) -> dict[str, ast.expr | None]:
    """The codes that the carriers of a module take where none is given."""
    found: dict[str, ast.expr | None] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in CARRIERS:
            continue
        for made in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(made, ast.FunctionDef):
                names = [one.arg for one in made.args.kwonlyargs]
                usual = dict(zip(names, made.args.kw_defaults, strict=True))
                found[node.name] = usual.get("code")
    return found


def _calls(node: ast.AST, scope: ast.AST | None) -> Iterator[tuple[ast.AST | None, ast.Call]]:
    """Every call below ``node``, with the function or class around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield scope, child
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(child, ast.FunctionDef) and isinstance(scope, ast.ClassDef):
            child.parent = scope  # type: ignore[attr-defined]
        yield from _calls(child, child if is_scope else scope)


def _made_by(call: ast.Call, scope: ast.AST | None, kinds: set[str]) -> tuple[str | None, int]:
    """The class of the error that a call makes, and where its message is; ``None``: no error."""
    name, around = _name(call.func), getattr(scope, "parent", None)
    if ast.unparse(call.func) == "super().__init__" and around is not None:
        # Not those that only hand on what they are given.
        own = around.name if around.name in kinds and around.name != "AllhandsError" else None
        return own, 0
    if name in CARRIERS:
        return CARRIERS[name]
    return (name, _MESSAGE_AT.get(name, 0)) if name in kinds else (None, 0)


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _by_case(
    code: ast.expr | None, message: ast.expr | None
) -> Iterator[tuple[ast.expr | None, ast.expr | None]]:
    """Code and message, one pair for each case if both distinguish the same ones."""
    if (
        isinstance(code, ast.IfExp)
        and isinstance(message, ast.IfExp)
        and ast.unparse(code.test) == ast.unparse(message.test)
    ):
        yield from ((code.body, message.body), (code.orelse, message.orelse))
    else:
        yield code, message


def _texts(code: ast.expr | None) -> Iterator[str]:
    """The codes that an expression can have, as far as they are written in it."""
    if isinstance(code, ast.Constant) and isinstance(code.value, str):
        yield code.value
    elif isinstance(code, ast.IfExp):
        yield from (*_texts(code.body), *_texts(code.orelse))


def _words(expression: ast.expr | None, scope: ast.AST | None) -> str:
    """A message with ``...`` for what is known only when it is made."""
    if isinstance(expression, ast.Constant):
        return str(expression.value)
    if isinstance(expression, ast.JoinedStr):
        return "".join(_words(part, None) for part in expression.values)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
        return _words(expression.left, scope) + _words(expression.right, scope)
    if isinstance(expression, ast.IfExp):
        return _words(expression.body, scope)
    if isinstance(expression, ast.Name) and scope is not None:
        before = [
            (node.lineno, _words(value, None))
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and node.lineno <= expression.lineno
            for value in _assigned(node, expression.id)
        ]
        return max(before, default=(0, "..."))[1]
    return "..."


def _assigned(node: ast.Assign, name: str) -> Iterator[ast.expr]:
    """What an assignment gives a variable, also as one of several."""
    (target, *_), value = node.targets, node.value
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, each in zip(target.elts, value.elts, strict=False):
            if isinstance(one, ast.Name) and one.id == name:
                yield each
