"""A directory to the Hugging Face Hub, with huggingface_hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub import errors as hub_errors

from allhands.errors import ConfigError, ModelError
from allhands.io.paths import meant
from allhands.model.sources import first_line

# Files that a run keeps for itself, and files that nobody should publish by accident.
IGNORED = ["checkpoints/**", "logs/**", "*.log", "events.jsonl", ".*", "**/.*"]
_ELSE = "give a directory that allhands fuse, export or train wrote"
_KNOWN = ("config.json", "adapter_config.json", "Modelfile")


def _is_whole(directory: Path) -> bool:
    known = any((directory / name).is_file() for name in _KNOWN)
    return known or any(directory.glob("*.gguf"))


def upload(directory: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload a model's or an adapter's directory as one commit; the address of the repository.

    Raises:
        ConfigError: ``repo`` is no name of a repository.
        ModelError: the directory holds no model, or the Hub refuses.
    """
    if not directory.is_dir():
        raise ModelError(
            "there is no such directory",
            code="model-missing",
            where=str(directory),
            hint=meant(directory, _ELSE, _is_whole),
        )
    if not _is_whole(directory):
        raise ModelError(
            "there is no model and no adapter in it",
            code="model-missing",
            where=str(directory),
            hint=_ELSE,
        )
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ConfigError(
            f"{repo!r} is no name on the Hub",
            code="hub-name-invalid",
            where="--to",
            hint="give owner/name",
        )
    api = HfApi()
    try:
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        if private and not api.repo_info(repo).private:
            raise ModelError(
                "the repository is there already, and public",
                code="repository-public",
                where=repo,
                hint="choose another name, or make it private on huggingface.co",
            )
        api.upload_folder(
            repo_id=repo,
            folder_path=str(directory),
            ignore_patterns=IGNORED,
            commit_message=message,
        )
    except ModelError:
        raise
    except Exception as error:  # also the network's, whose classes are those of several libraries
        raise ModelError(
            f"the Hub: {first_line(error)}", code="upload-failed", where=repo, hint=_advice(error)
        ) from None
    return address


def _advice(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or isinstance(error, hub_errors.LocalTokenNotFoundError):
        return "`hf auth login` with a token that may write to this owner's repositories"
    if isinstance(error, hub_errors.HfHubHTTPError | hub_errors.HFValidationError):
        return "check the name of the repository, then try again"
    return "check the connection (and HF_HUB_OFFLINE), then try again"
