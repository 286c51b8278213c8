"""Write docs/configuration.md from the configuration model; ``--check`` only tells whether it is up
to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from allhands.config.aliases import ALIASES, ELSEWHERE, for_key
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig
from allhands.errors import AllhandsError

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = """# Options of `allhands train`

Every option is a flag (`--batch-size 8`), a YAML key (`batch_size: 8`, with `-c file.yaml`) and a keyword argument of
`allhands.finetune(batch_size=8)`. A flag wins over the YAML file, which wins over the default. Names and meanings are
those of `mlx_lm.lora`, and its YAML files can be used unchanged. `batch_size` is always the global batch: with two
ranks and `--batch-size 8` each rank computes about half of the eight examples.

An *iteration* is one batch, as in mlx_lm. The options `iters`, `steps_per_report`, `steps_per_eval`, `save_every`,
`keep_every` and `sample_every` count iterations. A *step* is one optimizer update. All other numbers count steps: lines
of progress, reports, curves, trackers and the names of checkpoints. With `grad_accumulation_steps` 4 a step takes four
iterations, and the last step takes the rest. A report, validation or save that is due at an iteration comes after the
step that contains this iteration.

An option with one value may be given only once. To give it twice on the command line, under two names, or twice in a
file is an error for every command. A `~` or `~user` at the beginning of a path means that home directory, in flags
(also in `--data=~/x`), in files and in Python. In YAML a `~` alone means "not set". With several computers each one
uses its own home directory; `allhands launch` uses that of this computer. `allhands cluster sync` and `cluster check`
also use the home directory of each computer in the paths of model and data. In a hostfile `cwd` and `python` may begin
with `~/`.

Files of earlier versions of `mlx_lm` work: `lora_layers` is `num_layers`, and a note says that `alpha` beside `scale`,
`use_dora: false` and `adapter_file` have no effect. Each of the `keys` in `lora_parameters` must name a layer, such as
`self_attn.q_proj`. A key without a layer is an error in a new run, and a note in a resumed run.

This page is made from the code: `python scripts/write_configuration_docs.py`.

| key | default | meaning |
|---|---|---|
"""


PRETRAINING = """## Options of `allhands pretrain`

`allhands pretrain` has the options of `allhands train`. The table has its further options and those with other
defaults ([pre-training](pretraining.md)).

| key | default | meaning |
|---|---|---|
"""

OTHER_NAMES = """In other trainers `max_steps`, `save_steps`, `eval_steps` and `logging_steps` count updates; here they
count iterations. With `grad_accumulation_steps` 4 give four times the number."""


def summary(kind: type) -> str:
    """The first paragraph of a class's docstring, as one line."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def kinds(base: type[AllhandsError]) -> list[type[AllhandsError]]:
    """All classes below ``base`` that have a code of their own; others in the package only carry
    more facts.
    """
    children = [
        child for child in base.__subclasses__() if child.__module__ == AllhandsError.__module__
    ]
    return [kind for child in children for kind in (child, *kinds(child))]


def row(name: str, field: Any) -> str:
    """The line of one key."""
    default = "" if field.default_factory or field.default in (None, "") else f"`{field.default}`"
    if isinstance(field.default, BaseModel):
        default = ""
    text = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {default} | {text} |\n"


def page() -> str:
    """The whole page."""
    rows = [row(name, field) for name, field in TrainConfig.model_fields.items()]
    # What pre-training adds, and what has another default there.
    known = set(rows)
    others = [
        line
        for name, field in PretrainConfig.model_fields.items()
        if (line := row(name, field)) not in known
    ]
    aliases = "".join(f"| `{alias}` | `{target}` |\n" for alias, target in sorted(ALIASES.items()))
    elsewhere = "".join(
        f"| `{name}` | {for_key(hint)} |\n" for name, hint in sorted(ELSEWHERE.items())
    )
    codes = "".join(
        f"| {kind.exit_code} | {summary(kind)} |\n"
        for kind in sorted(kinds(AllhandsError), key=lambda kind: kind.exit_code)
    )
    return (
        f"{INTRODUCTION}{''.join(rows)}\n{PRETRAINING}{''.join(others)}\n"
        f"## Other names that are understood\n\n{OTHER_NAMES}\n\n| name | is |\n|---|---|\n{aliases}\n"
        f"## Names that mean something else here\n\n| name | what to do |\n|---|---|\n{elsewhere}\n"
        f"## Exit codes\n\n| code | meaning |\n|---|---|\n| 0 | Done. |\n| 1 | A defect of allhands: report it. |\n"
        f"{codes}| 137 | A process was killed (often: out of memory). |\n| 143 | Stopped by SIGTERM, after saving. |\n"
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0
            if PAGE.exists() and PAGE.read_text() == page()
            else f"{PAGE} is out of date: run {sys.argv[0]}"
        )
    PAGE.write_text(page())
