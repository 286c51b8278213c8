"""Every command that README and docs show is one that the program takes, and README's run in order."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import parse, verbs
from tiny import write_model

import allhands
from allhands.config.aliases import ALIASES, ELSEWHERE, for_flag
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig, build_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "sh", "shell", "console")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in any of ``languages``."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for language, content in found if language in languages]


def commands(block: str) -> Iterator[list[str]]:
    """The simple commands of a block, as words."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;()<>"):
                yield words
                words = []
            else:
                words.append(word)
        yield words


def own_commands(page: Path) -> Iterator[list[str]]:
    """Arguments of each ``allhands ...`` of a page's shell blocks, under another launcher or not."""
    for block in blocks(page, *SHELL):
        for words in commands(block):
            places = [
                i
                for i, word in enumerate(words)
                if word == "allhands" or word.endswith("/allhands")
            ]
            if places and words[0] not in ("pip", "python", "git"):
                yield words[places[0] + 1 :]


def ids(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_is_taken_by_the_real_parser(page: Path) -> None:
    for arguments in own_commands(page):
        verb, flags = parse(arguments)
        if verb == "train":
            build_config({name: value for name, value in flags.items() if name != "config"})


def test_readme_shows_the_road_from_model_to_answer() -> None:
    shown = {parse(arguments)[0] for arguments in own_commands(ROOT / "README.md")}
    assert {"model get", "data demo", "train", "plot", "generate"} <= shown
    made = [
        words[1]
        for block in blocks(ROOT / "README.md", *SHELL)
        for words in commands(block)
        if words[:1] == ["make"]
    ]
    assert {"demo", "test"} <= set(made)


def test_make_targets_that_are_shown_exist() -> None:
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for page in PAGES:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        shown = set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE))
        assert shown <= targets, page.name


def test_commands_in_running_text_and_in_hints_exist() -> None:
    known = {name.split()[0] for name, _ in verbs()}
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page.exists()]
    inline = [
        shlex.split(command)
        for text in texts
        for command in re.findall(r"`allhands ([a-z][^`]*)`", text)
    ]
    assert [words for words in inline if words[0] not in known] == []
    hints = [
        shlex.split(found)
        for text in ELSEWHERE.values()
        for found in re.findall(r"allhands ([^,']+)", for_flag(text))
    ]
    assert hints
    for words in hints:
        parse(words)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_yaml_that_is_shown_is_a_configuration(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml", "yml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block, encoding="utf-8")
        build_config({}, path, PretrainConfig if page.name == "pretraining.md" else TrainConfig)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_that_is_shown_uses_names_that_exist(page: Path) -> None:
    options = {*TrainConfig.model_fields, *ALIASES, "callbacks", "progress"}
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and _is_allhands(node.value)
        }
        assert used <= set(allhands.__all__)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "finetune"
            ):
                assert {keyword.arg for keyword in node.keywords} <= options
            if isinstance(node, ast.ClassDef) and any(
                getattr(base, "attr", "") == "Callback" for base in node.bases
            ):
                methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
                for method in methods:
                    original = getattr(allhands.Callback, method.name)
                    names = original.__code__.co_varnames[: original.__code__.co_argcount]
                    assert [argument.arg for argument in method.args.args] == list(names), (
                        method.name
                    )


def _is_allhands(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "allhands"


# --- README's commands, run -----------------------------------------------------------------------


def small(command: str, model: Path) -> str:
    """The command with the large model replaced by a tiny one, and fewer steps, layers and rows."""
    command = re.sub(r"\bmodel get demo\b", f"model get {shlex.quote(str(model))}", command)
    command = re.sub(r"--model demo\b", f"--model {shlex.quote(str(model))}", command)
    command = re.sub(r"--iters \d+", "--iters 6 --val-batches 1", command)
    command = command.replace("--num-layers 8", "--num-layers 2").replace(
        "--batch-size 8", "--batch-size 4"
    )
    return re.sub(r"--max-tokens \d+", "--max-tokens 8", command)


def run_in_shell(command: str, folder: Path) -> None:
    """Run a line of a page as a shell does, with this environment's programs; it must succeed."""
    # One thread: a product of tiny matrices is slower on two, and much slower where the other is at
    # work.
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def shorten(data: Path) -> None:
    """The first rows of each split are enough for commands that are only to end well."""
    for file in data.glob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:24]))


@pytest.mark.long
def test_the_readmes_commands_run_in_order(tmp_path: Path) -> None:
    model = write_model(tmp_path / "small", layers=2)
    ran: list[str] = []
    for block in blocks(ROOT / "README.md", *SHELL):
        for line in block.replace("\\\n", " ").splitlines():
            program = line.split("#")[0].split()
            # Others are targets of the Makefile, which run this very suite, or installations.
            if not program or program[0] not in ("allhands", "mlx_lm.generate", "mlx_lm.fuse"):
                continue
            command = small(line, model)
            if command.startswith("allhands demo"):
                continue
            run_in_shell(command, tmp_path)
            ran.append(program[0])
            if command.startswith("allhands data demo"):
                shorten(tmp_path / "data" / "pirate")
    assert ran.count("allhands") >= 6
    adapters = list(tmp_path.rglob("adapters.safetensors"))
    assert adapters
    assert all((path.parent / "adapter_config.json").exists() for path in adapters)
    assert list(tmp_path.rglob("*.png"))
