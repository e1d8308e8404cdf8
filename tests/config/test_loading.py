"""YAML and `--set` into configuration dataclasses, and every file of `configs/`."""

import dataclasses
import json
from pathlib import Path

import pytest

from jinfer.config import DisaggregationConfig, EngineConfig, LayoutConfig, ModelConfig
from jinfer.config.engine import POLICIES
from jinfer.config.loading import config_names, configs_dir, load_config, replace_config
from jinfer.errors import ConfigError
from jinfer.scheduler.policy import POLICIES as SERVED


def names(folder):
    found = config_names(folder)
    assert found
    return found


@pytest.mark.parametrize("name", names("engine"))
def test_engine_files_load(name):
    assert isinstance(load_config(EngineConfig, name), EngineConfig)


def test_default_file_is_the_default():
    assert load_config(EngineConfig, "default") == EngineConfig() == load_config(EngineConfig)


def test_default_file_shows_every_field():
    text = (configs_dir() / "engine" / "default.yaml").read_text()
    for field in dataclasses.fields(EngineConfig):
        assert f"\n{field.name}: " in text


@pytest.mark.parametrize("name", names("layouts"))
def test_layout_files_load(name):
    layout = load_config(LayoutConfig, name)
    assert layout.mesh["tensor"] == (1 if name == "single" else int(name.removeprefix("tp")))


def test_model_numbers_have_their_types():
    config = load_config(ModelConfig, "smollm2-135m")
    assert config.norm_eps == 1e-5  # YAML 1.1 reads 1e-5 as a string
    assert config.eos_ids == (2,)


def test_demo_workload():
    lines = (configs_dir() / "workloads" / "demo.jsonl").read_bytes().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 32 == len({row["custom_id"] for row in rows})
    assert {"prompt", "messages"} == {key for row in rows for key in row} & {"prompt", "messages"}


def test_overrides_are_typed_and_dotted():
    config = load_config(EngineConfig, "cpu-int8", [
        "max_rows=8", "memory_utilization=1", "kv_memory_gb=0.5", "warmup=false", "max_context=null",
        "layout.mesh.tensor=4", "layout.rules.vocab=null", "compilation_cache=/tmp/x"])
    assert (config.quantization, config.max_rows, config.warmup) == ("int8", 8, False)
    assert isinstance(config.memory_utilization, float)
    assert config.layout.mesh == {"tensor": 4}
    assert config.layout.rules == {"vocab": None, "kv_heads": "tensor", "ffn": "tensor"}
    assert config.compilation_cache == "/tmp/x"


def test_overrides_of_scheduling():
    config = load_config(EngineConfig, None, [
        "decode_rows=8", "step_tokens=256", "itl_target=0.05", "policy=fcfs", "ageing=5", "admission=reserving",
        "max_preemptions=0", "max_waiting=100", "prefix_cache=false", "host_kv_gb=1.5"])
    assert (config.decode_rows, config.step_tokens, config.itl_target) == (8, 256, 0.05)
    assert (config.policy, config.ageing, config.admission, config.max_preemptions) == ("fcfs", 5.0, "reserving", 0)
    assert (config.max_waiting, config.prefix_cache, config.host_kv_gb) == (100, False, 1.5)
    for policy in ("priority", "deadline", "longest-prefix", "static", "mine.policies:first"):
        assert load_config(EngineConfig, None, [f"policy={policy}"]).policy == policy


def test_policies_are_those_there_are():
    assert set(POLICIES) == set(SERVED)


def test_layout_by_name_and_then_changed():
    assert load_config(EngineConfig, None, ["layout=tp2"]).layout == load_config(LayoutConfig, "tp2")
    changed = load_config(EngineConfig, "default", ["layout=tp4", "layout.rules.ffn=null"]).layout
    assert changed.mesh == {"tensor": 4}
    assert changed.rules["ffn"] is None


def test_a_part_that_is_not_there_by_default():
    changed = load_config(EngineConfig, None, ["disaggregation.decode=tp4", "disaggregation.decode_workers=2"])
    assert changed.disaggregation == DisaggregationConfig(decode=load_config(LayoutConfig, "tp4"), decode_workers=2)
    assert load_config(EngineConfig, "disaggregated", ["disaggregation=null"]).disaggregation is None


def test_the_last_override_wins():
    assert load_config(EngineConfig, None, ["max_rows=2", "max_rows=3"]).max_rows == 3


def test_file_by_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("max_rows: 3\nlayout: {mesh: {tensor: 2}}\n")
    config = load_config(EngineConfig, path)
    assert config.max_rows == 3
    assert config.layout.rules == LayoutConfig().rules


def test_an_empty_file_is_the_default(tmp_path):
    (tmp_path / "e.yaml").write_text("# nothing\n")
    assert load_config(EngineConfig, tmp_path / "e.yaml") == EngineConfig()


@pytest.mark.parametrize(("override", "words"), [
    ("max_row=3", ["max_row:", "did you mean max_rows?"]),
    ("zzz=3", ["zzz:", "known: dtype"]),
    ("max_rows=many", ["max_rows:", "integer", "'many'"]),
    ("max_rows=true", ["max_rows:", "integer"]),
    ("max_rows=1.5", ["max_rows:", "integer"]),
    ("max_rows=", ["max_rows:", "None"]),
    ("max_rows=0", ["max_rows:", "positive"]),
    ("warmup=1", ["warmup:", "true or false"]),
    ("memory_utilization=lots", ["memory_utilization:", "number"]),
    ("dtype=bfloat17", ["dtype:", "did you mean bfloat16?"]),
    ("quantization=int9", ["quantization:", "int8"]),
    ("layout.mesh=2", ["layout.mesh:", "mapping"]),
    ("layout.mehs.tensor=2", ["layout.mehs:", "did you mean mesh?"]),
    ("layout.mesh.tensor=x", ["layout.mesh.tensor:", "integer"]),
    ("layout=tp3", ["tp3", "did you mean tp"]),
    ("max_rows.x=2", ["max_rows.x:", "no parts"]),
    ("max_rows", ["--set", "key=value"]),
    ("=3", ["--set", "key=value"]),
    ("max_rows=[1", ["--set max_rows", "YAML"]),
    ("policy=lifo", ["policy:", "fcfs", "package.module:name"]),
    ("policy=:first", ["policy:", "package.module:name"]),
    ("policy=a.b:c.d:e", ["policy:", "package.module:name"]),
    ("policy=priorty", ["policy:", "did you mean priority?"]),
    ("admission=reserve", ["admission:", "did you mean reserving?"]),
    ("decode_rows=65", ["decode_rows:", "65", "max_rows 64"]),
    ("step_tokens=0", ["step_tokens:", "positive"]),
    ("step_tokens=64", ["step_tokens:", "64 tokens a step", "decode_rows"]),
    ("itl_target=0", ["itl_target:", "positive number of seconds"]),
    ("ageing=-1", ["ageing:", "positive"]),
    ("ageing=.inf", ["ageing:", "positive"]),
    ("max_preemptions=-1", ["max_preemptions:", "at least 0"]),
    ("max_waiting=0", ["max_waiting:", "positive"]),
    ("prefix_cache=yes please", ["prefix_cache:", "true or false"]),
    ("host_kv_gb=-1", ["host_kv_gb:", "0 or more"]),
])
def test_bad_overrides_name_the_key(override, words):
    with pytest.raises(ConfigError) as error:
        load_config(EngineConfig, None, [override])
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("text", "words"), [
    ("max_rows: 1\nmax_rows: 2\n", ["max_rows", "twice"]),
    ("- 1\n", ["key: value"]),
    ("{", ["not valid YAML"]),
    ("3: 4\n", ["3:", "unknown key"]),
])
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(EngineConfig, path)
    for word in words:
        assert word in str(error.value)


def test_missing_files_and_names():
    with pytest.raises(ConfigError, match=r"cpu-int9: no such configuration; did you mean cpu-int8\?"):
        load_config(EngineConfig, "cpu-int9")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_config(EngineConfig, Path("nowhere.yaml"))


def test_missing_required_value(tmp_path):
    (tmp_path / "m.yaml").write_text("vocab_size: 10\n")
    with pytest.raises(ConfigError, match=r"hidden_size: required by ModelConfig"):
        load_config(ModelConfig, tmp_path / "m.yaml")


def test_replace_config_checks_names_and_types():
    assert replace_config(EngineConfig(), {"max_rows": 2, "layout": "tp2"}).layout.mesh == {"tensor": 2}
    with pytest.raises(ConfigError, match=r"max_row: .*did you mean max_rows"):
        replace_config(EngineConfig(), {"max_row": 2})
    with pytest.raises(ConfigError, match=r"max_rows: must be an integer"):
        replace_config(EngineConfig(), {"max_rows": "2"})
