"""Which processes are forked in tests, and what their fork servers have imported: an *image* for each kind of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

OURS = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.fsdp",
    "torch.profiler._cupti_monitor",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "slipstream.agents.chat_template",
    "slipstream.agents.command",
    "slipstream.agents.image_renderer",
    "slipstream.launch.cli.main",
    "slipstream.launch.cli.role",
    "slipstream.launch.cli.train",
    "slipstream.launch.program.link",
    "slipstream.launch.program.run",
    "slipstream.launch.prompts",
    "slipstream.launch.run",
    "slipstream.launch.explain",
    "slipstream.launch.samplers",
    "slipstream.launch.supervisor.entrypoints",
    "slipstream.launch.supervisor.factory",
    "slipstream.launch.supervisor.learner_rank",
    "slipstream.launch.supervisor.push_targets",
    "slipstream.launch.supervisor.samples",
    "slipstream.launch.supervisor.supervisor",
    "slipstream.dashboard.export",
    "slipstream.envs.adapters.nemo_gym",
    "slipstream.envs.reasoning_gym",
    "slipstream.learner.fsdp2.backend",
    "slipstream.learner.megatron.backend",
    "slipstream.learner.loop",
    "slipstream.buffer.service",
    "slipstream.monitor.recorder",
    "slipstream.rollout.evaluation",
    "slipstream.rollout.gateway_agents",
    "slipstream.rollout.player",
    "slipstream.rollout.reward_server",
    "slipstream.rollout.worker",
    "slipstream.rollout.engines.registry",
    "slipstream.rollout.engines.vllm.client",
    "slipstream.rollout.engines.server.app",
    "slipstream.rollout.engines.transformers.engine",
    "slipstream.rollout.engines.fake.engine",
    "slipstream.tests.forkgate",
    "slipstream.tests.tiny",
    "slipstream.tests.ranks",
)
"""What most commands of a run import. One that is renamed is imported by the command itself, later."""

VLLM = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3",
    # Both import these when they have begun, half a second of CPU in all.
    "model_hosting_container_standards.sagemaker",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.instrumentator.offline_docs",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.dev.cache.api_router",
    "vllm.entrypoints.serve.dev.rpc.api_router",
    "vllm.entrypoints.serve.dev.server_info.api_router",
    "vllm.entrypoints.serve.dev.sleep.api_router",
    "vllm.entrypoints.serve.elastic_ep.api_router",
    "vllm.entrypoints.serve.utils.fingerprint",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvicorn.lifespan.on",
)
"""What a vLLM server and the process that it computes in import. What this version of it has not is left out."""

SGLANG = (
    "slipstream.common.process",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.models.qwen3",
)
"""What the three processes of an SGLang server import, in its own Python."""

PARSERS = "rollout/engines/parse_options.py"
"""The script that asks a server's own parser, and whose first argument is the kind of the server."""

IMAGES = {"ours": OURS, "vllm": (*OURS, *VLLM), "sglang": SGLANG}
"""Image name -> the modules that its fork server imports."""

NEVER_STARTS = {
    "role": ("buffer", "worker", "learner", "reference", "critic", "sft"),
    "ledger": (),
    "replicas": (),
    "workers": (),
}
"""Commands, or their first arguments, whose processes start no others of this package: these get no fork server of their own."""

SERVED_BY_VLLM = re.compile("kind: (vllm|classifier|judge)")
OTHER_ENGINE = re.compile("engine:\n +kind: (?!vllm)")
"""In the config of a run: engines and reward models that vLLM serves, and an engine that is another."""

PRESETS = Path(__file__).parent.parent / "configs"
"""Where a config is that is named without a path."""

KNOWN = re.compile(r"slipstream\.(tests|launch\.env_check)\b")
"""In code that is forked: helpers of tests, and the checks of an environment."""

XDIST = "import sys;exec(eval(sys.stdin.readline()))"
"""Code of a process that pytest-xdist starts."""

LOADS_VLLM = ("vllm.", "slipstream.rollout.engines.vllm.", "slipstream.tests.vllm_in_fp8")
"""Modules whose processes load vLLM."""

GATE_FLAG = "--gate"
"""First argument of what is no command but the gate, see `forkgate.py`; the others are its address and its image."""


def image_of(command: Sequence[str], environment: dict[str, str]) -> str | None:
    """The image that `command` is forked from; None where it is executed."""
    if command[1:2] == (GATE_FLAG,):
        return command[3]
    if (plain := without_nice(command)[0]) is not command:
        return image_of(plain, environment)
    kind, what, rest = split_command(command)
    if kind == "-m" and what.startswith("sglang."):
        return "sglang"
    if not kind and what.endswith(PARSERS) and rest[0] == "sglang":
        return "sglang"
    if command[0] != sys.executable or environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        return None
    if (kind == "-m" and what.startswith(LOADS_VLLM)) or (not kind and what.endswith(PARSERS)):
        return "vllm"
    if kind == "-m" and what == "slipstream.launch.cli":
        return "vllm" if _runs_vllm(rest) else "ours"
    if kind == "-m" and what == "slipstream.common.process" and rest:  # it becomes the rest
        became = image_of(rest, environment)
        return became if became != "sglang" else None
    if kind == "-m" and what.startswith(("slipstream.rollout.engines.", "slipstream.benchmarks.")):
        return "ours"
    if kind == "-m" and what == "pytest":
        return "ours"
    if kind == "-c":
        known = what.startswith(("from multiprocessing.spawn import", XDIST)) or KNOWN.search(what)
        return "ours" if known else None
    return "ours" if not kind and what.startswith(str(Path(__file__).parent)) else None


def _runs_vllm(words: Sequence[str]) -> bool:
    """Whether this command starts vLLM's servers, as far as its words and its run's config tell. A reward model is served by vLLM
    beside any engine."""
    match words[:2]:
        case ["resume", run]:
            return any(SERVED_BY_VLLM.search(path.read_text()) for path in Path(run).glob("*.yaml"))
        case ["train" | "eval", source]:
            named = [word for word in words if "engine.kind=" in word or "engine={" in word]
            rewarded = any(word.startswith(("reward.kind=classifier", "reward.kind=judge")) for word in words)
            file = Path(source) if Path(source).is_file() else PRESETS / f"{source}.yaml"
            if not named and file.is_file() and OTHER_ENGINE.search(config := file.read_text()):
                return rewarded or SERVED_BY_VLLM.search(config) is not None
            return not named or rewarded or any("vllm" in word for word in named)
    return False


def without_nice(command: Sequence[str]) -> tuple[Sequence[str], int]:
    """What `nice -n NUMBER COMMAND` begins, and by how much more slowly; other commands as they are."""
    return (command[3:], int(command[2])) if tuple(command[:2]) == ("nice", "-n") else (command, 0)


def split_command(command: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """`-m`, `-c` or nothing, then the module, code or script, then its arguments. Other flags of Python are left out."""
    for at, word in enumerate(command[1:], 1):
        if word in ("-m", "-c"):
            return word, command[at + 1], tuple(command[at + 2 :])
        if not word.startswith("-"):
            return "", word, tuple(command[at + 1 :])
        if word not in ("-P", "-B", "-u", "-Wignore"):
            break
    return "?", "", ()


def starts_others(command: Sequence[str]) -> bool:
    """Whether a process of this command may start others of this package."""
    _, _, words = split_command(command)
    if not words or words[0] not in NEVER_STARTS:
        return True
    kinds = NEVER_STARTS[words[0]]
    return bool(kinds) and not words[1].startswith(kinds)
