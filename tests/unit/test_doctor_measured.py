"""What training would send: parameters counted from the heads of files, against the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from computers import cluster, host

from allhands.cluster.doctor import measured as doctor
from allhands.cluster.doctor.facts import Tree
from allhands.cluster.doctor.measured import measured, trained_parameters
from allhands.cluster.figures import Failure, Figures, Measurement, Timing
from allhands.cluster.hosts import Host
from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError


def made(path: Path, **options: object) -> tuple[int, int]:
    """Trained and all parameters, as training counts them."""
    from allhands.model.adapters import make_trainable
    from allhands.model.load import load_model

    found = make_trainable(load_model(str(path)).model, TrainConfig.model_validate(options))
    return found.parameters, found.total_parameters


@pytest.mark.parametrize("bits", [None, 4])
def test_counts_are_those_of_training(tiny_model: Path, tmp_path: Path, bits: int | None) -> None:
    from allhands.model.load import Conversion, get_model

    path = (
        get_model(
            str(tiny_model), tmp_path / "packed", Conversion(quantize_bits=bits, group_size=32)
        )
        if bits
        else tiny_model
    )
    found = trained_parameters(
        cluster(host(1, ssh=None, trees=(Tree(role="model", source="m", path=str(path)),)))
    )
    lora, full = made(path)
    assert found["LoRA"] == lora
    assert found["full"] == pytest.approx(full, rel=0.02)  # all matrices


def test_no_model_no_figures(tmp_path: Path) -> None:
    for content in (None, "{}", "[]", "no JSON"):
        if content:
            (tmp_path / "config.json").write_text(content)
        tree = Tree(role="model", source="m", path=str(tmp_path))
        assert trained_parameters(cluster(host(1, ssh=None, trees=(tree,)))) == {}
    assert trained_parameters(cluster()) == {}


# --- the measurement ------------------------------------------------------------------------------


def figures(a: str, b: str, seconds: float) -> Figures:
    """All-reduces of 4 kB in 0.1 ms, and of 1 MB in ``seconds``."""
    timings = [Timing(4096, 9, 1e-4, 9e-5, 2e-4), Timing(1_000_000, 9, seconds, seconds, seconds)]
    return Figures((a, b), 2, "ring", tuple(timings))


HOSTS = [Host(f"node{i}", f"node{i}") for i in (1, 2, 3)]


def test_figures_are_taken_over(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = (figures("node1", "node2", 0.002), figures("node1", "node3", 0.1))
    answer = Measurement(
        "ring", links[0], links, (Failure(("node3",), ("node2", "node3"), "no answer", "look"),)
    )
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(doctor, "measure", lambda *arguments: asked.append(arguments) or answer)
    tree = Tree(role="model", source="m", path=str(tiny_model))
    found = measured(
        HOSTS,
        cluster(host(1, ssh=None, trees=(tree,)), host(2), backend="jaccl"),
        lambda words: None,
    )
    # A group of JACCL is not started by allhands: what can be, is measured.
    assert [(hosts, backend) for hosts, backend, _ in asked] == [(HOSTS, "auto")]
    assert found.slowest == ("node1", "node3")
    # Of two ranks each link carries the bytes of the array once.
    assert [link.bus_bytes_per_s for link in found.links] == pytest.approx([5e8, 1e7])
    assert [link.latency_s for link in found.links] == [1e-4, 1e-4]
    assert [(failure.hosts, failure.hint) for failure in found.failures] == [(("node3",), "look")]
    lora, full = made(tiny_model)
    assert found.seconds["LoRA"] == links[0].seconds(4 * lora)
    assert found.seconds["full"] == pytest.approx(links[0].seconds(4 * full), rel=0.02)


def test_speeds_are_those_of_computers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have several ranks; numbers that cannot be are no speeds."""
    timings = [Timing(4096, 9, 1e-4, 9e-5, 2e-4)]
    hosts = [Host("node1", "node1"), Host("node2", "node2", slots=2), Host("absent", "absent")]
    told: tuple[float, ...] = (3e9, 1e9, 0.5e9)
    for speeds, expected in (
        (told, {"node1": 3e9, "node2": 1.5e9}),
        ((3e9, 1e9), {}),
        ((3e9, float("nan"), 1e9), {}),
    ):
        whole = Figures.from_json(
            Figures(("node1", "node2"), 3, "ring", tuple(timings), speeds).as_json()
        )
        monkeypatch.setattr(
            doctor, "measure", lambda *arguments, whole=whole: Measurement("ring", whole)
        )
        assert measured(hosts, cluster(), lambda words: None).speeds == expected
        assert Figures.from_json(whole.as_json()) == whole


def test_what_cannot_be_measured_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Measurement:
        raise ConfigError("no such thing", code="any-fault", hint="another")

    monkeypatch.setattr(doctor, "measure", refuse)
    found = measured(HOSTS, cluster(), lambda words: None)
    assert [(failure.hosts, failure.message) for failure in found.failures] == [
        (("node1", "node2", "node3"), "no such thing")
    ]
