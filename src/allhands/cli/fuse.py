"""``allhands fuse``: a trained adapter merged into the model below it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.answering import TrustCode, tell_harm
from allhands.errors import ConfigError

if TYPE_CHECKING:
    from allhands.export.fusing import Fused

Below = Annotated[str | None, typer.Option("--model", help="The model below it; default: as adapter_config.json says.")]
Adapter = Annotated[Path, typer.Option("--adapter-path", help="Directory of a training run.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16; default: the model's.")]

GGUF_NAME = "ggml-model-f16.gguf"


def fuse(
    model: Below = None,
    adapter_path: Adapter = Path("adapters"),
    save_path: Annotated[Path, typer.Option("--save-path", help="Directory to write.")] = Path("fused_model"),
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize", "--de-quantize", help="Unpack quantised weights: nothing of the adapter is lost."),
    ] = False,
    dtype: Dtype = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is in --save-path.")] = False,
    export_gguf: Annotated[bool, typer.Option("--export-gguf", help="Also write a GGUF file.")] = False,
    gguf_path: Annotated[
        str | None, typer.Option("--gguf-path", help="Name of that file inside --save-path. [ggml-model-f16.gguf]")
    ] = None,
    upload_repo: Annotated[str | None, typer.Option("--upload-repo", help="Not here: allhands upload.")] = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Merge a trained adapter into its model.

    The result is an ordinary model directory, which mlx_lm and allhands load without the adapter. Options are those of
    mlx_lm.fuse. Before it is in its place it is read back, and has to compute what model and adapter do.
    """
    if upload_repo is not None:
        hint = f"allhands upload {save_path} --to {upload_repo}, when you have looked at it"
        raise ConfigError("fusing uploads nothing", where="--upload-repo", hint=hint)
    from allhands.export.fusing import FuseOptions, fuse_model

    tell_harm(adapter_path)  # before it may be refused for what the training did
    options = FuseOptions(model, adapter_path, dequantize, dtype, force, trust_remote_code)
    if export_gguf:
        from allhands.export.fusing import described
        from allhands.export.gguf import check_convertible, gguf_writer
        from allhands.model.sources import name_of, resolve

        # Before any work is done.
        below = described(adapter_path, model)[1]
        writer = gguf_writer(gguf_path or GGUF_NAME, name_of(below))
        check_convertible(resolve(below), dense=dequantize)
        done = fuse_model(options, save_path, writer)
    elif gguf_path is not None:
        raise ConfigError("it has no effect without --export-gguf", where="--gguf-path", hint="add --export-gguf")
    else:
        done = fuse_model(options, save_path)
    tell(done, save_path, adapter=adapter_path)
    if export_gguf:
        tell_gguf(gguf_path or GGUF_NAME)
    print(f"allhands generate --model {save_path} --prompt ...")


def tell(done: Fused, out: Path, when: str = "", adapter: Path | None = None) -> None:
    """What was written of which ``adapter``, and how near it is to that; ``when`` that was looked at."""
    what = "all weights" if done.kind == "full" else f"{done.num_layers} layer{'s' * (done.num_layers != 1)}"
    of = f" of {adapter}" if adapter is not None else ""
    print(f"written: {out} ({'no adapter' if done.kind == 'none' else f'{done.kind}{of}, {what}'})")
    print(f"checked{when}: its logits differ from those of model and adapter by {done.difference:.1e} of their spread")
    if done.stop is not None:
        print(f"note: answers end with {done.stop}, which was added to eos_token_id: the model did not stop there")
    if done.requantized:
        print("note: layers with an adapter were quantised again, which blurs what was learned; --dequantize does not")


def tell_gguf(name: str) -> None:
    """What :func:`allhands.export.gguf.write_gguf` has made sure of."""
    print(f"checked: every weight of {name} is that of the model, within rounding")
