"""Attention that does not cross documents, for rows that hold several.

mlx_lm's models ask their key-value cache for the attention mask. :class:`DocumentRow` takes the
cache's place: it keeps nothing and returns a mask that is block-diagonal by document. Positions
need no change: rotary embeddings depend only on differences of positions, which are the same
wherever a document begins. Some architectures may differ, so :func:`require_isolation` checks that
the hidden states of a document equal those of the document alone.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.errors import ConfigError
from allhands.kernels.known import follows_length


class DocumentRow:
    """The cache of a layer while rows of several documents are computed."""

    offset = 0

    def __init__(self, documents: mx.array) -> None:
        self._documents = documents
        self._starts: NDArray[np.int32] | None = None
        # True once a layer has asked for a window that is narrower than the row.
        self.windowed = False

    @property
    def numbers(self) -> mx.array:
        """(B, T) int32, the document number at each position."""
        return self._documents

    @property
    def starts(self) -> NDArray[np.int32]:
        """(B, T): first position of the document at each position; documents are in one piece."""
        if self._starts is None:
            documents = np.asarray(self._documents)
            places = np.arange(documents.shape[1], dtype=np.int32)
            begins = np.ones(documents.shape, dtype=bool)
            begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
            self._starts = np.ascontiguousarray(
                np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            )
        return self._starts

    def make_mask(self, _length: int, *, window_size: int | None = None, **_: Any) -> mx.array:
        """(B, 1, T, T) bool: true where a query (third axis) sees a key (fourth axis)."""
        length = self._documents.shape[1]
        places = mx.arange(length)
        distance = places[:, None] - places[None, :]
        visible = distance >= 0
        if window_size is not None and window_size < length:
            self.windowed = True
            visible = visible & (distance < window_size)
        same = self._documents[:, None, :, None] == self._documents[:, None, None, :]
        return same & visible

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of this pass: there are no earlier ones."""
        return keys, values


def caches_for(num_layers: int, documents: mx.array) -> list[Any]:
    """Return the ``cache`` argument for a model of ``num_layers``, with which each position sees
    only its own document.

    Args:
        documents: (B, T) int32, the document number at each position.
    """
    # One object: the mask is built once and shared by the layers that ask for it.
    return [DocumentRow(documents)] * num_layers


def require_isolation(model: Any, name: str) -> None:
    """Check, by a computation, that ``model`` can keep documents apart.

    Args:
        model: (B, T) token ids, and ``cache`` -> (B, T, V) logits.

    Raises:
        ConfigError: the architecture cannot keep them apart.
    """
    first, second = [1, 2, 3, 5, 8], [13, 4, 2, 7]
    # Two rows with documents of different lengths: some architectures apply a mask to the wrong row
    # or head.
    rows = mx.array([first + second, second + first])
    documents = mx.array(
        [[0] * len(first) + [1] * len(second), [0] * len(second) + [1] * len(first)]
    )
    try:
        alone = mx.concatenate([model(mx.array([second]))[0], model(mx.array([first]))[0]]).astype(
            mx.float32
        )

        def difference(logits: mx.array) -> mx.array:
            later = mx.concatenate([logits[0, len(first) :], logits[1, len(second) :]])
            return mx.abs(later.astype(mx.float32) - alone).max()

        apart = difference(model(rows, cache=caches_for(len(model.layers), documents)))
        # At most the rounding of half precision, and little compared to the difference without a
        # mask.
        kept_apart = bool(
            (
                (apart <= 0.02 * mx.abs(alone).max()) & (apart <= 0.2 * difference(model(rows)))
            ).item()
        )
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):
        kept_apart = False
    # These rows are too short to show that a model depends on their length.
    if not kept_apart or follows_length(model):
        raise ConfigError(
            f"documents cannot be kept apart in this architecture ({name})",
            code="option-unsuited-to-model",
            where="--isolate-documents",
            hint="leave it out: documents of a row then see each other, as in most pre-training",
        )
