"""``allhands export`` and ``allhands import``: exchange of adapters and models with other programs."""

from __future__ import annotations

from allhands.cli.answering import tell_harm
from allhands.cli.fuse import tell, tell_gguf
from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_models import Export, Import, Target
from allhands.errors import ConfigError
from allhands.export.fusing import FuseOptions
from allhands.export.huggingface import export_hf
from allhands.export.ollama import GGUF_FILE, MODELFILE, export_gguf
from allhands.export.peft import export_peft, import_peft
from allhands.run.adapter_files import check_adapter


def export_adapter(asked: Export) -> None:
    """Run the verb."""
    idle = {
        "--base": None if asked.to is Target.peft else asked.base,
        "--dtype": None if asked.to is Target.hf else asked.dtype,
    }
    refuse_idle(idle, f"with --to {asked.to.value}", "leave it out")
    if asked.to is Target.peft:
        _export_adapter(asked)
        return
    if asked.adapter_path is None and asked.model is None:
        raise ConfigError(
            "there is nothing to export",
            code="nothing-to-do",
            hint="give --adapter-path, --model or both",
        )
    tell_harm(asked.adapter_path, asked.model)  # before the adapter may be refused
    _export_model(asked)


def _export_adapter(asked: Export) -> None:
    if asked.adapter_path is None:
        raise ConfigError(
            "--to peft writes an adapter",
            code="option-missing",
            where="--adapter-path",
            hint="say which: --adapter-path",
        )
    check_adapter(asked.adapter_path)
    tell_harm(asked.adapter_path)
    done = export_peft(
        asked.adapter_path,
        asked.out,
        asked.model,
        asked.base,
        force=asked.force,
        trust_remote_code=asked.trust_remote_code,
    )
    if done.stop is not None:
        print(
            f"note: answers end with {done.stop}, at which the model does not stop: give generate() this eos_token_id"
        )
    print(f"written: {asked.out} ({done.told})")
    print("checked: read back by PEFT's rules, every weight update equals the adapter's")
    for note in done.notes:
        print(f"note: {note}")
    print(
        f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{done.base}"), "{asked.out}")'
    )


def _export_model(asked: Export) -> None:
    out, adapter_path = asked.out, asked.adapter_path
    options = FuseOptions(
        asked.model, adapter_path, True, asked.dtype, asked.force, asked.trust_remote_code
    )
    if asked.to is Target.hf:
        tell(export_hf(options, out), out, adapter=adapter_path)
        print(f'AutoModelForCausalLM.from_pretrained("{out}")')
        return
    done, chat = export_gguf(options, out, modelled=asked.to is Target.ollama)
    tell(done, out, ", before it was converted", adapter_path)
    tell_gguf(GGUF_FILE)
    if chat is None:
        print(f"llama-cli --model {out / GGUF_FILE}")
        return
    print(f"chat template: {chat.format.name}")
    if not chat.takes_system:
        print("note: this format has no place for a system message: Ollama leaves one out")
    print(f"ollama create NAME --file {out / MODELFILE}")


def import_adapter(asked: Import) -> None:
    """Run the verb."""
    done = import_peft(
        asked.path,
        asked.out,
        asked.model,
        force=asked.force,
        trust_remote_code=asked.trust_remote_code,
    )
    print(f"written: {asked.out} ({done.told})")
    print(f"allhands generate --model {done.base} --adapter-path {asked.out} --prompt ...")
