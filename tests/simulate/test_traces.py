"""Trace readers and prompts made of runs."""

import itertools
import json

import pytest

from jinfer.bench.jobs import Prompt
from jinfer.bench.synthetic import load_workload, make_jobs
from jinfer.bench.traces import read_trace
from jinfer.config.loading import config_names
from jinfer.config.workload import ArrivalConfig, ChatConfig, ClassConfig, LengthConfig, SharingConfig, WorkloadConfig
from jinfer.errors import ConfigError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIVE = LengthConfig(value=5)


def write(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure(tmp_path):
    path = write(tmp_path, AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    first, second = read_trace(path)
    assert (first.time, first.prompt, first.output) == (0.0, 374, 44)
    assert (second.prompt, second.output) == (396, 109)
    assert second.time == pytest.approx(4.314579, abs=1e-6)


def test_mooncake_blocks_are_equal_tokens_where_ids_are(tmp_path):
    rows = [{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
            {"timestamp": 250, "input_length": 1030, "output_length": 4, "hash_ids": [0, 1, 9]}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)), "trace.jsonl")
    assert [r.time for r in read_trace(path)] == [0.0, 0.25]
    a, b = (job.prompt for job in load_workload(path)[1])
    assert (len(a), len(b)) == (1100, 1030)
    assert a[:1024] == b[:1024]
    assert a[1024:1030] != b[1024:]


def test_sharegpt(tmp_path):
    path = write(tmp_path, '{"input_toks": 7, "output_toks": 5, "arrival_time_ns": 46926808}\n'
                           '{"input_toks": 8, "output_toks": 6, "arrival_time_ns": 347938951}\n', "trace.jsonl")
    assert [(r.prompt, r.output) for r in read_trace(path)] == [(7, 5), (8, 6)]
    assert read_trace(path)[1].time == pytest.approx(0.301012143)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("t.csv", AZURE + "2023-11-16 18:15:46.68,374,x\n", "line 2: GeneratedTokens: must be an integer"),
    ("t.csv", AZURE + "2023-11-16 18:15:46.68,374\n", "line 2: 2 columns"),
    ("t.csv", AZURE + "\nyesterday,3,4\n", "line 3: TIMESTAMP: not a time"),
    ("t.csv", AZURE, "holds no request"),
    ("t.csv", "a,b\n1,2\n", "line 1: format"),
    ("t.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: input_length: must be an integer"),
    ("t.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "line 1: hash_ids: 1 blocks"),
    ("t.jsonl", '{"timestamp": -1, "input_length": 6, "output_length": 1}', "line 1: timestamp"),
    ("t.jsonl", '{"hash_ids": \n', "line 1: not JSON"),
])
def test_bad_traces_name_line_and_field(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, text, name))


def test_a_trace_repeats_with_fresh_contents_and_stretches(tmp_path):
    rows = [{"timestamp": 1000 * i, "input_length": 512, "output_length": 3, "hash_ids": [i // 2]} for i in range(4)]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)), "trace.jsonl")
    jobs = load_workload(path, requests=10, rate=0.5)[1]
    assert [job.time for job in jobs] == pytest.approx([2.0 * i for i in range(10)])
    texts = [tuple(job.prompt[:1]) for job in jobs]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert len(set(texts)) == 5  # two of each copy, and one of the third
    names = {job.name for job in jobs}
    assert len(names) == 10
    assert not names & {text[0] for text in texts}


def test_prompts_are_sequences():
    whole = [1] * 3 + [2] * 4 + [3] * 2
    prompt = Prompt((1, 2, 3), (3, 7, 12), 9)
    assert (len(prompt), list(prompt), prompt[-1]) == (9, whole, 3)
    for start in range(10):
        for stop in range(start, 11):
            assert prompt[start:stop] == whole[start:stop]
    assert prompt[::2] == whole[::2]
    with pytest.raises(IndexError):
        prompt[9]
    longer = prompt.followed((7, 2), (8, 1))
    assert longer[:] == [*whole, 7, 7, 8]
    assert Prompt((), (), 0).followed((5, 2))[:] == [5, 5]


def test_arrival_processes():
    def times(**arrivals):
        jobs = make_jobs(WorkloadConfig(requests=4000, arrivals=ArrivalConfig(**arrivals), prompt=FIVE, output=FIVE))
        return [job.time for job in jobs]

    def variation(times):
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return mean, (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    assert set(times(process="closed")) == {0.0}
    assert variation(times(process="constant", rate=4.0)) == pytest.approx((0.25, 0.0), abs=1e-6)
    mean, spread = variation(times(process="poisson", rate=4.0))
    assert (mean, spread) == (pytest.approx(0.25, rel=0.05), pytest.approx(1.0, rel=0.1))
    mean, spread = variation(times(process="gamma", rate=4.0, burstiness=0.25))
    assert (mean, spread) == (pytest.approx(0.25, rel=0.1), pytest.approx(2.0, rel=0.1))
    assert times(process="poisson") == times(process="poisson")


def test_chats_carry_what_was_said_before():
    config = WorkloadConfig(requests=6, prompt=FIVE, output=FIVE, n=2,
                            sharing=SharingConfig(length=LengthConfig(value=10)),
                            chat=ChatConfig(turns=LengthConfig(value=3), message=LengthConfig(value=2)))
    jobs = make_jobs(config)
    assert [job.after for job in jobs] == [None, jobs[0], jobs[1], None, jobs[3], jobs[4]]
    assert [len(job.prompt) for job in jobs] == [15, 22, 29] * 2
    assert jobs[1].prompt[:15] == jobs[0].prompt[:]
    assert jobs[1].prompt[15:20] == [jobs[0].name] * 5
    assert jobs[3].prompt[:10] == jobs[0].prompt[:10]
    assert jobs[3].prompt[10] != jobs[0].prompt[10]
    texts = [name for job in jobs for name in (job.name, job.name + 1)]
    assert len(set(texts)) == 12
    assert not set(texts) & {token for job in (jobs[0], jobs[3]) for token in job.prompt}


def test_classes_lengths_and_declared(tmp_path):
    write(tmp_path, "tokens\n7\n9\n", "lengths.csv")
    config = WorkloadConfig(
        requests=1000, prompt=LengthConfig(kind="empirical", file="lengths.csv", column="tokens"),
        output=LengthConfig(kind="uniform", low=10, high=20, most=18), declared_factor=3.0,
        classes=(ClassConfig(name="a", weight=3, cancel=0.5), ClassConfig(name="b", priority=2, timeout=5.0)))
    jobs = make_jobs(config, tmp_path)
    assert {len(job.prompt) for job in jobs} == {7, 9}
    assert {job.output for job in jobs} == set(range(10, 19))
    assert all(job.declared == 3 * job.output for job in jobs)
    urgent = [job for job in jobs if job.group == 0]
    assert len(urgent) == pytest.approx(750, abs=60)
    assert sum(job.cancel_after is not None for job in urgent) == pytest.approx(375, abs=60)
    assert {(job.service.priority, job.service.timeout, job.cancel_after) for job in jobs if job.group} == {(2, 5.0, None)}
    with pytest.raises(ConfigError, match=r"prompt.column: .*no column 'x'"):
        make_jobs(WorkloadConfig(prompt=LengthConfig(kind="empirical", file="lengths.csv", column="x"), output=FIVE), tmp_path)


@pytest.mark.parametrize("name", config_names("workloads"))
def test_workload_files_load(name):
    config, jobs = load_workload(name, requests=50, rate=2.0)
    assert len(jobs) == 50
    assert config.arrivals.rate == 2.0


@pytest.mark.parametrize(("text", "message"), [
    ("output: {value: 3}\n", "prompt: required where there is no trace"),
    ("output: {value: 3}\nprompt:\n  kind: lognormal\n", "line 2: prompt.mean: a lognormal distribution needs it"),
    ("prompt: {value: 1}\noutput: {value: 3}\nclasses:\n- {name: a}\n- {weight: 0}\n", r"line 5: classes\[1\].weight: must"),
    ("prompt: {value: 1}\noutput: {value: 3}\narrivals:\n  process: poison\n", "line 4: arrivals.process: .*mean poisson"),
    ("trace: t.csv\nprompt: {value: 1}\n", "line 2: prompt: comes with the trace"),
    ("prompt: {value: 1}\noutput: {value: 3}\nlimit: 3\n", "line 3: limit: belongs to a trace"),
    ("prompt: {value: 1}\noutputs: {value: 3}\n", "line 2: outputs: unknown key"),
    ("prompt: {value: 1}\noutput: {value: 3}\nsharing:\n  length: {kind: uniform, low: 3, high: 2}\n",
     "line 4: sharing.length.high: 2 is less than low 3"),
])
def test_bad_workloads_name_line_and_field(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_workload(write(tmp_path, text, "w.yaml"))
