"""LLM over an engine: shapes of arguments and results, refusals, streaming, sharing, cancelling."""

import gc
import time

import numpy as np
import pytest

from jinfer import LLM, SamplingParams, ServiceParams
from jinfer.errors import CapacityError, ConfigError, JinferError, OverloadError, RequestError
from tests.engines import golden
from tests.fake_engine import FakeEngine

GREEDY = SamplingParams(temperature=0, max_tokens=20)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["fake", "real"])
def llm(request):
    """An LLM over the fake engine, and one over jinfer's own on the table model."""
    if request.param == "fake":
        engine = FakeEngine()
    else:
        engine = request.getfixturevalue("engines").get("table_open", max_rows=4)
    llm = LLM.from_engine(engine)
    llm.before = llm.metrics.snapshot()
    yield llm
    assert idle(llm)


def cancelled(llm):
    return llm.metrics.since(llm.before).requests_cancelled


def idle(llm):
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check()
    return True


def test_one_prompt_gives_one_output(llm):
    output = llm.generate("L", GREEDY)
    assert output.text == "yz"
    assert output.prompt == "L"
    assert output.completions[0].finish_reason == "stop"


def test_token_ids_are_one_prompt_and_get_nothing_added(llm):
    output = llm.generate([76], GREEDY)
    assert output.prompt_token_ids == [76]
    assert output.text == "yz"


def test_many_prompts_come_back_in_order(llm):
    prompts = ["r", "L", [117], "L", "M", "u"] * 3  # more than the engine's four rows
    outputs = llm.generate(prompts, GREEDY)
    assert [o.text for o in outputs] == ["r" * 20, "yz", "é漢😀!", "yz", "", "é漢😀!"] * 3
    assert llm.generate([], GREEDY) == []


def test_parameters_one_for_each(llm):
    outputs = llm.generate(["r", "r"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
    assert [o.text for o in outputs] == ["rr", "rrr"]
    with pytest.raises(RequestError, match="params: 1 given for 2 prompts"):
        llm.generate(["r", "r"], [GREEDY])


def test_choices(llm):
    output = llm.generate("L", SamplingParams(n=3))
    assert [c.text for c in output.completions] == ["yz"] * 3


def test_deltas_join_to_the_outputs(llm):
    texts = {}

    def note(delta):
        texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text

    outputs = llm.generate(["u", "L"], GREEDY, on_delta=note)
    assert [texts[o.request_id] for o in outputs] == [o.text for o in outputs]


def test_a_refused_prompt_names_its_place_and_nothing_runs(llm):
    with pytest.raises(CapacityError, match=r"^prompts\[1\]: prompt: 301 tokens are more than the context"):
        llm.generate(["L", "r" * 300], GREEDY)
    assert llm.metrics.since(llm.before).prefill_tokens == 0
    assert idle(llm)
    assert llm.generate("L", GREEDY).text == "yz"


def test_a_single_refused_prompt_is_not_numbered(llm):
    with pytest.raises(RequestError, match=r"^prompt: token id 999 is outside"):
        llm.generate([999], GREEDY)


def test_empty_prompts(llm):
    assert llm.generate("", GREEDY).prompt_token_ids == [256]  # BOS stands before any text
    with pytest.raises(RequestError, match=r"^prompt: is empty$"):
        llm.stream([], GREEDY)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt: is empty$"):
        llm.generate([[76], []], GREEDY)


def test_errors_can_be_returned(llm):
    bad, good, worse = llm.generate([[999], "L", [[1]]], GREEDY, errors="return")
    assert (good.text, good.error) == ("yz", None)
    assert isinstance(bad.error, RequestError)
    assert bad.finished
    assert bad.completions == []
    assert "list of token ids" in str(worse.error)
    with pytest.raises(RequestError, match="errors: must be raise or return"):
        llm.generate("L", GREEDY, errors="ignore")


@pytest.mark.parametrize("prompt", [3, None, b"L", [1.5], [True], {"a": 1}, "\ud83d", ["L", 3]])
def test_not_a_prompt(llm, prompt):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompt, GREEDY)
    assert idle(llm)


def test_chat(llm):
    output = llm.chat(HI, GREEDY)
    right = golden("table_open_expected")["chat"]
    assert output.prompt == right["rendered"]
    assert output.prompt_token_ids == right["right_ids"]  # the template holds BOS: none is added
    assert output.text == "OQ"
    assert [o.text for o in llm.chat([HI, HI], GREEDY)] == ["OQ", "OQ"]


@pytest.mark.parametrize("messages", ["hi", [HI, "hi"], [[]], [HI, [{"content": "x"}]],
                                      [{"role": 3}]])
def test_not_a_conversation(llm, messages):
    with pytest.raises(RequestError, match="messages"):
        llm.chat(messages, GREEDY)
    assert idle(llm)


def test_a_model_without_a_template():
    llm = LLM.from_engine(FakeEngine(chat=False))
    with pytest.raises(RequestError, match="messages: this model has no chat template"):
        llm.chat(HI)
    assert llm.generate("L").text == "yz"


def test_stream(llm):
    deltas = list(llm.stream("u", GREEDY))
    assert "".join(d.text for d in deltas) == "é漢😀!"
    assert [d.request_finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].output.text == "é漢😀!"
    assert "".join(d.text for d in llm.stream(HI, GREEDY)) == "OQ"


def test_a_stream_is_refused_at_once(llm):
    with pytest.raises(RequestError):
        llm.stream([999], GREEDY)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_stream_cancels(llm, taken):
    stream = llm.stream("r", SamplingParams(max_tokens=200))
    for _ in range(taken):
        next(stream)
    stream.close()
    assert cancelled(llm) == 1
    assert list(stream) == []
    assert idle(llm)


def test_letting_go_of_a_stream_cancels(llm):
    stream = llm.stream("r", SamplingParams(max_tokens=200))
    next(stream)
    del stream
    gc.collect()
    assert cancelled(llm) == 1


def test_a_finished_stream_is_not_cancelled(llm):
    with llm.stream("L", GREEDY) as stream:
        assert len(list(stream)) == 3
    assert cancelled(llm) == 0


def test_streams_and_generate_share_the_engine(llm):
    one, two = llm.stream("u", GREEDY), llm.stream("r", GREEDY)
    first = next(one)
    nested = []

    def nest(delta):
        if not nested:
            nested.append("".join(d.text for d in llm.stream("L", GREEDY)))

    assert llm.generate(["L", "u"], GREEDY, on_delta=nest)[1].text == "é漢😀!"
    assert nested == ["yz"]
    assert first.text + "".join(d.text for d in one) == "é漢😀!"
    assert "".join(d.text for d in two) == "r" * 20


def test_an_interrupted_generate_cancels_everything(llm):
    def stop(delta):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["r"] * 6, SamplingParams(max_tokens=200), on_delta=stop)
    assert cancelled(llm) == 6
    assert idle(llm)


def test_score(llm):
    output = llm.score("uSTP")
    assert output.text == ""
    assert [p.token_id for p in output.prompt_logprobs] == output.prompt_token_ids
    assert output.prompt_logprobs[0].logprob is None
    assert [len(o.prompt_logprobs) for o in llm.score([[1, 2], [3]])] == [2, 1]


def test_a_template_error_is_the_requests():
    llm = LLM.from_engine(FakeEngine())
    with pytest.raises(RequestError, match="messages: chat template: unknown role alien"):
        llm.chat([{"role": "alien", "content": "x"}])


def test_arrays_of_token_ids(llm):
    ids = np.array([76], np.int32)
    assert llm.generate(ids, GREEDY).text == "yz"
    assert llm.generate(list(ids), GREEDY).text == "yz"
    assert [o.text for o in llm.generate([ids, "u"], GREEDY)] == ["yz", "é漢😀!"]


def test_an_engine_that_forgets_a_request_is_an_error_not_a_hang():
    llm = LLM.from_engine(FakeEngine())
    llm.engine.step = lambda: (llm.engine._waiting.clear(), [])[1]
    with pytest.raises(JinferError, match="idle"):
        list(llm.stream("L", GREEDY))


def test_an_engine_failure_reaches_the_caller():
    llm = LLM.from_engine(FakeEngine(fail_at=3))
    with pytest.raises(RuntimeError, match="on fire"):
        llm.generate(["r", "r"], GREEDY)


def test_service_one_or_a_list():
    llm = LLM.from_engine(FakeEngine())
    fast, slow = ServiceParams(priority=-1), ServiceParams(timeout=9)
    llm.generate(["L", "u"], GREEDY, service=[fast, slow])
    llm.generate(["L", "u"], GREEDY, service=slow)
    llm.chat(HI, GREEDY, service=fast)
    llm.score("L", service=slow)
    list(llm.stream("L", GREEDY, service=fast))
    assert list(llm.engine.services.values()) == [fast, slow, slow, slow, fast, slow, fast]
    with pytest.raises(RequestError, match="service: 1 given for 2 prompts"):
        llm.generate(["r", "r"], service=[fast])
    with pytest.raises(RequestError, match="service: must be ServiceParams or a list of them, got 3"):
        llm.generate("r", service=3)


def test_more_prompts_than_may_wait():
    llm = LLM.from_engine(FakeEngine(max_rows=2, max_waiting=3))
    outputs = llm.generate(["r", "L", "u"] * 10, GREEDY)
    assert [o.text for o in outputs] == ["r" * 20, "yz", "é漢😀!"] * 10
    assert llm.engine.most_waiting == 3
    assert llm.metrics.requests_rejected == 0
    with pytest.raises(OverloadError):
        llm.generate("L", SamplingParams(n=4))  # never fits into the queue
    with pytest.raises(CapacityError, match=r"^prompts\[7\]"):
        llm.generate(["r"] * 7 + ["r" * 300], GREEDY)
    assert idle(llm)


def test_prompts_wait_for_room_that_others_take():
    llm = LLM.from_engine(FakeEngine(max_rows=1, max_waiting=1))
    others = [llm.stream("r", GREEDY)]
    next(others[0])
    others.append(llm.stream("u", GREEDY))  # fills the queue
    with pytest.raises(OverloadError):
        llm.stream("L", GREEDY)
    assert llm.generate(["L", "L"], GREEDY)[1].text == "yz"
    assert ["".join(d.text for d in other) for other in others] == ["r" * 19, "é漢😀!"]


def test_a_timeout_ends_a_request_and_keeps_its_text(llm):
    started, waiting = llm.generate(["r", "L"], SamplingParams(max_tokens=200, temperature=0),
                                    service=[ServiceParams(), ServiceParams(timeout=1e-9)])
    assert (started.text, waiting.text) == ("r" * 200, "")
    assert waiting.completions[0].finish_reason == "timeout"
    assert waiting.error is None
    with llm.stream("r", SamplingParams(max_tokens=200), service=ServiceParams(timeout=0.5)) as stream:
        first = next(stream)
        deadline = time.monotonic() + 0.6
        while time.monotonic() < deadline:
            time.sleep(0.05)
        *rest, last = stream
    assert last.finish_reason == "timeout"
    assert last.request_finished
    assert last.output.text == "".join(d.text for d in [first, *rest, last])
    assert 0 < len(last.output.text) < 200
    assert llm.metrics.since(llm.before).requests_timed_out == 2


def test_drain(llm):
    streams = [llm.stream("r", GREEDY) for _ in range(6)]  # the engine runs four
    next(streams[0])
    assert llm.drain() == []
    assert not llm.engine.has_work
    with pytest.raises(OverloadError, match="draining"):
        llm.generate("L", GREEDY)
    assert ["".join(d.text for d in stream) for stream in streams] == ["r" * 19] + ["r" * 20] * 5
    assert llm.metrics.since(llm.before).requests_rejected == 1
    llm.resume()
    assert llm.generate("L", GREEDY).text == "yz"


def test_drain_hands_back_what_was_not_begun(llm):
    streams = [llm.stream("r", SamplingParams(max_tokens=20, n=2 if i == 5 else 1)) for i in range(6)]
    next(streams[0])
    assert llm.drain(hand_back=True) == [stream.request_id for stream in streams[4:]]
    outputs = [list(stream)[-1].output for stream in streams]
    assert [output.text for output in outputs] == ["r" * 20] * 4 + [""] * 2
    assert [type(output.error) for output in outputs] == [type(None)] * 4 + [OverloadError] * 2
    assert {c.finish_reason for output in outputs[4:] for c in output.completions} == {"cancelled"}
    change = llm.metrics.since(llm.before)
    assert (change.requests_handed_back, change.requests_cancelled) == (2, 0)
    llm.resume()


def test_a_drain_amid_generate(llm):
    def drain(delta):
        if not llm.engine.draining:
            llm.engine.drain(hand_back=True)

    outputs = llm.generate(["r"] * 8, GREEDY, on_delta=drain)
    assert sorted(output.text for output in outputs) == [""] * 4 + ["r" * 20] * 4
    assert all(isinstance(output.error, OverloadError) == (not output.text) for output in outputs)
    llm.resume()


def test_a_drain_amid_generate_with_a_short_queue():
    llm = LLM.from_engine(FakeEngine(max_rows=2, max_waiting=2))

    def drain(delta):
        llm.engine.drain()

    outputs = llm.generate(["r"] * 8, GREEDY, on_delta=drain)
    assert [bool(output.error) for output in outputs] == [False] * 4 + [True] * 4
    assert [len(output.text) for output in outputs] == [20] * 4 + [0] * 4


def test_pin():
    llm = LLM.from_engine(FakeEngine())
    stream = llm.stream("r", GREEDY)
    name = llm.pin("prefix", ServiceParams(cache_salt="x"))
    assert llm.engine.pins == {name: [256, *b"prefix"]}
    assert llm.engine.services[name].cache_salt == "x"
    other = llm.pin(HI)
    assert llm.engine.tokenizer.decode(llm.engine.pins[other]) == "user\nhi"  # no assistant's turn begins
    assert "".join(d.text for d in stream) == "r" * 20  # whose deltas were not lost meanwhile
    llm.unpin(name)
    assert list(llm.engine.pins) == [other]
    with pytest.raises(RequestError, match="pin: 'nothing' is not pinned"):
        llm.unpin("nothing")
    with pytest.raises(JinferError, match="not pinned: its request ended as timeout"):
        llm.pin("late", ServiceParams(timeout=1e-9))


def test_close():
    engine = FakeEngine()
    with LLM.from_engine(engine) as llm:
        assert not engine.closed
    assert engine.closed
    llm.close()


def test_a_bad_configuration_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"max_row: unknown key of EngineConfig; did you mean max_rows\?"):
        LLM("no-such-model", max_row=3)
    with pytest.raises(ConfigError, match="no such configuration"):
        LLM("no-such-model", "no-such-config")
