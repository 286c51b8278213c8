"""Options of verbs about models and adapters: each class is the command line of a verb."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument, Option

ModelName = Annotated[
    str, Option("--model", help="Model directory, Hugging Face repository, or 'demo'.")
]
Adapter = Annotated[Path | None, Option("--adapter-path", help="Directory of a training run.")]
SystemPrompt = Annotated[str | None, Option("--system-prompt", help="System message.")]
MaxTokens = Annotated[int, Option("--max-tokens", "-m", min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, Option("--temp", min=0.0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, Option("--top-p", min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")]
Seed = Annotated[int, Option("--seed", min=0, help="Seed of the sampling.")]
TrustCode = Annotated[bool, Option("--trust-remote-code", help="Allow a model's own Python code.")]


# Library that connects ranks.
Backend = StrEnum("Backend", ["auto", "ring", "mpi", "nccl", "jaccl"])


class Division(StrEnum):
    """Division of a model among ranks."""

    pipeline = "pipeline"


DividedBy = Annotated[
    Division | None,
    Option("--strategy", help="pipeline: each rank has some of the model's blocks."),
]
NumRanks = Annotated[
    int | None,
    Option("--num-ranks", "-n", min=1, help="With --strategy: processes to start here."),
]
Hosts = Annotated[str | None, Option("--hosts", help="With --strategy: computers, by name.")]
Hostfile = Annotated[str | None, Option("--hostfile", help="With --strategy: file of computers.")]
BackendName = Annotated[
    str | None, Option("--backend", help="With --strategy: communication back-end.")
]
Split = Annotated[
    str | None,
    Option("--pp-split", help="With --strategy: blocks of each rank, such as 20,12."),
]


ChatTemplate = Annotated[
    str | None,
    Option(
        "--chat-template",
        metavar="FILE|NAME",
        help="Chat template in place of the model's or the adapter's: a Jinja file, or chatml, llama3 and so on.",
    ),
]
System = Annotated[
    str,
    Option(
        "--system",
        metavar="template|merge",
        help="merge: put system messages before questions, as in training.",
    ),
]

# Options of the verbs that listen: ``serve`` and ``dashboard``.
Host = Annotated[str, Option("--host", help="Address to listen on; other computers need a token.")]
Port = Annotated[int, Option("--port", min=0, max=65535, help="Port; 0 is any free one.")]
Token = Annotated[
    str | None,
    Option(
        "--token",
        envvar="ALLHANDS_TOKEN",
        help="Token that clients must send; the variable ALLHANDS_TOKEN hides it from process lists. "
        "[a new one where other computers can reach the port]",
        show_envvar=False,
    ),
]
HostNames = Annotated[
    list[str] | None,
    Option("--name", help="Further name or address of the server. Repeatable."),
]


class Format(StrEnum):
    """Format of an adapter."""

    peft = "peft"


class Target(StrEnum):
    """Target of an export."""

    peft = "peft"
    hf = "hf"
    gguf = "gguf"
    ollama = "ollama"


OutDir = Annotated[Path, Option("--out", help="Directory to write.")]
Force = Annotated[
    bool,
    Option("--force", help="Replace the result of an earlier export or import in --out."),
]

Below = Annotated[
    str | None, Option("--model", help="Base model. [the one in adapter_config.json]")
]
RunDirectory = Annotated[Path, Option("--adapter-path", help="Directory of a training run.")]
Dtype = Annotated[str | None, Option("--dtype", help="float32, float16 or bfloat16. [the model's]")]

ModelArgument = Annotated[
    str | None,
    Argument(metavar="MODEL", help="'demo', a model directory, or a Hugging Face repository."),
]
ModelOption = Annotated[str | None, Option("--model", help="The same model, as an option.")]


class Generate(NamedTuple):
    """Ask a model, with or without a trained adapter.

    Prints speed and peak memory, too. --strategy pipeline is for a model larger than one
    computer.
    """

    prompt: Annotated[str, Option("--prompt", "-p", help="Prompt; '-' reads standard input.")]
    model: ModelName = "demo"
    adapter_path: Adapter = None
    max_tokens: MaxTokens = 256
    temp: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed = 0
    system_prompt: SystemPrompt = None
    ignore_chat_template: Annotated[bool, Option(help="Give the prompt to the model as it is.")] = (
        False
    )
    chat_template: ChatTemplate = None
    system: System = "template"
    trust_remote_code: TrustCode = False
    strategy: DividedBy = None
    num_ranks: NumRanks = None
    hosts: Hosts = None
    hostfile: Hostfile = None
    backend: BackendName = None
    pp_split: Split = None


class Chat(NamedTuple):
    """Talk with a model, with or without a trained adapter.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer. Each line of a
    pipe is a turn. --strategy pipeline is for a model larger than one computer.
    """

    model: ModelName = "demo"
    adapter_path: Adapter = None
    system_prompt: SystemPrompt = None
    max_tokens: MaxTokens = 512
    temp: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed = 0
    chat_template: ChatTemplate = None
    system: System = "template"
    trust_remote_code: TrustCode = False
    strategy: DividedBy = None
    num_ranks: NumRanks = None
    hosts: Hosts = None
    hostfile: Hostfile = None
    backend: BackendName = None
    pp_split: Split = None


class Compare(NamedTuple):
    """Answer held-out prompts before and after training.

    The answers are shown side by side; those of the pirate data have a score.
    """

    model: ModelName = "demo"
    adapter_path: Adapter = None
    data: Annotated[
        str, Option(help="Data with the test split to ask: a directory, or 'demo'.")
    ] = "demo"
    num_prompts: Annotated[int, Option(min=1, help="Prompts to ask.")] = 16
    show: Annotated[int, Option(min=0, help="Answers to print side by side.")] = 4
    max_tokens: MaxTokens = 60
    out: Annotated[
        Path | None,
        Option(help="JSON file for prompts, answers and scores. [answers.json of a run]"),
    ] = None
    force: Annotated[bool, Option("--force", help="Replace a file that holds no such answers.")] = (
        False
    )
    strategy: DividedBy = None
    num_ranks: NumRanks = None
    hosts: Hosts = None
    hostfile: Hostfile = None
    backend: BackendName = None
    pp_split: Split = None


class Serve(NamedTuple):
    """Serve a model over HTTP with OpenAI's interface.

    The server is mlx_lm's: /v1/chat/completions, /v1/completions and /v1/models. Programs of this
    computer may send requests; web pages need --allow-origin, and other computers --host and a
    token. Ctrl-C ends it.
    """

    model: ModelName = "demo"
    adapter_path: Adapter = None
    host: Host = "127.0.0.1"
    port: Port = 8080
    token: Token = None
    name: HostNames = None
    allowed_origins: Annotated[
        list[str] | None,
        Option(
            "--allow-origin",
            "--allowed-origins",
            metavar="URL",
            help="Web pages that may send requests, such as http://localhost:3000; * is all. Repeatable. [none]",
        ),
    ] = None
    max_tokens: Annotated[
        int,
        Option(
            min=1,
            help="Most tokens of an answer, unless a request gives a number.",
        ),
    ] = 512
    temp: Annotated[
        float,
        Option(min=0.0, help="Sampling temperature, unless a request gives one."),
    ] = 0.0
    top_p: Annotated[
        float,
        Option(min=0.0, max=1.0, help="Nucleus sampling, unless a request gives a number."),
    ] = 1.0
    chat_template: ChatTemplate = None
    system: System = "template"
    trust_remote_code: TrustCode = False


class Fuse(NamedTuple):
    """Merge a trained adapter into its model.

    The result is an ordinary model directory, which mlx_lm and allhands load without the adapter.
    Options are those of mlx_lm.fuse. The result is read back and compared with model and adapter
    before it gets its name.
    """

    model: Below = None
    adapter_path: RunDirectory = Path("adapters")
    save_path: Annotated[Path, Option(help="Directory to write.")] = Path("fused_model")
    dequantize: Annotated[
        bool,
        Option(
            "--dequantize",
            "--de-quantize",
            help="Write dense weights, so that the adapter loses no precision.",
        ),
    ] = False
    dtype: Dtype = None
    force: Annotated[bool, Option("--force", help="Replace a model that is in --save-path.")] = (
        False
    )
    export_gguf: Annotated[bool, Option("--export-gguf", help="Also write a GGUF file.")] = False
    gguf_path: Annotated[
        str | None,
        Option(help="Name of that file inside --save-path. [ggml-model-f16.gguf]"),
    ] = None
    upload_repo: Annotated[str | None, Option(help="Refused: use allhands upload.")] = None
    trust_remote_code: TrustCode = False


class Export(NamedTuple):
    """Export an adapter or a model for other programs.

    peft: LoRA and DoRA adapters for PyTorch, as PeftModel.from_pretrained, vLLM and others read
    them. hf: the model with the adapter merged, as transformers loads it. gguf: the same as one
    file for llama.cpp and LM Studio. ollama: that file and a Modelfile.
    """

    to: Annotated[Target, Option(help="Program that reads the result.")]
    out: OutDir
    adapter_path: Annotated[
        Path | None,
        Option(
            help="Directory of a training run; without it --model is exported alone.",
        ),
    ] = None
    model: Below = None
    base: Annotated[
        str | None,
        Option(help="peft: name under which PEFT loads the base model. [--model]"),
    ] = None
    dtype: Annotated[str | None, Option(help="hf: float32, float16 or bfloat16.")] = None
    force: Force = False
    trust_remote_code: TrustCode = False


class Import(NamedTuple):
    """Import an adapter that another program has trained.

    peft: LoRA and DoRA adapters that PEFT's save_pretrained wrote. The result is a directory for
    --adapter-path.
    """

    path: Annotated[
        Path, Argument(metavar="DIR", help="Directory of the adapter.", show_default=False)
    ]
    source: Annotated[Format, Option("--from", help="Program that wrote the adapter.")]
    out: OutDir
    model: Annotated[str | None, Option(help="Base model. [the one that the adapter names]")] = None
    force: Force = False
    trust_remote_code: TrustCode = False


class Upload(NamedTuple):
    """Upload a model or an adapter to the Hugging Face Hub.

    No other command publishes a model. Checkpoints and logs of a run are left out. Run `hf auth
    login` first.
    """

    directory: Annotated[
        Path,
        Argument(metavar="DIR", help="Directory of a model or an adapter.", show_default=False),
    ]
    to: Annotated[str, Option(help="Repository on the Hub: owner/name.")]
    private: Annotated[bool, Option("--private", help="Make the repository private.")] = False
    message: Annotated[str, Option(help="Message of the commit.")] = "Upload with allhands"


class ModelGet(NamedTuple):
    """Fetch a model into a normal MLX model directory.

    Options quantise it, dequantise it or change its type.
    """

    source: ModelArgument = None
    out: Annotated[Path | None, Option("--out", "-o", help="Directory to write. [models/NAME]")] = (
        None
    )
    model: ModelOption = None
    quantize: Annotated[int | None, Option(metavar="BITS", help="Quantise to 2-8 bits.")] = None
    group_size: Annotated[int | None, Option(help="Values of a quantisation group.")] = None
    dequantize: Annotated[bool, Option("--dequantize", help="Write dense weights.")] = False
    dtype: Annotated[str | None, Option(help="float32, float16 or bfloat16.")] = None
    force: Annotated[bool, Option("--force", help="Replace an existing directory.")] = False
