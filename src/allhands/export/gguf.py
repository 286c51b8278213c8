"""Llama-shaped models as GGUF files, which llama.cpp, Ollama and LM Studio read.

The tensors and the numbers of the architecture are written as in mlx_lm's converter
(``mlx_lm.gguf``). The tokenizer is written in another way: mlx_lm calls each one a SentencePiece
model without scores, and then llama.cpp cuts texts differently from the training. The names of the
rules for cutting are those of llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.gguf import TokenType, permute_weights, prepare_metadata, translate_weight_names

from allhands.data.render import ChatTemplate, has_chat_template
from allhands.errors import ModelError
from allhands.export.fusing import Finish
from allhands.export.gguf_check import check_gguf
from allhands.io.files import write_whole
from allhands.model.hf_names import architecture_of, other_way
from allhands.model.load import Json, load_tokenizer, overflow, read_config
from allhands.model.reading import opened
from allhands.model.sources import name_of

ARCHITECTURES = ("llama", "mistral", "mixtral")
_OTHERWISE = (
    "allhands export --to hf, then convert_hf_to_gguf.py of llama.cpp, which knows more models"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The patterns that split words, and llama.cpp's names for them.
_RULES = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _TAIL: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _TAIL: "qwen2",
}
# Experts are one tensor each in mlx_lm and in llama.cpp, under other names.
_EXPERTS = {
    f"block_sparse_moe.switch_mlp.{name}_proj": f"ffn_{name}_exps"
    for name in ("gate", "up", "down")
}


def gguf_writer(file: str, name: str) -> Finish:
    """Return the last step of :func:`allhands.export.fusing.fuse_model` that writes the model as
    ``file``, too.

    Raises:
        ModelError: ``file`` leads out of the directory.
    """
    if Path(file).name != file:
        raise ModelError(
            "the GGUF file is written into --save-path",
            code="gguf-path-invalid",
            where=f"--gguf-path {file}",
            hint="give a name",
        )
    return lambda staged, config: write_gguf(staged, staged / file, name)


def check_convertible(path: Path, *, dense: bool = True) -> None:
    """Refuse a model that cannot be written as GGUF, before any work is done.

    Args:
        dense: whether it will be unpacked first if it is quantised.

    Raises:
        ModelError: its architecture or tokenizer is not supported.
    """
    config = read_config(path)
    require_known(config, path)
    _Vocabulary.of(path, 0)
    # Last, because its remedy is another try.
    _require_dense({} if dense else config, path)


def require_known(config: Json, path: Path) -> None:
    """Refuse a model whose written file would compute something else (ModelError)."""
    scaling, kind = _scaling(config)
    for wrong, what in (
        (config["model_type"] not in ARCHITECTURES, f"its architecture is {config['model_type']}"),
        (scaling and kind not in ("linear", "default"), f"its rotary embedding is scaled ({kind})"),
        (config.get("attention_bias") or config.get("mlp_bias"), "its layers have biases"),
    ):
        if wrong:
            known = architecture_of(config)
            hint = _OTHERWISE if known is not None and known.whole else other_way(known)
            raise ModelError(
                f"it cannot be written as GGUF: {what}",
                code="gguf-unsupported",
                where=str(path),
                hint=hint,
            )


def _require_dense(config: Json, path: Path) -> None:
    if "quantization" in config:
        raise ModelError(
            "a quantised model cannot be written as GGUF",
            code="model-is-quantised",
            where=str(path),
            hint="add --dequantize",
        )


def _scaling(config: Json) -> tuple[Json, str | None]:
    """Return the rotary embedding's scaling and its kind; newer configs have it beside the theta."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or (parameters if "factor" in parameters else {})
    return scaling, scaling.get("type") or scaling.get("rope_type")


def write_gguf(model: Path, out: Path, name: str | None = None) -> None:
    """Write the dense model in the directory ``model`` into the file ``out``: matrices float16, the
    rest float32.

    Programs that read it show the model under ``name``, by default that of its directory.

    It is read back and compared with the model before it gets its name.

    Raises:
        ModelError: it is quantised, or of an architecture or with a tokenizer that cannot be
            written; or the file does not hold the model's weights.
        StorageError: the file cannot be written.
    """
    config = read_config(model)
    require_known(config, model)
    _require_dense(config, model)
    tensors: dict[str, mx.array] = {}
    for arrays, _ in opened(model):
        tensors |= {_name(name): _tensor(name, value, config) for name, value in arrays.items()}
    rows = tensors["token_embd.weight"].shape[0]
    vocabulary = _Vocabulary.of(model, rows)
    heads = config["num_attention_heads"]
    theta = (config.get("rope_parameters") or {}).get(
        "rope_theta", config.get("rope_theta", 10000.0)
    )
    scaling, kind = _scaling(config)
    # llama.cpp loads no model without a context length; 2048 is what a Llama without one has in
    # transformers.
    defaults = {"num_key_value_heads": heads, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    known = {key: value for key, value in config.items() if value is not None}
    metadata: dict[str, Any] = prepare_metadata(
        {**defaults, **known, "rope_theta": theta}, vocabulary
    )
    if kind == "linear":
        metadata["llama.rope.scaling.type"] = kind
        metadata["llama.rope.scaling.factor"] = mx.array(scaling["factor"], dtype=mx.float32)
    # prepare_metadata writes unsigned numbers, at which llama.cpp refuses the file.
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"].astype(mx.int32)
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        metadata[f"llama.{key}"] = mx.array(width, dtype=mx.uint32)
    shown = name or name_of(str(model))
    metadata |= {"general.name": shown, **vocabulary.metadata()}
    for tensor, value in tensors.items():
        if not mx.all(mx.isfinite(value)).item():
            raise overflow(
                tensor,
                shown,
                "allhands export --to hf --dtype bfloat16, then convert_hf_to_gguf.py --outtype bf16 of llama.cpp",
            )

    def write(temporary: Path) -> None:
        mx.save_gguf(str(temporary), tensors, metadata)
        tensors.clear()  # so that the model is in memory once, not twice
        check_gguf(model, temporary)

    write_whole(out, write)


def _name(name: str) -> str:
    for ours, theirs in _EXPERTS.items():
        name = name.replace(ours, theirs)
    return translate_weight_names(name)


def _tensor(name: str, value: mx.array, config: Json) -> mx.array:
    """A tensor in llama.cpp's order of rows and type."""
    heads = config["num_attention_heads"]
    if ".q_proj." in name:
        value = permute_weights(value, heads, heads)
    elif ".k_proj." in name:
        value = permute_weights(value, heads, config.get("num_key_value_heads", heads))
    # Norms are multiplied in float32 there, and the router decides in it.
    small = value.ndim == 1 or name.endswith("block_sparse_moe.gate.weight")
    return mx.contiguous(value.astype(mx.float32 if small else mx.float16))


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer as GGUF describes it; the part that ``prepare_metadata`` asks for has the names
    that it knows.

    Attributes:
        rule: how llama.cpp calls the way in which words are told apart; ``None`` for SentencePiece.
    """

    tokenizer: Any
    description: Json
    rule: str | None
    vocab_size: int

    @classmethod
    def of(cls, model: Path, rows: int) -> _Vocabulary:
        """Read the vocabulary of a model's directory; ``rows``: of its embedding."""
        file = model / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                "there is no tokenizer.json",
                code="tokenizer-missing",
                where=str(model),
                hint=_OTHERWISE,
            )
        description: Json = json.loads(file.read_bytes())
        try:
            rule = _rule(description)
        except LookupError as error:
            raise ModelError(
                f"this tokenizer cannot be described for llama.cpp: {error.args[0]}",
                code="tokenizer-unsupported",
                where=str(file),
                hint=_OTHERWISE,
            ) from None
        tokenizer: Any = load_tokenizer(str(model)).tokenizer
        count = max(tokenizer.get_vocab().values()) + 1
        if rows and count > rows:
            raise ModelError(
                f"the tokenizer has {count} tokens, the model's vocabulary {rows}",
                code="vocabulary-mismatch",
                where=str(model),
                hint="the tokenizer is another model's: copy this model's own",
            )
        return cls(tokenizer, description, rule, max(rows, count))

    @property
    def merges(self) -> list[str]:
        """Pairs in the order in which they are joined, as llama.cpp writes them."""
        found: list[Any] = self.description["model"]["merges"]
        return [pair if isinstance(pair, str) else " ".join(pair) for pair in found]

    def all_tokens(self) -> Iterator[tuple[str, float, TokenType]]:
        """Text, score and type of every token, those included that the model has rows for and
        nobody uses.
        """
        names = {number: text for text, number in self.tokenizer.get_vocab().items()}
        added = {
            token["id"]: bool(token.get("special"))
            for token in self.description.get("added_tokens", [])
        }
        # SentencePiece joins what has the highest score: what BPE joins first.
        scores = {
            pair.replace(" ", ""): -float(place)
            for place, pair in reversed(list(enumerate(self.merges)))
        }
        unknown = self.description["model"].get("unk_token")
        for number in range(self.vocab_size):
            text = names.get(number)
            if text is None:
                yield f"[PAD{number}]", 0.0, TokenType.UNUSED
            elif text == unknown:
                yield text, 0.0, TokenType.UNKNOWN
            elif number in added:
                yield text, 0.0, TokenType.CONTROL if added[number] else TokenType.USER_DEFINED
            elif self.rule is None and len(text) == 6 and text.startswith("<0x"):
                yield text, 0.0, TokenType.BYTE
            else:
                yield text, scores.get(text, 0.0), TokenType.NORMAL

    def metadata(self) -> dict[str, Any]:
        """Return GGUF's metadata of the tokenizer besides its tokens."""
        first = self.tokenizer.encode("a")[0]
        found: dict[str, Any] = {"tokenizer.ggml.model": "llama" if self.rule is None else "gpt2"}
        if self.rule is not None:
            found["tokenizer.ggml.pre"] = self.rule
            found["tokenizer.ggml.merges"] = (
                self.merges
            )  # llama.cpp wants them even if there are none
        found["tokenizer.ggml.add_bos_token"] = mx.array(first == self.tokenizer.bos_token_id)
        if self.tokenizer.pad_token_id is not None:
            found["tokenizer.ggml.padding_token_id"] = mx.array(
                self.tokenizer.pad_token_id, dtype=mx.uint32
            )
        ends = (
            ChatTemplate(self.tokenizer).answers.closing
            if has_chat_template(self.tokenizer)
            else None
        )
        number = None if ends is None else self.tokenizer.get_vocab().get(ends)
        if number not in (None, self.tokenizer.eos_token_id):
            found["tokenizer.ggml.eot_token_id"] = mx.array(number, dtype=mx.uint32)
        template = self.tokenizer.chat_template
        if isinstance(template, str):
            found["tokenizer.chat_template"] = template
        return found


def _rule(description: Json) -> str | None:
    """llama.cpp's name for the way in which words are told apart; ``None`` for SentencePiece's BPE.

    Raises:
        LookupError: it has none, with the reason.
    """
    model = description["model"]
    if model.get("type") != "BPE":
        raise LookupError(f"it is of type {model.get('type')}")
    if model.get("byte_fallback"):
        return None
    parts = _parts(description.get("pre_tokenizer"))
    normalizers = [part["type"] for part in _parts(description.get("normalizer"), "normalizers")]
    kinds = tuple(part["type"] for part in parts)
    first, last = (parts[0], parts[-1]) if parts else ({}, {})
    known = {
        (("ByteLevel",), True): "gpt-2",
        (("Digits", "ByteLevel"), True): "smollm" if first.get("individual_digits") else None,
        (("Split", "ByteLevel"), False): _RULES.get(str(first.get("pattern", {}).get("Regex"))),
    }
    rule = known.get((kinds, bool(last.get("use_regex", True))))
    if (
        rule
        and not last.get("add_prefix_space")
        and normalizers in ([], ["NFC"] if rule == "qwen2" else [])
    ):
        return rule
    raise LookupError(
        f"it prepares texts by {', '.join([*normalizers, *kinds]) or 'nothing'}, in a way of its own"
    )


def _parts(stage: Json | None, inner: str = "pretokenizers") -> list[Json]:
    if stage is None:
        return []
    if stage["type"] == "Sequence":
        return [part for one in stage[inner] for part in _parts(one, inner)]
    return [stage]
