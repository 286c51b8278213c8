"""Do all ranks mean the same run? Asked before the first gradient is summed.

MLX's ring adds raw bytes: ranks that disagree about a shape or dtype get silently wrong sums. So
each rank states its facts (options, parameter names, shapes and dtypes, data, versions), their hash
is compared in a collective of fixed size, and only on a difference are the facts themselves
exchanged, with the files behind them; :mod:`allhands.distributed.blame` says whose differ.
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
    """The facts that a rank adds where its own differ from the others'.

    Attributes:
        computer: its name.
        leads: whether it is the first of its computer's ranks.
        details: the files behind sections of the facts: ``files`` and ``places`` of a
            :class:`~allhands.distributed.blame.Statement`; may take as long as it takes to read
            them.
        given: for the words; ``launcher`` may be left out where it is the computer of rank 0.
    """

    computer: str = ""
    leads: bool = True
    details: Callable[[set[str]], Mapping[str, Any]] = lambda sections: {}
    given: Circumstances = field(default_factory=Circumstances)


def agree(
    communicator: Communicator, facts: Mapping[str, Any], witness: Witness | None = None
) -> None:
    """Return if ``facts`` (JSON values) are the same on every rank.

    Raises:
        MisfitError: on every rank alike, naming the ranks that differ from the others, and in what.
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
    # Of one computer's ranks, which say the same, the first speaks for all.
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
    """Return the owners of the statements: computers, or ranks if those of one computer differ."""
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
