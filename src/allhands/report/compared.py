"""Whether losses that stand side by side can be compared: only if they are of the same validation samples."""

from __future__ import annotations

from collections.abc import Sequence

from allhands.report.facts import ReportFacts

# Options that say which tokens a validation is about; the number of its examples is the product of two more.
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
    """Says that the runs were validated on different samples, and which options differ; empty if they were not."""
    runs = [run for run in runs if run.history.valid]
    if len(runs) < 2:
        return ""
    counted = {max(one.num_tokens for one in run.history.valid) for run in runs}
    known = [run for run in runs if run.config]
    names = [name for name in _ABOUT if len({_plain(run, name) for run in known}) > 1]
    # With more batches than there are examples, all of them are taken, whatever the number says.
    if len({_examples(run) for run in known}) > 1 and len(counted) > 1:
        names += [name for name in ("val_batches", "batch_size") if len({_plain(run, name) for run in known}) > 1]
    if names:
        why = f"they differ in {', '.join('--' + name.replace('_', '-') for name in names)}"
    elif len(counted) > 1:
        why = f"their validations are of {' and '.join(f'{count:,}' for count in sorted(counted))} tokens"
    else:
        return ""
    return f"The runs were validated on different samples ({why}): their validation losses cannot be compared."


def _plain(run: ReportFacts, name: str) -> str:
    """An option's value; what was not given, and what is off, are the same."""
    return repr(run.config.get(name) or None)


def _examples(run: ReportFacts) -> int | None:
    batches, size = run.config.get("val_batches"), run.config.get("batch_size")
    if not isinstance(batches, int) or not isinstance(size, int):
        return None
    return -1 if batches < 0 else batches * size
