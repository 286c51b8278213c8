"""``allhands plan``: predict memory and time of a training, and the use of more computers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from allhands.cli.options import parsed_options
from allhands.cli.plan_shown import show
from allhands.cli.verbs_runs import Plan
from allhands.cluster.ranks import require_cores
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig, build_config
from allhands.config.yaml_files import read_yaml
from allhands.errors import ConfigError
from allhands.io.files import require_ours, require_writable
from allhands.io.paths import output_file
from allhands.io.pictures import DRAWN_HERE, PICTURES
from allhands.io.terminal import echo, print_json, tell
from allhands.plan.job import Prices
from allhands.plan.kept import keep_in
from allhands.plan.site import AskedComputers, check_computers, on_hosts


def plan(asked: Plan) -> None:
    """Run the verb."""
    for flag, price in (("hour", asked.price_per_hour), ("kwh", asked.price_per_kwh)):
        _require_amount(f"--price-per-{flag}", price, "2.5")
    _require_amount("--watts", asked.watts, "60")
    if asked.after is not None:
        from allhands.cli.plan_after import show_after

        show_after(asked.after, as_json=asked.as_json)
        return
    picture = _place_of(asked.picture, force=asked.force)  # before anything that takes long
    config = training_config(asked.context.args)
    device = None if asked.device is None else ", ".join(asked.device)
    prices = Prices(asked.price_per_hour, asked.watts, asked.price_per_kwh)
    computers = AskedComputers(
        device, asked.link, _numbers(asked.machines), asked.once, asked.timeout_s, prices
    )
    if device is None:
        from allhands.cluster.planned import site_of

        computers = replace(computers, site=site_of(config))
        if not on_hosts(config):
            require_cores(config.num_ranks)
    check_computers(config, computers)
    from allhands.plan.facts import plan_of

    outlook, notes, values = plan_of(
        config, computers, lambda text: None if asked.as_json else typer.echo(text, err=True)
    )
    kept, told = keep_in(Path(config.adapter_path), values)
    if asked.as_json:
        print_json({**values, "kept": None if kept is None else str(kept)})
        if kept is None:
            tell(told)
    else:
        show(outlook, notes)
        echo(told)
    if picture is not None:
        from allhands.plan.chart import draw_chart

        # Last, so that a failed write does not lose the measurements.
        typer.echo(f"chart: {draw_chart(outlook, picture)}", err=asked.as_json)


def _place_of(picture: Path | None, *, force: bool) -> Path | None:
    """Return the path of the chart, with a suffix; ``None`` if no chart is wanted.

    Raises:
        ConfigError: the path is no name of a picture, or another kind of file is there.
        StorageError: the file cannot be written.
    """
    if picture is not None:
        picture = output_file(picture, PICTURES)
        require_ours(picture, [DRAWN_HERE], "picture of ours", force=force, option="--picture")
        require_writable(picture)
    return picture


def training_config(words: Sequence[str]) -> TrainConfig:
    """Return the training that options of ``allhands train`` or ``allhands pretrain`` describe.

    Raises:
        ConfigError: an option that neither command has, or an invalid value.
    """
    # PretrainConfig has the options of both commands.
    flags = parsed_options(words, "allhands plan", PretrainConfig)
    file = flags.get("config")
    keys = {*flags, *(read_yaml(file) if file else ())}
    kind = PretrainConfig if {"shape", "tokenizer"} & keys else TrainConfig
    return build_config({"train": True, **flags}, file, kind)


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError:
        found = (0,)
    if found and not 1 <= found[0] <= found[-1] <= 1024:
        raise ConfigError(
            f"{text!r} is not a list of numbers",
            code="value-invalid",
            where="--machines",
            hint="give some, as 1,2,4",
        )
    return found


def _require_amount(flag: str, value: float | None, example: str) -> None:
    if value is not None and not 0.0 <= value < math.inf:
        raise ConfigError(
            f"{value:g} is no amount",
            code="value-out-of-range",
            where=flag,
            hint=f"give a number from 0 on, as {flag} {example}",
        )
