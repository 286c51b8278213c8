"""Brings model, data and configuration to every host: only what differs, from host to host, verified by hashes.

The coordinator (:mod:`run <allhands.cluster.sync.run>`) starts a worker on each host over ssh and sends it its own
code, so a host needs Python 3.9 or newer and nothing else. Each host compares its files with the manifest, then asks
the one before it for the blocks that it lacks, and passes on what it gets to the one behind it.

Hosts connect to each other over TLS with a certificate made for the run, which they get over ssh; not over ssh itself,
because that would need keys from host to host. ``tcp`` saves the encryption's processor time where the network is
one's own and faster than that; ``ssh`` needs no other connection than the one from this computer to each host.
"""

from __future__ import annotations

from allhands.cluster.sync.plan import Plan, Topology, Transport, make_plan
from allhands.cluster.sync.run import HostState, SyncOptions, SyncState, synchronise

__all__ = ["HostState", "Plan", "SyncOptions", "SyncState", "Topology", "Transport", "make_plan", "synchronise"]
