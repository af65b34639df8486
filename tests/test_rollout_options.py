"""The options of inference servers: passed on as they are, refused where Slipstream sets them or the server's parser does."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.rollout.engines import parse_options
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.access import ServerFiles
from slipstream.rollout.engines.http_engine import HttpEngine
from slipstream.rollout.engines.options import arguments_of
from slipstream.rollout.engines.sglang import launch as sglang_server
from slipstream.rollout.engines.sglang.client import SglangEngine
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.tests.tiny import tiny_qwen3

NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}
CHOSEN = {"enforce-eager", "block-size", "device", "attention-backend", "sleep-on-idle", "disable-overlap-schedule"}
"""Arguments that Slipstream chooses for CPUs, or for one way of updating weights: an option may choose otherwise."""


def configured(kind: str, folder: Path, options: dict[str, Any]):
    words = [
        f"rollout.engine.kind={kind}",
        f"model.path={folder}",
        "agent.max_tokens=64",
        "rollout.engine.memory=64MiB",
    ]
    return load("quickstart", [*words, f"rollout.engine.options={options}"])


def command(kind: str, folder: Path, **options: Any) -> list[str]:
    return servers.command(configured(kind, folder, options), servers.LOOPBACK, 1, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "model")


KINDS = ("vllm", "sglang")


def test_values_become_words_of_a_command_line():
    assert arguments_of({"max_num_batched_tokens": 4096, "swap_space": 0.5, "async_scheduling": False}) == [
        "--max-num-batched-tokens=4096",
        "--swap-space=0.5",
        "--no-async-scheduling",
    ]
    assert arguments_of({"trust_remote_code": True, "sizes": [1, 2]} | NGRAM) == [
        "--trust-remote-code",
        "--sizes",
        "1",
        "2",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_options_come_last_and_split_a_replica(kind: str, folder: Path) -> None:
    line = command(kind, folder, tensor_parallel_size=2, max_prefill_tokens=512)
    assert line[-1] == "--max-prefill-tokens=512"
    assert sum("tensor-parallel" in word or word == "--tp-size=2" for word in line) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_that_slipstream_sets_is_refused_by_name(kind: str, folder: Path, tmp_path: Path) -> None:
    owned = (vllm_server if kind == "vllm" else sglang_server).OWNED
    config = configured(kind, folder, {})
    for files in (None, ServerFiles(str(tmp_path), True)):
        line = servers.command(config, servers.LOOPBACK, 1, seed=0, files=files)
        set_here = {word[2:].partition("=")[0] for word in line if word.startswith("--")}
        assert set_here - CHOSEN - {"tp-size"} <= owned.keys()
    for name, why in owned.items():
        option = name.replace("-", "_")
        if option in ("tensor_parallel_size", "nnodes", "quantization"):
            continue
        with pytest.raises(ConfigError, match=re.escape(f"rollout.engine.options.{option}: {why}")):
            command(kind, folder, **{option: 1})


def test_drafts_whose_log_probs_would_be_wrong_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for drafts in (NGRAM, {"spec_method": "ngram", "spec_tokens": 3}, {"spec_tokens": 3}, {"spec_model": "small"}):
        said = rf"{next(iter(drafts))}: vLLM for CPU \(0\.32\) reports wrong log-probs"
        with pytest.raises(ConfigError, match=said):
            command("vllm", folder, **drafts)
    monkeypatch.setattr(vllm_server, "serves_on_cpu", lambda: False)
    assert command("vllm", folder, **NGRAM)[-1].startswith("--speculative-config={")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{max-num-seqs: 1}", "rollout.engine.options.max-num-seqs: a name has small letters, digits and underscores"),
        ("{swap_space: null}", "rollout.engine.options.swap_space: null is no value"),
        ("{tensor_parallel_size: 0}", "rollout.engine.options.tensor_parallel_size=0: allowed are integers from 1 on"),
        ("{tensor_parallel_size: true}", "rollout.engine.options.tensor_parallel_size=True: allowed are integers"),
    ],
)
def test_what_no_server_takes_is_refused_without_one(options: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load("quickstart", [f"rollout.engine.options={options}"])


@pytest.mark.parametrize(
    ("options", "unknown", "owned", "error"),
    [
        ({"depth": 3, "loud": True}, {}, {}, ""),
        ({"deph": 3}, {"deph": "depth"}, {}, ""),
        ({"zzz": 3}, {"zzz": ""}, {}, ""),
        ({"dep": 3}, {"dep": "depth"}, {}, ""),  # an abbreviation, which argparse would take
        ({"model": "m"}, {}, {"model": "model-path"}, ""),
        ({"depth": "deep"}, {}, {}, "argument --depth: invalid int value: 'deep'"),
        ({"loud": False}, {}, {}, "unrecognized arguments: --no-loud"),
    ],
)
def test_what_a_parser_says(
    options: dict[str, Any],
    unknown: dict[str, str],
    owned: dict[str, str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = parse_options.RefusingParser()
    made.add_argument("--model-path", "--model", required=True)  # Slipstream sets it
    made.add_argument("--depth", type=int)
    made.add_argument("--loud", action="store_true")
    monkeypatch.setattr(parse_options, "parser_of", lambda kind: made)
    said = parse_options.answer("any", arguments_of(options), list(options), ["model-path", "gone"])
    assert said == {"unknown": unknown, "owned": owned, "error": error}


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("vllm", {"max_num_batched_tokens": "many"}, "not take this: argument --max-num-batched-tokens: "),
        ("sglang", {"tp_size": 2}, "options.tensor_parallel_size sets this argument"),
    ],
)
@pytest.mark.full
def test_the_servers_own_parser_is_asked_before_anything_starts(
    kind: str, options: dict[str, Any], said: str, folder: Path
) -> None:
    fine = {
        "vllm": {"compilation_config": {"mode": 0}, "async_scheduling": False},
        "sglang": {"schedule_policy": "lpm"},
    }
    servers.check_options(configured(kind, folder, fine[kind]))
    with pytest.raises(ConfigError, match=re.escape(said)):
        servers.check_options(configured(kind, folder, fine[kind] | options))


def test_clients_of_all_servers_take_the_same_request() -> None:
    """`HttpEngine` calls them all alike."""
    asked = [list(signature(kind.completion_request).parameters) for kind in (HttpEngine, VllmEngine, SglangEngine)]
    assert asked[0] == asked[1] == asked[2]
