"""What the documentation shows is true: commands parse, configurations load, code runs, keys, files and links exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import psutil
import pytest
from safetensors.torch import load_file
from slipstream.configs import Config, SftConfig, describe, describe_schema, load
from slipstream.configs.backends import MegatronOption, Option
from slipstream.envs import Message, task_source
from slipstream.launch.cli.main import make_parser
from slipstream.launch.cli.options import merge_overrides
from slipstream.launch.init_model import TinyModelShape
from slipstream.tests.runs import metrics, tiny_policy

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.yaml")])
MARKDOWN = [page for page in PAGES if page.suffix == ".md"]

MINE = {"CONFIG": "quickstart", "my.yaml": "quickstart", "RUN": "runs/x", "DIR": "models/x", "NAME": "engine-0"} | {
    word: "1" for word in "NSM"
}
"""What stands for the reader's own in a command, and what the test puts there."""

NAMES_FILES = re.compile(r"\.(py|jsonl?|md|yaml|sqlite|html|png|arrays)$")


def page_name(page: Path) -> str:
    return page.name


def commands(page: Path) -> list[str]:
    """Every `slipstream ...` in a code block, in backticks or in a comment of a preset."""
    text = page.read_text()
    prefix = r"^(?:    |#     |  )(?:make [\w-]+ && )?(?:\.venv/bin/)?"
    return re.findall(prefix + r"(slipstream [a-z].*)$", text, re.MULTILINE) + re.findall(
        r"`(slipstream [a-z][^`]*)`", text
    )


def words(command: str) -> list[str]:
    """The arguments of a command as the documentation writes it: without notes and optional parts, the first of alternatives."""
    command = re.split(r"\s{2,}", command)[0]  # a note stands behind two spaces
    command = re.sub(r"\[(?:key=value \.\.\.|--[^\]]*|CONFIG|COUNT)\]", "", command)
    alternatives = (
        word.split("|")[0] if re.fullmatch(r"[A-Za-z0-9|-]+", word) else word for word in shlex.split(command)
    )
    return [MINE.get(word, word) for word in alternatives][1:]


def test_the_pages_have_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 40


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_parses_and_its_configuration_loads(page: Path) -> None:
    parser = make_parser()
    for command in commands(page):
        arguments = words(command)
        if len(arguments) == 1:  # the text names the command
            assert f" {arguments[0]} " in parser.format_help(), command
            continue
        options, unparsed = parser.parse_known_args(arguments)
        merge_overrides(parser, options, unparsed)
        config = getattr(options, "config", None) or "runs/"
        if not config.startswith("runs/"):
            load(config, getattr(options, "overrides", ()), SftConfig if arguments[0] == "sft" else Config)


@pytest.mark.parametrize("page", MARKDOWN, ids=page_name)
def test_every_configuration_loads(page: Path, tmp_path: Path) -> None:
    text = re.sub(r"\\\n *", "", page.read_text())
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    lines = re.findall(r"^    ((?:env|agent|learner|rollout|buffer)[.:].*)$", text, re.MULTILINE)
    overrides = [line for line in lines if not re.match(r"\w+:", line)]
    for block in blocks:
        (tmp_path / "config.yaml").write_text(extended(block))
        load(str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text("\n".join(["extends: quickstart", *(set(lines) - set(overrides))]))
    load(str(tmp_path / "config.yaml"))
    for line in overrides:
        load("quickstart", shlex.split(line))


def extended(block: str) -> str:
    """A whole config of a block that may be a part of one."""
    return block if block.startswith("extends:") else f"extends: quickstart\n{block}"


def module_of(page: Path, name: str, defines: str) -> ModuleType:
    """The block of Python on a page that defines a name, as a module."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if re.search(rf"^(class|def) {defines}\b", block, re.MULTILINE)]
    module = ModuleType(name)
    exec(compile(found, str(page), "exec"), vars(module))
    return module


async def test_the_data_of_the_page_is_scored_by_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row, function and config of the section on data are what they claim together."""
    page = (ROOT / "docs" / "environments.md").read_text()
    row, function, config = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("json", "python", "yaml"))
    assert row
    assert function
    assert config
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(row[1])
    (tmp_path / "my.py").write_text(function[1])
    (tmp_path / "config.yaml").write_text(extended(config[1]))
    source = task_source(load(str(tmp_path / "config.yaml")).env, "train", 0)
    env = source.make()
    opening = await env.reset(source.task(0))
    assert [m.content for m in opening.messages] == ["Answer with a number.", "What is 17 + 25?"]
    # The second is how the quickstart's model answers.
    for answer, reward in ((" 42", 1.0), ("<answer>42</answer>", 1.0), ("41", 0.0), ("none", 0.0)):
        env = source.make()
        await env.reset(source.task(0))
        assert (await env.step(Message("assistant", answer))).reward == reward


@pytest.mark.parametrize(
    ("page", "factory", "right"),
    [
        ("README.md", "shop:Shop", lambda task: {"tea": "3.20", "milk": "1.10"}.get(task.payload["item"], "2.75")),
        (
            "docs/environments.md",
            "shop:Shop",
            lambda task: {"tea": "3.20", "milk": "1.10"}.get(task.payload["item"], "2.75"),
        ),
        (
            "docs/environments.md",
            "capitals:Capitals",
            lambda task: {"France": "Paris"}.get(task.payload["country"], "Tokyo"),
        ),
    ],
)
async def test_the_environments_of_the_pages_run(page, factory, right, monkeypatch) -> None:
    name = factory.partition(":")[0]
    monkeypatch.setitem(sys.modules, name, module_of(ROOT / page, name, factory.partition(":")[2]))
    config = load("quickstart", ["env.kind=python", f"env.factory={factory}", "agent.kind=single_turn"])
    source = task_source(config.env, "train", 0)
    for answer, reward in ((right, 1.0), (lambda task: "no", 0.0)):
        task, env = source.task(3), source.make()
        observation = await env.reset(task)
        assert observation.messages[0].role == "user"
        result = await env.step(Message("assistant", answer(task)))
        assert (result.reward, result.done) == (reward, True)
        await env.close()


def test_the_readme_names_what_it_needs_and_the_size_of_its_model(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    for need in ("`lscpu`", "GB of disk", "GB of free memory", "minutes on two cores"):
        assert need in text
    model = tiny_policy(tmp_path / "model", TinyModelShape())
    parameters = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    assert f"{parameters / 1e6:.2f} million parameters" in text


def test_every_option_of_the_learners_backend_has_its_row_for_each_kind() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [*get_args(Option)]
    assert {name for name, megatrons in rows if not re.match(r"no\b", megatrons)} == {*get_args(MegatronOption)}
    for kind, options in (("FSDP2", Option), ("Megatron-core", MegatronOption)):
        section = re.split(r"^## ", page, flags=re.MULTILINE)
        (found,) = [text for text in section if text.startswith(f"{kind}\n")]
        assert re.findall(r"^\| `options=\[(\w+)\]`", found, re.MULTILINE) == [*get_args(options)], kind


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_key_file_and_link_exists(page: Path) -> None:
    text = page.read_text()
    keys = {doc.key for doc in (*describe_schema(), *describe(SftConfig()))}
    keys |= {key[: dot.start()] for key in keys for dot in re.finditer(r"\.", key)}
    mappings = (
        "learner.backend.parallel",
        "learner.aux_models",
        "learner.algorithm.advantage.lam",
        "learner.algorithm.terms",
        "reward.weights",
        "sft.loss",
        "rollout.failures",
        "env.parts",
        "launch.ports",
    )
    for name in re.findall(r"`((?:\w+\.)+\w+)(?:=[^`]*)?`", text):
        if name.partition(".")[0] in keys and not NAMES_FILES.search(name):
            assert name in keys or name.startswith(mappings), f"{page.name} names {name}"
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|toml))`", text):
        assert (ROOT / name).exists() or any(ROOT.glob(f"*/{name}")) or re.search("NAME|ROOM", name), (
            f"{page.name} names {name}"
        )
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        other = page.parent / file if file else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_the_two_hosts_of_the_page_on_clusters(tmp_path: Path) -> None:
    begin, end = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-eu", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )

    try:
        done = run(begin)
    finally:
        ended = run(end)
    assert done.returncode == 0, done.stdout[-5000:]
    assert ended.returncode == 0, ended.stdout
    left = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
    assert psutil.wait_procs(left, timeout=30)[1] == []
    assert [row["step"] for row in metrics(tmp_path / "runs" / "two")] == [1, 2, 3]
