"""Names for the types of arrays that data are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Int8s = NDArray[np.int8]
Int32s = NDArray[np.int32]
Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]
