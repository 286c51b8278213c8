"""The configurations of ``examples/configs`` are read by the real loader, and the list of them has
all.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from command_line import parse

from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig, build_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))
LIST = ROOT / "examples" / "README.md"


def kind_of(path: Path) -> type[TrainConfig]:
    return PretrainConfig if path.name.startswith("pretrain") else TrainConfig


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_is_a_configuration(path: Path) -> None:
    config = build_config({}, path, kind_of(path))
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.model_fields_set >= set(given)
    assert config.notes == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_names_the_command_that_uses_it(path: Path) -> None:
    in_file = re.findall(r"^#   (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    listed = re.findall(r"`([^`]*-c examples/configs/[^`]*)`", LIST.read_text(encoding="utf-8"))
    own = [line for line in in_file if f"-c examples/configs/{path.name}" in line]
    assert len(own) == 1
    assert own[0] in listed
    for line in in_file:
        words = shlex.split(line)
        if words[0] == "allhands":
            verb, flags = parse(words[1:])
            if "config" in flags:
                assert verb == kind_of(path).VERB


def test_each_situation_has_its_settings() -> None:
    configs = {path.stem: build_config({}, path, kind_of(path)) for path in CONFIGS}
    assert configs["lora-one-mac"].hostfile is None
    assert configs["qlora-two-macs"].strategy == "data"
    assert configs["pipeline-70b-two-macs"].strategy == "pipeline"
    assert configs["full-eight-gpus"].num_ranks == 8
    assert configs["slow-links"].compress == "int8"
    # The job's script gives these, and what it gives wins over the file.
    assert not configs["slurm"].model_fields_set & {"model", "data", "adapter_path", "resume"}
