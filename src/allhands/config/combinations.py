"""Which options of a training do not go together."""

from __future__ import annotations

from typing import Any

from allhands.errors import ConfigError


def refuse_combinations(config: Any) -> None:
    """See that options do not contradict each other, and that none is without effect.

    Args:
        config: of :class:`allhands.config.schema.TrainConfig`, which calls this.

    Raises:
        ValueError: some do, or one is.
    """
    if config.iters is not None and config.epochs is not None:
        raise ValueError("--iters and --epochs: give one of the two")
    if config.train_on != "assistant" and not config.mask_prompt:
        raise ValueError("--train-on has an effect only with --mask-prompt: add it")
    if config.packing and config.mask_prompt:
        raise ValueError("--packing cuts texts anywhere, answers from their questions too: not with --mask-prompt")
    if config.isolate_documents and not config.packing:
        raise ValueError("--isolate-documents has an effect only with --packing: add it")
    if config.early_stopping_patience is not None and config.val_batches == 0:
        raise ValueError("--early-stopping-patience needs validation: --val-batches is 0")
    if config.test and config.test_batches == 0:
        raise ValueError("--test with --test-batches 0 tests nothing: give a number from 1, or -1 for all")
    if config.lr_schedule is not None and config.lr_schedule.warmup and config.warmup_steps:
        raise ValueError("warm-up is given twice: in --lr-schedule and as --warmup-steps")
    if config.weight_decay is not None and config.optimizer == "adam":
        raise ValueError("--weight-decay has no effect on adam: use --optimizer adamw")
    if config.keep_last == 0 and (config.max_restarts or config.min_ranks):
        raise ValueError("--keep-last 0 writes no checkpoint to go on from: not with --max-restarts or --min-ranks")
    if config.hosts is not None and config.hostfile is not None:
        raise ValueError("--hosts and --hostfile: give one of the two")
    if config.project_name is not None and not config.report_to:
        raise ValueError("--project-name has an effect only with --report-to: add it")
    unknown = set(config.optimizer_config) - {"adam", "adamw", "muon", "sgd", "adafactor"}
    if unknown:
        raise ValueError(f"optimizer_config: unknown optimizer {sorted(unknown)[0]!r}")
    _refuse_rounds(config)
    _refuse_stages(config)


def _refuse_given(config: Any, names: tuple[str, ...], needs: str) -> None:
    """Refuse options that are not at their defaults, as they have an effect only with another one."""
    for name in names:
        if getattr(config, name) != type(config).model_fields[name].default:
            raise ValueError(f"--{name.replace('_', '-')} has an effect only with {needs}")


def _refuse_stages(config: Any) -> None:
    if config.strategy != "pipeline":
        _refuse_given(config, ("pp", "pp_schedule", "pp_split"), "--strategy pipeline: add it")
        return
    if config.compress != "none":
        raise ValueError("--compress packs gradients, which do not travel with --strategy pipeline: leave one out")
    if config.rank_weights not in (None, "equal"):
        raise ValueError("--rank-weights divides a batch; with --strategy pipeline --pp-split divides the blocks")


def unfit_stages(config: Any, num_ranks: int) -> ConfigError | None:
    """Why so many ranks do not make up the pipelines that are asked for; ``None``: they do, or none is asked for."""
    if config.strategy != "pipeline":
        return None
    stages = config.pp or num_ranks
    if num_ranks == 1:
        return ConfigError(
            "a pipeline needs several ranks, and there is one",
            where="--strategy pipeline",
            hint="add a second computer (--hosts), or -n 2 to try it on this one",
        )
    if num_ranks % stages:
        return ConfigError(
            f"{num_ranks} ranks are not whole pipelines of {stages}",
            where=f"--pp {stages}",
            hint="take a number of stages that divides that of the ranks",
        )
    if config.pp_split == "auto":
        return None
    each, rest = divmod(len(config.pp_split.split(",")), stages)
    if not rest and (each > 1 if config.pp_schedule == "interleaved" else each == 1):
        return None
    needed = f"{2 * stages} numbers, two for each rank" if config.pp_schedule == "interleaved" else f"{stages} numbers"
    return ConfigError(
        f"these stages are not those of {stages} ranks",
        where=f"--pp-split {config.pp_split}",
        hint=f"give {needed}, or auto",
    )


def require_stages(config: Any, num_ranks: int) -> None:
    """Refuse ranks that do not make up the pipelines that are asked for.

    Raises:
        ConfigError: see :func:`unfit_stages`.
    """
    if problem := unfit_stages(config, num_ranks):
        raise problem


def _refuse_rounds(config: Any) -> None:
    if config.sync_every == 1:
        names = ("outer_momentum", "outer_lr", "sync_fragments", "sync_delay")
        _refuse_given(config, names, "--sync-every: add it, with 2 or more steps")
    elif config.strategy != "auto":
        what = {
            "data": "sums gradients in each step",
            "zero1": "divides one optimizer, and here each rank has its own",
            "pipeline": "divides the model",
        }
        raise ValueError(
            f"--sync-every {config.sync_every} is a strategy of its own: --strategy {config.strategy} "
            f"{what[config.strategy]}; leave one of the two out"
        )
    if config.sync_fragments > config.sync_every:
        raise ValueError(
            f"--sync-fragments {config.sync_fragments} with --sync-every {config.sync_every}: one part is exchanged "
            "after a step, so that there can be no more parts than steps"
        )
    if config.sync_delay > (most := config.sync_every // config.sync_fragments):
        raise ValueError(
            f"--sync-delay {config.sync_delay}: an exchange is to be over when the next begins, which is after "
            f"{most} {'step' if most == 1 else 'steps'} (--sync-every {config.sync_every} in "
            f"{config.sync_fragments} {'part' if config.sync_fragments == 1 else 'parts'}): give no more than that"
        )
