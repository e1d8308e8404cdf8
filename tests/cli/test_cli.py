"""The `jinfer` command: options, output, errors in one line, exit status. The engine is a fake one."""

import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jinfer import LLM, SamplingParams, ServiceParams
from jinfer.bench import demo
from jinfer.cli import main as cli
from jinfer.cli import options, session
from jinfer.cli.chat import answer
from tests.engines import SMALL
from tests.fake_engine import FakeChat, FakeEngine

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "batch"


@pytest.fixture
def jinfer(monkeypatch, capsys):
    """Runs a command line in this process; returns (exit status, stdout, stderr)."""
    opened = []

    def open_llm(model, config, overrides, console):
        from jinfer.config import EngineConfig
        from jinfer.config.loading import load_config
        opened.append((model, load_config(EngineConfig, config, overrides)))
        return LLM.from_engine(FakeEngine(max_context=context[0]))

    context = [256]
    monkeypatch.setattr(session, "open_llm", open_llm)
    monkeypatch.setattr(demo, "open_llm", open_llm)

    def run(*args, stdin="", main=cli.main):
        monkeypatch.setattr(sys, "argv", ["jinfer", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = 0
        try:
            main()
        except SystemExit as done:
            if isinstance(done.code, str):
                print(done.code, file=sys.stderr)
            status = done.code if isinstance(done.code, int) else int(done.code is not None)
        return status, *capsys.readouterr()

    run.opened, run.context = opened, context
    return run


def turns(*messages):
    """The prompt the fake engine's template makes."""
    return FakeChat().render([{"role": role, "content": content} for role, content in messages])


def test_generate_streams_one_prompt(jinfer):
    assert jinfer("generate", "-p", "u")[:2] == (0, "é漢😀!\n")
    assert jinfer.opened[0][0] == "smollm2-135m"


def test_generate_from_stdin_with_configuration(jinfer):
    status, out, _ = jinfer("generate", "m.gguf", "-c", "cpu-int8", "-s", "max_rows=3", stdin="L")
    assert (status, out) == (0, "yz\n")
    model, config = jinfer.opened[0]
    assert (model, config.quantization, config.max_rows) == ("m.gguf", "int8", 3)


def test_generate_several(jinfer):
    assert jinfer("generate", "-p", "L", "-p", "u")[1] == "--- 1\nyz\n--- 2\né漢😀!\n"
    assert jinfer("generate", "-p", "L", "--n", "2")[1] == "--- 1.1\nyz\n--- 1.2\nyz\n"


def test_generate_json(jinfer):
    _, out, _ = jinfer("generate", "-p", "L", "-p", "r", "--json", "--logprobs", 1, "--max-tokens", 5)
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], first["text"], first["finish_reason"]) == ("L", "yz", "stop")
    assert len(second["logprobs"]) == 5


def test_generate_chat(jinfer):
    assert jinfer("generate", "-p", "L", "--chat")[1] == "OQ\n"
    out = json.loads(jinfer("generate", "-p", "L", "--system", "S", "--json")[1])
    assert out["prompt"] == turns(("system", "S"), ("user", "L"))


def test_every_sampling_field_has_an_option_and_a_help(monkeypatch):
    seen = {}
    run = options.takes_sampling()(lambda sampling: seen.update(sampling))
    assert set(run.__annotations__) == {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(options.field_help()) == set(run.__annotations__)
    run(**dict.fromkeys(run.__annotations__) | {
        "stop": ["a", "b"], "logit_bias": ["3=-1.5", "4=2"], "skip_special_tokens": True, "top_k": 0})
    assert seen == {
        "stop": ["a", "b"], "logit_bias": {3: -1.5, 4: 2.0}, "skip_special_tokens": False, "top_k": 0}
    SamplingParams.from_dict(seen)


def test_every_service_field_has_an_option_and_a_help():
    seen = {}
    run = options.takes_service()(lambda service: seen.update(service))
    assert set(run.__annotations__) == {f.name for f in dataclasses.fields(ServiceParams)}
    assert set(options.field_help(ServiceParams)) == set(run.__annotations__)
    run(**dict.fromkeys(run.__annotations__) | {"cache": True, "priority": 0, "cache_salt": "a"})
    assert seen == {"cache": False, "priority": 0, "cache_salt": "a"}


@pytest.mark.parametrize("command", [["generate", "-p", "L"], ["generate", "-p", "L", "-p", "u"],
                                     ["generate", "-p", "L", "--chat", "--json"], ["batch"]])
def test_service_options_reach_the_request(jinfer, monkeypatch, tmp_path, command):
    got = []
    submit = FakeEngine.submit
    monkeypatch.setattr(FakeEngine, "submit", lambda self, prompt, params, **k: (
        got.append(k["service"]), submit(self, prompt, params, **k))[1])
    if command == ["batch"]:
        (tmp_path / "in.jsonl").write_text('{"prompt": "L"}\n')
        command = ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
    args = ["--timeout", 9, "--no-cache", "--cache-salt", "me"]
    assert jinfer(*command, *args, "--priority", -2, "--ttft-target", 0.5, "--itl-target", 0.1)[0] == 0
    want = ServiceParams(priority=-2, timeout=9, ttft_target=0.5, itl_target=0.1, cache=False, cache_salt="me")
    assert set(got) == {want}


def test_chat_takes_the_service_options_of_one_request(jinfer):
    assert jinfer("chat", "--timeout", 9, "--no-cache", "--cache-salt", "me", stdin="a\n")[:2] == (0, "OQ\n")
    assert jinfer("chat", "--priority", 1)[0] == 2
    status, out, err = jinfer("chat", "--timeout", 1e-9, stdin="a\n")
    assert (status, out) == (0, "\n")
    assert "[timed out]" in err


def test_options_reach_the_request(jinfer, monkeypatch):
    got = []
    submit = FakeEngine.submit
    monkeypatch.setattr(FakeEngine, "submit", lambda self, prompt, params, **k: (
        got.append(params), submit(self, prompt, params, **k))[1])
    jinfer("generate", "-p", "L", "--temperature", "0.5", "--top-k", 4, "--top-p", 0.9, "--min-p", 0.1,
           "--seed", 7, "--presence-penalty", 1, "--frequency-penalty", -1, "--repetition-penalty", 1.2,
           "--stop", "x", "--stop", "y", "--stop-token-id", 3, "--logit-bias", "5=-2", "--max-tokens", 9,
           "--min-tokens", 2, "--ignore-eos", "--include-stop", "--no-skip-special-tokens",
           "--prompt-logprobs", 1)
    assert got == [SamplingParams(
        temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=7, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, stop=("x", "y"), stop_token_ids=(3,), logit_bias={5: -2.0}, max_tokens=9,
        min_tokens=2, ignore_eos=True, include_stop=True, skip_special_tokens=False, prompt_logprobs=1)]


@pytest.mark.parametrize(("args", "words"), [
    (["generate", "-p", "L", "--temperature", "nan"], "temperature: must be a finite number"),
    (["generate", "-p", "L", "--logit-bias", "x"], "logit_bias: must look like ID=NUMBER"),
    (["generate", "-p", "r" * 300], "prompt: 301 tokens are more than the context of 256"),
    (["generate", "-p", "L", "--set", "max_row=2"], "max_row: unknown key"),
    (["generate", "-p", "L", "--config", "nope"], "nope: no such configuration"),
    (["generate", "-p", "L", "-p", "r" * 300], "prompts[1]: prompt: 301 tokens"),
    (["batch", "none.jsonl", "out.jsonl"], "none.jsonl: no such file"),
    (["chat", "--top-p", "2"], "top_p: must be"),
    (["generate", "-p", "L", "--timeout", "0"], "timeout: must be a positive number of seconds"),
    (["batch", "none.jsonl", "out.jsonl", "--itl-target", "-1"], "itl_target: must be a positive number"),
    (["generate", "-p", "L", "--set", "max_waiting=0"], "max_waiting: must be a positive integer"),
])
def test_errors_are_one_line(jinfer, args, words):
    status, out, err = jinfer(*args)
    assert (status, out) == (1, "")
    assert err.startswith("jinfer: ")
    assert words in err
    assert err.count("\n") == 1


def test_stdin_that_is_no_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"))
    monkeypatch.setattr(sys, "argv", ["jinfer", "generate"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "jinfer: prompt: stdin is not UTF-8 at byte 2\n"


@pytest.mark.parametrize("args", [["nothing"], ["generate", "--nothing"], ["batch", "one.jsonl"],
                                  ["generate", "--top-k", "x"]])
def test_wrong_usage_is_status_2(jinfer, args):
    assert jinfer(*args)[0] == 2


def test_chat(jinfer):
    lines = ["hello", "", "/what", "again", "/reset", "once more", "/exit", "no"]
    status, out, err = jinfer("chat", "--max-tokens", 5, stdin="\n".join(lines))
    assert (status, out) == (0, "OQ\nOQ\nOQ\n")
    assert "/what is no command. /reset" in " ".join(err.split())
    assert "new conversation" in err


def test_chat_sends_the_whole_conversation(jinfer, monkeypatch):
    prompts = []
    submit = FakeEngine.submit
    monkeypatch.setattr(FakeEngine, "submit", lambda self, prompt, params, **k: (
        prompts.append(prompt), submit(self, prompt, params, **k))[1])
    jinfer("chat", "--system", "S", stdin="a\nb\n/reset\nc\n")
    opening = ("system", "S")
    assert prompts == [turns(opening, ("user", "a")),
                       turns(opening, ("user", "a"), ("assistant", "OQ"), ("user", "b")),
                       turns(opening, ("user", "c"))]


def test_chat_goes_on_when_the_context_is_full(jinfer):
    status, out, err = jinfer("chat", stdin=f"{'x' * 300}\nshort\n")
    assert (status, out) == (0, "OQ\n")
    assert "more than the context" in err


def test_interrupting_an_answer_cancels_only_that(monkeypatch, capsys):
    llm = LLM.from_engine(FakeEngine())
    written = []

    class Interrupted(io.StringIO):
        def write(self, text):
            written.append(text)
            if len(written) == 1:
                raise KeyboardInterrupt

    console = session.stderr_console()
    monkeypatch.setattr(sys, "stdout", Interrupted())
    text = answer(llm, [{"role": "user", "content": "x"}], SamplingParams(), console)
    assert text == "O"
    assert len(llm.engine.cancelled) == 1
    assert answer(llm, [{"role": "user", "content": "x"}], SamplingParams(), console) == "OQ"


def test_batch(jinfer, tmp_path):
    target = tmp_path / "out.jsonl"
    status, out, err = jinfer("batch", DATA / "nasty.jsonl", target)
    assert (status, out) == (0, "")
    assert len(target.read_bytes().splitlines()) == 24
    for words in ("prefill", "decode", "TTFT", "ITL", "KV pool", "compilations", "14 failed"):
        assert words in err.replace("\n", " ")
    assert jinfer("batch", DATA / "nasty.jsonl", target)[0] == 1  # it exists
    assert jinfer("batch", DATA / "nasty.jsonl", target, "--overwrite", "--in-flight", 1)[0] == 0


def test_batch_defaults(jinfer, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "r"}\n{"prompt": "r", "max_tokens": 2}\n')
    jinfer("batch", source, target, "--max-tokens", 3)
    assert [json.loads(line)["text"] for line in target.read_text().splitlines()] == ["rrr", "rr"]


def signals_at(patch, number, *turns):
    """So many turns after the model was opened, the process gets a signal in the middle of a step."""
    step = FakeEngine.step

    def interrupted(engine):
        if engine.turns in turns:
            signal.raise_signal(number)
        return step(engine)

    patch.setattr(FakeEngine, "step", interrupted)


@pytest.fixture
def handlers():
    """Ctrl-C as in a terminal, and that whoever changes a handler puts it back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    yield
    after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, before[0])
    assert after == (signal.default_int_handler, before[1])


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_batch_and_the_same_command_goes_on(jinfer, monkeypatch, tmp_path, number):
    target = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        signals_at(patch, number, 12)
        status, out, err = jinfer("batch", DATA / "order40.jsonl", target)
    assert (status, out) == (1, "")
    err = " ".join(err.split())
    assert "stopping when the rows that run are done; once more stops at once" in err
    assert re.search(r"out.jsonl.partial: \d+ answered", err)
    assert "the same command goes on from there" in err
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.partial"]
    assert jinfer("batch", DATA / "order40.jsonl", target, "--max-tokens", 3)[0] == 1  # not the same
    status, _, err = jinfer("batch", DATA / "order40.jsonl", target)
    assert status == 0
    assert re.search(r"40 answered, 0 failed, \d+ of them in an earlier run", " ".join(err.split()))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    ids = [json.loads(line)["custom_id"] for line in target.read_bytes().splitlines()]
    assert ids == [json.loads(line)["custom_id"] for line in (DATA / "order40.jsonl").read_bytes().splitlines()]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_a_batch_at_once(jinfer, monkeypatch, tmp_path, number):
    signals_at(monkeypatch, number, 12, 13)
    status, _, _ = jinfer("batch", DATA / "order40.jsonl", tmp_path / "out.jsonl")
    assert status != 0
    assert list(tmp_path.iterdir()) == []


def test_demo(jinfer, tmp_path):
    target = tmp_path / "demo.jsonl"
    jinfer.context[0] = 4096
    status, _, err = jinfer("--output", target, main=demo.main)
    assert status == 0, err
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["custom_id"] for record in records] == [f"demo-{i:02d}" for i in range(1, 33)]
    assert all(record["finish_reason"] for record in records)


def test_on_the_real_engine(tmp_path, pytestconfig):
    model = ROOT / "tests" / "data" / "models" / "table_open"
    cache = pytestconfig.rootpath / ".cache" / "xla"  # programs other tests have compiled
    values = {**SMALL, "max_rows": 4, "compilation_cache": cache}
    settings = [f"--set={key}={value}" for key, value in values.items()]

    def call(*args):
        return subprocess.run([sys.executable, "-m", "jinfer.cli.main", *map(str, args), *settings], cwd=ROOT,
                              text=True, capture_output=True, check=False)
    done = call("generate", model, "-p", "u")
    assert (done.returncode, done.stdout) == (0, "é漢😀!\n"), done.stderr
    done = call("batch", DATA / "order40.jsonl", tmp_path / "out.jsonl", "--model", model)
    assert done.returncode == 0, done.stderr
    assert "40 answered, 0 failed" in done.stderr
    done = call("generate", tmp_path / "missing", "-p", "u")
    assert (done.returncode, done.stdout) == (1, "")
    *stages, error = done.stderr.splitlines()
    assert len(stages) == 1  # where there is no terminal, progress is one line a stage
    assert error.startswith("jinfer: ")


def test_help_and_version():
    def call(*args):
        return subprocess.run([sys.executable, "-m", "jinfer.cli.main", *args], cwd=ROOT, text=True,
                              capture_output=True, check=True).stdout
    overall = call("--help")
    for command in ("generate", "chat", "batch"):
        assert command in overall
        assert "--repetition-penalty" in call(command, "--help")
    assert call("--version").startswith("jinfer 0.")
