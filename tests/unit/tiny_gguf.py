"""A tiny Llama in a GGUF written by hand, byte by byte, from the specification; for the tests
beside.
"""

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.model.gguf import convert_gguf
from allhands.model.load import load_model

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 128, 4, 2, 256, 2
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


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
        head += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body)
        )
        body += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)


def packed(rng: np.random.Generator, kind: int, shape: tuple[int, ...]) -> tuple[bytes, np.ndarray]:
    """Random blocks of a type: their bytes, and by the type's formula the float32 values they stand
    for.
    """
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
        s.tobytes() + m.tobytes() + q.tobytes()
        for s, m, q in zip(scale, least, nibbles, strict=True)
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
        "tokenizer.ggml.token_type": [3] * len(SPECIAL)
        + [1] * (len(tokens) - len(SPECIAL) - 1)
        + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def tiny_gguf(path: Path, **changed: Any) -> dict[str, np.ndarray]:
    """Write the tiny model; the values of its tensors. ``changed`` replaces metadata (dots as
    ``__``).
    """
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


def tiny_model(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The converted tiny model in ``folder`` and the values that its GGUF stands for."""
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
