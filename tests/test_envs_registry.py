import pytest
from slipstream.configs.schema import PythonEnv
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task, task_source
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
        (here("not_a_source"), "env.factory: .* returned object without name, task, make, demonstration"),
    ],
)
def test_wrong_factories_are_named(config, complaint):
    with pytest.raises(ConfigError, match=complaint):
        task_source(config, "train", 0)
