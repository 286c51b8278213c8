"""Which files are brought and what they are called elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from allhands.cli.commands import function_of
from allhands.cluster.hosts import Host
from allhands.cluster.probes.files import root_directory
from allhands.cluster.probes.trees import cache_place, hub_place
from allhands.cluster.sync.plan import FoundFile, Root, environment_of, make_plan
from allhands.errors import AllhandsError, ConfigError, DataError, ModelError
from allhands.runtime.blas import cache_dir


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a working directory in it."""
    work = tmp_path / "home" / "work"
    work.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "XDG_CACHE_HOME",
        "ALLHANDS_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(work)
    return work


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(words: list[str]) -> list[tuple[str, str, str]]:
    """Base, root and path of each file."""
    return [
        (found.root.base, found.root.at, "/".join(found.parts)) for found in make_plan(words).files
    ]


def on(host: Host, found: FoundFile) -> str:
    return os.path.join(root_directory(found.root.on(host)), *found.parts)


def test_a_path_is_found_under_the_words_that_name_it(here: Path) -> None:
    for path in ("data/train.jsonl", "data/sub/more.jsonl", "config.yaml", "../beside/x"):
        write(here / path)
    assert names(["data"]) == [("cwd", "data", "sub/more.jsonl"), ("cwd", "data", "train.jsonl")]
    assert names(["./config.yaml"]) == [("cwd", "", "config.yaml")]
    assert names(["../beside"]) == [("cwd", "../beside", "x")]
    assert names([str(here / "data/sub")]) == [("absolute", str(here / "data/sub"), "more.jsonl")]
    assert names(["~/work/data/sub"]) == [("home", "work/data/sub", "more.jsonl")]


def test_every_host_has_its_own_places(here: Path) -> None:
    write(here / "data" / "a")
    write(here.parent / "m" / "b")
    relative, home = (make_plan([word]).files[0] for word in ("data", "~/m"))
    assert on(Host("a", "a", cwd="/elsewhere"), relative) == "/elsewhere/data/a"
    assert on(Host("a", "a", cwd="~/there"), relative) == f"{here.parent}/there/data/a"
    assert on(Host("a", "a", cwd="there"), relative) == f"{here.parent}/there/data/a"
    assert on(Host("a", "a"), relative) == f"{here}/data/a"
    assert on(Host("a", "a"), home) == f"{here.parent}/m/b"


def test_a_working_directory_that_cannot_be_there_is_the_home(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the agent does it, which starts the ranks."""
    write(here / "data" / "a")
    told = make_plan(["data"]).files[0].root.on(Host("a", "a"))
    (here.parent / "file").write_text("x")
    for cwd in (str(here.parent / "file" / "sub"), str(here.parent / "file")):
        assert root_directory(told | {"cwd": cwd}) == str(here.parent / "data")
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(here))
    assert root_directory(told | {"cwd": str(here / "new")}) == str(here.parent / "data")
    assert root_directory(told | {"cwd": str(here.parent / "new")}) == str(
        here.parent / "new" / "data"
    )
    assert root_directory(told | {"cwd": "/proc/nothing", "required": True}) == "/proc/nothing/data"


def test_a_model_of_the_hub_is_found_by_its_name_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = here.parent / ".cache" / "huggingface" / "hub"
    repository = hub / "models--owner--name"
    blob = write(repository / "blobs" / "0123", "weights")
    write(repository / "blobs" / "4567", "of another revision")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    write(repository / "snapshots" / "def" / "other")
    write(repository / "refs" / "main", "abc")
    write(repository / "refs" / "old", "def")
    plan = make_plan([str(snapshot)])
    assert [(found.root, "/".join(found.parts)) for found in plan.files] == [
        (Root("hub", "models--owner--name"), "refs/main"),
        (Root("hub", "models--owner--name"), "snapshots/abc/model.safetensors"),
    ]
    assert plan.files[1].path.read_text() == blob.read_text()
    host = Host("a", "a")
    assert on(host, plan.files[1]) == str(snapshot / "model.safetensors")
    monkeypatch.setenv("HF_HOME", "/disk/hf")
    assert (
        on(host, plan.files[1])
        == "/disk/hf/hub/models--owner--name/snapshots/abc/model.safetensors"
    )


def test_the_hubs_client_finds_what_is_brought(here: Path, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    repository = here.parent / ".cache" / "huggingface" / "hub" / "models--owner--name"
    write(repository / "snapshots" / "abc" / "config.json", "{}")
    write(repository / "refs" / "main", "abc")
    for found in make_plan([str(repository / "snapshots" / "abc")]).files:
        write(tmp_path / "there" / found.root.at / Path(*found.parts), found.path.read_text())
    got = snapshot_download("owner/name", cache_dir=tmp_path / "there", local_files_only=True)
    assert (Path(got) / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("environment", "hub", "cache"),
    [
        ({}, "~/.cache/huggingface/hub", "~/.cache/allhands"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub", "/x/allhands"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub", "/x/allhands"),
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c", "~/.cache/allhands"),
        ({"HUGGINGFACE_HUB_CACHE": "/old"}, "/old", "~/.cache/allhands"),
        ({"ALLHANDS_CACHE": "~/own"}, "~/.cache/huggingface/hub", "~/own"),
    ],
)
def test_the_caches_are_where_their_owners_look(
    here: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], hub: str, cache: str
) -> None:
    if sys.platform == "darwin":
        pytest.skip("allhands has another cache there")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hub_place() == str(Path(hub).expanduser())
    assert cache_place() == str(Path(cache).expanduser()) == str(cache_dir())


def test_macs_have_their_own_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (
        cache_place() == str(cache_dir({})) == str(here.parent / "Library" / "Caches" / "allhands")
    )


def test_what_lies_in_a_cache_goes_to_the_cache(here: Path) -> None:
    model = write(cache_dir() / "SmolLM" / "config.json").parent
    assert names([str(model)]) == [("cache", "SmolLM", "config.json")]


def test_a_hosts_own_variables_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_CACHE", "/here")
    monkeypatch.setenv("HF_HOME", "/not/forwarded")
    assert environment_of(Host("a", "a", envs={"HF_HOME": "/h", "TOKEN": "t"})) == {
        "ALLHANDS_CACHE": "/here",
        "HF_HOME": "/h",
    }
    assert environment_of(Host("a", "a", envs={"ALLHANDS_CACHE": "/there"})) == {
        "ALLHANDS_CACHE": "/there"
    }


def test_what_is_no_file_is_named_and_links_are_followed_once(here: Path) -> None:
    write(here / "data" / "a")
    write(here / "real" / "b")
    (here / "data" / "linked").symlink_to(here / "real")
    (here / "data" / "circle").symlink_to(here / "data")
    (here / "data" / "nothing").symlink_to("absent")
    write(here / "data" / ".allhands-0123.part")
    os.mkfifo(here / "data" / "pipe")
    plan = make_plan(["data", "data/a"])
    assert [("/".join(found.parts)) for found in plan.files] == ["a", "linked/b"]
    notes = sorted(plan.notes)
    assert [note.partition(" ")[0] for note in notes] == [
        str(here / "data" / name) for name in ("circle", "nothing", "pipe")
    ]
    assert [note.rpartition(": ")[0].partition(" ")[2] for note in notes] == [
        "leads back to a directory above it",
        "is a link to nothing",
        "is no regular file",
    ]


def test_names_that_a_mac_takes_for_one_are_told(here: Path) -> None:
    write(here / "data" / "A")
    write(here / "data" / "a")
    assert len(make_plan(["data"]).files) == 2
    assert "differ in case only" in make_plan(["data"]).notes[0]


def test_wrong_paths_are_told(here: Path) -> None:
    (here / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        make_plan(["absent"])
    assert caught.value.code == "path-missing"
    assert caught.value.where == "absent"
    for words in ([], ["empty"]):
        with pytest.raises(ConfigError) as caught:
            make_plan(words)
        assert caught.value.code == "nothing-to-do"


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["--data", "absent"], DataError, 3),
        (["--data", "/absent/data"], DataError, 3),
        (["--model", "./absent"], ModelError, 4),
        (["absent"], ConfigError, 2),
        (["-c", "absent.yaml"], ConfigError, 2),
    ],
)
def test_what_is_missing_has_the_code_that_training_has_for_it(
    here: Path, arguments: list[str], kind: type[AllhandsError], code: int
) -> None:
    app = typer.Typer()
    app.command()(function_of("cluster.ClusterSync cluster_sync:sync"))
    with pytest.raises(kind) as caught:
        app(["--hosts", "a", *arguments], standalone_mode=False)
    assert caught.value.exit_code == code
    assert caught.value.where == arguments[-1]
    assert caught.value.hint


def test_an_unreadable_directory_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    write(here / "data" / "a")
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        make_plan(["data"])
