"""Write docs/configuration.md from the configuration model; ``--check`` only tells whether it is up
to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from allhands.cli.option_groups import GROUPS, OTHERS, group_of
from allhands.config.aliases import ALIASES, ELSEWHERE, for_key
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = """# Options of `allhands train`

Every option is a flag (`--batch-size 8`), a YAML key (`batch_size: 8`, with `-c file.yaml`) and a keyword argument of
`allhands.finetune(batch_size=8)`. A flag wins over the YAML file, which wins over the default. Names and meanings are
those of `mlx_lm.lora`, and its YAML files can be used unchanged. `batch_size` is always the global batch: with two
ranks and `--batch-size 8` each rank computes about half of the eight examples.

An *iteration* is one batch, as in mlx_lm. The options `iters`, `steps_per_report`, `steps_per_eval`, `save_every`,
`keep_every` and `sample_every` count iterations. A *step* is one optimizer update. All other numbers count steps: lines
of progress, reports, curves, trackers and the names of checkpoints. With `grad_accumulation_steps` 4 a step takes four
iterations, and the last step takes the rest. A report, validation or save that is due at an iteration comes after its
step.

An option with one value may be given once on the command line and once in a file, under any of its names; a second time
is an error. A `~` or `~user` at the beginning of a path means that home directory, in flags
(also in `--data=~/x`), in files and in Python. In YAML a `~` alone means "not set". With several computers each one
uses its own home directory; `allhands launch` uses that of this computer. `allhands cluster sync` and `cluster check`
also use the home directory of each computer in the paths of model and data. In a hostfile `cwd` and `python` may begin
with `~/`.

Files of earlier versions of `mlx_lm` work: `lora_layers` is `num_layers`, and a note says that `alpha` beside `scale`,
`use_dora: false` and `adapter_file` have no effect. Each of the `keys` in `lora_parameters` must name a layer, such as
`self_attn.q_proj`. A key without a layer is an error in a new run, and a note in a resumed run.

This page is made from the code: `python scripts/write_configuration_docs.py`.

"""


PRETRAINING = """## Options of `allhands pretrain`

`allhands pretrain` has the options of `allhands train`. The table has its own options and those with other defaults
([pre-training](pretraining.md)).

"""

OTHER_NAMES = """In other trainers `max_steps`, `save_steps`, `eval_steps` and `logging_steps` count updates; here they
count iterations. With `grad_accumulation_steps` 4 give a number that is four times as large."""


def row(name: str, field: Any) -> str:
    """The line of one key."""
    default = "" if field.default_factory or field.default in (None, "") else f"`{field.default}`"
    if isinstance(field.default, BaseModel):
        default = ""
    text = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {default} | {text} |\n"


def table(rows: dict[str, str], level: str) -> str:
    """The lines of options, by name, under the headings of the command's help."""
    groups: dict[str, list[str]] = {}
    for group in (*GROUPS, OTHERS):
        groups[group] = [line for name, line in rows.items() if group_of(name) == group]
    return "\n".join(
        f"{level} {'Others' if group == OTHERS else group}\n\n| key | default | meaning |\n|---|---|---|\n{''.join(lines)}"
        for group, lines in groups.items()
        if lines
    )


def page() -> str:
    """The whole page."""
    rows = {name: row(name, field) for name, field in TrainConfig.model_fields.items()}
    # What pre-training adds, and what has another default there.
    others = {
        name: line
        for name, field in PretrainConfig.model_fields.items()
        if (line := row(name, field)) != rows.get(name)
    }
    aliases = "".join(f"| `{alias}` | `{target}` |\n" for alias, target in sorted(ALIASES.items()))
    elsewhere = "".join(
        f"| `{name}` | {for_key(hint)} |\n" for name, hint in sorted(ELSEWHERE.items())
    )
    return (
        f"{INTRODUCTION}{table(rows, '##')}\n{PRETRAINING}{table(others, '###')}\n"
        f"## Other names that are understood\n\n{OTHER_NAMES}\n\n| name | is |\n|---|---|\n{aliases}\n"
        f"## Names that mean something else here\n\n| name | what to do |\n|---|---|\n{elsewhere}"
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0
            if PAGE.exists() and PAGE.read_text() == page()
            else f"{PAGE} is out of date: run {sys.argv[0]}"
        )
    PAGE.write_text(page())
