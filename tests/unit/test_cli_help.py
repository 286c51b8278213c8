"""Help texts, exit codes of the parser, and the time until the first line appears."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import parse, verbs
from tiny import run_allhands

from allhands.cli.main import main, make_app
from allhands.cli.option_groups import GROUPS
from allhands.config.aliases import ALIASES, COMMANDS, ELSEWHERE, OF_VERBS, for_flag
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig

# Of two seconds on a busy machine most is Python's own start; importing MLX alone would add more
# than that.
HELP_SECONDS = 5.0


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, in this process."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


@pytest.fixture(scope="module")
def train_help() -> str:
    """Help of the longest verb, at the width of the narrowest usual terminal."""
    done = run_allhands("train", "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("field", sorted(TrainConfig.model_fields))
def test_every_field_is_a_flag_with_its_description(field: str, train_help: str) -> None:
    flag = re.escape(f"--{field.replace('_', '-')}")
    # Written in full, not cut off, at the beginning of its line.
    assert re.search(rf"^  (-\w, )?{flag}( |$)", train_help, re.MULTILINE), field
    description = TrainConfig.model_fields[field].description
    assert description
    assert words(description) in words(train_help)


def test_defaults_and_choices_are_in_the_help(train_help: str) -> None:
    text = words(train_help)
    assert "--batch-size INTEGER Examples per batch: global, over all ranks. [4]" in text
    assert re.search(r"--fine-tune-type lora\|dora\|full [^[]*\[lora\]", text)
    assert "[adapters: 16; full: all]" in text
    assert "--seed INTEGER Seed of data order, adapters and dropout. [0]" in text
    assert re.search(r"--keep-best / --no-keep-best .* \[on\]", text)


def test_options_stand_in_groups(train_help: str) -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert {*TrainConfig.model_fields, *PretrainConfig.model_fields} - {"config"} <= set(grouped)
    headings = re.findall(r"^(\w.*):$", train_help, re.MULTILINE)
    assert headings == [*(name for name in GROUPS if name != "A new model"), "Options"]
    assert all(len(line) <= 80 for line in train_help.splitlines())
    examples = re.findall(r"^  (allhands train .*)$", train_help, re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        assert parse(example.split()[1:])[0] == "train"


def test_the_help_comes_quickly_and_without_mlx() -> None:
    begun = time.perf_counter()
    done = run_allhands("--help")
    took = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    assert took < HELP_SECONDS, f"{took:.1f} s"
    code = "import sys; sys.argv = ['allhands', 'train', '--help']\n" + (
        "from allhands.cli.main import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('mlx.core', 'mlx_lm', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.splitlines()[-1] == "[]"


def loaded_by(*arguments: str) -> set[str]:
    """What the command imports that is not Python's own: packages, and the modules of allhands."""
    code = (
        f"import sys\nbare = set(sys.modules)\nsys.argv = ['allhands', *{list(arguments)!r}]\n"
        "from allhands.__main__ import run\ntry:\n    run()\nexcept SystemExit:\n    pass\nfinally:\n"
        "    names = {n if n.startswith('allhands') else n.partition('.')[0] for n in set(sys.modules) - bare}\n"
        "    print('loaded', *sorted(n for n in names - sys.stdlib_module_names if n[0] != '_'), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stderr.splitlines()[-1].split()[1:])


# What the parser itself needs; anything else would be waited for by everybody at every command.
PARSER = {"annotated_doc", "click", "shellingham", "typer", "typing_extensions"}
OWN = {
    "",
    ".__main__",
    ".cli",
    ".cli.commands",
    ".cli.main",
    ".cli.parser",
    ".config",
    ".config.aliases",
    ".errors",
}
OWN |= {".io", ".io.paths", ".io.terminal"}
OWN |= {
    ".runtime",
    *(f".runtime.{name}" for name in ("blas", "command", "jit_cache", "libraries")),
}
# What options are made from.
OPTIONS = {
    ".cli.option_groups",
    ".cli.options",
    ".config.combinations",
    ".config.problems",
    ".config.nested",
    ".config.schema",
    ".config.values",
    ".io.strict_json",
}


@pytest.mark.parametrize("arguments", [(), ("--help",)], ids=" ".join)
def test_the_overview_imports_the_parser_and_nothing_else(arguments: tuple[str, ...]) -> None:
    found = loaded_by(*arguments)
    assert "typer" in found
    assert found - PARSER <= {f"allhands{name}" for name in OWN}


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (("plot", "--help"), {"verbs_models", "verbs_runs"}),
        (("model", "get", "--help"), {"verbs_models"}),
        (("trian",), set()),
        (("version",), {"env", "verbs_models", "verbs_runs"}),
    ],
)
def test_a_verb_imports_nothing_for_the_others(arguments: tuple[str, ...], own: set[str]) -> None:
    loaded = loaded_by(*arguments)
    assert {name for name in loaded if name.startswith("allhands.cli.")} <= {
        f"allhands{name}" for name in OWN | {f".cli.{verb}" for verb in own}
    }
    assert not loaded & {"mlx", "mlx_lm", "transformers"}


def test_options_are_all_that_the_help_of_training_loads() -> None:
    found = {name for name in loaded_by("train", "--help") if name.startswith("allhands")}
    assert found == {f"allhands{name}" for name in OWN | OPTIONS}


def test_the_overview_says_of_each_verb_what_the_verb_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, quick, _ = run_main(capsys, "--help")
    with pytest.raises(SystemExit):
        make_app()(args=["--help"], prog_name="allhands")
    assert quick == capsys.readouterr().out


def test_every_verb_explains_itself_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = dict(verbs())
    assert {
        "train",
        "generate",
        "compare",
        "plot",
        "demo",
        "version",
        "model get",
        "data demo",
    } <= set(found)
    code, overview, _ = run_main(capsys, "--help")
    assert code == 0
    for name, command in found.items():
        code, text, _ = run_main(capsys, *name.split(), "--help")
        assert code == 0, name
        assert f"Usage: allhands {name}" in text
        for option in command.params:
            shown = re.search(rf"\s{re.escape(option.opts[0])}[\s,/]", text) is not None
            hidden = name == "pretrain" and option.name in PretrainConfig.HIDDEN
            assert shown != hidden or option.param_type_name == "argument", (name, option.name)
            assert option.help or option.param_type_name == "argument", (name, option.name)
        if " " not in name:
            # One line of the overview each, not cut off.
            line = next(line for line in overview.splitlines() if line.startswith(f"  {name} "))
            assert not line.endswith("..."), line


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_flags_of_other_trainers_are_explained(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    code, _, err = run_main(capsys, "train", flag, "8")
    assert code == 2
    assert flag in err
    assert for_flag(ELSEWHERE[name]) in err
    named = set(re.findall(r"\w+_\w+", err)) & set(TrainConfig.model_fields)
    assert not named, "keys, where a flag was typed"


@pytest.mark.parametrize(
    ("verb", "flag", "ours"),
    [
        ("model get", "-q", "--quantize"),
        ("model get", "--q-bits", "--quantize"),
        ("model get", "--q-group-size", "--group-size"),
        ("model get", "-d", "--dequantize"),
        ("model get", "--mlx-path", "--out"),
        ("model get", "--upload-repo", "upload"),
        ("upload", "--upload-repo", "--to"),
        ("fuse", "--mlx-path", "--save-path"),
        ("train", "--q-bits", "--quantize"),
        ("generate", "--lora-r", "allhands train"),
    ],
)
def test_flags_of_mlx_lm_name_what_the_verb_has(
    verb: str, flag: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(capsys, *verb.split(), flag, "4")
    assert code == 2
    assert ours in err


def test_what_is_done_instead_of_a_flag_is_an_option_of_that_verb() -> None:
    known = {
        name: {flag for option in command.params for flag in option.opts}
        for name, command in verbs()
    }
    for verb, hints in OF_VERBS.items():
        for flag, hint in hints.items():
            assert f"--{flag.replace('_', '-')}" not in known[verb], (verb, flag)
            own = set(re.findall(r"--[a-z-]+", for_flag(hint).partition("allhands")[0]))
            assert own <= known[verb], (verb, flag)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(
            ("lora", "train"),
            ("finetune", "train"),
            ("fine_tune", "train"),
            ("mlx_lm.lora", "train"),
        ),
        *(
            ("convert", "model get"),
            ("quantise", "model get"),
            ("download", "model get"),
            ("get", "model get"),
        ),
        *(
            ("merge", "fuse"),
            ("evaluate", "eval"),
            ("perplexity", "eval"),
            ("test", "eval"),
            ("inference", "generate"),
        ),
        *(
            ("server", "serve"),
            ("push", "upload"),
            ("prepare", "data prepare"),
            ("check", "data check"),
        ),
        *(
            ("trian", "train"),
            ("finetun", "train"),
            ("data prepar", "data prepare"),
            ("data convert", "data prepare"),
        ),
        *(
            ("model quantize", "model get"),
            ("model download", "model get"),
            ("cluster chekc", "cluster check"),
        ),
    ],
)
def test_an_unknown_verb_names_ours(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(capsys, *typed.split())
    assert code == 2
    assert f"allhands {meant}" in err
    assert typed.split()[-1] in err


@pytest.mark.parametrize("typed", ["dpo", "awq", "mlx_lm.gptq", "zzz", "model zzz"])
def test_what_there_is_not_names_no_other_verb_as_the_same(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(capsys, *typed.split())
    assert code == 2
    assert "did you mean" not in err


def test_commands_in_hints_about_commands_are_taken_by_the_parser() -> None:
    known = {name for name, _ in verbs()}
    assert not set(COMMANDS) & known
    for hint in COMMANDS.values():
        for command in re.findall(r"`allhands ([^`]+)`", hint):
            if command != "--help":
                parse(command.split())


def test_h_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["-h"], ["train", "-h"], ["data", "check", "-h"]):
        code, out, _ = run_main(capsys, *arguments)
        assert (code, out.startswith("Usage: allhands")) == (0, True)


@pytest.mark.parametrize("alias", sorted(alias for alias in ALIASES if len(alias) > 1))
def test_aliases_are_flags_with_dashes_and_with_underscores(alias: str) -> None:
    field = ALIASES[alias]
    value = [] if TrainConfig.model_fields[field].annotation is bool else ["3"]
    for flag in (f"--{alias}", f"--{alias.replace('_', '-')}"):
        _, flags = parse(["train", flag, *value])
        assert set(flags) == {field}


def test_no_alias_takes_a_flag_of_another_verb() -> None:
    for name, command in verbs():
        if name != "train":
            own = {
                flag.lstrip("-").replace("-", "_")
                for option in command.params
                for flag in option.opts
            }
            assert not {flag for flag in own if len(flag) > 1} & set(ALIASES), name


def test_nothing_given_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run_main(capsys)
    assert "Usage: allhands" in out + err


def test_wrong_values_of_our_own_checks_are_code_2_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_main(capsys, "train", "--train", "--learning-rate", "0")
    assert code == 2
    assert err.startswith("allhands: error: --learning-rate: ")
    code, _, err = run_main(capsys, "train", "--batch-size", "0")
    assert code == 2
    assert err.startswith("allhands: error: --batch-size: ")


def test_the_command_may_run_twice_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    first = run_main(capsys, "--help")
    assert run_main(capsys, "--help") == first


def test_version_names_what_determines_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "version")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["allhands", "mlx", "mlx-lm", "numpy"]


@pytest.mark.parametrize(
    ("verb", "more", "code"), [("train", ["--train"], 3), ("pretrain", ["--tokenizer", "no"], 4)]
)
@pytest.mark.parametrize("after", [(), ("--iters", "2")])
def test_resume_needs_no_value(
    tmp_path: Path, verb: str, more: list[str], code: int, after: tuple[str, ...]
) -> None:
    done = run_allhands(verb, "--data", "no-data", *more, "--resume", *after, cwd=tmp_path)
    assert (done.returncode, "argument" in done.stderr) == (code, False), done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("words", [("version",), ("model", "--help"), ("train", "--help")])
def test_an_output_that_is_full_is_told(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "allhands", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 5
    assert done.stderr.count("standard output") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "fault",
    [
        "",  # mlx-lm is there, but Linux has to be told which MLX
        "raise ImportError('libcuda.so.1: cannot open', name='mlx.core')",
    ],
    ids=["missing", "broken"],
)
@pytest.mark.parametrize(
    "words",
    [
        ("train", "--model", "demo", "--data", "demo", "--iters", "1"),
        ("train", "--model", "demo", "--data", "demo", "--iters", "1", "-n", "2"),
        ("plan", "--model", "demo", "--data", "demo"),
        ("generate", "--model", "demo", "--prompt", "hello"),
        ("model", "get", "demo", "--out", "model"),
        ("report", "adapters"),
    ],
    ids=" ".join,
)
def test_without_mlx_there_is_one_message(
    words: tuple[str, ...], fault: str, tmp_path: Path
) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx/__init__.py").write_text(fault)
    (tmp_path / "adapters").mkdir()
    done = run_allhands(*words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    told = done.stdout + done.stderr
    assert (done.returncode, told.count("Traceback")) == (2, 0), told
    assert told.count("what to do: pip install") == 1, told
