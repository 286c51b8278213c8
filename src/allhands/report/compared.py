"""Check that compared losses were measured on the same samples, and speeds on the same model."""

from __future__ import annotations

from collections.abc import Sequence

from allhands.io.formatting import format_count
from allhands.report.facts import ReportFacts

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
    "isolate_documents",
)


def unlike_validations(runs: Sequence[ReportFacts]) -> str:
    """Return a sentence that the runs were validated on different samples, with the options that
    differ; empty if they were not.
    """
    runs = [run for run in runs if run.history.valid]
    if len(runs) < 2:
        return ""
    counted = {max(one.num_tokens for one in run.history.comparable) for run in runs}
    # With more batches than there are examples, all of them are taken, whatever the number says.
    options = (*_ABOUT, "val_batches", "batch_size") if len(counted) > 1 else _ABOUT
    # An option that was not given is the same as one that is off.
    flags = [
        f"--{name.replace('_', '-')}"
        for name in options
        if len({repr(run.config.get(name) or None) for run in runs if run.config}) > 1
    ]
    if flags:
        why = f"they differ in {', '.join(flags)}"
    elif len(counted) > 1:
        why = f"their validations are of {' and '.join(f'{count:,}' for count in sorted(counted))} tokens"
    else:
        return ""
    return f"The runs were validated on different samples ({why}): their validation losses cannot be compared."


def unlike_models(runs: Sequence[ReportFacts]) -> str:
    """Return a sentence that the runs train models of different sizes; empty if they do not."""
    started = [run.history.started for run in runs]
    sizes = sorted({one.total_params for one in started if one is not None and one.total_params})
    if len(sizes) < 2:
        return ""
    told = " and ".join(dict.fromkeys(map(format_count, sizes)))
    return f"The runs train models of different sizes ({told} parameters): their losses and speeds cannot be compared."
