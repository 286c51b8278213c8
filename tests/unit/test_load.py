"""Loading models, and `model get`: what works, and one clear message for what cannot."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import errors as hub_errors
from tiny_gguf import dense_parameters, tiny_model

from allhands.errors import ConfigError, ModelError, StorageError
from allhands.io.staging import publish, staging
from allhands.model import sources
from allhands.model.load import (
    Conversion,
    get_model,
    load_bare_tokenizer,
    load_model,
    load_tokenizer,
)
from allhands.model.sources import resolve


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


# --- the Hub, behind its client's one function ----------------------------------------------------


class FakeHub(BaseHTTPRequestHandler):
    """What a download asks the Hub for: a repository's commit, the list of its files, and each
    file.
    """

    folder: ClassVar[Path]

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, *, with_body: bool) -> None:
        if "owner/tiny" not in self.path:
            code = "GatedRepo" if "gated" in self.path else "RepoNotFound"
            return self.send(
                403 if "gated" in self.path else 401, b"{}", with_body, {"X-Error-Code": code}
            )
        if self.path.startswith("/api/"):
            files = [(file.name, file.stat().st_size) for file in self.folder.iterdir()]
            tree = [
                {"type": "file", "path": name, "size": size, "oid": name} for name, size in files
            ]
            info = {
                "id": "owner/tiny",
                "sha": "5" * 40,
                "siblings": [{"rfilename": name} for name, _ in files],
            }
            answer = tree if "/tree/" in self.path else info
            return self.send(200, json.dumps(answer).encode(), with_body, {})
        content = (self.folder / self.path.rpartition("/")[2]).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return self.send(200, content, with_body, {"X-Repo-Commit": "5" * 40, "ETag": f'"{etag}"'})

    def send(self, status: int, content: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tiny: tuple[Path, dict[str, np.ndarray]]) -> Iterator[str]:
    """The address of a Hub on this machine that has one repository, owner/tiny."""
    handler = type("Handler", (FakeHub,), {"folder": tiny[0]})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


GET = """
import sys
from pathlib import Path
from allhands.errors import AllhandsError
from allhands.model.load import Conversion, get_model
for repo in sys.argv[2:]:
    try:
        print(get_model(repo, Path(sys.argv[1]), Conversion(dequantize=True)))
    except AllhandsError as error:
        print(error.where, "|", error.message, "|", error.hint)
"""


def test_real_client_against_a_hub(
    tiny: tuple[Path, dict[str, np.ndarray]], hub: str, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    command = [
        sys.executable,
        "-c",
        GET,
        str(tmp_path / "out"),
        "owner/tiny",
        "owner/none",
        "owner/gated",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    fetched, none, gated = done.stdout.splitlines()
    assert fetched == str(tmp_path / "out")
    assert none.startswith(
        "owner/none | no such directory here, and no such repository on the Hub | check"
    )
    assert gated.startswith("owner/gated | the repository is gated | accept its terms")
    reference = dense_parameters(tiny[0])
    for name, value in dense_parameters(tmp_path / "out").items():
        assert np.array_equal(value, reference[name]), name


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (hub_errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (hub_errors.HFValidationError("bad"), "not a Hub repository id"),
        (hub_errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (RuntimeError("strange\nand long"), "the Hub answered: strange"),
    ],
)
def test_hub_failures(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(sources, "snapshot_download", fail)
    with pytest.raises(ModelError, match=says) as caught:
        load_model("owner/name")
    assert caught.value.where == "owner/name"
    assert caught.value.hint


def test_hub_disk_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources, "snapshot_download", fail)
    with pytest.raises(StorageError) as caught:
        resolve("owner/name")
    assert caught.value.code == "disk-full"


# --- loading what is broken -----------------------------------------------------------------------


@pytest.fixture
def copy(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> Path:
    return get_model(str(tiny[0]), tmp_path / "copy")


def edit_config(path: Path, **changed: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changed))


def test_missing_paths_are_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "file.gguf").touch()
    for name in (str(tmp_path / "no"), "./no", "~/no-such", "models/no", "a/b/c", "no/"):
        with pytest.raises(ModelError) as caught:
            load_model(name)
        assert caught.value.code == "model-missing"
    with pytest.raises(ModelError) as caught:
        load_model("file.gguf")
    assert caught.value.code == "model-missing"


def test_broken_directories(copy: Path) -> None:
    def fails(says: str) -> None:
        with pytest.raises(ModelError, match=says) as caught:
            load_model(str(copy))
        assert caught.value.where is not None
        assert caught.value.hint
        assert str(copy) in caught.value.where

    config = (copy / "config.json").read_text()
    for content, says in (
        ("{", "not readable JSON"),
        ("[]", "no model_type"),
        ("{}", "no model_type"),
        (config.replace('"llama"', '"alpaca"'), "alpaca not supported"),
        (config.replace('"hidden_size": 128', '"hidden_size": 64'), "cannot be built"),
        (config.replace('"hidden_size": 128', '"hidden_size": "x"'), "cannot be built"),
        (config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'), "layers.2.mlp"),
    ):
        (copy / "config.json").write_text(content)
        fails(says)
    (copy / "config.json").write_text(
        config.replace('"num_hidden_layers": 2', '"num_hidden_layers": "two"')
    )
    with pytest.raises(ModelError, match="num_hidden_layers") as caught:
        load_tokenizer(str(copy))
    assert caught.value.where == str(copy / "config.json")
    (copy / "config.json").unlink()
    fails("no config.json")
    (copy / "config.json").write_text(config)
    whole = (copy / "model.safetensors").read_bytes()
    for length in (0, 100, 5000, len(whole) - 1):
        (copy / "model.safetensors").write_bytes(whole[:length])
        fails("torn")
    kind = whole.index(b'"F32"')
    (copy / "model.safetensors").write_bytes(whole[:kind] + b'"F64"' + whole[kind + 5 :])
    fails("F64")
    (copy / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    )
    fails("missing: model-00002-of-00002")
    (copy / "model.safetensors.index.json").write_text("[")
    fails("index cannot be read")
    (copy / "model.safetensors.index.json").unlink()
    (copy / "model.safetensors").unlink()
    (
        copy / "model.safetensors"
    ).mkdir()  # no file that can be opened: so for one without the right to read it
    fails("cannot be read: Is a directory")
    (copy / "model.safetensors").rmdir()
    fails("no model\\*.safetensors")
    (copy / "model.safetensors").write_bytes(whole)
    (copy / "tokenizer.json").write_text("{")
    fails("tokenizer cannot be loaded")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    fails("no tokenizer")


def test_an_architecture_whose_package_is_missing_is_a_message(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    sizes = {
        "d_model": 32,
        "n_layers": 1,
        "mlp_hidden_size": 64,
        "n_heads": 4,
        "embedding_size": 264,
    }
    (copy / "config.json").write_text(json.dumps(config | sizes | {"model_type": "olmo"}))
    with pytest.raises(ModelError) as caught:
        load_model(str(copy))
    assert caught.value.exit_code == 4


def test_code_of_the_model_needs_trust(copy: Path) -> None:
    edit_config(copy, model_file="own.py")
    (copy / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError) as caught:
        load_model(str(copy))
    assert caught.value.code == "model-not-buildable"
    assert "--trust-remote-code" in str(caught.value.hint)


def test_dtype_on_loading(copy: Path) -> None:
    model: Any = load_model(str(copy), dtype="float16").model
    assert model.model.norm.weight.dtype == mx.float16
    assert model.model.embed_tokens.scales.dtype == mx.float16
    with pytest.raises(ModelError, match="finer than bfloat16"):
        load_model(str(copy), dtype="bfloat16")
    with pytest.raises(ConfigError, match="int3"):
        load_model(str(copy), dtype="int3")


def test_fingerprint_follows_the_weights_only(copy: Path) -> None:
    before = load_model(str(copy)).fingerprint
    edit_config(copy, max_position_embeddings=64)
    assert load_model(str(copy)).fingerprint == before
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    assert load_model(str(copy)).fingerprint != before


# --- model get ------------------------------------------------------------------------------------


def test_dequantize_is_exact_in_float32_and_rounded_once_in_others(
    tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    reference = dense_parameters(tiny[0])
    dense = get_model(str(tiny[0]), tmp_path / "f32", Conversion(dequantize=True))
    assert "quantization" not in json.loads((dense / "config.json").read_text())
    for name, value in dense_parameters(dense).items():
        assert np.array_equal(value, reference[name]), name
    half = get_model(str(tiny[0]), tmp_path / "f16", Conversion(dequantize=True, dtype="float16"))
    for name, value in dense_parameters(half).items():
        assert np.array_equal(value, reference[name].astype(np.float16).astype(np.float32)), name
    get_model(str(tiny[0]), tmp_path / "bf16", Conversion(dequantize=True, dtype="bfloat16"))
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_quantize(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    reference = dense_parameters(tiny[0])
    said: list[str] = []
    out = get_model(
        str(tiny[0]),
        tmp_path / "q8",
        Conversion(dequantize=True, quantize_bits=8, group_size=128),
        report=said.append,
    )
    assert "bits per weight" in said[0]
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 8
    for name, value in dense_parameters(out).items():
        # 255 steps span a group's range, at most the tensor's; MLX moves them by up to half a step,
        # to have zero among them, and rounding takes another half.
        step = np.ptp(reference[name]) / 255
        assert 0 < np.abs(value - reference[name]).max() <= step or "norm" in name, name


def test_options_that_cannot_take_effect_are_refused(
    tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    source, out = str(tiny[0]), tmp_path / "out"
    for options, kind, code in (
        ({"quantize_bits": 4}, ModelError, "model-is-quantised"),
        ({"quantize_bits": 7}, ConfigError, "value-unknown"),
        ({"quantize_bits": 4, "group_size": 48}, ConfigError, "value-unknown"),
        ({"group_size": 64}, ConfigError, "option-without-effect"),
        ({"dtype": "float64"}, ConfigError, "value-unknown"),
        ({"dtype": "bfloat16"}, ModelError, "dtype-loses-precision"),
    ):
        with pytest.raises(kind) as raised:
            get_model(source, out, Conversion(**options))  # type: ignore[arg-type]
        assert raised.value.code == code
    dense = str(get_model(source, tmp_path / "dense", Conversion(dequantize=True)))
    with pytest.raises(ModelError) as caught:
        get_model(dense, out, Conversion(dequantize=True))
    assert caught.value.code == "model-not-quantised"
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_existing_output(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    source, out = str(tiny[0]), tmp_path / "out"
    said: list[str] = []
    out.mkdir()  # an empty directory is free
    get_model(source, out, Conversion(dequantize=True))
    inode = out.stat().st_ino
    get_model(source, out, Conversion(dequantize=True), report=said.append)
    assert out.stat().st_ino == inode
    assert "holds this model already" in said[-1]
    with pytest.raises(ConfigError) as caught:
        get_model(source, out)
    assert caught.value.code == "output-exists"
    assert out.stat().st_ino == inode
    get_model(source, out, force=True)
    assert "quantization" in json.loads((out / "config.json").read_text())
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").touch()
    with pytest.raises(ConfigError) as caught:
        get_model(source, other, force=True)
    assert caught.value.code == "place-taken"
    for overlapping in (tiny[0], tiny[0] / "inside"):
        with pytest.raises(ConfigError) as caught:
            get_model(source, overlapping, force=True)
        assert caught.value.code == "output-place-unsuitable"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photos"]


def test_unwritable_output(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        get_model(str(tiny[0]), tmp_path / "file" / "out")
    with pytest.raises(ConfigError) as caught:
        get_model(str(tiny[0]), tmp_path / "file")
    assert caught.value.code == "place-taken"


# A file-size limit stands for a full disk: writes fail in the same places.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from allhands.errors import StorageError
from allhands.model.load import Conversion, get_model
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    get_model(sys.argv[1], Path(sys.argv[2]), Conversion(dequantize=sys.argv[3] == "dequantize"))
except StorageError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("mode", ["copy", "dequantize"])
def test_full_disk_leaves_nothing(
    tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, mode: str
) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tiny[0]), str(tmp_path / "out"), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == StorageError.exit_code, done.stderr
    assert "cannot be written" in done.stdout
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from allhands.io.staging import staging
with staging(Path(sys.argv[1])) as staged:
    (staged / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert not out.exists()
    assert len(list(tmp_path.iterdir())) == 1
    with staging(out) as mine:
        assert list(tmp_path.iterdir()) == [mine]
        with staging(out) as other:
            assert sorted(tmp_path.iterdir()) == sorted([mine, other])
            (other / "whole").touch()
            publish(other, out)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]


def test_a_vocabulary_alone_is_no_tokenizer(tmp_path: Path) -> None:
    letters = {chr(code): code - 33 for code in range(33, 127)}
    (tmp_path / "vocab.json").write_text(json.dumps({**letters, "th": 94, "<|endoftext|>": 95}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    with pytest.raises(ModelError) as caught:
        load_bare_tokenizer(str(tmp_path))
    assert caught.value.message == "tokenizer.json is missing, which says how texts are cut"
    assert "trust-remote-code" not in str(caught.value)
    # A class that can be made of it helps.
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert load_bare_tokenizer(str(tmp_path)).tokenizer.encode("this") == [
        94,
        letters["i"],
        letters["s"],
    ]


def test_a_tokenizer_of_which_only_the_settings_are_there_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ModelError) as caught:
        load_bare_tokenizer(str(tmp_path))
    assert caught.value.message == "tokenizer.json is missing, which says how texts are cut"
