"""What mlx_lm itself cannot train or compute is told as its limit, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import allhands

# isort: split
import mlx.core as mx
import pytest
from command_line import call_allhands
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tiny import run_allhands, write_adapter, write_model, write_tokenizer

from allhands.config.eval_schema import EvalConfig
from allhands.config.schema import build_config
from allhands.errors import ConfigError, ModelError
from allhands.model.beyond import Use, limits_told
from allhands.model.load import load_model
from allhands.run.context import RunContext
from allhands.run.evaluating import run_evaluation
from allhands.run.preparing import compiles
from allhands.run.session import run_finetune

COMMON = {
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
RECURRENT_GEMMA = {
    **{
        "model_type": "recurrent_gemma",
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    **{"attention_window_size": 16, "num_key_value_heads": 1},
    "block_types": ["recurrent", "recurrent", "attention"],
}
AFM7 = {
    **{
        "model_type": "afm7",
        "hidden_dim": 32,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
    },
    "num_kv_heads": 2,
}
# Architectures of our own, which mlx_lm loads as it does others: a Llama, and what is done to its
# output.
OWN = """
import mlx.core as mx
from mlx_lm.models.llama import Model as Llama, ModelArgs

class Model(Llama):
    def __call__(self, inputs, cache=None, **more):
        logits = super().__call__(inputs, cache, **more)
        {}
        return logits
"""
WITHOUT_GRADIENT = "logits = mx.take_along_axis(logits, mx.argsort(logits), axis=-1)"
NEEDS_A_WEIGHT = "assert self.layers[0].mlp.up_proj.weight.ndim == 2"
FAILS = "raise NotImplementedError('not here')"


def write(directory: Path, config: dict[str, Any]) -> Path:
    """A model of any architecture, with random weights."""
    config = COMMON | config
    model_class, arguments = _get_classes(config)
    mx.random.seed(1)
    model = model_class(arguments.from_dict(config))
    directory.mkdir(parents=True, exist_ok=True)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


@pytest.fixture
def train(tiny_data: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(model: Path, callbacks: tuple[allhands.Callback, ...] = (), **options: Any) -> Any:
        short = {"iters": 1, "batch_size": 2, "val_batches": 0, "max_seq_length": 64}
        place = {"model": str(model), "data": str(tiny_data), "adapter_path": str(tmp_path / "out")}
        return run_finetune(
            build_config({"train": True, **short, **place, **options}), RunContext(), callbacks
        )

    return run


def evaluated(model: Path, data: Path, **options: Any) -> float:
    config = build_config({"model": str(model), "data": str(data), **options}, None, EvalConfig)
    assert isinstance(config, EvalConfig)
    return run_evaluation(config, RunContext()).loss


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_a_model_that_mlx_lm_cannot_prepare_for_training(
    train: Callable[..., Any], tiny_data: Path, tmp_path: Path, method: str
) -> None:
    model = write(tmp_path / "model", RECURRENT_GEMMA)
    with pytest.raises(
        ModelError, match=r"mlx_lm .* itself.* recurrent_gemma.*AttributeError"
    ) as told:
        train(model, fine_tune_type=method)
    assert told.value.exit_code == 4
    assert isinstance(told.value.__cause__, AttributeError)
    # That it can compute it is another matter.
    assert 0.0 < evaluated(model, tiny_data) < 20.0


def own(directory: Path, line: str) -> Path:
    """A model with code of its own beside it."""
    model = write_model(directory)
    (model / "own.py").write_text(OWN.format(line))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    return model


def test_adapters_that_a_layer_cannot_have(train: Callable[..., Any], tmp_path: Path) -> None:
    model = own(tmp_path / "model", NEEDS_A_WEIGHT)
    with pytest.raises(ModelError, match=r"AttributeError: .*'weight'") as told:
        train(model, trust_remote_code=True)
    assert "--lora-parameters" in (told.value.hint or "")
    train(model, trust_remote_code=True, lora_parameters={"keys": ["self_attn.q_proj"]})
    train(model, trust_remote_code=True, fine_tune_type="full", adapter_path=str(tmp_path / "full"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_pass_that_mlx_lm_cannot_compute_either(
    train: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    model = own(tmp_path / "model", WITHOUT_GRADIENT)
    with pytest.raises(ModelError, match=r"ValueError: .*VJP") as told:
        train(model, trust_remote_code=True, fine_tune_type=method)
    assert told.value.where == str(model)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_model_that_only_has_no_gradient_is_evaluated(tiny_data: Path, tmp_path: Path) -> None:
    assert (
        evaluated(own(tmp_path / "model", WITHOUT_GRADIENT), tiny_data, trust_remote_code=True)
        > 0.0
    )


def test_evaluating_and_answering(tiny_data: Path, tmp_path: Path) -> None:
    model = own(tmp_path / "model", FAILS)
    with pytest.raises(ModelError, match="NotImplementedError: not here"):
        evaluated(model, tiny_data, trust_remote_code=True)
    adapter = write_adapter(write_model(tmp_path / "plain"), tmp_path / "adapter")
    for more in ([], ["--adapter-path", adapter]):
        done = call_allhands(
            "generate", "--model", model, "--prompt", "x", "--trust-remote-code", *more
        )
        assert done.returncode == 4, done.stderr
        assert "NotImplementedError: not here" in done.stderr


def test_layers_that_mlx_lm_cannot_quantise(train: Callable[..., Any], tmp_path: Path) -> None:
    model = write(tmp_path / "model", AFM7)
    done = call_allhands(
        "model", "get", model, "--quantize", "4", "--group-size", "32", "--out", tmp_path / "small"
    )
    assert done.returncode == 4
    assert "mlx_lm itself cannot quantise" in done.stderr
    assert not (tmp_path / "small").exists()
    # As a file that somebody else has quantised.
    weights: Any = mx.load(str(model / "model.safetensors"))
    for name in [name for name in weights if name.endswith("qkv_proj.weight")]:
        base = name.removesuffix("weight")
        weights[name], weights[base + "scales"], weights[base + "biases"] = mx.quantize(
            weights[name], 32, 4
        )
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "quantization": {"group_size": 32, "bits": 4}})
    )
    with pytest.raises(ModelError, match="mlx_lm itself cannot quantise"):
        train(model)


@pytest.mark.slow
def test_a_pass_that_cannot_be_compiled(
    tiny_data: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    """dbrx chooses its experts in Python; what other models do is seen in the first step."""
    experts = {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}
    heads = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 500000.0}}
    dbrx = {"model_type": "dbrx", "d_model": 32, "n_layers": 2, "n_heads": 4, **experts, **heads}
    model = write(tmp_path / "dbrx", dbrx)
    with pytest.raises(ConfigError) as told:
        train(model, compile="on")
    assert told.value.where == "--compile"
    train(model)
    long = build_config({"train": True})
    assert not compiles(long, 1000, load_model(str(model)).model)
    assert compiles(long, 1000, load_model(str(write_model(tmp_path / "llama"))).model)
    looking = own(tmp_path / "own", "logits = logits * mx.array(inputs.tolist()).shape[0]")
    asked = [
        "train",
        "--model",
        looking,
        "--data",
        tiny_data,
        "--train",
        "--iters",
        "1",
        "--trust-remote-code",
    ]
    for compiled, code in (("on", 4), ("off", 0)):  # in processes: what is half compiled stays so
        done = run_allhands(
            *asked,
            "--compile",
            compiled,
            "--adapter-path",
            tmp_path / compiled,
            "--val-batches",
            "0",
        )
        assert done.returncode == code, done.stderr
        assert ("--compile off" in done.stderr) == (code != 0)


# --- what is no limit of mlx_lm -------------------------------------------------------------------


def test_a_defect_of_ours_is_not_put_on_mlx_lm(
    train: Callable[..., Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise ValueError("[gather_axis] Cannot calculate VJP with respect to indices.")

    monkeypatch.setattr("allhands.train.step.TrainStep.__call__", broken)
    with pytest.raises(ValueError, match="gather_axis"):
        train(tiny_model)


def test_an_error_in_a_callback_stays_what_it_is(
    train: Callable[..., Any], tiny_model: Path
) -> None:
    class Wrong(allhands.Callback):
        """Asks for what is not there."""

        def after_backward(self, step: int, gradients: Any) -> None:
            _ = gradients.nothing

    with pytest.raises(AttributeError, match="nothing"):
        train(tiny_model, (Wrong(),))


@pytest.mark.parametrize("rank", [10_000, 10**6, 10**9])
def test_a_rank_beyond_any_layers_sides_is_refused(
    train: Callable[..., Any], tiny_model: Path, rank: int
) -> None:
    with pytest.raises(ConfigError) as told:
        train(tiny_model, lora_parameters={"rank": rank})
    assert told.value.where == "--lora-parameters"
    train(tiny_model, lora_parameters={"rank": 64})


def test_no_keys_at_all_are_refused(train: Callable[..., Any], tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as told:
        train(tiny_model, lora_parameters={"keys": []})
    assert "lora" in (told.value.where or "")


# --- adapter keys ---------------------------------------------------------------------------------


def test_keys_that_match_nothing_are_named_where_others_match(
    train: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    shape = {"keys": ["self_attn.q_proj", "attention.wq", "q_proj", "mlp"]}
    with pytest.raises(ConfigError) as told:
        train(tiny_model, lora_parameters={"keys": shape["keys"][:3]})
    assert told.value.where == "--lora-parameters"
    assert "attention.wq, q_proj" in told.value.message
    assert "self_attn.q_proj" not in told.value.message
    assert "self_attn.q_proj" in (told.value.hint or "")
    assert not (tmp_path / "out").exists()
    # Of one layer, of the model as a whole, and by its full name.
    keys = ["self_attn.q_proj", "model.layers.2.self_attn.k_proj", "model.embed_tokens"]
    train(tiny_model, lora_parameters={"keys": keys}, num_layers=1)


def test_keys_of_a_run_that_goes_on_and_of_an_adapter_that_is_tested(
    train: Callable[..., Any],
    tiny_model: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were taken once, by mlx_lm or an earlier version: only a new run can do without them."""
    keys = {"keys": ["self_attn.q_proj", "attention.wq"], "rank": 2}
    with monkeypatch.context() as patch:
        patch.setattr("allhands.model.adapters.unmatched_keys", lambda *_: ())
        train(tiny_model, lora_parameters=keys)
    train(tiny_model, lora_parameters=keys, resume="auto", iters=2)
    assert evaluated(tiny_model, tiny_data, adapter_path=str(tmp_path / "out")) > 0.0


def test_a_model_without_a_layer_that_could_have_an_adapter(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    layers = "[one.input_layernorm for one in self.model.layers]"
    model = own(tmp_path / "model", "")
    with (model / "own.py").open("a") as file:
        file.write(f"\n    @property\n    def layers(self):\n        return {layers}\n")
    with pytest.raises(ModelError) as told:
        train(model, trust_remote_code=True)
    assert told.value.code == "no-adaptable-layer"
    # What is advised works.
    assert "--fine-tune-type full" in (told.value.hint or "")
    train(model, trust_remote_code=True, fine_tune_type="full")
    # It is not where it would not.
    bitnet = write(
        tmp_path / "bitnet",
        {"model_type": "bitnet", "tie_word_embeddings": True, "rope_theta": 10000.0},
    )
    with pytest.raises(ModelError) as refused:
        train(bitnet)
    assert "full" not in (refused.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[malloc] Unable to allocate 8 bytes.",
    ],
)
@pytest.mark.parametrize("fine_tune_type", ["lora", None])
def test_full_memory_is_no_limit_of_mlx_lm(text: str, fine_tune_type: str | None) -> None:
    """Beside our own model any other one would find too little memory, too."""
    with (
        pytest.raises(ModelError) as caught,
        limits_told(Use("no/such/model", fine_tune_type=fine_tune_type)),
    ):
        raise RuntimeError(text)
    assert caught.value.exit_code == ModelError.exit_code
    assert text in caught.value.message
    assert ("--batch-size" in (caught.value.hint or "")) == (fine_tune_type is not None)
