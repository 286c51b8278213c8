"""All verbs by name: the module of a verb is imported only when the verb is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import typer

from allhands.cli.parser import App, HostsCommand

_TRAINING = {
    "train": """Fine-tune a model, on one process or on many.

-n starts several processes on this computer. Under mpirun, mlx.launch and the like each process is a rank.

Options are those of mlx_lm.lora, from flags or a YAML file (-c); flags win. --batch-size counts all ranks together.

\b
allhands train --model demo --data data/mine --adapter-path runs/first
allhands train -n 2 -c run.yaml --epochs 3 --resume auto
""",
    "pretrain": """Train a new model from scratch, on one process or on many.

--data and --tokenizer are required. --shape is a size by name, or a family with your own numbers.

Options are those of `allhands train`, with defaults for pre-training, from flags or a YAML file (-c); flags win.

\b
allhands pretrain --data data/stories --tokenizer tokenizer --shape llama-15m
allhands pretrain -n 2 -c stories.yaml --epochs 2 --resume auto
""",
}
# For each verb: the class of its options in verbs_*.py, the module and function of its work, and
# its line in the overview. The modules are imported only when the verb is called.
_VERBS = {
    "plan": (
        "runs.Plan plan:plan",
        "Predict a training's time and memory, on one computer or more.",
    ),
    "launch": (
        "training.Launch launch:launch",
        "Run your own program on every rank; restart it after faults.",
    ),
    "generate": (
        "models.Generate generate:generate",
        "Ask a model, with or without a trained adapter.",
    ),
    "compare": (
        "models.Compare compare:compare",
        "Answer held-out prompts before and after training.",
    ),
    "plot": (
        "runs.Plot plot:plot",
        "Draw the loss curves of runs on one graph; print their times.",
    ),
    "monitor": (
        "runs.Monitor monitor:monitor",
        "Show memory, load and phases of a run's processes, live.",
    ),
    "demo": (
        "runs.Demo demo:demo",
        "Teach a small model to talk like a pirate, from start to end.",
    ),
    "report": ("runs.Report report:report", "Write a report about a run, or compare several runs."),
    "dashboard": (
        "runs.Dashboard dashboard:dashboard",
        "Show runs in the browser while they go on.",
    ),
    "chat": ("models.Chat chat:chat", "Talk with a model, with or without a trained adapter."),
    "eval": (
        "training.Eval evaluate:evaluate",
        "Measure loss and perplexity of a model on a split of the data.",
    ),
    "serve": ("models.Serve serve:serve", "Serve a model over HTTP with OpenAI's interface."),
    "fuse": ("models.Fuse fuse:fuse", "Merge a trained adapter into its model."),
    "export": (
        "models.Export exchange:export_adapter",
        "Export an adapter or a model for other programs.",
    ),
    "import": (
        "models.Import exchange:import_adapter",
        "Import an adapter that another program has trained.",
    ),
    "upload": (
        "models.Upload upload:upload",
        "Upload a model or an adapter to the Hugging Face Hub.",
    ),
    "container": (
        "runs.Container container:container",
        "Train in a container, on SageMaker, Vertex AI or Kubernetes.",
    ),
    "env": (
        "runs.Env env:show_environment",
        "Show the launcher of this process, and its settings.",
    ),
    "version": ("runs.Version env:version", "Show the versions of allhands and its packages."),
}
_GROUPS = {
    "model": (
        "Fetch and convert models.",
        {"get": "models.ModelGet model:get", "check": "training.ModelCheck model:check"},
    ),
    "data": (
        "Prepare and check training data.",
        {
            "prepare": "data.DataPrepare prepare:prepare",
            "check": "training.DataCheck check:check",
            "demo": "data.DataDemo prepare:data_demo",
        },
    ),
    "tokenizer": (
        "Train tokenizers, and show how they split texts.",
        {
            "train": "data.TokenizerTrain tokenizer:train",
            "show": "data.TokenizerShow tokenizer:show",
        },
    ),
    "checkpoint": (
        "List, inspect and verify the checkpoints of a run.",
        {
            "list": "runs.CheckpointList checkpoint:list_checkpoints",
            "inspect": "runs.CheckpointInspect checkpoint:inspect_checkpoint",
            "verify": "runs.CheckpointVerify checkpoint:verify_checkpoints",
        },
    ),
    "cluster": (
        "Check, prepare and measure several computers.",
        {
            "init": "cluster.ClusterInit cluster_init:cluster_init",
            "sync": "cluster.ClusterSync cluster_sync:sync",
            "check": "cluster.ClusterCheck cluster_check:cluster_check",
            "bench": "cluster.ClusterBench netbench:bench",
        },
    ),
}
# Settings of the parser for verbs that pass words on to training or to another program.
_SETTINGS: dict[str, dict[str, Any]] = {
    "Plan": {"allow_extra_args": True, "ignore_unknown_options": True},
    "Launch": {"allow_interspersed_args": False},
    "Container": {"ignore_unknown_options": True, "allow_interspersed_args": False},
}
_ABOUT_HOSTS = ("ClusterSync", "ClusterCheck")


def register(app: typer.Typer, called: Sequence[str] = ()) -> None:
    """Attach every verb to ``app``.

    Args:
        called: first words of the command line: the called verb, perhaps after its group. All
            other verbs then have only their line in the overview, and their modules are not
            imported. Empty: all verbs are attached in full.
    """
    verb = called[0] if called else None
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
            if member in called[1:] or not members.keys() & called[1:]:
                _attach(group, member, place)
        app.add_typer(group, name=name)


def _attach(app: typer.Typer, name: str, place: str) -> None:
    """Add the verb with options and work at ``place``, as in :data:`_VERBS`."""
    kind = place.split()[0].partition(".")[2]
    more: dict[str, Any] = {"cls": HostsCommand} if kind in _ABOUT_HOSTS else {}
    app.command(name, context_settings=_SETTINGS.get(kind), **more)(function_of(place))


def function_of(place: str) -> Callable[..., None]:
    """Return the function of a verb for typer: its parameters are the fields of the options' class.

    It calls the function of the verb's work with an object of this class. A field that is annotated
    with a list of options gets a dictionary of the given ones.
    """
    options_place, work = place.split()
    group, name = options_place.split(".")
    kind: Any = getattr(import_module(f"allhands.cli.verbs_{group}"), name)
    parameters: list[Parameter] = []
    several: dict[str, list[Parameter]] = {}
    hints = get_type_hints(kind, include_extras=True)
    for name in kind._fields:
        options: Any = next(iter(getattr(hints[name], "__metadata__", ())), None)
        if isinstance(options, list):
            several[name] = options
            parameters += options
        else:
            default = kind._field_defaults.get(name, Parameter.empty)
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            )

    def command(**given: Any) -> None:
        for name, options in several.items():
            values = {one.name: given.pop(one.name) for one in options}
            given[name] = {option: value for option, value in values.items() if value is not None}
        module, function = work.split(":")
        getattr(import_module(f"allhands.cli.{module}"), function)(kind(**given))

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = kind.__doc__
    return command


def _not_called() -> None:
    """Stand for a verb that is only listed in the overview."""


def _training(verb: str) -> Callable[..., None]:
    """Return the function of ``train`` or ``pretrain``, with an option for each field of its
    configuration.
    """
    from allhands.cli.options import option_function

    schema = import_module(
        "allhands.config.schema" if verb == "train" else "allhands.config.pretrain_schema"
    )
    kind = schema.TrainConfig if verb == "train" else schema.PretrainConfig

    def run(flags: dict[str, Any]) -> None:
        from allhands.cli.train import train

        raise typer.Exit(train(flags if verb == "train" else {"train": True, **flags}, kind))

    return option_function(run, _TRAINING[verb], kind)
