"""The suites of an evaluation, each as the config that it is played with."""

from __future__ import annotations

from msgspec import structs

from .evaluation import Evaluation, EvaluationSuite
from .schema import Config


def suites_of(config: Config) -> dict[str, Config]:
    """The suites that have tasks, by name: each is `config` with the suite's own environment, numbers and limits. Without named
    ones there is one under the empty name, the run's own."""
    evaluation = config.evaluation
    suites = evaluation.suites or {"": EvaluationSuite()}
    return {name: _played_with(config, suite) for name, suite in suites.items() if suite.tasks or evaluation.tasks}


def _played_with(config: Config, suite: EvaluationSuite) -> Config:
    run, agent = config.evaluation, config.agent
    longest = suite.max_tokens or agent.max_tokens
    per_turn = suite.max_tokens_per_turn or min(agent.max_tokens_per_turn, longest)
    evaluation = Evaluation(
        tasks=suite.tasks or run.tasks,
        samples=suite.samples or run.samples,
        temperature=run.temperature if suite.temperature is None else suite.temperature,
    )
    dropped = {reason: structs.replace(failure, then="drop") for reason, failure in config.rollout.failures.items()}
    return structs.replace(
        config,
        env=suite.env or config.env,
        rollout=structs.replace(config.rollout, failures=dropped),  # never trained on: no environment needs a penalty
        agent=structs.replace(agent, max_tokens=longest, max_tokens_per_turn=per_turn),
        evaluation=evaluation,
    )
