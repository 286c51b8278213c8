"""``allhands fuse``: a trained adapter merged into the model below it."""

from __future__ import annotations

from pathlib import Path

from allhands.cli.answering import tell_harm
from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_models import Fuse
from allhands.errors import ConfigError
from allhands.export.fusing import Fused, FuseOptions, described, fuse_model
from allhands.export.gguf import check_convertible, gguf_writer
from allhands.model.sources import name_of, resolve

GGUF_NAME = "ggml-model-f16.gguf"


def fuse(asked: Fuse) -> None:
    """Run the verb."""
    if asked.upload_repo is not None:
        raise ConfigError(
            "fusing uploads nothing",
            code="option-unsupported",
            where="--upload-repo",
            hint=f"allhands upload {asked.save_path} --to {asked.upload_repo}, after you have checked it",
        )

    tell_harm(asked.adapter_path)  # before fusing, which may refuse such an adapter
    options = FuseOptions(
        asked.model,
        asked.adapter_path,
        asked.dequantize,
        asked.dtype,
        asked.force,
        asked.trust_remote_code,
    )
    if asked.export_gguf:
        # All checks come before any work.
        below = described(options)[1]
        writer = gguf_writer(asked.gguf_path or GGUF_NAME, name_of(below))
        check_convertible(resolve(below), dense=asked.dequantize)
        done = fuse_model(options, asked.save_path, writer)
    else:
        refuse_idle({"--gguf-path": asked.gguf_path}, "without --export-gguf", "add --export-gguf")
        done = fuse_model(options, asked.save_path)
    tell(done, asked.save_path, adapter=asked.adapter_path)
    if asked.export_gguf:
        tell_gguf(asked.gguf_path or GGUF_NAME)
    print(f"allhands generate --model {asked.save_path} --prompt ...")


def tell(done: Fused, out: Path, when: str = "", adapter: Path | None = None) -> None:
    """Print the path of the written model, its ``adapter``, and the result of the check.

    ``when``: words that say when the model was checked.
    """
    what = (
        "all weights"
        if done.kind == "full"
        else f"{done.num_layers} layer{'s' * (done.num_layers != 1)}"
    )
    of = f" of {adapter}" if adapter is not None else ""
    print(f"written: {out} ({'no adapter' if done.kind == 'none' else f'{done.kind}{of}, {what}'})")
    print(
        f"checked{when}: its logits differ from those of model and adapter by {done.difference:.1e} of their spread"
    )
    if done.stop is not None:
        print(
            f"note: answers end with {done.stop}, which was added to eos_token_id: the model did not stop there"
        )
    if done.requantized:
        print(
            "note: layers with an adapter were quantised again, and rounding lost some of the training; "
            "--dequantize avoids this"
        )


def tell_gguf(name: str) -> None:
    """Print that :func:`allhands.export.gguf.write_gguf` has checked the file ``name``."""
    print(f"checked: every weight of {name} is that of the model, within rounding")
