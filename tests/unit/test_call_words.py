"""Errors of Python calls: they name keyword arguments, not flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import allhands
from allhands.config.call_words import as_call, named_as_arguments
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig
from allhands.errors import AllhandsError, ConfigError

FLAG = re.compile(r"--(?:no-)?([a-z][a-z0-9-]*)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lower --learning-rate, or add --max-grad-norm 1", "lower learning_rate, or add max_grad_norm=1"),
        ("add --compile on, or leave it out", 'add compile="on", or leave it out'),
        ("only with --mask-prompt: add it", "only with mask_prompt=True: add it"),
        ("--no-master-weights turns these off", "master_weights=False turns these off"),
        ("for example --rank-weights '[2, 1]', or", "for example rank_weights=[2, 1], or"),
        ("--pp-split 20,12", 'pp_split="20,12"'),
        ("use --learning-rate 1e-4.", "use learning_rate=1e-4."),
        ("the same command with --resume", 'the same call with resume="auto"'),
        ("use --strategy fsdp or pipeline", 'use strategy="fsdp" or pipeline'),
        ("begin with --resume-adapter-file runs/a.safetensors", 'begin with resume_adapter_file="runs/a.safetensors"'),
        # As other programs' names are explained.
        ('use lora_parameters: {"rank": 8, "scale": 2.0}', 'use lora_parameters={"rank": 8, "scale": 2.0}'),
        ("use compress: int8, or bf16", 'use compress="int8", or bf16'),
        ("use packing: on with isolate_documents: on", "use packing=True with isolate_documents=True"),
        ("use data: DIRECTORY (allhands data check D makes one)", "use data=DIRECTORY (allhands data check D makes one)"),
        # Commands, and flags of other programs.
        ("`allhands train --iters 3` does", "`allhands train --iters 3` does"),
        ("(allhands data check D --seed 1), or --iters 3", "(allhands data check D --seed 1), or iters=3"),
        ("ring --verbose", "ring --verbose"),
    ],
)  # fmt: skip
def test_options_are_spelled_as_arguments(text: str, expected: str) -> None:
    assert as_call(text, TrainConfig) == expected


@pytest.mark.parametrize("schema", [TrainConfig, PretrainConfig])
def test_no_flag_of_an_option_is_left(schema: type[TrainConfig]) -> None:
    for field in schema.model_fields.values():
        left = FLAG.findall(as_call(field.description or "", schema))
        assert not {name.replace("-", "_") for name in left} & set(schema.model_fields)


def test_the_error_keeps_its_class_and_its_facts() -> None:
    class Particular(ConfigError):
        fact = 3

    with pytest.raises(Particular) as told, named_as_arguments(TrainConfig):
        raise Particular(
            "--iters is 0", code="value-out-of-range", where="--batch-size", hint="give --epochs 3"
        )
    error = told.value
    assert (error.message, error.where, error.hint) == (
        "iters is 0",
        "batch_size=",
        "give epochs=3",
    )
    assert (error.fact, str(error)) == (3, "batch_size=: iters is 0\n  what to do: give epochs=3")


@pytest.mark.parametrize(
    ("options", "where", "named"),
    [
        ({"learning_rate": -1}, "learning_rate=", ["learning_rate="]),
        ({"iters": "many"}, "iters=", ["iters="]),
        ({"modle": "demo"}, "modle=", ["did you mean model?"]),
        ({"load_in_4bit": True}, "load_in_4bit=", ["model=DIR"]),
        ({"lora_r": 8}, "lora_r=", ['lora_parameters={"rank": 8']),
        ({"iters": 3, "epochs": 1}, None, ["iters and epochs"]),
        ({"project_name": "mine"}, None, ["project_name", "report_to"]),
        ({"strategy": "data", "pp": 2}, None, ['strategy="pipeline"']),
        ({"num_ranks": 2}, "num_ranks=", ["allhands launch -n 2 -- python SCRIPT"]),
        ({"hosts": "one,two"}, "hosts=", ["allhands launch --hosts one,two -- python SCRIPT"]),
        ({"model": "no/such/place", "data": "no-data"}, None, []),
    ],
)  # fmt: skip
def test_errors_of_calls_name_arguments(
    options: dict[str, Any], where: str | None, named: list[str], tmp_path: Path
) -> None:
    with pytest.raises(AllhandsError) as told:
        allhands.finetune(**{"adapter_path": str(tmp_path / "run"), "progress": False, **options})
    text = str(told.value)
    assert where is None or told.value.where == where
    assert all(words in text for words in named)
    left = FLAG.findall(re.sub(r"allhands launch .*", "", text))
    assert not {name.replace("-", "_") for name in left} & set(TrainConfig.model_fields)
    assert "mpirun" not in text


def test_errors_of_pretraining_name_its_own_arguments() -> None:
    with pytest.raises(ConfigError) as told:
        allhands.pretrain(data="stories", progress=False)
    assert told.value.code == "option-missing"
    assert "--tokenizer" not in str(told.value)


def test_a_file_for_several_computers_does_not_train_on_one(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("hostfile: hosts.json\niters: 2\n")
    with pytest.raises(ConfigError) as told:
        allhands.finetune(config=file, progress=False)
    assert told.value.where == "hostfile="
