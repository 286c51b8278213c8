"""The source of the CUDA kernels, one file each; ``.cuh`` files are included in them.

``T`` is the arrays' type; a thread reads 16 bytes of them at a time (``W`` values). Sizes of the
model are constants of the kernel. The number of rows is given at each call, since a kernel is built
anew for every set of constants, and batches have many lengths. All arithmetic is in float32,
rounded once at the end, as the matrix products beside them do it. CUDA's own headers are not
included: they take longer to read than the rest.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def text_of(file: str) -> str:
    """Return the text of a file here, without its first comment and with its includes."""
    text = (files(__name__) / file).read_text(encoding="utf-8")
    return re.sub(
        r'#include "(\w+\.cuh)"\n',
        lambda found: text_of(found[1]),
        re.sub(r"\A(//.*\n)+", "", text),
    )
