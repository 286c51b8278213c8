"""Write src/allhands/config/options.py, the types of keyword arguments, from the configuration
model; ``--check`` only tells whether it is up to date.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from allhands.config.nested import HfDataset, LoraParameters, LrSchedule
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig
from allhands.config.values import LocalPath

FILE = Path(__file__).parents[1] / "src" / "allhands" / "config" / "options.py"

# An argument of the functions themselves.
LEFT_OUT = ("config",)
# What a validator takes besides the type of its field.
ALSO_TAKEN = {
    "clear_cache_threshold": "str",  # 2GB
    "sample_prompts": "str",
    "lr_schedule": 'Literal["constant", "linear", "cosine"]',
}
OBJECTS = {LoraParameters: "Object", LrSchedule: "Object", HfDataset: "Object", Any: "Any"}
PLAIN = {bool: "bool", int: "int", float: "float", str: "str", NoneType: "None"}

HEADER = '''"""Types of the keyword arguments of :func:`allhands.finetune` and :func:`allhands.pretrain`.

This file is made from the configuration model: ``python scripts/write_option_types.py``. Other
names of options that are understood, such as ``lr``, are unknown to type checkers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from allhands.config.nested import Strict

PathName = str | os.PathLike[str]
# An option with fields of its own.
Object = Mapping[str, Any] | Strict
'''


def spelled(kind: Any) -> list[str]:
    """The alternatives of a type, as source text."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return [text for inner in arguments for text in spelled(inner)]
    if origin is Literal:
        texts = [
            f"Literal[{', '.join(repr(word).replace(chr(39), chr(34)) for word in arguments)}]"
        ]
        return ["bool", *texts] if {"on", "off"} <= set(arguments) else texts
    if origin is list:
        return [f"Sequence[{' | '.join(spelled(arguments[0]))}]"]
    if origin is dict:
        return [f"Mapping[{', '.join(' | '.join(spelled(inner)) for inner in arguments)}]"]
    return [{**PLAIN, **OBJECTS}[kind]]


def line_of(name: str, field: FieldInfo) -> str:
    """The line of one option."""
    # pydantic keeps what Annotated adds to a type in the field's metadata.
    of_path = get_args(LocalPath)[1]
    is_path = of_path in field.metadata or LocalPath in get_args(field.annotation)
    if is_path:
        texts = ["PathName", *(["None"] if NoneType in get_args(field.annotation) else [])]
    else:
        texts = spelled(field.annotation)
    if name in ALSO_TAKEN and ALSO_TAKEN[name] not in texts:
        texts.insert(0, ALSO_TAKEN[name])
    texts = [text for text in texts if text != "None"] + ["None"] * ("None" in texts)
    return f"    {name}: {' | '.join(dict.fromkeys(texts))}\n"


def source() -> str:
    """The whole file, formatted."""
    train = {
        name: line_of(name, field)
        for name, field in TrainConfig.model_fields.items()
        if name not in LEFT_OUT
    }
    both = {
        name: line_of(name, field)
        for name, field in PretrainConfig.model_fields.items()
        if name not in LEFT_OUT
    }
    other = {name for name in train if both[name] != train[name]}
    if other:
        raise SystemExit(f"allhands pretrain has other types of {', '.join(sorted(other))}")
    text = (
        f'{HEADER}\n\nclass TrainOptions(TypedDict, total=False):\n    """The options of ``allhands train``."""\n\n'
        f"{''.join(train.values())}\n\nclass PretrainOptions(TrainOptions, total=False):\n"
        f'    """The options of ``allhands pretrain``."""\n\n'
        f"{''.join(line for name, line in both.items() if name not in train)}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0
            if FILE.exists() and FILE.read_text() == source()
            else f"{FILE} is out of date: run {sys.argv[0]}"
        )
    FILE.write_text(source())
