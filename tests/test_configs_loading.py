"""A config is either right or refused with one line that says what to change."""

import functools
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from slipstream.configs import Config, SftConfig, check, describe, dump, load, presets
from slipstream.configs.backends import MegatronOption, Option
from slipstream.configs.environments import PythonEnv, shares_of
from slipstream.configs.renamed import RENAMED
from slipstream.configs.schema import FAILURES, Failure
from slipstream.errors import ConfigError

MIXED = "env={kind: mixture, parts: {a: {kind: reasoning_gym}, b: {kind: reasoning_gym}}}"


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def refusal(source: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("preset", presets())
def test_presets_are_valid_and_survive_both_round_trips(preset, tmp_path):
    config = load(preset)
    assert load(write(tmp_path, dump(config))) == config


def test_the_presets_that_the_readme_names_exist():
    assert {"quickstart", "qwen3-0.6b"} <= set(presets())


def test_an_empty_file_is_the_default_config(tmp_path):
    assert load(write(tmp_path, "# nothing\n")) == Config()


def test_numbers_and_text_are_read_by_yaml_1_2(tmp_path):
    text = "learner: {optimizer: {lr: 1e-6}}\nrun: {dir: 2026-01-01}\nmodel: {path: no}\nagent: {renderer: 007}\n"
    config = load(write(tmp_path, text))
    assert config.learner.optimizer.lr == 1e-6
    assert (config.run.dir, config.model.path, config.agent.renderer) == ("2026-01-01", "no", "007")


@pytest.mark.parametrize("text", ["1e-6", "true", "007", "12", "no", "~", "a: b", "0.85", ""])
def test_text_that_looks_like_something_else_is_dumped_as_text(text, tmp_path):
    config = load("quickstart", ["env.kind=python", "env.factory=my.envs:Make"])
    env = msgspec.structs.replace(config.env, arguments={"x": text, "y": [text, 1e-7, 3, None, {"z": True}]})
    config = msgspec.structs.replace(config, env=env)
    assert load(write(tmp_path, dump(config))) == config


def test_overrides_are_applied_over_the_file():
    config = load(
        "quickstart",
        [
            "buffer.max_staleness=5",
            "learner.optimizer.lr=1e-4",
            "run.trackers=[wandb]",
            "env.parameters.max_terms=9",
        ],
    )
    assert config.buffer.max_staleness == 5
    assert config.learner.optimizer.lr == 1e-4
    assert config.run.trackers == ("wandb",)
    assert config.env.parameters["max_terms"] == 9


@pytest.mark.parametrize("turn", [1, -1])
def test_another_kind_drops_the_keys_of_the_old_one_in_any_order(turn):
    overrides = ["env.kind=python", "env.factory=my.envs:Make", "env.arguments.level=3"][::turn]
    env = load("quickstart", overrides).env
    assert env == PythonEnv(factory="my.envs:Make", arguments={"level": 3})


def test_a_whole_section_is_set_before_its_keys():
    overrides = ["env.factory=my.envs:Other", "env={kind: python, factory: 'my.envs:Make', arguments: {a: 1}}"]
    env = load("quickstart", overrides).env
    assert (env.factory, env.arguments) == ("my.envs:Other", {"a": 1})


def test_the_same_kind_keeps_the_keys_of_the_file():
    assert load("quickstart", ["env.kind=reasoning_gym"]) == load("quickstart")


def test_the_agents_kind_is_a_value_and_drops_nothing():
    config = load("quickstart", ["agent.kind=my.agents:play"])
    assert config.agent.max_tokens_per_turn == load("quickstart").agent.max_tokens_per_turn


def test_text_keys_take_numbers_from_the_command_line_as_written():
    config = load("quickstart", ["rollout.engine.memory=0.85", "run.dir=0010", 'model.path="12"'])
    assert (config.rollout.engine.memory, config.run.dir, config.model.path) == ("0.85", "0010", "12")


def test_a_mixture_is_written_part_by_part_or_whole(tmp_path):
    overrides = ["env.kind=mixture", "env.parts.a={kind: reasoning_gym, share: 3}", "env.parts.b.kind=python"]
    config = load("quickstart", [*overrides, "env.parts.b.factory=my.envs:Make", "env.parts.a.family=gcd"])
    assert list(config.env.parts) == ["a", "b"]
    assert (config.env.parts["a"].family, config.env.parts["b"].factory) == ("gcd", "my.envs:Make")
    assert shares_of(config.env) == (3.0, 1.0)
    assert shares_of(load("quickstart").env) == (1.0,)
    assert load(write(tmp_path, dump(config))) == config


@pytest.fixture
def _installed(tmp_path, monkeypatch):
    """A package that adds the kind `coins`, as pip leaves it behind."""
    folder = tmp_path / "their_games-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: their-games\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[slipstream.environments]\ncoins = their_games.coins:Coins\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_installed")
def test_a_kind_that_a_package_adds_is_a_python_environment_with_its_factory(tmp_path):
    coins = PythonEnv(factory="their_games.coins:Coins", arguments={"sides": 3, "fair": {"often": True}}, share=2.0)
    text = "env: {kind: coins, sides: 3, fair: {often: true}, share: 2}"
    assert load(write(tmp_path, text)).env == coins
    assert load(write(tmp_path, f"extends: quickstart\n{text}")).env == coins
    overrides = ["env.kind=coins", "env.sides=3", "env.fair.often=true", "env.share=2.0"]
    config = load("quickstart", overrides)
    assert config.env == coins
    assert load(write(tmp_path, dump(config))) == config
    mixed = load("quickstart", ["env={kind: mixture, parts: {a: {kind: reasoning_gym}, b: {kind: coins}}}"])
    assert mixed.env.parts["b"] == PythonEnv(factory="their_games.coins:Coins")


@pytest.mark.usefixtures("_installed")
def test_an_unknown_kind_is_refused_with_those_of_installed_packages(tmp_path):
    for key, text in (
        ("env.kind", "env: {kind: coin}"),
        ("env.parts.a.kind", "env: {kind: mixture, parts: {a: {kind: coin}}}"),
    ):
        with pytest.raises(
            ConfigError, match=rf"{key}: 'coin' is unknown; did you mean coins\? allowed: reasoning_gym, .*coins$"
        ):
            load(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"agent.kind: 'coins'"):
        load("quickstart", ["agent.kind=coins"])


def test_failures_that_are_not_named_keep_their_policies(tmp_path):
    failures = load("quickstart", ["rollout.failures.timeout.then=train"]).rollout.failures
    assert failures == FAILURES | {"timeout": Failure(then="train")}
    assert failures["engine"].retries == 2
    assert all(policy.then == "drop" for policy in load("quickstart").rollout.failures.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout: {failures: {tol: {retries: 3}}}", ["rollout.failures.tol: no such key", "rollout.failures.tool?"]),
        (
            "rollout: {failures: {worker: {}}}",
            ["rollout.failures.worker", "engine, environment, policy, reward, timeout, tool"],
        ),
        ("rollout: {failures: {tool: {retry: 3}}}", ["rollout.failures.tool.retry: no such key", "retries, then"]),
        ("rollout: {failures: {tool: 3}}", ["rollout.failures.tool: 3", "a section with the keys retries, then"]),
        ("rollout: {failures: {engine: {}, tool: {then: hope}}}", ["failures.tool.then: 'hope'", "drop, train"]),
        ("rollout: {failures: {tool: {retries: -1}}}", ["rollout.failures.tool.retries: -1", ">= 0"]),
        ("env: {kind: mixture}", ["env.parts: must be set"]),
        ("env: {kind: mixture, parts: {}}", ["env.parts", "at least one"]),
        ("env: {kind: mixture, parts: {a: {family: gcd}}}", ["env.parts.a.kind: must be set", "reasoning_gym, python"]),
        ("env: {kind: mixture, parts: {a: {kind: mixture}}}", ["env.parts.a.kind: 'mixture' is unknown"]),
        ("env: {kind: mixture, parts: {a: {kind: python}}}", ["env.parts.a.factory: must be set"]),
        ("env: {kind: mixture, parts: {a: {kind: python, factory: x}}}", ["env.parts.a.factory: 'x'", "module:Name"]),
        (
            "env: {kind: mixture, parts: {b: {kind: reasoning_gym}, a: {kind: reasoning_gym, share: 0}}}",
            ["env.parts.a.share: 0", "a number > 0"],
        ),
        ("env: {kind: mixture, parts: {a b: {kind: reasoning_gym}}}", ["env.parts.a b", "letters, digits"]),
        ("env: {kind: mixture, parts: {a: {kind: reasoning_gym}, a: {kind: reasoning_gym}}}", ["'a'", "set before"]),
        ("env: {kind: mixture, parts: [1]}", ["env.parts: [1]", "a mapping of names to sections"]),
        ("learner: {optimzer: {lr: 1}}", ["learner.optimzer: no such key", "learner.optimizer?", "steps, backend"]),
        ("max_staleness: 3", ["max_staleness: no such key", "did you mean buffer.max_staleness?", "seed, run"]),
        (
            "env: {factory: 'a:B'}",
            ["env.factory: no such key", "set too", "env.kind=python", "with kind reasoning_gym: kind, family"],
        ),
        ("env: {kind: gym}", ["env.kind: 'gym' is unknown", "reasoning_gym, python, dataset, ", "mixture"]),
        ("env: {kind: python}", ["env.factory: must be set"]),
        ("rollout: {engine: {kind: tgi}}", ["rollout.engine.kind: 'tgi'", "vllm"]),
        ("learner: {steps: many}", ["learner.steps: 'many' is not allowed", "an integer >= 1"]),
        ("learner: {steps: 0}", ["learner.steps: 0", "an integer >= 1"]),
        ("learner: {steps: 1.0}", ["learner.steps: 1.0", "an integer"]),
        ("seed: true", ["seed: True", "an integer"]),
        ("env: {calculator: yes}", ["env.calculator: 'yes'", "true or false"]),
        ("env: {direct_answers: 1.5}", ["env.direct_answers: 1.5", "a number >= 0 and <= 1"]),
        ("learner: {optimizer: {lr: 0}}", ["learner.optimizer.lr: 0", "a number > 0"]),
        ("learner: {optimizer: {lr: .inf}}", ["learner.optimizer.lr: inf", "not a finite number"]),
        ("model: {dtype: fp8}", ["model.dtype: 'fp8'", "one of bfloat16, float32"]),
        ("run: {trackers: [aim]}", ["run.trackers: ['aim']", "a list of mlflow, swanlab, tensorboard, trackio, wandb"]),
        ("run: {on_alert: curl}", ["run.on_alert: 'curl' is not allowed", "a list of text"]),
        ("rollout: {engine: {memory: 0.85}}", ["rollout.engine.memory: 0.85 is not text; write it in quotes"]),
        ("learner:", ["learner: None", "a section with the keys steps"]),
        ("buffer: 3", ["buffer: 3", "a section"]),
        (
            "learner: {algorithm: {loss: {importance_cap: 3}}}",
            [
                "learner.algorithm.loss.importance_cap: no such key",
                "allowed in learner.algorithm.loss with kind decoupled_ppo: kind, clip",
            ],
        ),
        ("learner: {algorithm: {loss: {kind: vpo}}}", ["algorithm.loss.kind: 'vpo' is unknown", "gspo, cispo, sapo"]),
        (
            "learner: {algorithm: {loss: {kind: cispo, clip_low: 1}}}",
            ["loss.clip_low: no such key", "it is now learner.algorithm.loss.clip=[LOW, HIGH]"],
        ),
        (
            "learner: {algorithm: {loss: {kind: kl_cov, held: {share: 0}}}}",
            ["loss.held.share=0", "more than 0, up to 1"],
        ),
        ("learner: {algorithm: {loss: {kind: kl_cov, share: 0.1}}}", ["it is now learner.algorithm.loss.held.share"]),
        ("learner: {algorithm: {loss: {kind: clip_cov, held: {low: 9}}}}", ["low=9 is above high=5"]),
        (
            "learner: {algorithm: {loss: {kind: kl_cov, held: {abs: 0}}}}",
            ["abs, k2 and k3 are 0", "at least one above 0"],
        ),
        (
            "learner: {algorithm: {loss: {kind: dual_clip_ppo, clip: [0.2, 0.28, 1.2]}}}",
            ["loss.clip=[0.2, 0.28, 1.2]", "more than 1 + the second, 1.28"],
        ),
        (
            "learner: {algorithm: {loss: {kind: sppo}, aggregation: sequence_mean}}",
            [
                "aggregation=sequence_mean with learner.algorithm.loss.kind=sppo",
                "not SPPO",
                "auto, sequence_sum, token_mean",
            ],
        ),
        (
            "learner: {algorithm: {advantage: {kind: gae, lam: {by_length: 0}}}}",
            ["advantage.lam.by_length=0 divides by zero", "VAPO has 0.05"],
        ),
        (
            "learner: {algorithm: {advantage: {kind: gae, lam: by_length}}}",
            ["advantage.lam: 'by_length' is not allowed", "a mapping of by_length, critic, policy to a number"],
        ),
        (
            "learner: {algorithm: {advantage: {kind: gae, critic_lam: 1}}}",
            ["it is now learner.algorithm.advantage.lam.critic"],
        ),
        (
            "learner: {algorithm: {kl: {kind: reward, coefficient: {start: 0.2}}}}",
            ["kl.coefficient", "needs both, for example {start: 0.2, target: 6}"],
        ),
        ("learner: {algorithm: {entropy: 0.1}}", ["it is now learner.algorithm.terms.entropy"]),
        ("learner: {algorithm: {imitation: 0.1}}", ["it is now learner.algorithm.terms.imitation"]),
        (
            "learner: {algorithm: {loss: {kind: cispo}, correction: {kind: rejected, weights: {kind: truncated}}}}",
            ["correction.weights would weigh tokens twice", "loss.kind=cispo", "null"],
        ),
        (
            "learner: {algorithm: {correction: {kind: truncated, bounds: [3, 2]}}}",
            ["correction.bounds=[3, 2]", "a high of at least the low"],
        ),
        ("buffer: {group_size: 1}", ["buffer.group_size=1", "advantage.kind=grpo compares", "kind reinforce_pp, gae"]),
        (
            "buffer: {group_size: 1, filter: best}\nlearner: {algorithm: {advantage: {kind: reinforce_pp}}}",
            ["buffer.filter=best with buffer.group_size=1", "none and untruncated"],
        ),
        (
            "learner: {algorithm: {correction: {kind: tis}}}",
            ["correction.kind: 'tis'", "auto, none, uncorrected, truncated, masked, rejected"],
        ),
        (
            "learner: {algorithm: {correction: {kind: masked, level: turn}}}",
            ["correction.level: 'turn'", "geometric, sequence, token"],
        ),
        (
            "learner: {algorithm: {correction: {kind: truncated, low: 1}}}",
            [
                "correction.low: no such key",
                "it is now learner.algorithm.correction.bounds=[LOW, HIGH]",
                "level, bounds",
            ],
        ),
        (
            "learner: {algorithm: {correction: {kind: truncated, biased: true}}}",
            [
                "correction.biased: no such key",
                "it is now learner.algorithm.correction.kind=uncorrected",
                "level, bounds",
            ],
        ),
        (
            "learner: {algorithm: {correction: {high: 3}}}",
            ["correction.high: no such key", "it is now learner.algorithm.correction.bounds=[LOW, HIGH]"],
        ),
        (
            "learner: {algorithm: {aggregation: sum}}",
            ["aggregation: 'sum'", "auto, fixed_length, sequence_mean, sequence_sum, token_mean"],
        ),
        ("learner: {algorithm: {terms: {entropy: -0.1}}}", ["learner.algorithm.terms.entropy: -0.1", ">= 0"]),
        ("- a", ["['a']"]),
        ("seed: 1\nrun: {dir: a}\nseed: 2", ["line 3", "'seed'", "line 1"]),
        ("env:\n  family: a\n  family: b", ["line 3", "'family'"]),
        ("seed: 1\nrun: [", ["line 2", "not valid YAML"]),
        ("seed: !!python/object:os.system 1", ["line 1", "not valid YAML"]),
        ("1: 2", ["line 1", "'1' is not text"]),
    ],
)
def test_a_bad_file_is_one_line_naming_key_value_and_what_is_allowed(text, expected, tmp_path):
    message = refusal(write(tmp_path, text))
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("buffer.max_stalenes=1", ["buffer.max_stalenes: no such key", "did you mean buffer.max_staleness?"]),
        ("bufer.max_staleness=1", ["bufer: no such key", "did you mean buffer?"]),
        ("buffer.max_staleness=-1", ["buffer.max_staleness: -1", ">= 0"]),
        ("buffer.max_staleness", ["buffer.max_staleness", "key.sub=value"]),
        (".=1", ["key.sub=value"]),
        ("seed.deeper=1", ["seed.deeper", "seed has no keys below it"]),
        ("env.parameters={a: ", ["env.parameters", "not valid YAML"]),
        ("env.kind=pyton", ["env.kind: 'pyton' is unknown; did you mean python?", "python"]),
        ("learner.algorithm.advantage.kind=GAE", ["'GAE' is unknown; did you mean gae? allowed: grpo, "]),
        (
            "learner.algorithm.advantage=gae",
            ["'gae' is not allowed", "did you mean learner.algorithm.advantage.kind=gae?"],
        ),
        ("env=[1]", ["env: [1]", "a section"]),
        (
            "learner.aux_models.critc=2",
            ["learner.aux_models.critc: no such key; did you mean learner.aux_models.critic?"],
        ),
        (
            "learner.aux_models={reference: 1, critic: -1}",
            ["learner.aux_models.critic: -1", "expected an integer >= 0"],
        ),
        (
            "learner.aux_models=2",
            ["learner.aux_models: 2", "expected a mapping of critic, reference to an integer >= 0"],
        ),
        (
            "run.trackers=[wandb, aim]",
            ["run.trackers: ['wandb', 'aim']", "a list of mlflow, swanlab, tensorboard, trackio, wandb"],
        ),
    ],
)
def test_a_bad_override_is_one_line(override, expected):
    message = refusal("quickstart", override)
    for part in expected:
        assert part in message


def test_a_missing_file_names_the_presets():
    assert "quickstart" in refusal("nowhere.yaml")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["agent.max_tokens_per_turn=2000"], ["agent.max_tokens_per_turn=2000", "agent.max_tokens=256", "1 to 256"]),
        (["agent.kind=single_turn"], ["agent.kind=single_turn", "env.calculator=false"]),
        (
            ["agent.kind=single_turn", "env={kind: mixture, parts: {sums: {kind: reasoning_gym}}}"],
            ["agent.kind=single_turn", "env.parts.sums.calculator=false"],
        ),
        (["agent.kind=solo"], ["agent.kind: 'solo'", "tool_calling, single_turn", "package.module:coroutine"]),
        (["env.kind=python", "env.factory=mine"], ["env.factory: 'mine'", "package.module:Name"]),
        (["learner.algorithm.minibatches=9"], ["learner.algorithm.minibatches=9", "groups_per_batch=8", "1 to 8"]),
        (
            ["learner.algorithm.correction.kind=none"],
            [
                "learner.algorithm.correction.kind=none",
                "buffer.max_staleness=2",
                "loss.kind=decoupled_ppo",
                "auto, truncated, masked or rejected",
                "(ppo, dual_clip_ppo, cispo)",
                "buffer.max_staleness=0",
                "learner.algorithm.correction.kind=uncorrected",
            ],
        ),
        (["learner.algorithm.correction.kind=none", "learner.algorithm.loss.kind=kl_cov"], ["loss.kind=kl_cov would"]),
        (
            ["learner.algorithm.correction.kind=truncated", "learner.algorithm.loss.kind=cispo"],
            ["correction.kind=truncated", "twice", "loss.kind=cispo", "auto, none, masked and rejected"],
        ),
        (
            ["learner.algorithm.correction={kind: masked, bounds: [1.5, 1.2]}"],
            ["learner.algorithm.correction.bounds=[1.5, 1.2]", "low below 1 and a high above 1"],
        ),
        (["learner.algorithm.correction={kind: rejected, bounds: [0.5, 1]}"], ["correction.bounds=[0.5, 1] "]),
        (
            ["learner.algorithm.correction={kind: rejected, weights: {kind: truncated, bounds: [3, 2]}}"],
            ["learner.algorithm.correction.weights.bounds=[3, 2]: the first is the lower one"],
        ),
        (["buffer.keep=64MB"], ["buffer.keep", "64MB", "MiB"]),
        (["rollout.engine.memory=1.5"], ["rollout.engine.memory", "1.5", "0.85"]),
        (["rollout.engine.memory=lots"], ["rollout.engine.memory", "lots"]),
        (["buffer.max_staleness=0", "learner.batch_s=10"], ["buffer.max_staleness=0", "learner.batch_s=10", "600"]),
        (["buffer.on_deadline=wait", "learner.batch_s=10"], ["buffer.on_deadline=wait", "learner.batch_s=10"]),
        (["learner.optimizer.betas=[0.9, 1]"], ["learner.optimizer.betas"]),
        (
            ["learner.backend.parallel.context=2"],
            ["learner.backend.parallel.context=2", "learner.backend.ranks=1", "divisors of ranks"],
        ),
        (
            ["learner.backend.parallel.expert=2", "learner.backend.ranks=3"],
            ["learner.backend.parallel.expert=2 does not divide learner.backend.ranks=3", "divisors of ranks"],
        ),
        (
            [
                "learner.backend.parallel.expert=2",
                "learner.backend.ranks=2",
                "learner.backend.options=[liger]",
            ],
            ["learner.backend.parallel.expert=2 with learner.backend.options=[liger]", "leave one of the two out"],
        ),
        (
            ["learner.backend.options=[compile, liger]"],
            ["learner.backend.options=[compile, liger]", "leave one of the two out"],
        ),
        (
            ["learner.backend.parallel.expert=2", "learner.backend.ranks=2", "learner.backend.options=[offload]"],
            ["learner.backend.parallel.expert=2 with learner.backend.options=[offload]", "leave one of the two out"],
        ),
        (
            [
                "learner.backend.parallel.expert=4",
                "learner.backend.ranks=4",
                "learner.aux_models.reference=2",
                "learner.algorithm.kl={kind: loss}",
            ],
            ["learner.aux_models.reference=2: learner.backend splits a model", "over 4 ranks", "multiples of 4"],
        ),
        (
            ["learner.backend.options=[offload]", "learner.backend.device=cpu"],
            ["learner.backend.options=[offload]", "learner.backend.device=cpu allows recompute and compile"],
        ),
        *[
            (
                [f"learner.backend={{kind: megatron, options: [{option}]}}"],
                [
                    f"learner.backend.options: ['{option}'] is not allowed",
                    "a list of offload, recompute, router_replay",
                ],
            )
            for option in sorted({*get_args(Option)} - {*get_args(MegatronOption)})
        ],
        (
            ["learner.aux_models.reference=1"],
            [
                "aux_models.reference=1: this algorithm has no reference policy",
                "kl.kind of loss, reward or distillation",
            ],
        ),
        (["learner.algorithm.advantage.kind=none"], ["advantage.kind=none leaves nothing", "loss.kind=dpo and"]),
        (
            [
                "learner.algorithm.advantage.kind=none",
                "learner.algorithm.kl.kind=reward",
                "learner.algorithm.terms.imitation=1",
            ],
            ["kl.kind=reward with learner.algorithm.advantage.kind=none", "none, loss and distillation"],
        ),
        (
            [
                "learner.algorithm.advantage.kind=none",
                "learner.algorithm.kl={kind: distillation, reference: m}",
                "learner.algorithm.overlong=8",
            ],
            ["overlong=8 with learner.algorithm.advantage.kind=none", "reads no reward; allowed is 0"],
        ),
        (
            ["learner.algorithm.loss.kind=dpo", "buffer.filter=best_worst"],
            ["advantage.kind=grpo with", "allowed is none"],
        ),
        (
            ["learner.algorithm.loss.kind=dpo", "learner.algorithm.advantage.kind=none"],
            ["buffer.filter=none with learner.algorithm.loss.kind=dpo", "best_worst"],
        ),
        (["dpo", "learner.algorithm.minibatches=2"], ["learner.algorithm.minibatches=2 with", "allowed is 1"]),
        (["dpo", "learner.algorithm.epochs=2"], ["learner.algorithm.epochs=2 with"]),
        (["dpo", "learner.algorithm.overlong=8"], ["overlong=8 with learner.algorithm.loss.kind=dpo", "allowed is 0"]),
        (["dpo", "learner.algorithm.aggregation=token_mean"], ["aggregation=token_mean", "auto and sequence_sum"]),
        (["dpo", "learner.algorithm.correction.kind=masked"], ["correction.kind=masked", "auto and none"]),
        (
            ["dpo", "learner.algorithm.kl={kind: distillation, reference: m}"],
            ["kl.kind=distillation", "none and loss"],
        ),
        (["learner.algorithm.kl.kind=distillation"], ["learner.algorithm.kl.reference: distillation needs a teacher"]),
        (
            ["learner.algorithm.kl={kind: distillation, reference: m, coefficient: {start: 0.1, target: 1}}"],
            ["learner.algorithm.kl.coefficient", "a number > 0"],
        ),
        (
            ["learner.algorithm.kl={kind: distillation, reference: m}", "learner.algorithm.advantage.kind=prime"],
            ["kl.kind=distillation with learner.algorithm.advantage.kind=prime"],
        ),
        (
            [
                "learner.algorithm.kl={kind: distillation, reference: m}",
                "learner.algorithm.loss.kind=sppo",
                "learner.algorithm.aggregation=auto",
            ],
            ["kl.kind=distillation with learner.algorithm.loss.kind=sppo"],
        ),
        (
            ["learner.algorithm.kl={kind: distillation, reference: m}", "buffer.dynamic_sampling=true"],
            ["buffer.dynamic_sampling=true would discard groups that teach", "kl.kind=distillation learns"],
        ),
        (
            ["learner.algorithm.kl={kind: distillation, reference: m, estimator: {reverse: 8, forward: 8}}"],
            ["kl.estimator: {reverse, forward}", "allowed are sampled, {reverse: 32} and {forward: 32}"],
        ),
        (
            ["learner.algorithm.kl={kind: distillation, reference: m, estimator: {reverse: 0}}"],
            ["kl.estimator", "one of sampled or a mapping of forward, reverse to an integer >= 1"],
        ),
        (
            [
                "learner.algorithm.kl={kind: distillation, reference: m, estimator: {reverse: 8}}",
                "learner.backend.kind=megatron",
            ],
            ["kl.estimator with learner.backend.kind=megatron", "sampled, and any with fsdp2"],
        ),
        (
            ["learner.algorithm.kl={kind: distillation, reference: {a: m}}"],
            ["kl.reference: one for each environment is for a mixture", "allowed is one model"],
        ),
        (
            [MIXED, "learner.algorithm.kl={kind: distillation, reference: {a: m, b: n, c: o}}"],
            ["learner.algorithm.kl.reference.c: env.parts has no environment of this name", "allowed are a, b"],
        ),
        (
            [MIXED, "learner.algorithm.kl={kind: loss, reference: {a: m}}"],
            ["learner.algorithm.kl.reference: b of env.parts has no model", "each of a, b, or one for all"],
        ),
        (
            [MIXED, "learner.algorithm.kl={kind: distillation, reference: {a: m, b: ''}}"],
            ["learner.algorithm.kl.reference: distillation needs a teacher"],
        ),
        (
            ["learner.aux_models.critic=1", "learner.algorithm.kl.kind=loss"],
            [
                "learner.aux_models.critic=1: no auxiliary model learns",
                "allowed are 0, or",
                "advantage.kind of gae or prime",
            ],
        ),
        (
            [
                "learner.aux_models.critic=3",
                "learner.algorithm.advantage.kind=prime",
                "learner.backend={kind: megatron, ranks: 4, parallel: {tensor: 2, pipeline: 2}}",
            ],
            ["learner.aux_models.critic=3", "over 4 ranks", "0, 1, which holds it whole, and multiples of 4"],
        ),
        *[
            (
                ["env={kind: dataset, path: rows.jsonl, reward: exact, traces: t.jsonl}", *keys],
                ["env.traces with", *expected],
            )
            for keys, expected in (
                (
                    ["learner.algorithm.advantage.kind=gae"],
                    ["advantage.kind=gae", "all but reinforce_pp, turn_level, gae"],
                ),
                (
                    ["learner.algorithm.loss.kind=clip_cov"],
                    ["loss.kind=clip_cov", "all but sppo, clip_cov, kl_cov, dpo"],
                ),
                (["learner.algorithm.kl.kind=reward"], ["kl.kind=reward", "all but reward, distillation"]),
                (["buffer.dynamic_sampling=true"], ["buffer.dynamic_sampling=true", "allowed is false"]),
                (["reward={kind: classifier, path: m}"], ["reward.kind=classifier", "allowed is environment"]),
                (["agent.kind=mine:agent"], ["agent.kind=mine:agent", "allowed are tool_calling, single_turn"]),
                (["learner.backend.options=[router_replay]"], ["options=[router_replay]", "leave one of them out"]),
            )
        ],
        (
            ["evaluation.suites={own: {env: {kind: dataset, path: a.jsonl, reward: exact, traces: t.jsonl}}}"],
            ["evaluation.suites.own.env.traces", "for training only"],
        ),
        (["run.dir="], ["run.dir"]),
        (["run.trackers=[wandb, wandb]"], ["run.trackers", "twice"]),
        (["run.on_alert=['']"], ["run.on_alert: names no program"]),
    ],
)
def test_impossible_combinations_name_their_keys(overrides, expected):
    preset = "quickstart" if "=" in overrides[0] else overrides.pop(0)
    message = refusal(preset, *overrides)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.calculator=false"],
        ["env.calculator=false", "agent.kind=single_turn"],
        ["rollout.top_p=0.9"],
        ["learner.backend.device=cuda"],
        ["learner.backend.device=cuda", "learner.backend.options=[offload]"],
        [
            "learner.backend={kind: megatron, ranks: 4, parallel: {expert: 2}, options: [offload, recompute], lora_rank: 8}"
        ],
        ["learner.backend.ranks=4", "learner.backend.parallel.context=2", "learner.backend.lora_rank=8"],
        ["learner.backend.ranks=4", "learner.backend.parallel={context: 2, expert: 4}"],
        [
            "learner.aux_models={reference: 1, critic: 3}",
            "learner.algorithm={advantage: {kind: gae}, kl: {kind: loss}}",
            "learner.backend.parallel.context=2",
            "learner.backend.ranks=2",
        ],
        ["rollout.workers=64"],
        ["learner.batch_s=10"],
        ["learner.algorithm.correction.kind=none", "buffer.max_staleness=0"],
        ["learner.algorithm.correction.kind=uncorrected"],
        *[
            [f"learner.algorithm.loss.kind={kind}"]
            for kind in ("ppo", "gspo", "cispo", "sapo", "sppo", "clip_cov", "kl_cov")
        ],
        ["learner.algorithm.loss.kind=dual_clip_ppo", "learner.algorithm.correction.kind=none"],
        ["learner.algorithm.loss.kind=ppo", "learner.algorithm.correction.kind=masked"],
        ["learner.algorithm.correction.kind=rejected", "learner.algorithm.correction.level=sequence"],
    ],
)
def test_what_is_only_slow_or_the_machines_matter_is_allowed(overrides):
    check(load("quickstart", overrides))


# --- what a change of kind keeps, files that extend others, anchors, paths, old keys -------------------------------


def noticed(source: str, *overrides: str) -> tuple[Config, list[str]]:
    lines: list[str] = []
    return load(source, overrides, notice=lines.append), lines


def test_another_kind_keeps_what_means_the_same_in_it(tmp_path):
    split = write(tmp_path, "extends: qwen3-0.6b\nrollout: {engine: {options: {tensor_parallel_size: 2}}}")
    config, lines = noticed(split, "rollout.engine.kind=transformers", "rollout.engine.max_concurrent=32")
    engine = config.rollout.engine
    assert (engine.memory, engine.start_s, engine.max_concurrent) == ("0.85", 300, 32)
    assert lines == [
        "rollout.engine.kind=transformers: dropped options={'tensor_parallel_size': 2}, which belonged to kind vllm"
    ]


def test_another_kind_drops_a_setting_whose_default_differs_and_says_so():
    """A clip range of the token ratio is no clip range of a whole sequence's."""
    config, lines = noticed("dapo", "learner.algorithm.loss.kind=gspo")
    assert config.learner.algorithm.loss.clip == (3e-4, 4e-4)
    assert lines == ["learner.algorithm.loss.kind=gspo: dropped clip=[0.2, 0.28], which belonged to kind decoupled_ppo"]


def test_the_same_kind_and_one_with_nothing_in_common_say_nothing():
    assert noticed("qwen3-0.6b", "rollout.engine.kind=vllm")[1] == []
    assert noticed("quickstart", "env.kind=python", "env.factory=my.envs:Make")[1] == []
    assert noticed("quickstart", "env={kind: python, factory: 'my.envs:Make'}")[1] == []


def test_a_file_extends_a_preset_or_a_file_next_to_it(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: quickstart\nlearner: {steps: 7}\nenv: {parameters: {max_terms: 3}}\n")
    config = load(write(tmp_path, "extends: base.yaml\nbuffer: {max_staleness: 5}\n"), ["learner.optimizer.lr=1e-5"])
    assert (config.learner.steps, config.buffer.max_staleness, config.buffer.groups_per_batch) == (7, 5, 8)
    assert config.env.parameters == {"max_terms": 3}  # a value is replaced, a section is merged
    assert (config.env.family, config.learner.optimizer.lr) == ("chain_sum", 1e-5)
    assert load(write(tmp_path, dump(config))) == config


def test_a_file_that_extends_may_change_a_kind(tmp_path):
    config, lines = noticed(write(tmp_path, "extends: dapo\nlearner: {algorithm: {loss: {kind: cispo}}}\n"))
    assert config.learner.algorithm.loss.clip == (1.0, 4.0)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: nowhere", ["config.yaml: extends: nowhere", "presets: ", "quickstart"]),
        ("extends: config.yaml", ["config.yaml", "extends itself"]),
        ("extends: 3", ["extends: 3 is not text"]),
        ("extends: quickstart\nbufer: {}", ["bufer: no such key"]),
    ],
)
def test_what_cannot_be_extended_is_one_line(text, expected, tmp_path):
    message = refusal(write(tmp_path, text))
    for part in expected:
        assert part in message


def test_keys_at_the_top_that_begin_with_x_hold_anchors(tmp_path):
    text = "x-small: &small {max_terms: 2, min_terms: 2}\nenv: {parameters: {<<: *small, max_digits: 3}}\n"
    assert load(write(tmp_path, text)).env.parameters == {"max_terms": 2, "min_terms": 2, "max_digits": 3}
    assert "x-small: no such key" in refusal(write(tmp_path, "env: {x-small: 1}")).replace("env.", "")


def test_paths_take_home_and_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = load("quickstart", ["run.dir=$SCRATCH/runs/a", "model.path=~/models/b"])
    assert (config.run.dir, config.model.path) == ("/scratch/runs/a", f"{tmp_path}/models/b")
    assert load(write(tmp_path, "run: {dir: '${SCRATCH}/x'}")).run.dir == "/scratch/x"
    named = load("quickstart", [MIXED, "learner.algorithm.kl={kind: loss, reference: {a: $SCRATCH/a, b: org/b}}"])
    assert named.learner.algorithm.kl.reference == {"a": "/scratch/a", "b": "org/b"}
    assert load(write(tmp_path, dump(named))) == named
    monkeypatch.delenv("SCRATCH")
    assert refusal("quickstart", "run.dir=$SCRATCH/x").startswith(
        "run.dir: '$SCRATCH/x' names $SCRATCH, which is not set"
    )


@functools.cache
def keys_of_presets() -> set[str]:
    return {doc.key for preset in presets() for doc in describe(load(preset))}


COLOCATED = ("launch.kind=colocated", "weightsync.transport=shared", "buffer.max_staleness=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("buffer.max_staleness=2", ["buffer.max_staleness=2", "take turns", "allowed are 0 and 1"]),
        (
            "weightsync.transport=broadcast",
            ["weightsync.transport=broadcast", "allowed is weightsync.transport=shared"],
        ),
        ("rollout.partial=keep_kv", ["rollout.partial=keep_kv", "allowed are recompute and abort_resume"]),
        ("evaluation.every=20", ["evaluation.every=20", "allowed is 0"]),
    ],
)
def test_what_servers_that_sleep_rule_out_is_refused(override, expected):
    message = refusal("quickstart", *COLOCATED, override)
    for part in (*expected, "launch.kind=colocated"):
        assert part in message
    for allowed in ("buffer.max_staleness=0", "rollout.partial=abort_resume", "rollout.engine.kind=transformers"):
        assert load("quickstart", [*COLOCATED, allowed]).launch.colocated


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_is_refused_and_the_new_one_named(old):
    new = RENAMED[old]
    assert new in refusal("quickstart", f"{old}=1")
    assert old not in keys_of_presets()  # what replaces it exists, or is no key at all


def test_an_old_key_in_a_file_is_refused_and_the_new_one_named(tmp_path):
    message = refusal(write(tmp_path, "learner: {beside: {critic: 1}}"))
    assert message.startswith("learner.beside: no such key; it is now learner.aux_models; allowed in learner: ")
    assert "slipstream sft" in refusal(write(tmp_path, "sft: {out: x}"))


def test_a_key_of_several_kinds_names_them_all():
    message = refusal("quickstart", "learner.algorithm.advantage.gamma=0.9")
    assert "it belongs to learner.algorithm.advantage.kind=turn_level, gae or prime, which must be set too" in message


def test_fine_tuning_adds_its_section_to_a_runs_config(tmp_path):
    config = load("quickstart", ["sft.epochs=3", "sft.out=here"], SftConfig)
    assert (config.sft.epochs, config.sft.out, config.learner) == (3, "here", load("quickstart").learner)
    assert load(write(tmp_path, "extends: quickstart\nsft: {lr: 1e-4}"), (), SftConfig).sft.lr == 1e-4
    with pytest.raises(ConfigError, match=r"sft\.out: must not be empty"):
        load("quickstart", ["sft.out="], SftConfig)
    assert (
        load("quickstart", ["sft.preferences=p.jsonl", "sft.loss.kind=dpo", "sft.loss.eta=4"], SftConfig).sft.loss.eta
        == 4
    )
    with pytest.raises(ConfigError, match=r"sft\.loss\.kind=dpo .* name them in sft\.preferences, or use auto"):
        load("quickstart", ["sft.loss.kind=dpo"], SftConfig)
