"""The doctor's checks of memory, disks, the model and the data."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from computers import DATA, GB, MODEL, cluster, disk, facts, host, mac_facts, only, told, tree

from allhands.cluster.doctor.facts import Cluster, File, HostFacts, Tree

MODEL_OPTION = {"model": "models/m", "option": "--hostfile hosts.json"}


def holding(*copies: Any, **more: Any) -> Cluster:
    """Computers of which each has such a tree."""
    hosts = [host(i, trees=() if copy is None else (copy,)) for i, copy in enumerate(copies, 1)]
    return cluster(*hosts, **{**MODEL_OPTION, "data": "data/d", **more})


def changed(name: str, **changes: Any) -> tuple[File, ...]:
    return tuple(file.model_copy(update=changes) if file.name == name else file for file in MODEL)


# --- memory (the model's weights are 8 GB) --------------------------------------------------------


@pytest.mark.parametrize(
    ("told_facts", "slots", "expected"),
    [
        (facts(2), 1, None),
        (facts(2, memory={"total": 7 * GB, "free": 6 * GB}), 1, "stop"),
        (facts(2, memory={"total": 32 * GB, "free": 10 * GB}), 1, "warn"),
        (facts(2, memory={"total": 32 * GB, "free": 11 * GB}), 1, None),
        (facts(2), 5, "stop"),  # five copies of 8 GB in 32 GB
        (
            facts(2, gpus=[{"kind": "cuda", "name": "A", "memory": 6 * GB, "free": 6 * GB}]),
            1,
            "stop",
        ),
        (
            facts(2, gpus=[{"kind": "cuda", "name": "A", "memory": 24 * GB, "free": 5 * GB}]),
            1,
            "warn",
        ),
        (
            facts(2, gpus=[{"kind": "cuda", "name": "A", "memory": 24 * GB, "free": 23 * GB}] * 2),
            2,
            None,
        ),
        (
            mac_facts(2, gpus=[{"kind": "metal", "memory": 10 * GB, "free": 10 * GB}]),
            1,
            "stop",
        ),  # two thirds
        (
            mac_facts(
                2,
                gpus=[{"kind": "metal", "memory": 16 * GB, "free": 16 * GB}],
                mac={"working_set": 7_000_000_000, "wired_limit_mb": 14000, "sleep_minutes": 0},
            ),
            1,
            "stop",
        ),
        (
            mac_facts(
                2,
                gpus=[{"kind": "metal", "memory": 16 * GB, "free": 16 * GB}],
                mac={"wired_limit_mb": 7000, "sleep_minutes": 0},
            ),
            1,
            "stop",
        ),
    ],
)
def test_the_model_fits_into_memory(
    told_facts: HostFacts, slots: int, expected: str | None
) -> None:
    computers = cluster(host(2, told_facts, slots=slots, trees=(tree(),)), **MODEL_OPTION)
    found = [(severity, hosts) for severity, check, hosts in told(computers) if check == "memory"]
    assert found == ([] if expected is None else [(expected, ("node2",))])


def test_what_is_too_large_can_be_quantised() -> None:
    small = facts(1, memory={"total": 4 * GB, "free": 3 * GB})
    assert only(cluster(host(1, small, trees=(tree(),)), **MODEL_OPTION)).remedy == (
        "allhands model get models/m --quantize 4 --out models/smaller"
    )


def test_little_free_memory_is_told_without_a_model_too() -> None:
    assert told(cluster(host(1, facts(1, memory={"total": 32 * GB, "free": GB})))) == [
        ("warn", "memory", ("node1",))
    ]


# --- disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disks", "expected"),
    [
        ([disk("work"), disk("adapter"), disk("temporary")], []),
        ([disk("work", free=GB)], ["warn"]),
        ([disk("work", free=10**7)], ["stop"]),
        ([disk("adapter", free=0, error="No space left on device")], ["stop"]),
        ([disk("adapter", error="Permission denied")], ["stop"]),
        ([disk("temporary", error="Read-only file system")], ["stop"]),
        (
            [disk("work", free=0), disk("adapter", free=0), disk("temporary", free=0)],
            ["stop"],
        ),  # one disk, told once
        ([disk("work", error="Permission denied")], []),  # only what is written to
    ],
)
def test_there_is_room_to_write(disks: list[dict[str, Any]], expected: list[str]) -> None:
    found = told(cluster(host(1), host(2, facts(2, disks=disks))))
    assert found == [(severity, "disk", ("node2",)) for severity in expected]


def test_a_full_disk_is_told_with_its_place_and_how_to_look() -> None:
    full = facts(2, disks=[disk("adapter", free=0, error="No space left on device")])
    finding = only(cluster(host(1), host(2, full)))
    assert "/adapter" in finding.message
    assert "No space left on device" in finding.message
    assert shlex.split(finding.remedy)[:2] == ["ssh", "node2"]
    assert "du -xh -d 1 /adapter" in finding.remedy


def test_what_is_to_be_copied_must_fit() -> None:
    lacking = host(
        2, facts(2, disks=[disk("work", free=5 * GB)]), trees=(tree(path=None, files=()),)
    )
    found = told(cluster(host(1, trees=(tree(),)), lacking, **MODEL_OPTION))
    assert found == [("stop", "disk", ("node2",)), ("stop", "model", ("node2",))]


# --- model and data -------------------------------------------------------------------------------


def test_equal_copies_are_well() -> None:
    assert told(holding(tree(), tree(path="/elsewhere/m"), tree())) == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (changed("model.safetensors", sha256="x"), "model.safetensors different"),
        (changed("config.json", size=701), "config.json different"),
        (MODEL[:1], "model.safetensors missing"),
        (
            (*MODEL, File(name="extra.safetensors", size=1, sha256="e")),
            "extra.safetensors only there",
        ),
    ],
)
def test_the_copy_that_differs_is_named_with_its_files(files: tuple[File, ...], words: str) -> None:
    finding = only(holding(tree(), tree(files=files), tree()))
    assert (finding.check, finding.severity, finding.hosts) == ("model", "stop", ("node2",))
    assert finding.message.startswith("the model /models/m ")
    assert finding.message.endswith(f"node1, node3: {words}")
    assert finding.remedy == "allhands cluster sync --hostfile hosts.json --model models/m"


def test_of_two_copies_the_first_computers_is_taken_for_right() -> None:
    assert only(holding(tree(files=changed("config.json", sha256="x")), tree())).hosts == ("node2",)


def test_without_contents_sizes_are_compared() -> None:
    blank = tuple(file.model_copy(update={"sha256": None}) for file in MODEL)
    other = tuple(file.model_copy(update={"size": file.size + 1}) for file in blank)
    assert told(holding(tree(files=blank), tree(files=blank))) == []
    assert told(holding(tree(files=blank), tree(files=other))) == [("stop", "model", ("node2",))]


@pytest.mark.parametrize(
    ("source", "path", "severity"),
    [
        ("models/my/m", "/work/models/my/m", "stop"),
        ("/models/m", "/models/m", "stop"),
        (
            "models/m",
            "/work/models/m",
            "stop",
        ),  # looks like a name of the Hub, but one of them has the directory
        ("owner/name", "/home/me/.cache/huggingface/hub/models--owner--name/snapshots/1", "warn"),
        ("demo", "/home/me/.cache/allhands/demo", "warn"),
    ],
)
def test_a_missing_model_is_fetched_only_if_it_can_be(
    source: str, path: str, severity: str
) -> None:
    ill = holding(tree(path=path), tree(path=None, files=()), model=source)
    finding = only(ill)
    assert (finding.check, finding.severity, finding.hosts) == ("model", severity, ("node2",))
    assert finding.remedy == f"allhands cluster sync --hostfile hosts.json --model {source}"


@pytest.mark.parametrize(
    ("source", "severity"), [("models/my/m", "stop"), ("owner/name", "warn"), ("demo", "warn")]
)
def test_a_model_that_nobody_has_is_told_once(source: str, severity: str) -> None:
    gone = tree(path=None, files=())
    assert told(holding(gone, gone, model=source)) == [(severity, "model", ("node1", "node2"))]


def test_a_directory_without_a_config_is_no_model() -> None:
    assert told(holding(tree(files=MODEL[1:]))) == [("stop", "model", ("node1",))]


def test_a_model_that_cannot_be_read() -> None:
    finding = only(
        holding(tree(), tree(error="/models/m/config.json: Permission denied", files=()))
    )
    assert (finding.severity, finding.hosts) == ("stop", ("node2",))
    assert "Permission denied" in finding.message


# --- files of some stages alone -------------------------------------------------------------------

PARTS = tuple(
    File(name=f"model-{i}-of-3.safetensors", size=4 * GB, sha256=f"m{i}") for i in range(1, 4)
)
LIST = File(name="allhands-weights.json", size=900, sha256="l")
SHARDED = (MODEL[0], *PARTS)


def stages(*parts: int, config: File = MODEL[0]) -> Tree:
    return tree(files=(config, LIST, *(PARTS[part] for part in parts)))


def test_copies_with_the_files_of_their_stages_are_the_same_model() -> None:
    assert told(holding(tree(files=SHARDED), stages(0, 1), stages(2))) == []
    assert told(holding(stages(0, 1), stages(1, 2))) == []
    assert told(holding(tree(files=SHARDED), tree(files=SHARDED[:3]), stages(2))) == [
        ("stop", "model", ("node2",))
    ]


def test_a_stage_of_another_model_is_found() -> None:
    other = PARTS[2].model_copy(update={"sha256": "x"})
    ill = tree(files=(MODEL[0], LIST, other))
    for whole in (tree(files=SHARDED), stages(0, 2)):
        finding = only(holding(whole, ill, stages(1, 2)))
        assert finding.hosts == ("node2",)
        assert other.name in finding.message
        assert (
            finding.remedy
            == "allhands cluster sync --hostfile hosts.json --model models/m --stages"
        )
    changed_config = stages(0, config=MODEL[0].model_copy(update={"sha256": "x"}))
    assert only(holding(tree(files=SHARDED), changed_config)).message.endswith(
        "config.json different"
    )
    lacks = tree(files=(LIST, PARTS[0]))
    assert told(holding(tree(files=SHARDED), lacks)) == [("stop", "model", ("node2",))]


def test_a_stage_has_to_fit_where_the_model_does_not() -> None:
    little, little_here = (
        facts(number, memory={"total": 9 * GB, "free": 9 * GB}) for number in (2, 1)
    )
    large, small = host(1, trees=(tree(files=SHARDED),)), host(2, little, trees=(stages(2),))
    assert told(cluster(large, small, **MODEL_OPTION)) == []
    assert told(cluster(large, host(2, little, trees=(stages(0, 1, 2),)), **MODEL_OPTION)) == [
        ("stop", "memory", ("node2",))
    ]
    assert (
        told(cluster(host(1, little_here, trees=(tree(files=SHARDED),)), small, **MODEL_OPTION))
        == []
    ), "half of 12 GB"


# --- data -----------------------------------------------------------------------------------------


def test_data_are_compared_likewise() -> None:
    def data(sha: str) -> Any:
        return tree("data", (DATA[0].model_copy(update={"sha256": sha}),), "/d")

    assert told(holding(data("t"), data("t"))) == []
    finding = only(holding(data("t"), data("x"), data("t")))
    assert (finding.check, finding.severity, finding.hosts) == ("data", "stop", ("node2",))
    assert finding.remedy == "allhands cluster sync --hostfile hosts.json --data data/d"


def test_names_go_quoted_into_commands() -> None:
    ill = holding(tree(), tree(path=None, files=()), model="/models/$(reboot) m")
    assert shlex.split(only(ill).remedy)[-1] == "/models/$(reboot) m"
