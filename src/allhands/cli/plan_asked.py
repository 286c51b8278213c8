"""The computers that the options of ``allhands plan`` name."""

from __future__ import annotations

from dataclasses import dataclass

from allhands.cluster.hosts import Host, hosts_named
from allhands.cluster.ranks import require_cores
from allhands.config.schema import TrainConfig
from allhands.distributed.mesh import check_weights
from allhands.errors import ConfigError
from allhands.plan.devices import PlannedDevice, device_of
from allhands.plan.job import Prices

_MOST_DEVICES = 1024


@dataclass(frozen=True)
class AskedComputers:
    """The options of ``allhands plan`` about computers.

    Attributes:
        device: text of ``--device``; ``None``: this computer, or computers over ssh.
        link: text of ``--link``.
        machines: numbers of imagined equal computers.
        once: True if the training is needed only once.
        timeout_s: seconds for each measurement.
        prices: prices of an hour.
    """

    device: str | None
    link: str | None
    machines: tuple[int, ...]
    once: bool
    timeout_s: float
    prices: Prices


def devices_of(text: str | None) -> list[PlannedDevice]:
    """Return the computers in a text such as ``M1 Pro 32GB, 2 x M1 16GB``; none for ``None``.

    All must be of one kind, because Macs and NVIDIA GPUs cannot train together.

    Raises:
        ConfigError: the computers are not known, too many, or of several kinds.
    """
    found: list[PlannedDevice] = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        number, x, rest = part.strip().partition(" x ")
        several = bool(x) and number.isdecimal()
        times = min(int(number[:9]), _MOST_DEVICES + 1) if several else 1
        found += [device_of(rest if several else part)] * times
        if len(found) > _MOST_DEVICES:
            raise ConfigError(
                f"more than {_MOST_DEVICES:,} computers cannot be planned",
                code="value-out-of-range",
                where="--device",
                hint=f"look at up to {_MOST_DEVICES:,}: each further one saves less than 5 % of a step",
            )
    if text is not None and not found:
        raise ConfigError(
            "no computer is named",
            code="value-empty",
            where="--device",
            hint="as in --device 'M1 Pro 32GB'",
        )
    if len({each.kind for each in found}) > 1:
        raise ConfigError(
            "Macs and NVIDIA GPUs cannot train together",
            code="options-conflict",
            where="--device",
            hint="MLX has no back-end for both in one group: plan for one kind",
        )
    return found


def on_hosts(config: TrainConfig) -> bool:
    """Return whether the plan is for computers over ssh."""
    return bool(config.hosts or config.hostfile)


def hosts_of(config: TrainConfig) -> tuple[Host, ...]:
    """Return the named computers; without names, this computer with all ranks."""
    return hosts_named(config.hosts, config.hostfile) or (
        Host("this computer", slots=config.num_ranks),
    )


def _check_ranks(config: TrainConfig) -> None:
    """Refuse more processes than this computer can run, and a wrong number of rank weights."""
    if not on_hosts(config):
        require_cores(config.num_ranks)
    check_weights(config.given_weights, sum(host.slots for host in hosts_of(config)))


def check_computers(config: TrainConfig, asked: AskedComputers) -> None:
    """Refuse options that name computers in two ways; called before any long work.

    Raises:
        ConfigError: options contradict each other, or ask for too many processes.
    """
    devices = devices_of(asked.device)
    if not devices:
        _check_ranks(config)
    several = config.num_ranks > 1
    values = {
        "--link": asked.link,
        "--hosts": config.hosts,
        "--hostfile": config.hostfile,
        "-n": several and not config.hostfile,
    }
    given = [flag for flag, value in values.items() if value]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} exclude each other",
            code="options-conflict",
            where=given[-1],
            hint="give one of them; a configuration file (-c) may have named the other one",
        )
    if devices and given and given != ["--link"]:
        raise ConfigError(
            "computers that are only described cannot be measured",
            code="options-conflict",
            where="--device",
            hint="leave --device out to plan with this computer's speed, or describe the link: --link 10GbE",
        )
    if asked.machines and (several or on_hosts(config) or len(devices) > 1):
        raise ConfigError(
            "the computers are named one by one",
            code="options-conflict",
            where="--machines",
            hint="leave it out",
        )
