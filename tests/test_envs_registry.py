import msgspec
import pytest
from slipstream.configs.environments import Mixture, PythonEnv, ReasoningGym
from slipstream.configs.schema import FAILURES, Failure
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task, parts_of, require_penalties, task_source
from slipstream.errors import ConfigError


class Guess(SimpleEnv):
    def task(self, index):
        return Task(f"guess-{index}", {"secret": self.rng(index).randint(1, self.arguments["highest"])})

    async def reset(self, task):
        self.secret = task.payload["secret"]
        return Observation((Message("user", "Guess the number."),))

    async def step(self, message):
        return StepResult(reward=float(message.content == str(self.secret)), done=True)


def not_a_source(split, seed):
    return object()


def here(name, **arguments):
    return PythonEnv(factory=f"{__name__}:{name}", arguments=arguments)


async def test_ten_lines_make_an_environment():
    source = task_source(here("Guess", highest=1000), "train", 0)
    task = source.task(3)
    assert task == source.task(3)
    assert task != task_source(here("Guess", highest=1000), "eval", 0).task(3)
    assert source.demonstration(task, source.rng(0)) is None
    first, second = source.make(), source.make()
    await first.reset(task)
    await second.reset(source.task(4))
    assert (await first.step(Message("assistant", str(task.payload["secret"])))).reward == 1.0
    assert (await second.step(Message("assistant", str(task.payload["secret"])))).reward == 0.0
    await first.close()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (PythonEnv(factory="guess"), "env.factory: 'guess' is not of the form package.module:Name"),
        (PythonEnv(factory="no_such_package.x:Y"), "env.factory: cannot import 'no_such_package.x'"),
        (here("Gues"), "env.factory: .* has no callable 'Gues'; it has .*Guess"),
        (here("not_a_source", highest=3), "env.arguments: .*not_a_source does not take"),
        (
            PythonEnv(factory="slipstream.envs:ToolEnv"),
            "env.factory: .*ToolEnv has no question and no score and no task; w",
        ),
        (here("not_a_source"), "env.factory: .* returned object without name, task, make, demonstration"),
    ],
)
def test_wrong_factories_are_named(config, complaint):
    with pytest.raises(ConfigError, match=complaint):
        task_source(config, "train", 0)


class Priced(Guess):
    penalty = -1


def test_a_mixture_is_its_parts_by_name_and_share_in_their_order():
    guess = msgspec.structs.replace(here("Priced", highest=9), share=3.0)
    sums, games = parts = parts_of(Mixture(parts={"sums": ReasoningGym(), "games": guess}), "train", 0)
    assert [(p.name, p.share, p.penalty) for p in parts] == [("sums", 1.0, None), ("games", 3.0, -1.0)]
    assert sums.source.task(0) == task_source(ReasoningGym(), "train", 0).task(0)
    assert games.source.task(0).id == "guess-0"
    (alone,) = parts_of(ReasoningGym(), "eval", 0)
    assert (alone.name, alone.share, alone.penalty) == ("chain_sum", 1.0, None)


def test_what_is_wrong_with_a_part_names_the_part():
    for part, complaint in (
        (PythonEnv(factory="no_such_package.x:Y"), "env.parts.b.factory: cannot import"),
        (ReasoningGym(family="chain_sums"), "env.parts.b.family: 'chain_sums'"),
        (ReasoningGym(parameters={"digits": 1}), "env.parts.b.parameters: chain_sum has no 'digits'"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            parts_of(Mixture(parts={"a": here("Guess", highest=3), "b": part}), "train", 0)


def test_failures_are_trained_on_only_where_every_environment_declares_a_penalty():
    free, priced = here("Guess", highest=3), here("Priced", highest=3)
    train = FAILURES | {"tool": Failure(then="train")}
    require_penalties(parts_of(priced, "train", 0), train)
    require_penalties(parts_of(free, "train", 0), FAILURES)
    with pytest.raises(ConfigError, match=r"rollout.failures.tool.then: train needs the penalty .* b declares none"):
        require_penalties(parts_of(Mixture(parts={"a": priced, "b": free}), "train", 0), train)


@pytest.mark.parametrize("penalty", [float("nan"), float("-inf"), "a lot"])
def test_a_penalty_that_is_no_number_is_refused(penalty, monkeypatch):
    monkeypatch.setattr(Priced, "penalty", penalty)
    with pytest.raises(ConfigError, match="Priced declares the penalty"):
        parts_of(here("Priced", highest=3), "train", 0)
