"""What is shipped where there is no room for it: one message that names the directory, and nothing
half-written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import call_allhands
from tiny import write_adapter, write_model

from allhands.errors import ConfigError, ModelError, StorageError
from allhands.export.fusing import FuseOptions, fuse_model

_KB = 8  # a file may have no more; the adapter alone has more


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["fuse --save-path", "export --to peft --out", "export --to hf --out", "import --out"]
)
def test_a_write_that_fails_is_one_message_and_leaves_nothing(tmp_path: Path, words: str) -> None:
    base = write_model(tmp_path / "base", hidden=64)
    adapter = write_adapter(base, tmp_path / "run")
    verb, *rest = words.split()
    command = [sys.executable, "-m", "allhands", verb, *rest, str(tmp_path / "out")]
    if verb == "import":
        done = call_allhands(
            "export", "--adapter-path", adapter, "--to", "peft", "--out", tmp_path / "peft"
        )
        assert done.returncode == 0, done.stderr
        command += ["--from", "peft", str(tmp_path / "peft")]
    else:
        command += ["--adapter-path", str(adapter)]
    # What MLX compiles is in its cache then: a compiler would need room, too.
    env = {**os.environ, "ALLHANDS_NATIVE": "off", "ALLHANDS_CACHE": str(tmp_path.parent / "cache")}
    warm = [str(tmp_path / "warm") if word == str(tmp_path / "out") else word for word in command]
    subprocess.run(warm, capture_output=True, timeout=120, env=env, check=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    limited = ["bash", "-c", f'ulimit -f {_KB}; exec "$@"', "bash", *command]
    done = subprocess.run(
        limited, capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == 5, done.stderr
    assert f"error: {tmp_path / 'out'}: cannot be written" in done.stderr
    assert "what to do" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_model_that_is_there_is_another_place_to_name(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    write_model(tmp_path / "out")
    with pytest.raises(ConfigError, match="there already") as caught:
        fuse_model(FuseOptions(str(base), None), tmp_path / "out")
    assert caught.value.exit_code == 2


def test_a_place_that_cannot_be_written_to_is_found_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    """Of a model whose weights cannot be read, either, the place is named."""
    base = write_model(tmp_path / "base")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StorageError, match="file"):
        fuse_model(FuseOptions(str(base), None), tmp_path / "file" / "out")
    with pytest.raises(ModelError):
        fuse_model(FuseOptions(str(base), None), tmp_path / "out")
