"""The list of all checks, in the order in which their findings are reported."""

from __future__ import annotations

from allhands.cluster.doctor import access, devices, network, storage
from allhands.cluster.doctor.facts import Cluster
from allhands.cluster.doctor.findings import ORDER, Check, Finding

CHECKS: tuple[Check, ...] = (*access.CHECKS, *storage.CHECKS, *network.CHECKS, *devices.CHECKS)


def findings_of(cluster: Cluster) -> list[Finding]:
    """Return all findings, the worst first."""
    found = [
        finding for check in CHECKS if check.applies(cluster) for finding in check.findings(cluster)
    ]
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))


def well(cluster: Cluster) -> list[Check]:
    """Return the checks that were made and passed."""
    made = [check for check in CHECKS if check.applies(cluster) and check.clean(cluster)]
    return [check for check in made if not check.findings(cluster)]
