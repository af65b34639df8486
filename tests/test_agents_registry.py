import pytest
from slipstream.agents import is_foreign, load_agent, load_renderer
from slipstream.agents.builtin import single_turn, tool_calling
from slipstream.agents.session import to_chat, to_tools
from slipstream.configs.environments import ReasoningGym
from slipstream.configs.schema import Agent
from slipstream.envs import Message, Observation, StepResult, Task, task_source
from slipstream.errors import ConfigError
from slipstream.launch.init_model import TinyModelShape, init_model
from transformers import AutoModelForCausalLM, AutoTokenizer

BOTH = r"`async def agent\(env, policy, task\)` or `async def agent\(messages, endpoint\) -> str`"


async def my_agent(env, policy, task):
    return 0.5


async def foreign(messages, endpoint, retries=3):
    return "42"


class Solver:
    async def solve(self, messages, endpoint):
        return "42"


solve = Solver().solve


def not_a_coroutine(env, policy, task):
    return 0.5


async def takes_one(messages):
    return ""


async def takes_no_task(env, policy):
    return 0.5


async def takes_anything(*arguments):
    return ""


async def takes_by_name(env, policy, *, task):
    return 0.5


def test_agents_by_name():
    assert load_agent("tool_calling") is tool_calling
    assert load_agent("single_turn") is single_turn
    assert load_agent(f"{__name__}:my_agent").__name__ == "my_agent"


def test_an_agent_that_was_written_elsewhere_is_known_by_its_signature():
    for name, expected in (("my_agent", False), ("foreign", True), ("solve", True)):
        assert is_foreign(load_agent(f"{__name__}:{name}")) is expected


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("tool_caling", "agent.kind: 'tool_caling' is not tool_calling, single_turn or of the form"),
        ("no_such_package:agent", "agent.kind: cannot import 'no_such_package'"),
        (f"{__name__}:not_a_coroutine", f"agent.kind: .* is not a coroutine; write {BOTH}"),
        (f"{__name__}:takes_one", rf"agent.kind: .*:takes_one takes \(messages\); write {BOTH}"),
        (f"{__name__}:takes_no_task", rf"agent.kind: .* takes \(env, policy\); write {BOTH}"),
        (f"{__name__}:takes_anything", rf"agent.kind: .* takes \(\*arguments\); write {BOTH}"),
        (f"{__name__}:takes_by_name", rf"agent.kind: .* takes \(env, policy, \*, task\); write {BOTH}"),
    ],
)
def test_wrong_agents_are_named(kind, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_agent(kind)


class Echo:
    """Wants three messages, rewards each with 1."""

    async def reset(self, task):
        self.seen = 0
        return Observation((Message("user", "go"),))

    async def step(self, message):
        self.seen += 1
        return StepResult((Message("user", f"seen {self.seen}"),), reward=1.0, done=self.seen == 3)

    async def close(self):
        return None


class Recorder:
    def __init__(self):
        self.histories = []

    async def chat(self, messages, tools=()):
        self.histories.append([m.content for m in messages])
        return Message("assistant", "ok")


async def test_tool_calling_plays_to_the_end_and_single_turn_once():
    policy = Recorder()
    assert await tool_calling(Echo(), policy, Task("t")) == 3.0
    assert policy.histories[-1] == ["go", "ok", "seen 1", "ok", "seen 2"]
    policy = Recorder()
    assert await single_turn(Echo(), policy, Task("t")) == 1.0
    assert policy.histories == [["go"]]


def test_the_tiny_model_is_an_ordinary_folder(tmp_path):
    source = task_source(ReasoningGym(), "train", 0)
    parameters = init_model(tmp_path / "a", sources=[source], agent=Agent(), seed=1, samples=64)
    init_model(tmp_path / "b", sources=[source], agent=Agent(), seed=1, samples=64)
    assert 900_000 < parameters < 3_000_000
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert len(tokenizer) <= model.config.vocab_size < len(tokenizer) + 64
    assert model.config.tie_word_embeddings
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id
    text = 'Ünï "quoted" 12 + 345 = ?\n\n<tool_call>\t<|im_end|>'
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("40321", add_special_tokens=False)) == 5
    renderer = load_renderer("qwen3", tokenizer, thinking=False)
    opening = source.opening(0)
    prompt = renderer.render_ids(to_chat(opening.messages), tools=to_tools(opening.tools), add_generation_prompt=True)
    assert len(prompt) < 100
    with pytest.raises(ConfigError, match="is not empty"):
        init_model(tmp_path / "a", sources=[source], agent=Agent(), shape=TinyModelShape(layers=1))
    with pytest.raises(ConfigError, match=r"agent.renderer: No renderer config registered for name='qwen'"):
        load_renderer("qwen", tokenizer, thinking=False)
    with pytest.raises(ConfigError, match=r"agent.renderer: 'glm-5' does not fit the tokenizer"):
        load_renderer("glm-5", tokenizer, thinking=False)
