"""The house rules, read off the source: layers, owners of concerns, sizes, exported names, read
options.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import allhands
from allhands.config.schema import TrainConfig
from allhands.data.records import ColumnNames
from allhands.distributed.capabilities import CAPABILITIES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

MLX = ("mlx", "mlx_lm")


@dataclass(frozen=True)
class Import:
    """One import: of which module, on which line, and whether it happens only when a function runs."""

    target: str
    line: int
    deferred: bool


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found: dict[str, ast.Module] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(module: str) -> Iterator[Import]:
    """All imports of a module; ``from package import module`` as one of that module."""

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, deferred)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno}: a relative import"
                assert child.module is not None
                for alias in child.names:
                    inner = f"{child.module}.{alias.name}"
                    yield Import(
                        inner if inner in sources() else child.module, child.lineno, deferred
                    )
            # What is imported for the type checker only is a dependency of the text, not of the
            # program.
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _for_types_only(
                child
            )
            yield from walk(child, deferred or inside)

    return walk(sources()[module], False)


def _for_types_only(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield module, node


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


# --- rooms ----------------------------------------------------------------------------------------


def test_imports_point_down_and_in_no_circle() -> None:
    """The rules are in ``pyproject.toml``; import-linter reads them."""
    command = [
        Path(sys.executable).with_name("lint-imports"),
        "--no-cache",
        ROOT / "pyproject.toml",
    ]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_few_modules_are_in_no_room() -> None:
    assert len(list((SOURCE / "allhands").glob("*.py"))) <= 6


@pytest.mark.slow
def test_mlx_waits_until_a_command_or_a_loop_needs_it() -> None:
    rooms = ("allhands.cli", "allhands.api", "allhands.loops", "allhands.__main__")
    for module in sources():
        if module.startswith(rooms) or module == "allhands":
            users = [
                found
                for found in imports(module)
                if found.target.split(".")[0] in MLX and not found.deferred
            ]
            assert users == [], module


# --- owners of concerns ---------------------------------------------------------------------------


def test_only_distributed_touches_mlxs_distributed() -> None:
    users = {module for module, node in nodes(ast.Attribute) if dotted(node) == "mx.distributed"}
    users |= {
        m
        for m in sources()
        for found in imports(m)
        if found.target.startswith("mlx.core.distributed")
    }
    assert users
    assert all(module.startswith("allhands.distributed") for module in users), users


def test_every_capability_of_a_backend_is_asked_for_by_name() -> None:
    """An entry that nobody reads is a promise that nobody keeps; a name that no back-end has is a
    slip.
    """
    asked = {
        node.args[1].value
        for _, node in nodes(ast.Call)
        if isinstance(node, ast.Call)
        and dotted(node.func).rpartition(".")[2] == "can"
        and len(node.args) == 2
        if isinstance(node.args[1], ast.Constant)
    }
    assert asked == set().union(*CAPABILITIES.values())


def test_only_rendering_touches_chat_templates() -> None:
    users = {
        m
        for m, node in nodes(ast.Attribute)
        if isinstance(node, ast.Attribute) and node.attr == "apply_chat_template"
    }
    assert users == {"allhands.data.render"}


def test_only_the_step_divides_gradients_by_token_counts() -> None:
    """By eye, with this as the reminder: whoever divides by ``num_targets`` is on this list for a
    reason.
    """
    users = {
        module
        for module, node in nodes(ast.BinOp)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and any("num_targets" in dotted(part) for part in ast.walk(node.right))
    }
    # The updaters (gradients; in a graph train.graph_update does it); loop and evaluator divide
    # sums of losses.
    assert users == {"allhands.train.updater", "allhands.run.loop", "allhands.train.evaluation"}


def test_nothing_is_pickled() -> None:
    for module in sources():
        assert not {found.target.split(".")[0] for found in imports(module)} & {
            "pickle",
            "marshal",
            "shelve",
            "dill",
        }
    allowed = [
        module
        for module, node in nodes(ast.keyword)
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only")
    ]
    assert allowed == []


def test_no_global_is_changed_and_no_foreign_module_patched() -> None:
    assert [
        f"{module}:{node.lineno}"
        for module, node in nodes(ast.Global)
        if isinstance(node, ast.Global)
    ] == []
    for module, tree in sources().items():
        modules = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and dotted(target.value).split(".")[0] in modules
                ):
                    # The hooks that Python offers for this, set by a command or a worker for its
                    # own process. The command's own streams, before it does anything.
                    allowed = {"sys.excepthook", "sys.unraisablehook"} | (
                        {"sys.stdout"} if module == "allhands.__main__" else set()
                    )
                    assert dotted(target) in allowed, (
                        f"{module}:{target.lineno} sets {dotted(target)}"
                    )


_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.Assert,
    ast.comprehension,
)

# --- sizes ----------------------------------------------------------------------------------------


def test_files_and_functions_fit_on_the_desk() -> None:
    for folder in ("src", "tests", "benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert len(text.splitlines()) <= 700, path
    lengths: list[int] = []
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lengths.append(node.end_lineno - node.lineno + 1)
                assert lengths[-1] <= 80, f"{module}: {node.name} has {lengths[-1]} lines"
                assert _branches(node) <= 12, (
                    f"{module}: {node.name} has {_branches(node)} ways through it"
                )
    assert sorted(lengths)[len(lengths) // 2] <= 14


def _branches(function: ast.AST) -> int:
    """McCabe's complexity, in which each "and" and "or" counts as well; of nested functions their
    own.
    """
    total, left = 1, list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        total += isinstance(node, _BRANCHES) + (
            len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        )
        left += ast.iter_child_nodes(node)
    return total


def test_public_functions_and_classes_say_what_they_do() -> None:
    silent = [
        f"{module}.{node.name}"
        for module, tree in sources().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    assert silent == []
    assert [
        module for module, tree in sources().items() if tree.body and not ast.get_docstring(tree)
    ] == []


# --- names and options ----------------------------------------------------------------------------


def test_all_is_exact_and_every_name_can_be_had() -> None:
    tree = sources()["allhands"]
    typed = {
        alias.name for node in ast.walk(tree) if _for_types_only(node) for alias in _imported(node)
    }
    assert set(allhands.__all__) == typed | {"__version__"}
    for name in allhands.__all__:
        assert getattr(allhands, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'finetoon'"):
        _ = allhands.finetoon
    assert allhands.TrainConfig is TrainConfig
    homes = {alias.name: node.module for node in ast.walk(tree) for alias in _imported_from(node)}
    for name in typed:
        module = importlib.import_module(str(homes[name]))
        assert getattr(allhands, name) is getattr(module, name)


def _imported(node: ast.AST) -> list[ast.alias]:
    return [alias for child in ast.walk(node) for alias in _imported_from(child)]


def _imported_from(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) else []


def test_every_option_is_read_somewhere() -> None:
    read = {
        node.attr
        for module, node in nodes(ast.Attribute)
        if isinstance(node, ast.Attribute) and module != "allhands.config.schema"
        if dotted(node.value).split(".")[-1] in ("config", "chosen", "_config")
    }
    assert [field for field in TrainConfig.model_fields if field not in read | READ_BY_NAME] == []


# Handed on in a dictionary and read under its name there; "config" itself by the command line.
READ_BY_NAME = {
    "config",
    "hang_timeout_s",
    *(f"{column}_feature" for column in ("prompt", "completion", "chat", "text")),
}


@pytest.mark.parametrize("field", sorted(READ_BY_NAME - {"config", "hang_timeout_s"}))
def test_column_options_reach_the_reader(field: str) -> None:
    plain = ColumnNames.from_options(TrainConfig().model_dump())
    chosen = ColumnNames.from_options(TrainConfig.model_validate({field: "my column"}).model_dump())
    assert chosen != plain
    assert "my column" in str(chosen)


def test_every_error_class_has_its_own_documented_exit_code() -> None:
    from allhands import errors

    classes = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.AllhandsError)
    ]
    codes = {kind.__name__: kind.exit_code for kind in classes}
    own = {
        name: code for name, code in codes.items() if name != "TakenError"
    }  # wrong input, whoever finds it
    assert len(set(own.values())) == len(own), codes
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert all(f"| {code} |" in page for code in codes.values())


def _modules_of(tree: ast.Module) -> set[str]:
    """The names that stand for modules in a file: of ``import a.b as c``, ``import a``, and ``from
    a import b``.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                e.asname or e.name for e in node.names if _is_module(f"{node.module}.{e.name}")
            }
    return names


@cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes; of ``setattr`` and ``delattr`` the object, as if of
    an attribute.
    """
    if isinstance(node, ast.Assign | ast.Delete):
        yield from node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("setattr", "delattr")
    ):
        yield ast.Attribute(node.args[0], "", ast.Store())


def _patches(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = _modules_of(tree)
    targets = [
        target
        for node in ast.walk(tree)
        for target in _changed(node)
        if isinstance(target, ast.Attribute)
    ]
    # What a module is told that is meant for it: its documentation says that these may be set.
    return [
        f"{path.name}:{target.value.lineno}: {ast.unparse(target)}"
        for target in targets
        if isinstance(target.value, ast.Name)
        and target.value.id in modules
        and target.attr not in ("excepthook", "unraisablehook", "stdout", "stderr")
    ]


@pytest.mark.slow
def test_nothing_is_set_on_a_module_and_no_import_is_hooked() -> None:
    for path in (SOURCE / "allhands").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"meta_path|path_hooks", text), path
        assert _patches(path) == []


def test_one_module_changes_the_class_of_instances() -> None:
    found = {
        path.name
        for path in SOURCE.rglob("*.py")
        if "__class__ =" in path.read_text(encoding="utf-8")
    }
    assert found == {"instances.py"}


@pytest.mark.parametrize("program", ["train.py", "allhands"])
def test_importing_allhands_changes_no_variable(program: str) -> None:
    code = (
        f"import os, sys\nsys.argv = [{program!r}]\nbefore, hooks = dict(os.environ), list(sys.meta_path)\n"
        "import allhands, allhands.cli.main\nassert dict(os.environ) == before and sys.meta_path == hooks"
    )
    # What the directory of the tests has set would hide it.
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    }
    subprocess.run([sys.executable, "-c", code], env=environ, timeout=60, check=True)


def test_importing_any_module_computes_nothing() -> None:
    """MLX reads how a GPU is to work when it makes the device's stream, for the first operation."""
    code = (
        "import importlib, pkgutil, allhands\nimport mlx.core as mx\n"
        "number = lambda: int(str(mx.new_stream(mx.cpu)).split()[-1].rstrip(')'))\nbefore = number()\n"
        "for each in pkgutil.walk_packages(allhands.__path__, 'allhands.'):\n"
        "    each.name.endswith('__main__') or importlib.import_module(each.name)\n"
        "assert number() == before + 1, 'a stream has been made'"
    )
    subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=120, check=True)
