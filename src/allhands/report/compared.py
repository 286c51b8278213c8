"""Check that compared losses were measured on the same samples, and speeds on the same model."""

from __future__ import annotations

from collections.abc import Sequence

from allhands.io.formatting import format_count
from allhands.report.facts import ReportFacts

# Options that decide how the same tokens are validated.
_HOW = ("isolate_documents",)
# Options that decide which tokens are validated; ``val_batches`` times ``batch_size`` is the number
# of examples.
_ABOUT = (
    "data",
    "hf_dataset",
    "tokenizer",
    "mask_prompt",
    "train_on",
    "max_seq_length",
    "packing",
    *_HOW,
)


def unlike_validations(runs: Sequence[ReportFacts]) -> str:
    """Return a sentence that the runs were validated on different samples, with the options that
    differ; empty if they were not.
    """
    runs = [run for run in runs if run.history.comparable]
    if len(runs) < 2:
        return ""
    counted = sorted({max(one.num_tokens for one in run.history.comparable) for run in runs})
    examples = {run.history.started and run.history.started.validated for run in runs}
    if flags := _differing(runs, _options_of(examples, len(counted))):
        why = f"they differ in {', '.join(flags)}"
    elif len(counted) > 1:
        why = f"their validations are of {' and '.join(f'{count:,}' for count in counted)} tokens"
    elif None not in examples and len(examples) > 1:
        why = "the data have changed between them"
    else:
        return ""
    return f"The runs were validated on different samples ({why}): their validation losses cannot be compared."


def _options_of(examples: set[str | None], sizes: int) -> Sequence[str]:
    """Return the options by which validations may differ.

    Args:
        examples: the runs' validated examples.
        sizes: number of different sizes of their validations.
    """
    if None not in examples and len(examples) == 1:
        return _HOW
    # With more batches than there are examples, all of them are taken, whatever the number says.
    return (*_ABOUT, "val_batches", "batch_size") if sizes > 1 else _ABOUT


def _differing(runs: Sequence[ReportFacts], options: Sequence[str]) -> list[str]:
    """Return the flags of options that are not the same in all runs."""
    # An option that was not given is the same as one that is off.
    return [
        f"--{name.replace('_', '-')}"
        for name in options
        if len({repr(run.config.get(name) or None) for run in runs if run.config}) > 1
    ]


def unlike_models(runs: Sequence[ReportFacts]) -> str:
    """Return a sentence that the runs train models of different sizes; empty if they do not."""
    started = [run.history.started for run in runs]
    sizes = sorted({one.total_params for one in started if one is not None and one.total_params})
    if len(sizes) < 2:
        return ""
    told = " and ".join(dict.fromkeys(map(format_count, sizes)))
    return f"The runs train models of different sizes ({told} parameters): their losses and speeds cannot be compared."
