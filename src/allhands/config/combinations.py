"""Refusal of training options that contradict each other."""

from __future__ import annotations

from typing import Any, cast

from allhands.config.values import RefusedOption
from allhands.errors import ConfigError


def refuse_combinations(config: Any) -> None:
    """Check that options do not contradict each other, and that each of them has an effect.

    Args:
        config: a :class:`allhands.config.schema.TrainConfig`, whose validation calls this function.

    Raises:
        ValueError: options contradict each other, or one has no effect; a :class:`RefusedOption` if
            the error has a code of its own.
    """
    c = config
    refuse_where(
        (
            c.iters is not None and c.epochs is not None,
            "--iters and --epochs: give one of the two",
        ),
        (
            c.packing and c.mask_prompt,
            "--packing cuts texts anywhere, answers from their questions too: not with --mask-prompt",
        ),
        (
            c.early_stopping_patience is not None and c.val_batches == 0,
            "--early-stopping-patience needs validation: --val-batches is 0",
        ),
        (
            c.test and c.test_batches == 0,
            "--test with --test-batches 0 tests nothing: give a number from 1, or -1 for all",
        ),
        (
            c.lr_schedule is not None and c.lr_schedule.warmup and c.warmup_steps,
            "warm-up is given twice: in --lr-schedule and as --warmup-steps",
        ),
        (
            c.keep_last == 0 and (c.max_restarts or c.min_ranks),
            "--keep-last 0 writes no checkpoint to go on from: not with --max-restarts or --min-ranks",
        ),
        (
            c.hosts is not None and c.hostfile is not None,
            "--hosts and --hostfile: give one of the two",
        ),
    )
    if unknown := sorted(set(c.optimizer_config) - {"adam", "adamw", "muon", "sgd", "adafactor"}):
        raise ValueError(f"optimizer_config: unknown optimizer {', '.join(unknown)}")
    _refuse_idle(c)
    _refuse_rounds(c)
    _refuse_stages(c)
    _refuse_divided_matrices(c)
    _refuse_context(c)
    _refuse_divided_experts(c)


def _refuse_idle(c: Any) -> None:
    refuse_where(
        (
            c.train_on != "assistant" and not c.mask_prompt,
            "--train-on has an effect only with --mask-prompt: add it",
        ),
        (
            c.isolate_documents and not c.packing,
            "--isolate-documents has an effect only with --packing: add it",
        ),
        (
            _is_given(c, "weight_decay") and c.weight_decay and c.optimizer == "adam",
            "--weight-decay has no effect on adam: use --optimizer adamw",
        ),
        (
            _is_given(c, "weight_decay_on") and c.optimizer == "adam",
            "--weight-decay-on has no effect on adam: use --optimizer adamw",
        ),
        (
            _is_given(c, "early_stopping_min_delta") and c.early_stopping_patience is None,
            "--early-stopping-min-delta has an effect only with --early-stopping-patience: add it",
        ),
        (
            c.sample_every is not None and not c.sample_prompts,
            "--sample-every has an effect only with --sample-prompts: add it",
        ),
        (
            c.project_name is not None and not c.report_to,
            "--project-name has an effect only with --report-to: add it",
        ),
        code="option-without-effect",
    )


def _is_given(config: Any, name: str) -> bool:
    """True if an option differs from its default."""
    fields = cast("dict[str, Any]", type(config).model_fields)
    return getattr(config, name) != fields[name].default


def _refuse_given(config: Any, names: tuple[str, ...], needs: str) -> None:
    """Refuse options that differ from their defaults, but need another option for an effect."""
    for name in names:
        if _is_given(config, name):
            raise RefusedOption(
                f"--{name.replace('_', '-')} has an effect only with {needs}",
                code="option-without-effect",
            )


def dividing_flags(config: Any) -> list[str]:
    """Return the options that divide the work inside a strategy, as flags."""
    numbers = {"--tp": config.tp, "--ep": config.ep, "--cp": config.cp}
    flags = [f"{flag} {number}" for flag, number in numbers.items() if number > 1]
    return flags + ([f"--dp-shard {config.dp_shard}"] if config.dp_shard is not None else [])


def is_sharded(config: Any) -> bool:
    """True if ranks are to divide all arrays of the model."""
    return config.strategy in ("zero2", "zero3", "fsdp")


def _refuse_stages(config: Any) -> None:
    piped = config.strategy == "pipeline"
    if not piped:
        _refuse_given(config, ("pp", "pp_schedule", "pp_split"), "--strategy pipeline: add it")
    if not is_sharded(config):
        if not piped:
            _refuse_given(config, ("dp_shard",), "--strategy fsdp or pipeline: add one")
        if config.dp_shard is None:
            _refuse_given(
                config,
                ("reshard",),
                "--strategy fsdp, or --strategy pipeline with --dp-shard: add one",
            )
    refuse_where(
        (
            config.strategy == "zero2" and config.reshard == "on",
            "--strategy zero2 keeps fetched weights, and --reshard on does not: take --strategy fsdp",
        ),
        (
            is_sharded(config) and config.compress != "none",
            "--compress packs whole sums of gradients, and --strategy fsdp makes parts of them: leave one out",
        ),
        (
            piped and config.compress != "none",
            "--compress packs gradients, and --strategy pipeline sends them uncompressed or not at all: leave one out",
        ),
        (
            config.pp_schedule == "zb" and config.dp_shard,
            "--pp-schedule zb computes the gradients of weights later, but --dp-shard needs them while the weights "
            "are fetched: leave one out",
        ),
        (
            piped and config.rank_weights not in (None, "equal"),
            "--rank-weights divides a batch; with --strategy pipeline --pp-split divides the blocks",
        ),
    )


def refuse_where(*cases: tuple[Any, str], code: str = "options-conflict") -> None:
    """Refuse the first case whose condition is true.

    Raises:
        RefusedOption: a condition is true; with its message.
    """
    for wrong, message in cases:
        if wrong:
            raise RefusedOption(message, code=code)


def _refuse_divided_matrices(config: Any) -> None:
    if config.tp == 1:
        return
    what = f"--tp {config.tp} divides the matrices of blocks"
    refuse_where(
        (config.strategy == "zero1", f"{what}: not with --strategy {config.strategy}"),
        (
            config.sync_every > 1 or config.sync_delay,
            f"{what}: not with --sync-every or --sync-delay",
        ),
        (
            config.compress != "none",
            f"{what}, whose sums are exchanged as they are: not with --compress",
        ),
        (
            config.rank_weights not in (None, "equal"),
            f"{what}, by equal parts: not with --rank-weights",
        ),
        (
            config.fine_tune_type == "dora",
            f"{what}; DoRA needs whole ones: take --fine-tune-type lora",
        ),
    )


def _refuse_divided_experts(config: Any) -> None:
    if config.ep == 1:
        return
    what = f"--ep {config.ep} divides the experts of blocks"
    refuse_where(
        (
            config.strategy == "zero1",
            f"{what}: not with --strategy zero1",
        ),
        (
            config.strategy == "pipeline" and config.tp == 1,
            f"{what} among ranks that compute different rows, and the ranks of a pipeline compute the same rows: add "
            f"--tp {config.ep}, so that the same ranks divide matrices and experts",
        ),
        (
            is_sharded(config) and config.cp > 1 and config.tp == 1,
            f"{what}: not with --strategy {config.strategy} and --cp; leave one of the three out",
        ),
        (
            is_sharded(config) and config.dp_shard and config.tp == 1,
            f"{what}, and with --strategy {config.strategy} the same ranks divide all other arrays: leave --dp-shard "
            "out",
        ),
        (
            config.sync_every > 1 or config.sync_delay,
            f"{what}: not with --sync-every or --sync-delay",
        ),
        (
            config.compress != "none",
            f"{what}, whose sums are exchanged as they are: not with --compress",
        ),
        (
            config.rank_weights == "auto",
            f"{what}, so that ranks wait for each other and their speeds are not known: not with --rank-weights auto",
        ),
        (
            config.tp not in (1, config.ep),
            f"--tp {config.tp} with --ep {config.ep}: the same ranks divide matrices and experts, so give one number",
        ),
        (
            config.fine_tune_type == "dora",
            f"{what}, for which there is no DoRA: take --fine-tune-type lora",
        ),
    )


def _refuse_context(config: Any) -> None:
    if config.cp == 1:
        return
    given = f"--cp {config.cp}"
    refuse_where(
        (
            config.sync_every > 1 or config.sync_delay,
            f"{given} needs ranks with the same weights: not with --sync-every or --sync-delay; leave one of them out",
        ),
        (
            config.rank_weights not in (None, "equal"),
            f"{given} divides rows into equal parts: not with --rank-weights; leave one of the two out",
        ),
    )


def require_groups(config: Any, num_ranks: int) -> None:
    """Refuse ranks that make no whole groups of ``--tp``, ``--cp``, ``--ep`` or ``--dp-shard``.

    Raises:
        ConfigError: the ranks make no whole groups.
    """
    given: list[str] = []
    size = 1
    experts = (
        config.ep if config.tp == 1 else 1
    )  # with --tp the same ranks divide matrices and experts
    sizes = {
        "--tp": config.tp,
        "--cp": config.cp,
        "--ep": experts,
        "--dp-shard": config.dp_shard or 1,
    }
    for flag, own in sizes.items():
        size *= own
        if own > 1:
            given.append(f"{flag} {own}")
        if num_ranks % size:
            told = f"{num_ranks} ranks do" if num_ranks > 1 else "one rank does"
            raise ConfigError(
                f"{told} not make whole groups of {size}",
                code="ranks-not-divisible",
                where=" ".join(given),
                hint="take a number that divides the number of ranks: the groups then divide the rows of a batch",
            )


def ranks_of_stage(config: Any) -> int:
    """Return the number of ranks that compute one stage of a pipeline together."""
    return config.tp * config.cp * (config.dp_shard or 1)


def unfit_stages(config: Any, num_ranks: int) -> ConfigError | None:
    """Return the error if ``num_ranks`` ranks do not make whole pipelines, or if ``--pp-split``
    does not fit them; ``None`` otherwise, or if no pipeline is requested.
    """
    if config.strategy != "pipeline":
        return None
    beside = ranks_of_stage(config)
    stages, interleaved = config.pp or num_ranks // beside, config.pp_schedule == "interleaved"
    if num_ranks == 1:
        what, where = "a pipeline needs several ranks, and there is one", "--strategy pipeline"
        return ConfigError(
            what,
            code="ranks-too-few",
            where=where,
            hint="add a second computer (--hosts), or -n 2 to try it on this one",
        )
    if stages < 2 or num_ranks % (stages * beside):
        return _not_whole(config, num_ranks, max(stages, 2), beside)
    each, rest = divmod(len(config.pp_split.split(",")), stages)
    if config.pp_split == "auto" or (not rest and (each > 1 if interleaved else each == 1)):
        return None
    return ConfigError(
        f"these stages are not those of {stages * beside} ranks",
        code="pp-split-mismatch",
        where=f"--pp-split {config.pp_split}",
        hint=f"give {2 * stages if interleaved else stages} numbers{', two for each rank' * interleaved}, or auto",
    )


def _not_whole(config: Any, num_ranks: int, stages: int, beside: int) -> ConfigError:
    """Return the error of ranks that make no whole pipelines; ``beside``: number of ranks that
    divide a stage.
    """
    given = {
        "--pp": config.pp,
        "--tp": config.tp if config.tp > 1 else None,
        "--cp": config.cp if config.cp > 1 else None,
        "--dp-shard": config.dp_shard,
    }
    where = (
        " ".join(f"{flag} {value}" for flag, value in given.items() if value)
        or "--strategy pipeline"
    )
    each = f"{stages}" if beside == 1 else f"{stages} stages of {beside} ranks each"
    return ConfigError(
        f"{num_ranks} ranks do not make whole pipelines of {each}",
        code="ranks-not-divisible",
        where=where,
        hint=f"take a number of ranks that is a multiple of {stages * beside}, or another number of stages",
    )


def require_stages(config: Any, num_ranks: int) -> None:
    """Refuse ranks that do not make the requested pipelines or groups.

    Raises:
        ConfigError: see :func:`unfit_stages` and :func:`require_groups`.
    """
    require_groups(config, num_ranks)
    if problem := unfit_stages(config, num_ranks):
        raise problem


def _refuse_rounds(config: Any) -> None:
    every = config.sync_every
    parts = config.sync_fragments
    delay = config.sync_delay
    strategy = config.strategy
    if every == 1:
        names = ("outer_momentum", "outer_lr", "sync_fragments")
        _refuse_given(config, names, "--sync-every: add it, with 2 or more steps")
        if delay > 1:
            raise ValueError(
                f"--sync-delay {delay}: gradients that are exchanged in each step come one step late at most; "
                "give 1, or add --sync-every with as many steps"
            )
        if delay and strategy not in ("auto", "data"):
            raise ValueError(
                f"--sync-delay 1 delays the gradients of data parallelism: not with --strategy {strategy}; leave "
                "one of the two out"
            )
    elif strategy != "auto":
        raise ValueError(
            f"--sync-every {every} is a strategy of its own, in which each rank has the whole model and its own "
            f"optimizer between two rounds: not with --strategy {strategy}; leave one of the two out"
        )
    if parts > every:
        raise ValueError(
            f"--sync-fragments {parts} with --sync-every {every}: one part is exchanged after each step, so there can "
            "be no more parts than steps"
        )
    if delay > every // parts:
        raise ValueError(
            f"--sync-delay {delay}: an exchange must end before the next one begins: give at most {every // parts} "
            f"(--sync-every {every} / --sync-fragments {parts})"
        )
