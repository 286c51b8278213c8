"""``allhands export`` and ``allhands import``: exchange of adapters with other programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allhands.cli.answering import tell_harm
from allhands.cli.export_models import export_model
from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_models import Export, Format, Import, Target
from allhands.data.templates import TEMPLATE_FILE
from allhands.errors import ConfigError, ModelError
from allhands.export.fusing import FuseOptions
from allhands.io.files import write_whole
from allhands.io.formatting import counted
from allhands.io.paths import meant
from allhands.io.staging import publish, require_place, staging
from allhands.io.trees import flatten
from allhands.model.load import load_model
from allhands.model.peft import CONFIG_FILE, WEIGHTS_FILE, Adapter, to_peft
from allhands.model.peft_base import PeftBase
from allhands.model.peft_check import check_peft
from allhands.model.peft_import import from_peft
from allhands.run.adapter_files import check_adapter, model_below

_OURS = ("adapters.safetensors", "adapter_config.json")


def export_adapter(asked: Export) -> None:
    """Run the verb."""
    idle = {
        "--base": None if asked.to is Target.peft else asked.base,
        "--dtype": None if asked.to is Target.hf else asked.dtype,
    }
    refuse_idle(idle, f"with --to {asked.to.value}", "leave it out")
    if asked.to is Target.peft:
        if asked.adapter_path is None:
            raise ConfigError(
                "--to peft writes an adapter",
                code="option-missing",
                where="--adapter-path",
                hint="say which: --adapter-path",
            )
        check_adapter(asked.adapter_path)
        tell_harm(asked.adapter_path)
        _to_peft(asked, asked.adapter_path)
        return
    if asked.adapter_path is None and asked.model is None:
        raise ConfigError(
            "there is nothing to export",
            code="nothing-to-do",
            hint="give --adapter-path, --model or both",
        )

    tell_harm(asked.adapter_path, asked.model)  # before the adapter may be refused
    export_model(
        asked.to.value,
        FuseOptions(
            asked.model, asked.adapter_path, True, asked.dtype, asked.force, asked.trust_remote_code
        ),
        asked.out,
    )


def _to_peft(asked: Export, adapter_path: Path) -> None:
    adapter, out, base = _read(adapter_path, *_OURS), asked.out, asked.base
    below = asked.model or model_below(adapter_path, adapter.config)
    require_place(out, "an adapter", (WEIGHTS_FILE, CONFIG_FILE, TEMPLATE_FILE), force=asked.force)
    loaded = load_model(below, trust_remote_code=asked.trust_remote_code)
    told = PeftBase.of(loaded, base or below)
    try:
        made = to_peft(adapter, told)
    except ModelError as error:
        raise ModelError(
            error.message, code=error.code, where=str(adapter_path), hint=error.hint
        ) from None

    def check(staged: Path) -> None:
        check_peft(_read(staged, WEIGHTS_FILE, CONFIG_FILE), adapter, told)

    _write(
        made, out, WEIGHTS_FILE, CONFIG_FILE, {"format": "pt"}, check, adapter_path / TEMPLATE_FILE
    )
    settings = made.config
    if stops := adapter.config.get("stop_tokens"):
        print(
            f"note: answers end with {stops[0]}, at which the model does not stop: give generate() this eos_token_id"
        )
    print(
        f"written: {out} (rank {settings['r']}, lora_alpha {settings['lora_alpha']}, {_count(adapter)})"
    )
    print("checked: read back by PEFT's rules, every weight update equals the adapter's")
    if settings.get("ensure_weight_tying"):
        print(
            "note: the adapted embedding is also the output layer. PEFT computes it correctly, but on merging adds it "
            "twice to the shared weights: --to hf writes the merged model"
        )
    if any(name.rpartition(".")[0] in told.experts for name in adapter.weights):
        print(
            "note: the adapter has parts for experts: with transformers 5 they need PEFT 0.19 or later"
        )
    if "quantization" in loaded.config and base is None:
        print(
            f"note: {below} is quantised for MLX, which other programs cannot read: name the original with --base, "
            "or as the model in Python"
        )
    print(
        f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base or below}"), "{out}")'
    )


def import_adapter(asked: Import) -> None:
    """Run the verb."""
    from allhands.infer.generate import put_on

    assert asked.source is Format.peft
    if not (asked.path / WEIGHTS_FILE).is_file() and (asked.path / "adapter_model.bin").is_file():
        raise ModelError(
            "adapter_model.bin is a pickle, which may run code when it is read",
            code="adapter-is-pickle",
            where=str(asked.path),
            hint="load the adapter in Python and save it again: save_pretrained(DIR, safe_serialization=True)",
        )
    adapter = _read(asked.path, WEIGHTS_FILE, CONFIG_FILE)
    below = asked.model or adapter.config.get("base_model_name_or_path")
    if not isinstance(below, str) or not below:
        raise ConfigError(
            "the adapter names no model",
            code="adapter-without-model-name",
            where=str(asked.path / CONFIG_FILE),
            hint="say which: --model",
        )
    require_place(asked.out, "an adapter", _OURS, force=asked.force)
    loaded: Any = load_model(below, trust_remote_code=asked.trust_remote_code)
    try:
        made = from_peft(adapter, PeftBase.of(loaded, below), num_layers=len(loaded.model.layers))
    except ModelError as error:
        # The error names a file; the directory is known here.
        raise ModelError(
            error.message,
            code=error.code,
            where=str(asked.path / (error.where or "")),
            hint=error.hint,
        ) from None
    made.config["model"] = below

    def fits(staged: Path) -> None:
        """Check the draft before it is published.

        Raises:
            ModelError: the adapter does not fit the model, or its files were not written correctly;
                it names the directories that the person gave.
        """
        try:
            put_on(loaded.model, staged)
        except ModelError as error:
            raise ModelError(
                error.message.replace(str(staged), str(asked.path)),
                code=error.code,
                where=str(asked.path),
                hint="use the model that the adapter was trained on: --model",
            ) from None
        import mlx.core as mx

        found = dict(flatten(loaded.model.parameters()))
        for name, value in made.weights.items():
            if name not in found or not mx.array_equal(found[name], value):
                raise ModelError(
                    f"the written files differ from the adapter, and were not kept: {name} has other values",
                    code="written-files-differ",
                    where=str(asked.out),
                    hint="if your input is right, this is a defect: report it",
                )

    _write(made, asked.out, *_OURS, {"format": "mlx"}, fits, private=True)
    settings = made.config["lora_parameters"]
    print(
        f"written: {asked.out} (rank {settings['rank']}, scale {settings['scale']:g}, {_count(made)})"
    )
    print(f"allhands generate --model {below} --adapter-path {asked.out} --prompt ...")


def _count(adapter: Adapter) -> str:
    """Return the number of adapted modules, in words."""
    count = len({name.rpartition(".lora")[0] for name in adapter.weights if ".lora" in name})
    return counted(count, "layer")


def _read(directory: Path, weights: str, config: str) -> Adapter:
    """Return an adapter from its two files.

    Raises:
        ModelError: a file is missing or cannot be read.
    """
    for name in (weights, config):
        if not (directory / name).is_file():
            there = "" if directory.is_dir() else "; there is no such directory"
            if directory.is_file():
                there = "; this is a file, not a directory"
            raise ModelError(
                f"{name} is missing{there}",
                code="adapter-missing",
                where=str(directory),
                hint=meant(directory, "give an adapter's directory"),
            )
    import mlx.core as mx

    try:
        described = json.loads((directory / config).read_bytes())
        if not isinstance(described, dict):
            raise ValueError("it is not an object")
        return Adapter(dict(mx.load(str(directory / weights))), described)  # type: ignore[arg-type]
    except (ValueError, RuntimeError, OSError) as error:
        file = directory / (weights if isinstance(error, RuntimeError) else config)
        raise ModelError(
            f"the file is torn: {error}",
            code="adapter-torn",
            where=str(file),
            hint="fetch or write it again",
        ) from None


def _write(
    adapter: Adapter,
    out: Path,
    weights: str,
    config: str,
    metadata: Mapping[str, str],
    check: Callable[[Path], None] = lambda directory: None,
    template: Path | None = None,
    private: bool = False,
) -> None:
    """Write both files of an adapter, whole or not at all.

    Args:
        check: called with the directory of the draft; an exception keeps it from being published.
        template: the file with the chat template, if there is one.
        private: True: only the owner can read the files, as in a run.
    """
    import mlx.core as mx

    with staging(out, private=private) as staged:
        write_whole(
            staged / weights,
            lambda temporary: mx.save_safetensors(
                str(temporary), adapter.weights, metadata=dict(metadata)
            ),
            private=private,
        )
        (staged / config).write_text(
            json.dumps(adapter.config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        if template is not None and template.is_file():
            (staged / TEMPLATE_FILE).write_bytes(template.read_bytes())
        check(staged)
        publish(staged, out, private=private)
