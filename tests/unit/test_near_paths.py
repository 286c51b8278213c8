"""A path that is almost one that exists: the message names what the command would take there, and
nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from tiny import run_allhands
from written_runs import write_run, write_samples

from allhands.io.paths import near_paths

OFFLINE = {"HF_HUB_OFFLINE": "1"}
# In processes of their own.
SLOW = [
    ("train --train --model demo --data dta/chats", "data/chats"),
    ("pretrain --train --tokenizer MODEL --shape llama-15m --data rows.jsn", "rows.json"),
    ("train --train --config rn.yaml", "run.yaml"),
    (
        "train --train --resume-adapter-file run1/adapter.safetensors",
        "run1/adapters.safetensors",
    ),
]
QUICK = [
    ("data prepare data/cats --out o", "data/chats"),
    ("data check dta/chats", "data/chats"),
    ("generate --prompt x --model modls/x", "models/x"),
    ("generate --prompt x --model ./modls/x", "models/x"),
    ("generate --prompt x --adapter-path ru1", "run1"),
    ("generate --prompt x --model demo --chat-template chat.jina", "chat.jinja"),
    ("fuse --adapter-path ru1", "run1"),
    ("export --to hf --out o --adapter-path ru1", "run1"),
    ("import --from peft ru1 --out o", "run1"),
    ("report ru1", "run1"),
    ("plot ru1", "run1"),
    ("monitor ru1", "run1"),
    ("checkpoint list ru1", "run1"),
    ("upload ru1 --to a/b", "run1"),
    ("compare --adapter-path ru1", "run1"),
    ("tokenizer show ru1 text", "run1"),
    ("cluster check --hostfile host", "hosts"),
]


def told(words: str, place: Path) -> str:
    call: Any = run_allhands if words.startswith(("train", "pretrain")) else call_allhands
    done = call(*words.split(), cwd=place, env=OFFLINE)
    assert done.returncode not in (0, 1)
    return done.stderr


def usable(place: Path) -> None:
    """Write something that each command takes."""
    write_run(place / "run1")
    write_samples(place / "run1")
    files = {
        "run1/adapters.safetensors": "",
        "run1/adapter_model.safetensors": "",
        "run1/tokenizer.json": "{}",
        "run1/checkpoints/step-0000001/state.json": "",
        "models/x/config.json": "{}",
        "models/x/model.safetensors": "",
        "data/chats/train.jsonl": json.dumps({"text": "x"}),
        "rows.json": json.dumps([{"text": "x"}]),
        "run.yaml": "iters: 1",
        "chat.jinja": "{{ messages }}",
        "hosts": "one\ntwo\n",
    }
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)


def useless(place: Path) -> None:
    """Write the same names, with nothing in them that a command can use."""
    for name in ("run1", "run1/adapters.safetensors", "models/x", "data/chats"):
        (place / name).mkdir(parents=True)
    (place / "models/x/config.json").write_text("{}")
    (place / "data/chats/notes.pdf").write_text("x")
    for name in ("run.yaml", "chat.jinja", "hosts"):
        (place / name).write_text("")


@pytest.mark.parametrize(
    ("words", "near"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_a_path_that_is_almost_one_that_exists_is_named(
    words: str, near: str, tmp_path: Path, tiny_model: Path
) -> None:
    usable(tmp_path)
    said = told(words.replace("MODEL", str(tiny_model)), tmp_path)
    assert f"did you mean {near}" in said


@pytest.mark.parametrize("words", [words for words, _ in QUICK])
def test_nothing_is_named_that_the_command_would_refuse(words: str, tmp_path: Path) -> None:
    useless(tmp_path)
    assert "did you mean" not in told(words, tmp_path)


def test_a_good_path_is_found_among_worse_ones_that_are_more_alike(tmp_path: Path) -> None:
    for name in ("model1", "model2", "model3", "model-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "model-x" / "config.json").touch()
    good = near_paths(tmp_path / "model", lambda near: (near / "config.json").is_file())
    assert good == [str(tmp_path / "model-x")]


def test_what_is_there_has_no_other_meaning(tmp_path: Path) -> None:
    (tmp_path / "model1").mkdir()
    assert near_paths(tmp_path / "model1", Path.is_dir) == []
    assert near_paths("", Path.is_dir) == []
