"""Check that all ranks are in the same run, before the first gradient is summed.

MLX's ring adds raw bytes: ranks that disagree about a shape or dtype get silently wrong sums. So
each rank states its facts (options, parameter names, shapes and dtypes, data, versions). Their hash
is compared in a collective of fixed size. Only if hashes differ, the facts themselves and hashes of
their files are exchanged, and :mod:`allhands.distributed.blame` finds the ranks that differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allhands.distributed.backend import Communicator
from allhands.distributed.blame import Circumstances, MisfitError, Statement, judge
from allhands.distributed.handout import all_equal, gather_json
from allhands.runtime.versions import software_here


@dataclass(frozen=True)
class Witness:
    """Further facts of a rank, used only if ranks differ.

    Attributes:
        computer: name of the rank's computer.
        leads: whether the rank is the first on its computer.
        details: returns, for sections of the facts, the ``files`` and ``places`` of a
            :class:`~allhands.distributed.blame.Statement`; it may read large files.
        given: circumstances for the message; an empty ``launcher`` means rank 0's computer.
    """

    computer: str = ""
    leads: bool = True
    details: Callable[[set[str]], Mapping[str, Any]] = lambda sections: {}
    given: Circumstances = field(default_factory=Circumstances)


def agree(
    communicator: Communicator, facts: Mapping[str, Any], witness: Witness | None = None
) -> None:
    """Require that ``facts`` (JSON values) are the same on every rank; all ranks call this.

    Raises:
        MisfitError: on every rank, if facts differ; it names the differing ranks and facts.
    """
    if communicator.size == 1 or all_equal(
        communicator, json.dumps(facts, sort_keys=True, default=str)
    ):
        return
    everyone = gather_json(communicator, facts)
    sections = {key for one in everyone for key in one if one.get(key) != everyone[0].get(key)}
    raise _misfit(communicator, everyone, sections, witness or Witness())


def _misfit(
    communicator: Communicator, everyone: list[dict[str, Any]], sections: set[str], witness: Witness
) -> MisfitError:
    own = {
        "computer": witness.computer,
        "leads": witness.leads,
        "software": software_here(),
        **witness.details(sections),
        "given": {**vars(witness.given), "trusted": sorted(witness.given.trusted)},
    }
    said = gather_json(communicator, own)
    names = _names(everyone, said)
    # Ranks of one computer state the same, so only the first of them is used.
    statements = [
        Statement(
            name,
            everyone[rank],
            *(said[rank].get(part, {}) for part in ("files", "places", "software")),
        )
        for rank, name in enumerate(names)
        if names.index(name) == rank
    ]
    first: dict[str, Any] = said[0]["given"]
    first |= {"launcher": first["launcher"] or names[0], "trusted": frozenset(first["trusted"])}
    verdict = judge(statements, Circumstances(**first))
    assert verdict is not None
    misfits = tuple(rank for rank, name in enumerate(names) if name in verdict.misfits)
    return MisfitError(verdict.message, code="computers-differ", hint=verdict.hint, misfits=misfits)


def _names(everyone: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names for the statements: of computers, or of ranks if computers do not suffice.

    Names of computers suffice if there are several, and the ranks of each computer agree.
    """
    computers = [one["computer"] for one in said]
    firsts = Counter(one["computer"] for one in said if one["leads"])
    alike = all(
        everyone[computers.index(name)] == facts
        for name, facts in zip(computers, everyone, strict=True)
    )
    if len(firsts) > 1 and alike and set(firsts.values()) == {1} and all(computers):
        return computers
    several = len(set(computers)) > 1
    return [
        f"rank {rank}" + (f" on {name}" if several else "") for rank, name in enumerate(computers)
    ]
