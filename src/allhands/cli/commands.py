"""All verbs with their options; the work behind a verb is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from allhands.cli.parser import App, HostsCommand
from allhands.cli.rank_options import BackendName, DividedBy, Hostfile, Hosts, NumRanks, Split, ranks_asked

Model = Annotated[str, typer.Option("--model", help="Model directory, Hugging Face repository, or 'demo'.")]
Adapter = Annotated[
    Path | None, typer.Option("--adapter-path", help="Directory with adapters.safetensors from a training run.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens to generate at most.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")]

_TRAIN_HELP = """Fine-tune a model, on one process or on many.

Starts -n processes on this machine, or is a rank of mpirun, mlx.launch and others.

Options are those of mlx_lm.lora, from flags or a YAML file (-c); flags win. --batch-size is global.

\b
allhands train --model demo --data data/mine --adapter-path runs/first
allhands train -n 2 -c run.yaml --epochs 3 --resume auto
"""


_PRETRAIN_HELP = """Train a new model from scratch, on one process or on many.

Needs --data and --tokenizer; --shape is a size by name, or a family with numbers of your own.

Options are those of `allhands train`, with defaults for pre-training, from flags or a YAML file (-c); flags win.

\b
allhands pretrain --data data/stories --tokenizer tokenizer --shape llama-15m
allhands pretrain -n 2 -c stories.yaml --epochs 2 --resume auto
"""


# Of the verbs that have modules of their own: their line of the overview, for which nothing is imported.
_LAUNCH = "Start a program of your own on every rank, and keep it going."
_CONTAINER = "Train as the program of a container image."
_GENERATE = "Ask a model, with or without a trained adapter."
_CHAT = "Talk with a model, with or without a trained adapter."
_SERVE = "Answer requests to a model over HTTP, as OpenAI does."
_EVAL = "Loss and perplexity of a model on a part of the data."
_FUSE = "Merge a trained adapter into its model."
_EXPORT = "Write what was trained for other programs."
_UPLOAD = "Put a model or an adapter on the Hugging Face Hub."
_IMPORT = "Take an adapter that another program has trained."
_PLAN = "Tell what a training takes, and if more computers help."
_DASHBOARD = "Show runs in the browser while they go on."
_REPORT = "Write a page about a run, or several compared."
_ENV = "Show the launcher of this process, and its settings."


def register(app: typer.Typer, verb: str | None = None) -> None:
    """Attach every verb to ``app``.

    Args:
        verb: the one that is called, or what stands in its place; the others then get no more than their line of
            the overview, and what they need is not imported. ``None``: all of them in full.
    """

    def attach(name: str, summary: str, fill: Callable[[typer.Typer], None]) -> None:
        if verb in (None, name):
            fill(app)
        else:
            app.command(name, help=summary)(_not_called)

    def group(name: str, summary: str, fill: Callable[[typer.Typer], None]) -> None:
        inner = App(help=summary, no_args_is_help=True)
        if verb in (None, name):
            fill(inner)
        app.add_typer(inner, name=name)

    attach("train", _TRAIN_HELP, _add_train)
    attach("pretrain", _PRETRAIN_HELP, _add_pretrain)
    attach("plan", _PLAN, _add_plan)
    attach("launch", _LAUNCH, _add_launch)
    attach("generate", _GENERATE, _add_generate)
    for function in (compare, plot, monitor, demo):
        attach(function.__name__, function.__doc__ or "", partial(_add, function))
    attach("report", _REPORT, _add_report)
    attach("dashboard", _DASHBOARD, _add_dashboard)
    attach("chat", _CHAT, _add_chat)
    attach("eval", _EVAL, _add_eval)
    attach("serve", _SERVE, _add_serve)
    attach("fuse", _FUSE, _add_fuse)
    attach("export", _EXPORT, _add_export)
    attach("import", _IMPORT, _add_import)
    attach("upload", _UPLOAD, _add_upload)
    attach("container", _CONTAINER, _add_container)
    attach("env", _ENV, _add_env)
    attach("version", version.__doc__ or "", partial(_add, version))
    group("model", "Fetch and convert models.", _fill_model)
    group("data", "Training data.", _fill_data)
    group("tokenizer", "Make tokenizers, and see how they cut texts.", _fill_tokenizer)
    group("checkpoint", "Checkpoints of a training run.", _fill_checkpoint)
    group("cluster", "Several computers: check, prepare and measure them.", _fill_cluster)


def _not_called() -> None:
    """In the place of a verb that only has to be named."""


def _add(function: Callable[..., None], app: typer.Typer) -> None:
    app.command(function.__name__)(function)


def _add_train(app: typer.Typer) -> None:
    from allhands.cli.options import option_function

    app.command("train", help=_TRAIN_HELP)(option_function(_train, _TRAIN_HELP))


def _add_pretrain(app: typer.Typer) -> None:
    from allhands.cli.options import option_function
    from allhands.config.pretrain_schema import PretrainConfig

    app.command("pretrain", help=_PRETRAIN_HELP)(option_function(_pretrain, _PRETRAIN_HELP, PretrainConfig))


def _add_plan(app: typer.Typer) -> None:
    from allhands.cli.plan import SETTINGS, plan

    app.command("plan", context_settings=SETTINGS)(plan)


def _add_launch(app: typer.Typer) -> None:
    from allhands.cli.launch import SETTINGS, launch

    app.command("launch", context_settings=SETTINGS)(launch)


def _add_dashboard(app: typer.Typer) -> None:
    from allhands.cli.dashboard import dashboard

    app.command("dashboard")(dashboard)


def _add_report(app: typer.Typer) -> None:
    from allhands.cli.report import report

    app.command("report")(report)


def _add_generate(app: typer.Typer) -> None:
    from allhands.cli.generate import generate

    app.command("generate")(generate)


def _add_chat(app: typer.Typer) -> None:
    from allhands.cli.chat import chat

    app.command("chat")(chat)


def _add_serve(app: typer.Typer) -> None:
    from allhands.cli.serve import serve

    app.command("serve")(serve)


def _add_eval(app: typer.Typer) -> None:
    from allhands.cli.evaluate import evaluate

    app.command("eval")(evaluate)


def _add_fuse(app: typer.Typer) -> None:
    from allhands.cli.fuse import fuse

    app.command("fuse")(fuse)


def _add_export(app: typer.Typer) -> None:
    from allhands.cli.exchange import export_adapter

    app.command("export", help=export_adapter.__doc__)(export_adapter)


def _add_import(app: typer.Typer) -> None:
    from allhands.cli.exchange import import_adapter

    app.command("import", help=import_adapter.__doc__)(import_adapter)


def _add_upload(app: typer.Typer) -> None:
    from allhands.cli.upload import upload

    app.command("upload")(upload)


def _add_container(app: typer.Typer) -> None:
    from allhands.cli.container import SETTINGS, container

    app.command("container", context_settings=SETTINGS)(container)


def _add_env(app: typer.Typer) -> None:
    from allhands.cli.env import show_environment

    app.command("env")(show_environment)


def _fill_model(model: typer.Typer) -> None:
    model.command("get")(model_get)
    model.command("check")(model_check)


def _fill_data(data: typer.Typer) -> None:
    from allhands.cli.check import check
    from allhands.cli.prepare import prepare

    data.command("prepare")(prepare)
    data.command("check")(check)
    data.command("demo")(data_demo)


def _fill_tokenizer(tokenizer: typer.Typer) -> None:
    from allhands.cli.tokenizer import show, train

    tokenizer.command("train")(train)
    tokenizer.command("show")(show)


def _fill_checkpoint(checkpoint: typer.Typer) -> None:
    from allhands.cli.checkpoint import inspect_checkpoint, list_checkpoints, verify_checkpoints

    checkpoint.command("list")(list_checkpoints)
    checkpoint.command("inspect")(inspect_checkpoint)
    checkpoint.command("verify")(verify_checkpoints)


def _fill_cluster(cluster: typer.Typer) -> None:
    from allhands.cli.cluster_check import cluster_check
    from allhands.cli.cluster_init import cluster_init
    from allhands.cli.cluster_sync import sync
    from allhands.cli.netbench import bench

    cluster.command("init")(cluster_init)
    cluster.command("sync", cls=HostsCommand)(sync)
    cluster.command("check", cls=HostsCommand)(cluster_check)
    cluster.command("bench")(bench)


def _train(flags: dict[str, Any]) -> None:
    from allhands.cli.train import train

    raise typer.Exit(train(flags))


def _pretrain(flags: dict[str, Any]) -> None:
    from allhands.cli.train import train
    from allhands.config.pretrain_schema import PretrainConfig

    raise typer.Exit(train({"train": True, **flags}, PretrainConfig))


def compare(
    model: Model = "demo",
    adapter_path: Adapter = None,
    data: Annotated[str, typer.Option("--data", help="Whose test split to ask: a directory, or 'demo'.")] = "demo",
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts to ask.")] = 16,
    show: Annotated[int, typer.Option("--show", min=0, help="Answers to print side by side.")] = 4,
    max_tokens: MaxTokens = 60,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file for prompts, answers and scores. [answers.json of a run]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that holds no such answers.")] = False,
    strategy: DividedBy = None,
    num_ranks: NumRanks = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    backend: BackendName = None,
    pp_split: Split = None,
) -> None:
    """Answer held-out prompts before and after training.

    The answers are shown side by side; of pirates, with a score of how pirate they are.
    """
    from allhands.cli.talk import Questions, run_compare

    ranks = ranks_asked(
        strategy, num_ranks=num_ranks, hosts=hosts, hostfile=hostfile, backend=backend, pp_split=pp_split
    )
    asked = Questions(data, num_prompts, max_tokens)
    raise typer.Exit(run_compare(model, adapter_path, asked, show, out, force=force, ranks=ranks))


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories or metrics.jsonl files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG to write.")] = Path("loss.png"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the graph.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no such picture.")] = False,
) -> None:
    """Draw the loss curves of runs on one graph; print their times.

    Of a single run the memory of its processes is drawn, too, beside it.
    """
    from allhands.cli.plot import run_plot

    run_plot(runs, out, title, force=force)


def monitor(
    run: Annotated[Path, typer.Argument(help="Directory of a run that goes on, or has ended.")],
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every sample as a line of JSON instead.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0,
    hosts: Annotated[str | None, typer.Option("--hosts", help="Look there too, over ssh: a,b.")] = None,
    hostfile: Annotated[str | None, typer.Option("--hostfile", help="The same, of the computers of a file.")] = None,
) -> None:
    """Show memory, load and phases of a run's processes, live.

    Ends when the run does; of one that has ended the last values and the highest are shown.
    """
    from allhands.cli.monitor import MonitorOptions, run_monitor

    run_monitor(MonitorOptions(run, once, as_json, every, hosts, hostfile))


ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="'demo', a model directory, or a Hugging Face repository.")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same, as other commands have it.")]


def _named_once(argument: str | None, option: str | None) -> str:
    """The model that was named in one of both ways.

    Raises:
        typer.BadParameter: in none, or in both.
    """
    given = [name for name in (argument, option) if name is not None]
    if len(given) != 1:
        message = "it is named twice: drop --model" if given else "name one: demo, a directory, or a Hub repository"
        raise typer.BadParameter(message, param_hint="MODEL")
    return given[0]


def model_get(
    source: ModelArgument = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory to write. [models/NAME]")] = None,
    model: ModelOption = None,
    quantize: Annotated[int | None, typer.Option("--quantize", metavar="BITS", help="Quantise to 2-8 bits.")] = None,
    group_size: Annotated[int | None, typer.Option("--group-size", help="Values a quantisation group.")] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Write dense weights.")] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing directory.")] = False,
) -> None:
    """Fetch a model into a normal MLX model directory.

    It is quantised, dequantised or cast as asked.
    """
    from allhands.cli.model import run_model_get

    run_model_get(_named_once(source, model), out, quantize, group_size, dequantize, dtype, force)


def model_check(
    source: ModelArgument = None,
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option("--data", help="What will be trained on: its longest row counts.")] = None,
    fine_tune_type: Annotated[str | None, typer.Option("--fine-tune-type", help="lora, dora or full.")] = None,
    num_layers: Annotated[int | None, typer.Option("--num-layers", help="Blocks to train; -1 is all.")] = None,
    max_seq_length: Annotated[int | None, typer.Option("--max-seq-length", help="Tokens of the long row.")] = None,
    lora_parameters: Annotated[str | None, typer.Option("--lora-parameters", help="As for train (JSON).")] = None,
    mask_prompt: Annotated[bool | None, typer.Option("--mask-prompt", help="As for train.")] = None,
    chat_template: Annotated[str | None, typer.Option("--chat-template", help="As for train.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="As for train.")] = None,
    grad_checkpoint: Annotated[bool | None, typer.Option("--grad-checkpoint", help="As for train.")] = None,
    compile: Annotated[str | None, typer.Option("--compile", help="on: the form that GPUs use.")] = None,
    trust_remote_code: Annotated[bool | None, typer.Option("--trust-remote-code", help="As for train.")] = None,
) -> None:
    """Compare a training step's loss and gradient with those of mlx_lm's own model.

    A short row and a long one are computed by both. Every training does this before its first step, but within
    seconds: with fewer blocks where the model is large.
    """
    from allhands.cli.model import run_model_check

    settings = {"fine_tune_type": fine_tune_type, "num_layers": num_layers, "lora_parameters": lora_parameters}
    settings |= {"mask_prompt": mask_prompt, "chat_template": chat_template, "system": system}
    settings |= {"grad_checkpoint": grad_checkpoint, "compile": compile}
    settings |= {"trust_remote_code": trust_remote_code}
    run_model_check(_named_once(source, model), data, max_seq_length, settings)


def data_demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")] = Path("data/pirate"),
) -> None:
    """Write the shipped pirate chat data as .jsonl files."""
    from allhands.data.demo import write_demo_data

    counts = write_demo_data(out)
    typer.echo(f"{out}: " + ", ".join(f"{name} {number}" for name, number in counts.items()))


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for everything the demo makes.")] = Path(
        "demo-run"
    ),
    iters: Annotated[int, typer.Option("--iters", min=2, help="Iterations: batches to train on.")] = 60,
    seed: Seed = 0,
) -> None:
    """A small model learns to talk like a pirate: the whole road.

    It is trained on one process and on two, and asked before and after.
    """
    from allhands.cli.demo import run_demo

    run_demo(out, iters, seed)


def version() -> None:
    """Versions of allhands and of what it stands on."""
    from allhands.runtime.versions import version_of

    for name in ("allhands", "mlx", "mlx-lm", "numpy"):
        typer.echo(f"{name} {version_of(name) or 'is not installed'}")
