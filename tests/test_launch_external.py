"""Servers that a run uses and does not start: what a config may say of them, what they must have been started for, and who may use
them. The servers are real ones, started by the command that an operator starts them with."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from slipstream.common.owned_folders import PRIVATE_VARIABLE
from slipstream.configs import Config, dump, load
from slipstream.configs.schema import TransportKind
from slipstream.errors import ConfigError, EngineError
from slipstream.launch.cli.main import main
from slipstream.launch.external_servers import check_servers, describe_server, misfit, push_address
from slipstream.launch.preflight import CHECKS
from slipstream.launch.resources import gpus_of, needed_gpus
from slipstream.launch.run import with_absolute_paths
from slipstream.launch.run_context import Addresses, RunContext
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.supervisor.external import external_servers
from slipstream.launch.supervisor.factory import make_engine
from slipstream.launch.supervisor.processes import role_names
from slipstream.launch.tune import Tuner, TuneRequest
from slipstream.planner.profile import settings_of
from slipstream.rollout.engines.access import DESCRIPTION_PATH, ServerAccess
from slipstream.rollout.engines.http_client import HttpClient
from slipstream.rollout.engines.server_keys import make_server_keys, read_server_keys
from slipstream.rpc.security import PeerTable, write_pair
from slipstream.tests import tiny
from slipstream.tests.served import KEY, ServedEngine, named
from slipstream.weightsync.fleet import ReplicaInfo
from slipstream.weightsync.publisher import Publisher
from transformers import PreTrainedModel

WAIT_S = 240.0
CPU = torch.device("cpu")
TWO = named("https://box1:8000: a.json", "https://box2:8001: b.json")


# --- the config ---------------------------------------------------------------------------------------------------


def test_a_config_names_servers_and_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "/mine")
    config = load("quickstart", [named("https://box1:8000: $KEYS/a.json", "https://box2:8001: b.json")])
    engine = config.rollout.engine
    assert engine.external == {"https://box1:8000": "/mine/a.json", "https://box2:8001": "b.json"}
    assert (engine.count, load("quickstart").rollout.engine.external) == (2, {})
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(str(tmp_path / "config.yaml")) == config
    monkeypatch.chdir(tmp_path)
    absolute = with_absolute_paths(config).rollout.engine.external
    assert list(absolute.values()) == ["/mine/a.json", f"{tmp_path}/b.json"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([named("http://a:1: k")], f"{KEY}: 'http://a:1' is not of the form https://HOST:PORT"),
        ([named("https://a: k")], f"{KEY}: 'https://a' is not of the form https://HOST:PORT"),
        ([named("https://a:0: k")], f"{KEY}: 'https://a:0' is not of the form"),
        ([named("https://a:65536: k")], f"{KEY}: 'https://a:65536' is not of the form"),
        ([named("https://token@a:1: k")], f"{KEY}: 'https://token@a:1' is not of the form"),
        ([named("https://a:1: ''")], f"{KEY}: https://a:1 has no file with its keys"),
        ([f"{KEY}={{}}"], f"{KEY}: names no server"),
        ([f"{KEY}=[https://a:1]"], f"{KEY}: ['https://a:1'] is not allowed; expected an integer >= 1 or a mapping"),
        ([named("https://a:1: 5")], f"{KEY}: "),
        (
            [TWO, "rollout.engine.kind=sglang", "rollout.partial=keep_kv"],
            "rollout.partial=keep_kv with rollout.engine.replicas that names SGLang servers of others",
        ),
        ([TWO, "weightsync.transport=shared"], "weightsync.transport=shared is one copy in the learner's memory"),
        (
            [TWO, "launch.kind=colocated", "weightsync.transport=shared", "buffer.max_staleness=0"],
            "launch.kind=colocated: servers sleep there on the devices of the learner",
        ),
    ],
)
def test_what_cannot_be(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", overrides)
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("transport", ["broadcast", "disk", "delta"])
def test_other_transports_are_allowed(transport: str) -> None:
    assert load("quickstart", [TWO, f"weightsync.transport={transport}"]).weightsync.transport == transport


def test_a_run_starts_none_beside_them() -> None:
    config = load("quickstart", [TWO, "rollout.engine.kind=transformers"])
    assert [name for name in role_names(config) if name.startswith("engine-")] == []
    assert not any(name.startswith("engine-") for name in needed_gpus(config, engines=True, learners=True))
    assert "evaluator" not in gpus_of(config)
    assert settings_of(config)[KEY] == 2  # `simulate` and `explain` know their number


def test_commands_that_start_servers_of_their_own_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = f"{KEY}: it names servers that others started, and `slipstream %s` starts its own; allowed here is a number"
    for command, more in {"eval": (), "rate": ("--out", str(tmp_path / "rows.jsonl"))}.items():
        assert main([command, "quickstart", TWO, *more]) == 2
        assert says % command in capsys.readouterr().err
    with pytest.raises(ConfigError) as refused:
        Tuner(TuneRequest(source="quickstart", overrides=(TWO,), minutes=1.0, out=tmp_path / "out"), print)
    assert str(refused.value).startswith(says % "tune")


def test_an_address_towards_the_servers_is_where_the_learner_listens() -> None:
    assert push_address(load("quickstart"), "10.1.2.3") == "10.1.2.3"
    assert push_address(load("quickstart", [named("https://127.0.0.1:9: k")]), "10.1.2.3") == "127.0.0.1"


# --- the file of keys ---------------------------------------------------------------------------------------------


def test_a_file_of_keys_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = make_server_keys(path, "127.0.0.1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_server_keys(KEY, str(path)) == keys
    assert (keys.access.request, keys.access.control) == (keys.request, keys.control)
    assert not any(secret in repr(keys) for secret in (keys.request, keys.control, keys.secret, keys.certificate_key))
    with pytest.raises(FileExistsError):
        make_server_keys(path, "127.0.0.1")

    def refusal(*servers: str) -> str:
        with pytest.raises(ConfigError) as refused:
            CHECKS["server keys"].run(RunInputs(load("quickstart", [named(*servers)])))
        assert "\n" not in str(refused.value)
        return str(refused.value)

    other = tmp_path / "other.json"
    assert refusal(f"https://a:1: {other}").startswith(
        f"{KEY}: {other} holds no keys of a server (No such file or directory); copy the file that `slipstream serve`"
    )
    other.write_text("{}")
    assert "holds no keys of a server (Object missing required field" in refusal(f"https://a:1: {other}")
    assert refusal(f"https://a:1: {path}", f"https://b:1: {path}") == (
        f"{KEY}: https://a:1 and https://b:1 have the same keys; each server needs a file of its own"
    )
    path.chmod(0o640)
    assert f"{path} has mode 0640" in refusal(f"https://a:1: {path}")
    assert f"chmod 600 {path}" in refusal(f"https://a:1: {path}")
    path.chmod(0o600)
    assert CHECKS["server keys"].run(RunInputs(load("quickstart", [named(f"https://a:1: {path}")]))) == str(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--address", "http://127.0.0.1:8000"), "--address: 'http://127.0.0.1:8000' is not of the form https://"),
        (("model.path=no/such/model",), "model.path: 'no/such/model' is no folder"),
        (("--keys", "none/keys.json"), "--keys: none/keys.json cannot be written"),
        (("--keys", "open.json"), "--keys: open.json has mode 0644"),
    ],
)
def test_a_server_that_cannot_be_started_is_one_line(
    arguments: tuple[str, ...],
    says: str,
    folders: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_server_keys(tmp_path / "open.json", "127.0.0.1")
    (tmp_path / "open.json").chmod(0o644)
    usual = (f"model.path={folders[0]}", "--address", "https://127.0.0.1:8000", "--keys", "keys.json")
    assert main(["serve", "quickstart", "rollout.engine.kind=transformers", *usual, *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"slipstream: {says}"), line
    assert line.count("\n") == 1


# --- a server that answers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> Iterator[ServedEngine]:
    server = ServedEngine(tmp_path_factory.mktemp("served"), folders[0], "agent.max_tokens=512")
    yield server
    server.kill()


def run_of(server: ServedEngine, *overrides: str) -> Config:
    return load("quickstart", [*server.config, named(server.named), *overrides])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["agent.max_tokens=513"], "agent.max_tokens = 512, this run needs 513 or more"),
        (["rollout.engine.max_concurrent=65"], "rollout.engine.max_concurrent = 64, this run needs 65 or more"),
        (["model.dtype=bfloat16", "weightsync.canary_tolerance=0.2"], "model.dtype = float32, this run has bfloat16"),
        (["rollout.engine.kind=fake"], "rollout.engine.kind = transformers, this run has fake"),
        (
            ["rollout.engine.options.quantization=fp8", "weightsync.canary_tolerance=0.2"],
            "rollout.engine.options.quantization = none, this run has fp8",
        ),
        (
            ["learner.backend.options=[router_replay]"],
            "learner.backend.options=[router_replay] = false, this run has true",
        ),
    ],
)
def test_what_a_server_must_have_been_started_for(server: ServedEngine, overrides: list[str], says: str) -> None:
    found = describe_server(load("quickstart", server.config))
    line = misfit("https://a:1", describe_server(run_of(server, *overrides)), found)
    assert line.startswith(f"{KEY}: https://a:1 was started with {says}; start it by `slipstream serve`")
    assert misfit("https://a:1", describe_server(run_of(server, "agent.max_tokens=256")), found) == ""


def test_another_model_or_release_is_named(server: ServedEngine, policy: Path) -> None:
    found = describe_server(load("quickstart", server.config))
    other = misfit("https://a:1", describe_server(run_of(server, f"model.path={policy}")), found)
    assert " of model.path = " in other
    earlier = msgspec.structs.replace(found, same=found.same | {"Slipstream": "0.0.1"})
    assert "was started with Slipstream = 0.0.1" in misfit("https://a:1", found, earlier)


def test_the_check_before_a_run_asks_the_servers(server: ServedEngine, folders: list[Path], tmp_path: Path) -> None:
    file, away = tmp_path / "other.json", f"https://127.0.0.1:{tiny.free_port()}"
    make_server_keys(file, "127.0.0.1")
    assert check_servers(run_of(server)) == f"started by others: {server.url}"
    assert CHECKS["engine"].run(RunInputs(run_of(server))) == f"started by others: {server.url}"
    assert CHECKS["memory"].run(RunInputs(run_of(server))).endswith("MiB free")
    two = load("quickstart", [*server.config, named(f"{away}: {file}", server.named)])
    assert check_servers(two).startswith(f"started by others: {server.url}; not there yet: {away} (a server at ")
    with pytest.raises(ConfigError, match=r"agent\.max_tokens = 512, this run needs 513 or more"):
        check_servers(run_of(server, "agent.max_tokens=513"))
    for url, why in ((away, "is not reachable"), (server.url, "has another certificate")):
        with pytest.raises(ConfigError, match=rf"^{KEY}: none of its servers answers as one .*{why}"):
            check_servers(load("quickstart", [*server.config, named(f"{url}: {file}")]))
    port = server.url.rpartition(":")[2]
    twice = load("quickstart", [*server.config, named(server.named, f"https://localhost:{port}: {tmp_path}/copy.json")])
    (tmp_path / "copy.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(server.keys, public="x" * 40)))
    (tmp_path / "copy.json").chmod(0o600)
    with pytest.raises(ConfigError, match="are the same server; name it once"):
        check_servers(twice)


async def test_only_its_keys_open_it(server: ServedEngine) -> None:
    owner, worker = server.client(), server.client(control=False)
    stranger = HttpClient("it", server.url, WAIT_S, ServerAccess(certificate=server.keys.access.certificate))
    try:
        assert json.loads(await owner.call("GET", DESCRIPTION_PATH))["least"]["agent.max_tokens"] == 512
        await worker.call("GET", "/health")
        for client, path, status in (
            (worker, DESCRIPTION_PATH, 403),
            (worker, "/is_paused", 403),
            (stranger, DESCRIPTION_PATH, 401),
            (stranger, "/health", 401),
        ):
            with pytest.raises(EngineError, match=f"answered {status}"):
                await client.call("GET", path)
    finally:
        for client in (owner, worker, stranger):
            await client.close()


def test_its_keys_are_in_its_private_folder_only(server: ServedEngine) -> None:
    keys, process = server.keys, psutil.Process(server.pid)
    seen, environment = " ".join(process.cmdline()), process.environ()
    for secret in (keys.request, keys.control, keys.secret):
        assert secret not in seen
        assert not any(secret in value for value in environment.values())
    folder = Path(environment[PRIVATE_VARIABLE])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.name != ".lock"} == {0o600}


async def test_weights_reach_it_by_every_transport_that_is_allowed(
    server: ServedEngine,
    folders: list[Path],
    models: list[PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its acknowledgments come over a guarded socket, by the key in its file; those of another key do not count."""
    monkeypatch.setenv(PRIVATE_VARIABLE, str(tmp_path))
    write_pair(tmp_path)
    config, keys = run_of(server), server.keys
    context = RunContext(config, Addresses("", "", "", ""), str(tmp_path), "gloo", str(tmp_path), pushed=True)
    engine = make_engine(context, ServerAccess(others={"engine-0": keys.access}), ReplicaInfo("engine-0", server.url))

    async def push(version: int, transport: TransportKind, peers: dict[str, str], push_s: float) -> dict[str, str]:
        publisher = Publisher(
            [engine],
            transport=transport,
            folder=tmp_path / transport,
            spool=tmp_path,
            host=push_address(config, "10.0.0.1"),
            backend="gloo",
            device=CPU,
            bucket_bytes=64 << 10,
            push_s=push_s,
            canary_tolerance=0.002,
            peers=PeerTable(peers),
        )
        try:
            one = version % 2
            report = await publisher.publish(version, tiny.weights(folders[one]).items(), *tiny.canary(models[one]))
            return report.failed
        finally:
            publisher.close()

    transports: tuple[TransportKind, ...] = ("broadcast", "disk", "delta")
    try:
        for version, transport in enumerate(transports, start=1):
            assert await push(version, transport, {"engine-0": keys.public}, 60.0) == {}
            assert await engine.version() == version
        failed = await push(4, "disk", {"engine-1": keys.public}, 4.0)
        assert "no ack of rank 0" in failed["engine-0"]
    finally:
        await engine.close()


async def test_a_server_that_comes_back_for_another_config_stays_out(server: ServedEngine, tmp_path: Path) -> None:
    """As one is that was away when the run was checked."""
    config = run_of(server, "agent.max_tokens=600")
    told: list[str] = []
    one, client = external_servers(config, told.append)["engine-0"].attach(), server.client()
    try:
        assert [await one.is_ours(client) for _ in range(3)] == [False, False, False]
    finally:
        await client.close()
    assert told == [one.url + " is left out: " + one.why]
    assert "agent.max_tokens = 512, this run needs 600 or more" in one.why
