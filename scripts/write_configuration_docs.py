"""Write docs/configuration.md from the configuration model; ``--check`` only tells whether it is up to date."""

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
those of `mlx_lm.lora`; its YAML files can be used as they are. `batch_size` is always the global batch: with two ranks
and `--batch-size 8` each computes about half of the eight examples.

An *iteration* is one batch, as in mlx_lm: that is what `iters`, `steps_per_report`, `steps_per_eval`, `save_every`,
`keep_every` and `sample_every` count. A *step* is one optimizer update: that is what everything else counts, from lines
of progress, reports, curves and trackers to the names of checkpoints. With `grad_accumulation_steps` 4 a step takes
four iterations, the last one what is left, and what is due at an iteration comes with the step that completes it.

What takes one value is given once: twice on the command line, under two names, or twice in a file is an error, on every
verb. A `~` or `~user` at the beginning of a path is that home directory, in flags (`--data=~/x`, too), in files and in
Python; a `~` alone in YAML is its word for "not set". With several computers each puts its own home directory there;
`allhands launch`, whose programs are others', that of this computer.
`allhands cluster sync` and `cluster check` take the paths of model and data as those of each computer likewise, and
`cwd` and `python` of a hostfile may begin with `~/`.

Files of earlier versions of `mlx_lm` run: `lora_layers` is `num_layers`, and `alpha` beside `scale`, `use_dora: false`
and `adapter_file` are named as what has no effect. Every one of `keys` in `lora_parameters` must name a layer, as
`self_attn.q_proj` does: one that matches nothing is an error in a new run, and a note where a run goes on.

This page is made from the code: `python scripts/write_configuration_docs.py`.

| key | default | what it does |
|---|---|---|
"""


PRETRAINING = """## Options of `allhands pretrain`

The same, and these, some of which have other defaults here: [pre-training](pretraining.md).

| key | default | what it does |
|---|---|---|
"""

OTHER_NAMES = """Other trainers' `max_steps`, `save_steps`, `eval_steps` and `logging_steps` count
updates there and iterations here: with `grad_accumulation_steps` 4 give four times as many."""


def kinds(base: type[AllhandsError]) -> list[type[AllhandsError]]:
    """All classes below ``base`` that have a code of their own; others in the package only carry more facts."""
    children = [child for child in base.__subclasses__() if child.__module__ == AllhandsError.__module__]
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
    others = [line for name, field in PretrainConfig.model_fields.items() if (line := row(name, field)) not in known]
    aliases = "".join(f"| `{alias}` | `{target}` |\n" for alias, target in sorted(ALIASES.items()))
    elsewhere = "".join(f"| `{name}` | {for_key(hint)} |\n" for name, hint in sorted(ELSEWHERE.items()))
    codes = "".join(
        f"| {kind.exit_code} | {(kind.__doc__ or '').splitlines()[0]} |\n"
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
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == page() else f"{PAGE} is out of date: run {sys.argv[0]}")
    PAGE.write_text(page())
