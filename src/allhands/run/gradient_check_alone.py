"""Comparison of a training step with mlx_lm's own model, without training, for ``allhands model
check``.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from allhands.config.schema import TrainConfig
from allhands.model.adapters import make_trainable
from allhands.model.dropout import dropout_keys_of
from allhands.model.load import LoadedModel, load_model
from allhands.model.passes import apply_passes
from allhands.run.datasets import load_data
from allhands.run.gradient_check import GradientCheck, GradientVerdict
from allhands.run.kernel_forms import kernel_forms
from allhands.run.preparing import pass_context
from allhands.runtime.accelerator import detect


def check_gradient(
    config: TrainConfig, longest: int, *, with_data: bool, say: Callable[[str], object]
) -> GradientVerdict:
    """Compare the gradients of a short row and a long one.

    Args:
        longest: tokens of the long row; not used with data.
        with_data: True for a long row as long as the longest row of ``config.data``.
        say: called with a line for each stage and each model pass.

    Raises:
        AllhandsError: the model or the data cannot be loaded, or the gradient cannot be computed.
    """
    accelerator = detect()
    loaded = load_model(config.model, trust_remote_code=config.trust_remote_code)
    largest = _vocabulary(loaded) - 1
    if with_data:
        sets = load_data(config)
        assert sets.train is not None
        longest, largest = int(sets.train.work.max()) + 1, sets.largest_token
    mx.random.seed(config.seed)
    make_trainable(loaded.model, config)
    cpu_native = accelerator.runs_natively(config.compile)
    say(
        f"mlx_lm's own model computes rows of 16 and {longest} tokens, then a training step does ..."
    )
    check = GradientCheck(
        loaded.model,
        accelerator,
        loaded.config,
        longest=longest,
        largest_token=largest,
        bounded=False,
    )
    selection = kernel_forms(accelerator, cpu_native=cpu_native).selection
    for each in apply_passes(
        loaded.model, pass_context(loaded.model, config, accelerator, selection)
    ):
        say(f"pass: {each}")
    return check.compare(loaded.model, cpu_native=cpu_native, dropout=dropout_keys_of(loaded.model))


def _vocabulary(loaded: LoadedModel) -> int:
    config = {**loaded.config, **(loaded.config.get("text_config") or {})}
    size = config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else len(loaded.tokenizer.get_vocab())
