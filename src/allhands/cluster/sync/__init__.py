"""Copies model, data and configuration to every host by rsync over ssh: only what differs, verified
by hashes.

The probe of :mod:`allhands.cluster.probe` runs on each host, so that a host needs Python 3.9, rsync
and nothing else. It compares its files with the list of :mod:`plan <allhands.cluster.sync.plan>`.
Those that it lacks come from this computer, or from a host that has them and can log in there by
ssh (:mod:`run <allhands.cluster.sync.run>`).
"""
