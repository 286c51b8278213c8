"""Facts that must be equal on all ranks before the first gradient, and the files they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from allhands.config.schema import TrainConfig
from allhands.data.behind import files_behind_data, hashes
from allhands.distributed.agree import Witness
from allhands.distributed.blame import SOFTWARE, Circumstances
from allhands.distributed.mesh import Mesh
from allhands.io.paths import written
from allhands.model.adapters import trained_weights
from allhands.model.fingerprints import fingerprints
from allhands.model.load import LoadedModel
from allhands.model.weight_files import absent, present
from allhands.run.datasets import Datasets
from allhands.runtime.versions import required, software_here

# Options whose files are compared by content: their paths may differ between computers.
_BY_CONTENT = frozenset({"model", "data", "tokenizer", "resume_adapter_file"})
# Keys of a configuration that never change a computation; used if a model does not say which keys
# it reads.
_IDLE_KEYS = frozenset({"_name_or_path", "transformers_version", "architectures"})


@dataclass(frozen=True)
class RankFacts:
    """The configuration, model and data of one rank, to be compared with the others'.

    Attributes:
        start: the file of weights to start from, or ``None``.
        equal: names of the trained arrays that every rank has completely; ``None``: all of them.
    """

    config: TrainConfig
    loaded: LoadedModel
    data: Datasets
    start: Path | None
    equal: Collection[str] | None = None

    def values(self) -> dict[str, Any]:
        """Return the facts that every rank must have in common, as JSON values.

        Weights are compared as files, because ranks on other devices may hold them in other types.
        """
        trained = (
            trained_weights(self.loaded.model)
            if self.config.train or self.start is not None
            else {}
        )
        return {
            "config": {
                k: v for k, v in self.config.shared_values().items() if k not in _BY_CONTENT
            },
            "parameters": {
                name: [list(array.shape), str(array.dtype)]
                for name, array in trained.items()
                if self.equal is None or name in self.equal
            },
            "data": self.data.fingerprints(),
            "model": {"weights": self.loaded.fingerprint, "config": _architecture(self.loaded)},
            "resume_adapter_file": {"weights": _sha256(self.start) if self.start else None},
            SOFTWARE: required(software_here()),
        }

    def witness(self, computer: str, mesh: Mesh, given: Circumstances) -> Witness:
        """Return the witness that adds files and options to the message if ranks differ.

        Args:
            computer: name of this computer.
            given: circumstances of the start; this run's options are added.
        """
        return Witness(
            computer, mesh.local_rank == 0, self.details, replace(given, **self._options())
        )

    def details(self, sections: set[str]) -> dict[str, Any]:
        """Return hashes of the files behind ``sections`` of :meth:`values`, and the files' places.

        The files are read now.
        """
        files: dict[str, str] = {}
        model = self.loaded.path
        if "model" in sections:
            files |= hashes("model", [model / "config.json"])
            files |= {f"model/{name}": digest for name, digest in fingerprints(model).items()}
        if "data" in sections:
            files |= self._behind_data()
        if "resume_adapter_file" in sections and self.start is not None:
            files |= hashes("adapter", [self.start])
        return {"files": files, "places": self._places()}

    def attested(self) -> dict[str, Any]:
        """Return all facts, for computers that may join later; weights are not read again."""
        model = self.loaded.path
        weights = [*present(model), *absent(model)]
        files = self._behind_data() | hashes("model", [model / "config.json"])
        if len(weights) == 1:
            files |= {f"model/{file.name}": self.loaded.fingerprint for file in present(model)}
        dated = None if self.data.dated is None else self.data.dated.isoformat()
        return {
            "facts": self.values(),
            "files": files,
            "places": self._places(),
            "software": software_here(),
            "dated": dated,
            "options": self._options(),
        }

    def _behind_data(self) -> dict[str, str]:
        return files_behind_data(Path(self.config.data), self.data.stored, self.loaded.path)

    def _places(self) -> dict[str, str]:
        places = {
            "model": str(self.loaded.path.absolute()),
            "data": str(Path(self.config.data).absolute()),
        }
        return places | (
            {"adapter": str(self.start.parent.absolute())} if self.start is not None else {}
        )

    def _options(self) -> dict[str, str]:
        """Return the paths as the person gave them; without options that are no path here."""
        named = {"adapter": self.config.resume_adapter_file, "config": self.config.config}
        paths = {name: written(path) for name, path in named.items() if path}
        data = {"data": written(self.config.data)} if Path(self.config.data).exists() else {}
        return {"model": written(self.config.model), **data, **paths}


def _architecture(loaded: LoadedModel) -> Any:
    """Return the configuration that the model's class has read; or, if it is not known, the config
    without idle keys.
    """
    args = getattr(loaded.model, "args", None)
    if is_dataclass(args) and not isinstance(args, type):
        read: Mapping[str, Any] = {
            **asdict(args),
            "quantization": loaded.config.get("quantization"),
        }
    else:
        read = {key: value for key, value in loaded.config.items() if key not in _IDLE_KEYS}
    return json.loads(json.dumps(read, default=lambda value: type(cast("object", value)).__name__))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
