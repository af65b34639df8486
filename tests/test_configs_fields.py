"""Every key is documented, and there are few enough to read them all."""

import pytest
from slipstream.configs import Config, count_fields, describe, load, presets
from slipstream.configs.fields import docs_of, root, variants


def sections(kind):
    for section in variants(kind):
        yield section
        for field in section.fields:
            below = getattr(field.type, "item_type", field.type)
            yield from sections(getattr(below, "value_type", below))


def test_there_are_fewer_than_160_keys():
    assert 80 < count_fields() < 160


def test_a_section_that_stands_in_several_places_counts_once():
    parts = load("quickstart", ["env={kind: mixture, parts: {a: {kind: reasoning_gym}}}"])
    assert "env.parts" in {doc.key for doc in describe(parts)}
    assert {"Failure", "PythonEnv"} <= {section.cls.__name__ for section in sections(root())}
    assert count_fields() < 160  # it would not be, were an environment counted twice


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
    assert found["env.kind"].type == "one of reasoning_gym, python, mixture"
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
