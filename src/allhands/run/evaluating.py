"""Evaluation of a model, with or without an adapter, on one split; exact on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from allhands.config.eval_schema import EvalConfig
from allhands.data.tokens import Windows
from allhands.errors import DataError
from allhands.model.beyond import limits_told, use_of
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.run.adapter_files import check_adapter
from allhands.run.context import RunContext
from allhands.run.contexts import agreed, context_of, same_rows
from allhands.run.piping import micro_batch_tokens, piped, piping_of, sums_together
from allhands.run.preparing import prepare
from allhands.train.evaluation import Evaluator


@dataclass(frozen=True)
class Evaluation:
    """The result of :func:`run_evaluation`.

    Attributes:
        loss: mean over the trained tokens, in nats per token.
        perplexity: ``exp(loss)``.
        bits_per_byte: loss in bits per byte of plain texts, as training reports it; ``None`` for
            other data, or if texts were cut.
        num_tokens: number of tokens in the loss.
        num_examples: number of evaluated examples; ``None`` for packed rows if a number of batches
            left some out.
        num_ranks: number of processes that computed the loss.
        notes: notes for the user about the data.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    num_tokens: int
    num_examples: int | None
    num_ranks: int
    notes: tuple[str, ...]


def run_evaluation(config: EvalConfig, surroundings: RunContext) -> Evaluation:
    """Evaluate as ``config`` says, as one rank of ``surroundings.mesh``.

    Every rank returns the same result.

    Raises:
        AllhandsError: an input is wrong, or the evaluation failed.
    """
    if config.adapter_path:
        check_adapter(Path(config.adapter_path))
    with limits_told(use_of(config)):
        return _evaluated(config, surroundings)


def _evaluated(config: EvalConfig, surroundings: RunContext) -> Evaluation:
    start = Path(config.adapter_path) / "adapters.safetensors" if config.adapter_path else None
    surroundings = replace(surroundings, mesh=piped(config, surroundings.mesh))
    ready = prepare(config, surroundings, Path(config.adapter_path), start)
    windows: Windows | None = getattr(ready.data, config.split)
    if windows is None or not len(windows):
        raise DataError(
            f"the {config.split} split is empty",
            code="split-empty",
            where=config.data,
            hint="name another: --split",
        )
    piping = (
        piping_of(config, ready.stages, ready.communicator, surroundings.mesh)
        if ready.stages
        else None
    )
    objective = CAUSAL_LM.across(context_of(ready.communicator, surroundings.mesh))
    together = sums_together(piping, ready, objective)
    group = same_rows(ready.communicator, surroundings.mesh)
    tokens = micro_batch_tokens(config, windows.work, surroundings.mesh)
    evaluator = Evaluator(
        ready.loaded.model,
        windows,
        ready.communicator,
        surroundings.mesh,
        agreed(ready.accelerator.sizing(tokens, compiled=False), group),
        batch_size=config.batch_size,
        num_batches=config.test_batches,
        cpu_native=ready.accelerator.cpu_native,
        stop_requested=surroundings.stop_requested,
        beat=surroundings.beat,
        objective=objective,
        together=together,
        same_rows=group,
    )
    try:
        loss, num_tokens, _ = evaluator()
    finally:
        surroundings.beat("end", 0)
    stored = ready.data.stored[config.split]
    if config.packing:
        ratio, num_examples = stored.report.tokens_per_byte, None
    else:
        bos: int | None = ready.loaded.tokenizer.bos_token_id
        ratio, num_examples = stored.targets_per_byte(bos), evaluator.num_windows
    if evaluator.num_windows == len(windows):
        num_examples = stored.report.num_examples
    perplexity = math.exp(loss) if loss < 700 else math.inf
    notes = tuple(
        note for note in (ready.accelerator.warning, *ready.data.notes, *ready.notes) if note
    )
    bits = None if ratio is None else loss / math.log(2) * ratio
    return Evaluation(
        loss, perplexity, bits, num_tokens, num_examples, surroundings.mesh.size, notes
    )
