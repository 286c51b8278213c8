"""All checks, in the order in which what they find is told."""

from __future__ import annotations

from allhands.cluster.doctor import access, devices, network, storage
from allhands.cluster.doctor.facts import Cluster
from allhands.cluster.doctor.findings import Check, Finding, ordered

CHECKS: tuple[Check, ...] = (*access.CHECKS, *storage.CHECKS, *network.CHECKS, *devices.CHECKS)


def findings_of(cluster: Cluster) -> list[Finding]:
    """Everything that is wrong, the worst first."""
    return ordered(finding for check in CHECKS if check.applies(cluster) for finding in check.look(cluster))


def well(cluster: Cluster) -> list[Check]:
    """The checks that were made and found nothing."""
    made = [check for check in CHECKS if check.applies(cluster) and check.clean(cluster)]
    return [check for check in made if not check.look(cluster)]
