"""Batch jobs (case C34): odd rows, order, ids, atomic output, bounded memory."""

import json
from pathlib import Path

import pytest

from jinfer import LLM, ServiceParams
from jinfer.batch import runner
from jinfer.batch.partial import partial_path
from jinfer.batch.runner import check_paths, count_rows, run_batch, run_file
from jinfer.errors import ConfigError, JinferError
from tests.fake_engine import FakeEngine

DATA = Path(__file__).resolve().parents[1] / "data" / "batch"
TEXTS = {"u": "é漢😀!", "L": "yz", "M": "", "r": "rrrrrrrr"}


def make_llm(**engine):
    return LLM.from_engine(FakeEngine(**engine))


def run_rows(rows, llm=None, **options):
    records = []
    counts = run_batch(llm or make_llm(), rows, records.append, **options)
    return counts, records


def plain(i, prompt="L", **fields):
    return json.dumps({"custom_id": f"c{i}", "prompt": prompt, "max_tokens": 8, **fields}).encode() + b"\n"


@pytest.fixture(scope="module", params=["fake", "real"])
def any_llm(request, engines):
    """An LLM over the fake engine, and one over jinfer's own on the table model."""
    llm = make_llm() if request.param == "fake" else LLM.from_engine(engines.get("table_open", max_rows=4))
    yield llm
    while llm.engine.has_work:  # the step that was under way when the last answer came
        llm.engine.step()
    llm.engine.check()


@pytest.fixture(scope="module")
def nasty(any_llm, tmp_path_factory):
    """(counts, records of nasty.jsonl, expectations by line)"""
    target = tmp_path_factory.mktemp("nasty") / "out.jsonl"
    counts = run_file(any_llm, DATA / "nasty.jsonl", target)
    lines = target.read_bytes().split(b"\n")
    assert lines.pop() == b""  # every record ends with a line feed
    expect = json.loads((DATA / "nasty.expect.json").read_text())["rows"]
    return counts, [json.loads(line) for line in lines], {int(line): row for line, row in expect.items()}


def test_nasty_one_record_a_row_in_order(nasty):
    counts, records, expect = nasty
    lines = [int(record["id"].removeprefix("batch_req_")) for record in records]
    assert lines == [line for line in sorted(expect) if line not in (6, 7)]  # 6 and 7 are blank
    assert (counts.lines, counts.skipped) == (26, 2)
    assert counts.completed + counts.failed + counts.skipped == counts.lines


def test_nasty_verdicts(nasty):
    counts, records, expect = nasty
    good = 0
    for record in records:
        row = expect[int(record["id"].removeprefix("batch_req_"))]
        assert (record["error"] is None) == (record["response"] is not None)
        if row["ok"] is None:  # the second row of an id that was used: refused, and not under that id
            assert record["custom_id"] is None
            assert record["error"]["message"] == "custom_id: 'dup' was used on line 23"
            continue
        assert (record["error"] is None) == row["ok"], row["why"]
        assert record["custom_id"] == row["custom_id"]
        good += row["ok"]
        if not row["ok"]:
            assert record["line"] == int(record["id"].removeprefix("batch_req_"))
            assert record["error"]["message"]
            assert record["error"]["param"]
    assert counts.completed == good


def test_nasty_answers(nasty):
    _, records, _ = nasty
    bodies = {r["custom_id"]: r["response"]["body"] for r in records if r["error"] is None}
    source = {}
    for line in (DATA / "nasty.jsonl").read_bytes().split(b"\n"):
        if b'"prompt": "L"' in line:
            try:
                source[json.loads(line.removeprefix(b"\xef\xbb\xbf"))["custom_id"]] = line
            except (ValueError, KeyError):
                continue
    checked = [name for name in source if name in bodies]
    assert len(checked) == 5
    for name in checked:
        (choice,) = bodies[name]["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("yz", "stop")
        assert bodies[name]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
                                         "prompt_tokens_details": {"cached_tokens": 0}}
    message = bodies["u2028"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "OQ"}


def test_ids_appear_once(nasty):
    ids = [r["custom_id"] for r in nasty[1] if r["custom_id"] is not None]
    assert len(ids) == len(set(ids))
    assert "id-ünïcode-\u2028" in ids


@pytest.mark.parametrize("in_flight", [1, 2, 32, None])
def test_order40_is_in_order_whatever_is_in_flight(any_llm, tmp_path, in_flight):
    target = tmp_path / "out.jsonl"
    counts = run_file(any_llm, DATA / "order40.jsonl", target, in_flight=in_flight)
    rows = [json.loads(line) for line in (DATA / "order40.jsonl").read_bytes().splitlines()]
    records = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert counts.completed == 40 == len(records)
    for row, record in zip(rows, records, strict=True):
        assert record["custom_id"] == row["custom_id"]
        whole = TEXTS[row["body"]["prompt"]].encode()[:row["body"]["max_tokens"]]
        assert record["response"]["body"]["choices"][0]["text"] == whole.decode(errors="replace")


def test_plain_records():
    _, (one, two, three) = run_rows([
        plain(1), plain(2, n=2), plain(3, logprobs=1, prompt_logprobs=0)])
    assert (one["custom_id"], one["text"], one["finish_reason"]) == ("c1", "yz", "stop")
    assert (one["prompt_tokens"], one["output_tokens"]) == (2, 3)
    assert one["seconds"]["ttft"] >= 0
    assert [choice["text"] for choice in two["choices"]] == ["yz", "yz"]
    assert "text" not in two
    assert three["logprobs"][0]["token"] == "y"
    assert three["prompt_logprobs"][0]["logprob"] is None
    json.dumps(three, allow_nan=False)  # the engine's -inf became a number


def test_openai_logprobs():
    messages = [{"role": "user", "content": "x"}]
    _, (text, chat) = run_rows([json.dumps(row).encode() for row in (
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "L", "logprobs": 2}},
        {"custom_id": "b", "url": "/v1/chat/completions",
         "body": {"messages": messages, "logprobs": True, "top_logprobs": 2}})])
    logprobs = text["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["y", "z", ""]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0]["y"] == -0.5
    content = chat["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert content[0]["bytes"] == [79]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0


def test_no_more_rows_than_asked_for_are_in_flight():
    llm = make_llm(max_rows=16)
    run_rows([plain(i, "r") for i in range(20)], llm, in_flight=3)
    assert llm.engine.most_running == 3


def test_rows_are_read_as_they_are_needed():
    read = []

    def rows():
        for i in range(1000):
            read.append(i)
            yield plain(i, "r", max_tokens=200) if i == 0 else plain(i)

    written = []
    ahead = []

    def write(record):
        written.append(record)
        ahead.append(len(read) - len(written))

    run_batch(make_llm(), rows(), write, in_flight=4)
    assert len(written) == 1000
    assert max(ahead) < runner.WINDOW * 4


def test_progress_and_outputs_are_reported():
    seen, outputs = [], []
    counts, _ = run_rows([plain(1), b"{\n", b"\n", plain(2)], on_output=outputs.append,
                         on_progress=lambda c: seen.append(c.completed + c.failed))
    assert seen == [1, 2, 3]
    assert len(outputs) == 2
    assert (counts.lines, counts.completed, counts.failed, counts.skipped) == (4, 2, 1, 1)


def after(answers):
    """A `stop` that says true once so many rows have a record."""
    done = [0]

    def on_progress(counts):
        done[0] = counts.completed + counts.failed
    return {"stop": lambda: done[0] >= answers, "on_progress": on_progress}


@pytest.mark.parametrize("in_flight", [1, 3, 12])
def test_a_stopped_job_finishes_what_runs_and_leaves_the_rest(in_flight):
    llm = make_llm()
    counts, records = run_rows([plain(i, "r" if i % 3 else "L") for i in range(40)], llm, in_flight=in_flight, **after(5))
    assert counts.stopped
    answered = [record["custom_id"] for record in records if record]
    assert 5 <= counts.completed == len(answered) <= 5 + 3 + 4  # in the same step, and the four that run
    assert answered == [f"c{i}" for i, record in enumerate(records) if record]  # in the places of their rows
    assert all(record["text"] == TEXTS["r" if int(record["custom_id"][1:]) % 3 else "L"] for record in records if record)
    assert counts.lines == counts.completed + counts.left
    assert not llm.engine.has_work
    assert llm.generate("L").text == "yz"  # the engine itself takes requests as before


def test_a_job_stopped_at_its_end_is_not_stopped():
    counts, records = run_rows([plain(i, "L") for i in range(3)], **after(3))
    assert (counts.stopped, counts.left, len(records)) == (False, 0, 3)


def test_a_job_ends_in_order_when_its_engine_drains():
    llm = make_llm()
    seen = []

    def drain(counts):
        if not seen:
            seen.append(llm.engine.drain(hand_back=True))

    counts, records = run_rows([plain(i, "r" if i else "L") for i in range(30)], llm, in_flight=8, on_progress=drain)
    assert len(seen[0]) == 3  # one of eight has ended, four run
    assert (counts.completed, counts.failed, counts.stopped) == (5, 0, True)
    assert [bool(record) for record in records] == [True] * 5 + [False] * 3
    llm.resume()
    assert llm.generate("L").text == "yz"


def test_a_stopped_job_goes_on_from_there(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [plain(i, "Lru"[i % 3], priority=-(i % 2)) for i in range(30)] + [b"\n", b"{\n", plain(3)]
    source.write_bytes(b"".join(rows))
    run_file(make_llm(), source, tmp_path / "whole.jsonl")
    runs, answered = [], 0
    for answers in (4, 9, 99):  # every run is stopped a few rows further
        llm = make_llm()
        runs.append(run_file(llm, source, target, in_flight=6, model="m", **after(answers)))
        assert runs[-1].resumed == min(answered, runs[-1].completed + runs[-1].failed)
        assert target.exists() == (answers == 99)
        if runs[-1].stopped:
            lines = partial_path(target).read_bytes().splitlines()
            answered = sum(line != b"null" for line in lines[:-1])
            assert answered >= answers
    assert [run.stopped for run in runs] == [True, True, False]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl", "whole.jsonl"]

    def timeless(path):
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_bytes().splitlines()]
    assert timeless(target) == timeless(tmp_path / "whole.jsonl")
    assert llm.metrics.output_tokens < sum(r.get("output_tokens", 0) for r in timeless(target))


def test_a_job_stopped_before_it_came_where_an_earlier_run_was_keeps_its_answers(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(plain(i, "L") for i in range(40)))
    run_file(make_llm(), source, target, in_flight=4, **after(20))
    run_file(make_llm(), source, target, in_flight=4, stop=lambda: True)
    counts = run_file(make_llm(), source, target)
    assert counts.resumed >= 20
    assert counts.completed == 40


def test_what_another_job_left_is_not_taken(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(plain(i, "L") for i in range(40)))
    run_file(make_llm(), source, target, in_flight=4, model="m", defaults={"temperature": 0}, **after(5))
    same = {"overwrite": False, "model": "m", "defaults": {"temperature": 0}}
    check_paths(source, target, **same)
    for other in ({"model": "n"}, {"defaults": {"temperature": 1}}):
        with pytest.raises(ConfigError, match=r"out.jsonl.partial: left by a job with other rows, model or options"):
            check_paths(source, target, **same | other)
    check_paths(source, target, **same | {"model": "n", "overwrite": True})
    whole = partial_path(target).read_bytes()
    partial_path(target).write_bytes(whole[:-40])  # cut off
    with pytest.raises(ConfigError, match="left by a job"):
        check_paths(source, target, **same)
    partial_path(target).write_bytes(whole)
    with source.open("ab") as rows:
        rows.write(plain(40))
    with pytest.raises(ConfigError, match="left by a job"):
        check_paths(source, target, **same)
    assert run_file(make_llm(), source, target, model="m").resumed == 0


def test_a_failure_keeps_what_an_earlier_run_left(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(plain(i, "r") for i in range(40)))
    run_file(make_llm(), source, target, in_flight=4, **after(5))
    kept = partial_path(target).read_bytes()
    with pytest.raises(RuntimeError, match="on fire"):
        run_file(make_llm(fail_at=9), source, target, in_flight=4)
    assert partial_path(target).read_bytes() == kept


def test_rows_wait_for_room_in_the_queue():
    llm = make_llm(max_rows=2, max_waiting=1)
    counts, records = run_rows([plain(i, "r", n=1) for i in range(20)] + [plain(20, "L", n=2)], llm, in_flight=8)
    assert (counts.completed, counts.failed) == (20, 1)  # two choices never fit into a queue of one
    assert records[-1]["error"]["code"] == "overloaded"
    assert llm.engine.most_waiting == 1
    assert llm.metrics.requests_rejected == 1


def test_rows_say_how_they_are_served():
    llm = make_llm()
    rows = [plain(0, priority=3, cache=False, cache_salt="me"), plain(1),
            json.dumps({"custom_id": "c2", "url": "/v1/completions",
                        "body": {"prompt": "L", "timeout": 9, "ttft_target": 1}}).encode(),
            plain(3, timeout=0), plain(4, priority="high"), plain(5, timeout=None)]
    counts, records = run_rows(rows, llm, defaults={"itl_target": 0.5, "timeout": 60, "max_tokens": 4})
    assert counts.completed == 4
    assert list(llm.engine.services.values()) == [
        ServiceParams(priority=3, cache=False, cache_salt="me", itl_target=0.5, timeout=60),
        ServiceParams(itl_target=0.5, timeout=60), ServiceParams(itl_target=0.5, timeout=9, ttft_target=1),
        ServiceParams(itl_target=0.5)]
    assert [records[i]["error"]["param"] for i in (3, 4)] == ["timeout", "priority"]


def test_a_row_that_ran_out_of_time_keeps_its_text():
    llm = make_llm(slow=0.002)
    _, (one, two) = run_rows([plain(0, "r", max_tokens=200, timeout=0.05), plain(1)], llm)
    assert one["finish_reason"] == "timeout"
    assert 0 < len(one["text"]) < 200
    assert two["finish_reason"] == "stop"


def test_an_engine_failure_leaves_no_file(tmp_path):
    target = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="on fire"):
        run_file(make_llm(fail_at=9), DATA / "order40.jsonl", target)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_job_cancels_and_leaves_the_old_file(tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    llm = make_llm()

    def interrupt(counts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_file(llm, DATA / "order40.jsonl", target, on_progress=interrupt)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
    while llm.engine.has_work:
        llm.engine.step()
    assert not llm.engine._running


def test_a_full_disk_is_one_line(tmp_path):
    with pytest.raises(JinferError, match=r"nowhere.*: No such file"):
        run_file(make_llm(), DATA / "order40.jsonl", tmp_path / "nowhere" / "out.jsonl")


def test_paths_are_checked_beforehand(tmp_path):
    source, other = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="no such file"):
        check_paths(source, other, overwrite=False)
    source.write_bytes(plain(1) + b"\n" + plain(2))
    assert count_rows(source) == 2
    check_paths(source, other, overwrite=False)
    with pytest.raises(ConfigError, match="input file"):
        check_paths(source, source, overwrite=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_paths(source, tmp_path / "no" / "out", overwrite=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_paths(source, tmp_path, overwrite=False)
    other.touch()
    with pytest.raises(ConfigError, match="--overwrite"):
        check_paths(source, other, overwrite=False)
    check_paths(source, other, overwrite=True)
