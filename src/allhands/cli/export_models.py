"""``allhands export`` of whole models: for transformers, llama.cpp and Ollama."""

from __future__ import annotations

import shutil
from pathlib import Path

from allhands.cli.fuse import tell, tell_gguf
from allhands.export.fusing import Fused, FuseOptions, described, fuse_model
from allhands.export.gguf import check_convertible, write_gguf
from allhands.export.huggingface import export_hf
from allhands.export.ollama import GGUF_FILE, MODELFILE, modelfile, recognise
from allhands.io.staging import publish, require_place, staging
from allhands.model.sources import name_of, resolve


def export_model(to: str, options: FuseOptions, out: Path) -> None:
    """Write the model of ``options`` into ``out``, for ``to``: hf, gguf or ollama."""
    if to == "hf":
        tell(export_hf(options, out), out, adapter=options.adapter_path)
        print(f'AutoModelForCausalLM.from_pretrained("{out}")')
        return

    # All checks of the model come before any work.
    path = resolve(described(options)[1])
    check_convertible(path)
    chat = recognise(path, options.adapter_path) if to == "ollama" else None
    text = None if chat is None else modelfile(chat)
    done = _with_gguf(options, out, text)
    tell(done, out, ", before it was converted", options.adapter_path)
    tell_gguf(GGUF_FILE)
    if chat is None:
        print(f"llama-cli --model {out / GGUF_FILE}")
        return
    print(f"chat template: {chat.format.name}")
    if not chat.takes_system:
        print("note: this format has no place for a system message: Ollama leaves one out")
    print(f"ollama create NAME --file {out / MODELFILE}")


def _with_gguf(options: FuseOptions, out: Path, modelfile: str | None) -> Fused:
    """Write a directory with the GGUF, and with ``modelfile`` if given, whole or not at all."""
    require_place(out, "an export", (GGUF_FILE, MODELFILE, "README.md"), force=options.force)
    with staging(out) as staged:
        fused = staged / "fused"
        done = fuse_model(options, fused)
        write_gguf(fused, staged / GGUF_FILE, name_of(done.source))
        shutil.move(fused / "README.md", staged / "README.md")
        shutil.rmtree(fused)
        if modelfile is not None:
            (staged / MODELFILE).write_text(modelfile, encoding="utf-8")
        publish(staged, out)
    return done
