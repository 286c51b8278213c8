"""Loading of a model's tokenizer without its weights, with a chosen chat template and the tokens
that end answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx_lm.utils as mlx_lm
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from allhands.data.render import ChatTemplate, has_chat_template
from allhands.data.templates import MERGE, NAMED, ChatChoice, template_text
from allhands.errors import ModelError
from allhands.io.names import MODELS_OF_A_RUN
from allhands.io.paths import meant
from allhands.model.sources import first_line, importing, is_path, resolve
from allhands.runtime.libraries import errors_only

Json = dict[str, Any]

GENERATION_FILE = "generation_config.json"

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tiktoken.model",
)

# Names of the number of positions in configurations.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)


@dataclass(frozen=True)
class LoadedTokenizer:
    """A model's tokenizer, and the model's directory.

    Attributes:
        template: the chat template that was chosen in place of the model's own; None: its own.
        notes: notes for the user about the chat template.
    """

    tokenizer: TokenizerWrapper
    path: Path
    template: str | None = None
    notes: tuple[str, ...] = ()


_OWN = ChatChoice()


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in _TOKENIZER_FILES)


def load_bare_tokenizer(
    path_or_repo: str, *, trust_remote_code: bool = False, chat: ChatChoice = _OWN
) -> LoadedTokenizer:
    """Load a tokenizer as :func:`load_tokenizer` does, where no model is needed (``--tokenizer``).

    Raises:
        ConfigError: there is no such chat template.
        ModelError: the tokenizer is missing or torn, or does not suit the chat template.
    """
    path = Path(path_or_repo)
    local = path_or_repo != "demo" and (path.exists() or is_path(path_or_repo))
    advice = "give the directory that holds tokenizer.json; `allhands tokenizer train` makes one from texts"
    if local and not _has_tokenizer(path):
        problem = "there is no such directory"
        if path.exists():
            problem = (
                "there is no tokenizer in this directory"
                if path.is_dir()
                else "this is a file, not a directory"
            )
        raise ModelError(
            problem,
            code="tokenizer-missing",
            where=path_or_repo,
            hint=meant(path, advice, _has_tokenizer),
        )
    try:
        return load_tokenizer(path_or_repo, trust_remote_code=trust_remote_code, chat=chat)
    except ModelError as error:
        if path_or_repo != "demo" and "`demo`" in (error.hint or ""):
            error.hint = f"check the name (or the connection); {advice}"
        raise


def load_tokenizer(
    path_or_repo: str, *, trust_remote_code: bool = False, chat: ChatChoice = _OWN
) -> LoadedTokenizer:
    """Load a model's tokenizer without its weights.

    Args:
        path_or_repo: ``demo``, a directory (with a model or a tokenizer alone) or a Hub repository
            id.
        trust_remote_code: let the tokenizer run the Python files that it carries.
        chat: choice of a chat template other than the tokenizer's own.

    Raises:
        ConfigError: there is no such chat template.
        ModelError: the model or its tokenizer is missing or torn, or does not suit the chat
            template.
    """
    path = resolve(path_or_repo)
    config = config_in(path)
    own = tokenizer_of(path, config, trust_remote_code)
    template = template_text(own, chat)
    if template is None:
        return LoadedTokenizer(own, path)
    return LoadedTokenizer(
        tokenizer_of(path, config, trust_remote_code, template), path, template, _notes(own, chat)
    )


def _notes(own: Any, chat: ChatChoice) -> tuple[str, ...]:
    """Return a note if system messages are merged, though the template has a place for them."""
    named = NAMED.get(chat.template or "")
    plain = None if named is None else named.system
    if chat.system == "merge" and chat.chosen() is None and has_chat_template(own):
        plain = ChatTemplate(own).takes_system
    if chat.system != "merge" or not plain:
        return ()
    return (
        f"{MERGE}: the chat template has a place for a system message, which is put before the question instead",
    )


def positions_of(config: Json) -> int | None:
    """Return the number of positions of a model by its configuration; ``None`` without a limit."""
    inner: Any = config.get("text_config")
    known: Json = {**config, **cast("Json", inner)} if isinstance(inner, dict) else config
    most = next((value for name in _POSITIONS if _is_count(value := known.get(name))), None)
    scaling: Any = known.get("rope_scaling") or known.get("rope_parameters")
    if most is None or not isinstance(scaling, dict):
        return most
    scaled = cast("Json", scaling)
    kind, factor = scaled.get("rope_type", scaled.get("type")), scaled.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 1:
        return most
    first = scaled.get("original_max_position_embeddings")
    if isinstance(first, int) and _is_count(first):
        return max(most, int(first * factor))
    # Without original_max_position_embeddings, the limit in the file is that before scaling.
    return int(most * factor) if kind in ("linear", "dynamic", "yarn") else most


def vocabulary_of(config: Json) -> int | None:
    """Return the number of rows in a model's embedding by its configuration; ``None`` if it does
    not say.
    """
    for place in (config, config.get("text_config")):
        if isinstance(place, dict) and isinstance(
            size := cast("Json", place).get("vocab_size"), int
        ):
            return size
    return None


def config_in(path: Path) -> Json:
    """Return :func:`read_config` of a directory, or {} if it holds a tokenizer alone."""
    # A caller that needs a model reports its absence.
    alone = not (path / "config.json").exists() and any(
        (path / name).is_file() for name in _TOKENIZER_FILES
    )
    return {} if alone else read_config(path)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_config(path: Path) -> Json:
    """Return the config.json of a model's directory.

    Raises:
        ModelError: the file is missing or damaged, or has no model_type.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "give the directory that holds config.json, model*.safetensors and the tokenizer"
        made = [
            folder
            for name in MODELS_OF_A_RUN
            if (folder := path / name).joinpath(file.name).is_file()
        ]
        if made:
            hint = f"this is the directory of a run; its models are {' and '.join(map(str, made))}"
        raise ModelError(
            "no config.json: this is not a model directory",
            code="model-config-missing",
            where=str(path),
            hint=hint,
        ) from None
    except (ValueError, OSError) as error:
        raise ModelError(
            f"this is not readable JSON: {error}",
            code="model-config-invalid",
            where=str(file),
            hint="fetch the model again",
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(
            "no model_type given",
            code="model-config-invalid",
            where=str(file),
            hint="fetch the model again",
        )
    return config


def eos_ids(path: Path, config: Json) -> list[int]:
    """Return the ids at which generation stops, from generation_config.json or else config.json, as
    in mlx_lm.
    """
    try:
        generation: Any = json.loads((path / GENERATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        generation = {}
    said: Any = generation.get("eos_token_id") if isinstance(generation, dict) else None
    found: Any = said or config.get("eos_token_id")
    return [found] if isinstance(found, int) else list(found or ())


def with_stop(config: Json, stop: int, usual: int | None) -> Json:
    """Return a ``config.json`` or ``generation_config.json`` with one more token at which
    generation stops.

    Args:
        stop: id of the token to add.
        usual: id at which generation stops if the file names none.
    """
    found: Any = config.get("eos_token_id")
    before = list(found) if isinstance(found, list) else [usual if found is None else found]
    return {**config, "eos_token_id": [*(one for one in before if one not in (None, stop)), stop]}


def _unwarned(tokenizer: TokenizerWrapper) -> TokenizerWrapper:
    """Switch off the tokenizer's warning that the model will fail on long texts.

    Callers that train or ask a model check the length themselves; others only count tokens.
    """
    given: dict[str, bool] = getattr(
        tokenizer, "deprecation_warnings", {}
    )  # warnings that were given already and are not repeated
    given["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def tokenizer_of(
    path: Path, config: Json, trust_remote_code: bool, template: str | None = None
) -> TokenizerWrapper:
    """Return the tokenizer in a directory, with ``template`` in place of its own chat template.

    Raises:
        ModelError: the tokenizer is missing or torn.
    """
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            "there is no tokenizer beside the weights",
            code="tokenizer-missing",
            where=str(path),
            hint="copy tokenizer.json and tokenizer_config.json of the same model there",
        )
    try:
        # mlx_lm looks for settings of the tokenizer in the model's module. transformers warns of
        # models that mlx_lm alone knows.
        with importing(path), errors_only("transformers"):
            loaded = mlx_lm.load_tokenizer(
                path,
                {
                    "trust_remote_code": trust_remote_code,
                    **({} if template is None else {"chat_template": template}),
                },
                eos_token_ids=eos_ids(path, config) or None,
            )
        return _unwarned(loaded)
    except ModelError:
        raise
    except Exception as error:  # a broken file fails anywhere in three libraries
        raise _unread(path, error) from error


def _unread(path: Path, error: Exception) -> ModelError:
    """Return the error for a tokenizer that cannot be loaded."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return ModelError(
            "tokenizer.json is missing, which says how texts are cut",
            code="tokenizer-missing",
            where=str(path),
            hint="copy tokenizer.json of the same model there, or save it from transformers with save_pretrained",
        )
    hint = "fetch the model again; --trust-remote-code if it brings its own code and you trust it"
    if isinstance(error, AttributeError) and str(error).startswith(
        "module "
    ):  # no file of the model can repair this
        hint = "look for newer versions: pip install -U mlx-lm transformers"
    elif isinstance(error, ImportError):
        hint = "install the package that is named there"
    elif isinstance(error, StrictDataclassError):
        hint = "correct that value in config.json, or fetch it of a conversion that Transformers can read"
    said = (
        " ".join(str(error).split())
        if isinstance(error, StrictDataclassError)
        else first_line(error)
    )
    where = path / "config.json" if isinstance(error, StrictDataclassError) else path
    return ModelError(
        f"the tokenizer cannot be loaded: {said}",
        code="tokenizer-unreadable",
        where=str(where),
        hint=hint,
    )
