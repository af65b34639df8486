"""Every key is documented, and there are few enough to read them all."""

from typing import get_args

import msgspec
import pytest
from slipstream.configs import Config, describe, describe_schema, load, presets
from slipstream.configs.algorithm import PythonFunction
from slipstream.configs.environments import EnvironmentKind, Tasks
from slipstream.configs.evaluation import EvaluationSuite
from slipstream.configs.fields import docs_of, root, variants
from slipstream.configs.schema import ProgramSandbox


def sections(kind):
    for section in variants(kind):
        yield section
        for field in section.fields:
            below = getattr(field.type, "item_type", field.type)
            yield from sections(getattr(below, "value_type", below))


def count_fields() -> int:
    """Keys in the whole schema: every field of every section of every kind, sections and `kind` keys included; a key that
    several kinds share, and a section that may stand in several places, counts once. The options of kinds of environments, and of
    the agent that is a program, and of functions of one's own, are left out: they are arguments of a library, a program or the
    user's own data, of which a run has
    those of its own kind only, and every adapter adds some. So are those of a suite of an evaluation, which are other keys' names
    again."""
    seen = {*get_args(EnvironmentKind), ProgramSandbox, EvaluationSuite, PythonFunction}

    def count(kind) -> int:
        kind = getattr(kind, "value_type", kind)
        here = [section for section in variants(kind) if section.cls not in seen]
        seen.update(section.cls for section in here)
        tags = int(any(section.tag is not None for section in here))
        keys = {field.encode_name: field.type for section in reversed(here) for field in section.fields}
        return tags + sum(1 + count(field) for field in keys.values())

    return count(root())


def test_there_are_fewer_than_120_keys():
    assert 80 < count_fields() < 120


def test_options_of_environments_are_few_by_themselves():
    """They are not in the count above, so each kind has a bound of its own, besides the six that all kinds have."""
    shared = len(msgspec.structs.fields(Tasks))
    sizes = {kind.__name__: len(msgspec.structs.fields(kind)) - shared for kind in get_args(EnvironmentKind)}
    sizes |= {one.__name__: len(msgspec.structs.fields(one)) for one in (ProgramSandbox, EvaluationSuite)}
    assert shared == 6
    assert max(sizes.values()) <= 12, sizes


def test_a_section_that_stands_in_several_places_counts_once():
    parts = load("quickstart", ["env={kind: mixture, parts: {a: {kind: reasoning_gym}}}"])
    assert "env.parts" in {doc.key for doc in describe(parts)}
    assert {"Failure", "PythonEnv"} <= {section.cls.__name__ for section in sections(root())}


def test_every_field_has_a_docstring():
    missing = [
        f"{section.cls.__name__}.{field.name}"
        for section in sections(root())
        for field in section.fields
        if not docs_of(section.cls).get(field.name)
    ]
    assert missing == []


def test_describe_gives_key_type_value_and_doc():
    found = {doc.key: doc for doc in describe(load("quickstart", ["env.kind=python", "env.factory=my.envs:Make"]))}
    assert found["buffer.max_staleness"].type == "an integer >= 0"
    assert found["buffer.max_staleness"].value == "2"
    assert "No token older" in found["buffer.max_staleness"].doc
    assert found["env.kind"].value == "python"
    kinds = ", ".join(str(kind.__struct_config__.tag) for kind in get_args(EnvironmentKind))
    assert found["env.kind"].type == f"one of {kinds}, mixture"
    assert found["env.factory"].value == "my.envs:Make"
    assert "env.family" not in found
    assert "seed, " not in found["seed"].doc


@pytest.mark.parametrize("preset", presets())
def test_what_describe_shows_can_be_written_back(preset, tmp_path):
    config = load(preset)
    overrides = [f"{doc.key}={doc.value}" for doc in describe(config)]
    (tmp_path / "empty.yaml").write_text("")
    assert load(str(tmp_path / "empty.yaml"), overrides) == config
    assert describe(Config())[0].key == "seed"


def test_a_key_that_differs_between_kinds_is_listed_for_each():
    listed = [(doc.key, doc.value, doc.kinds) for doc in describe_schema()]
    clip = "learner.algorithm.loss.clip"
    assert (clip, "[0.2,0.2]", ("ppo", "clip_cov")) in listed
    assert (clip, "[0.0003,0.0004]", ("gspo",)) in listed
    axes = [doc.type for doc in describe_schema() if doc.key == "learner.backend.parallel"]
    assert len(axes) == 2
    assert "a mapping of context, expert, pipeline, tensor, virtual to an integer >= 1; of kind megatron" in axes
    assert len(listed) == len(set(listed))
