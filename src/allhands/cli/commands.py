"""All verbs by name: the module of a verb is imported only when the verb is called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from allhands.cli.parser import App, HostsCommand

_TRAINING = {
    "train": """Fine-tune a model, on one process or on many.

Starts -n processes on this machine, or is a rank of mpirun, mlx.launch and others.

Options are those of mlx_lm.lora, from flags or a YAML file (-c); flags win. --batch-size is global.

\b
allhands train --model demo --data data/mine --adapter-path runs/first
allhands train -n 2 -c run.yaml --epochs 3 --resume auto
""",
    "pretrain": """Train a new model from scratch, on one process or on many.

Needs --data and --tokenizer; --shape is a size by name, or a family with numbers of your own.

Options are those of `allhands train`, with defaults for pre-training, from flags or a YAML file (-c); flags win.

\b
allhands pretrain --data data/stories --tokenizer tokenizer --shape llama-15m
allhands pretrain -n 2 -c stories.yaml --epochs 2 --resume auto
""",
}
# Module and function of each verb, and its line of the overview, for which nothing is imported.
_VERBS = {
    "plan": ("plan:plan", "Tell what a training takes, and if more computers help."),
    "launch": ("launch:launch", "Start a program of your own on every rank, and keep it going."),
    "generate": ("generate:generate", "Ask a model, with or without a trained adapter."),
    "compare": ("compare:compare", "Answer held-out prompts before and after training."),
    "plot": ("plot:plot", "Draw the loss curves of runs on one graph; print their times."),
    "monitor": ("monitor:monitor", "Show memory, load and phases of a run's processes, live."),
    "demo": ("demo:demo", "A small model learns to talk like a pirate: the whole road."),
    "report": ("report:report", "Write a page about a run, or several compared."),
    "dashboard": ("dashboard:dashboard", "Show runs in the browser while they go on."),
    "chat": ("chat:chat", "Talk with a model, with or without a trained adapter."),
    "eval": ("evaluate:evaluate", "Loss and perplexity of a model on a part of the data."),
    "serve": ("serve:serve", "Answer requests to a model over HTTP, as OpenAI does."),
    "fuse": ("fuse:fuse", "Merge a trained adapter into its model."),
    "export": ("exchange:export_adapter", "Write what was trained for other programs."),
    "import": ("exchange:import_adapter", "Take an adapter that another program has trained."),
    "upload": ("upload:upload", "Put a model or an adapter on the Hugging Face Hub."),
    "container": ("container:container", "Train as the program of a container image."),
    "env": ("env:show_environment", "Show who has started this process, and what follows from it."),
    "version": ("env:version", "Versions of allhands and of what it stands on."),
}
_GROUPS = {
    "model": ("Fetch and convert models.", {"get": "model:get", "check": "model:check"}),
    "data": ("Training data.", {"prepare": "prepare:prepare", "check": "check:check", "demo": "prepare:data_demo"}),
    "tokenizer": (
        "Make tokenizers, and see how they cut texts.",
        {"train": "tokenizer:train", "show": "tokenizer:show"},
    ),
    "checkpoint": (
        "Checkpoints of a training run.",
        {
            "list": "checkpoint:list_checkpoints",
            "inspect": "checkpoint:inspect_checkpoint",
            "verify": "checkpoint:verify_checkpoints",
        },
    ),
    "cluster": (
        "Several computers: check, prepare and measure them.",
        {
            "init": "cluster_init:cluster_init",
            "sync": "cluster_sync:sync",
            "check": "cluster_check:cluster_check",
            "bench": "netbench:bench",
        },
    ),
}
_ABOUT_HOSTS = {"cluster_sync:sync", "cluster_check:cluster_check"}


def register(app: typer.Typer, verb: str | None = None) -> None:
    """Attach every verb to ``app``.

    Args:
        verb: the one that is called, or what stands in its place; the others then get no more than their line of
            the overview, and what they need is not imported. ``None``: all of them in full.
    """
    for name, text in _TRAINING.items():
        app.command(name, help=text)(_training(name) if verb in (None, name) else _not_called)
    for name, (place, summary) in _VERBS.items():
        if verb in (None, name):
            _attach(app, name, place)
        else:
            app.command(name, help=summary)(_not_called)
    for name, (summary, members) in _GROUPS.items():
        group = App(help=summary, no_args_is_help=True)
        for member, place in members.items() if verb in (None, name) else ():
            _attach(group, member, place)
        app.add_typer(group, name=name)


def _attach(app: typer.Typer, name: str, place: str) -> None:
    """Add the verb whose function is at ``place``; its module may have ``SETTINGS`` for the parser."""
    module_name, function = place.split(":")
    module = import_module(f"allhands.cli.{module_name}")
    more: dict[str, Any] = {"cls": HostsCommand} if place in _ABOUT_HOSTS else {}
    app.command(name, context_settings=getattr(module, "SETTINGS", None), **more)(getattr(module, function))


def _not_called() -> None:
    """In the place of a verb that only has to be named."""


def _training(verb: str) -> Callable[..., None]:
    """The function of ``train`` or ``pretrain``, with an option for each field of its configuration."""
    from allhands.cli.options import option_function

    schema = import_module("allhands.config.schema" if verb == "train" else "allhands.config.pretrain_schema")
    kind = schema.TrainConfig if verb == "train" else schema.PretrainConfig

    def run(flags: dict[str, Any]) -> None:
        from allhands.cli.train import train

        raise typer.Exit(train(flags if verb == "train" else {"train": True, **flags}, kind))

    return option_function(run, _TRAINING[verb], kind)
