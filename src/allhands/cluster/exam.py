"""``python -m allhands.cluster.exam JSON``: the files and versions of a computer, for the
supervisor to compare.

In a second, and without MLX, it tells most of what a rank would tell that has loaded everything:
who has the same files and the same software has the same tokens and weights.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.cluster.guard import write_whole
from allhands.cluster.runfiles import ATTESTED_FILE
from allhands.runtime.versions import software_here

_BUSY_EVERY_S = 1.0


def examined(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts about ``model``, ``data`` with its ``splits``, and the files that ``options``
    name, on this computer.
    """
    from allhands.data.behind import files_behind_data, files_behind_options, hashes
    from allhands.model.fingerprints import fingerprint
    from allhands.model.weight_files import absent, present

    model = Path(asked["model"]).expanduser()
    weights = [*present(model), *absent(model)]
    total = fingerprint(model) if weights else ""
    files = {
        **files_behind_data(Path(asked["data"]).expanduser(), asked["splits"], model),
        **files_behind_options(
            {name: os.path.expanduser(path) for name, path in asked["options"].items()}
        ),
        **hashes("model", [model / "config.json"]),
        **({f"model/{file.name}": total for file in present(model)} if len(weights) == 1 else {}),
        "weights/all": total,
    }
    return {"files": files, "software": software_here()}


def main() -> None:
    """Write the answer where the supervisor's agent looks for it."""
    run_dir = Path(os.environ["ALLHANDS_RUN_DIR"])

    def tell_busy() -> None:
        while True:
            (run_dir / f"rank-{os.environ['ALLHANDS_RANK']}.busy").touch()
            time.sleep(_BUSY_EVERY_S)

    threading.Thread(target=tell_busy, daemon=True).start()
    write_whole(run_dir / ATTESTED_FILE, json.dumps(examined(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
