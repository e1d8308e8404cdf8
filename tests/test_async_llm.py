"""AsyncLLM: many tasks on one engine, cancellation, failures that nobody waits for in vain."""

import asyncio
import threading
import time

import pytest

from jinfer import AsyncLLM, SamplingParams, ServiceParams
from jinfer.errors import CapacityError, JinferError, OverloadError, RequestError
from tests.fake_engine import FakeEngine

GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(max_tokens=240)
pytestmark = pytest.mark.timeout(30)


def run(use, **engine):
    """Runs `use(llm)` in a fresh event loop, then checks that closing ends the thread."""
    async def body():
        async with AsyncLLM.from_engine(FakeEngine(**engine)) as llm:
            result = await use(llm)
        assert not llm._thread.is_alive()
        assert llm.engine.closed
        return result
    return asyncio.run(body())


async def settled(llm):
    """Waits, two seconds at most, until the engine has nothing left to do."""
    for _ in range(200):
        if not llm.engine.has_work and llm._commands.empty():
            return True
        await asyncio.sleep(0.01)
    return False


def test_generate():
    async def use(llm):
        return await llm.generate("u", GREEDY), await llm.generate([{"role": "user", "content": "x"}])
    plain, chat = run(use)
    assert (plain.text, chat.text) == ("é漢😀!", "OQ")


def test_many_tasks_are_batched():
    async def use(llm):
        outputs = await asyncio.gather(*(llm.generate(p, GREEDY) for p in ["L", "r", "u"] * 10))
        return [o.text for o in outputs], llm.engine.most_running
    texts, most = run(use, slow=0.001)
    assert texts == ["yz", "r" * 20, "é漢😀!"] * 10
    assert most == 4


def test_stream():
    async def use(llm):
        return [delta async for delta in llm.stream("u", GREEDY)]
    deltas = run(use)
    assert "".join(d.text for d in deltas) == "é漢😀!"
    assert [d.request_finished for d in deltas].index(True) == len(deltas) - 1


def test_a_refused_request_fails_alone():
    async def use(llm):
        return await asyncio.gather(llm.generate("L", GREEDY), llm.generate([], GREEDY),
                                    llm.generate("r" * 300), llm.generate(3), return_exceptions=True)
    good, empty, long, wrong = run(use)
    assert good.text == "yz"
    assert isinstance(empty, RequestError)
    assert isinstance(long, CapacityError)
    assert isinstance(wrong, RequestError)


def test_an_unexpected_error_in_submit_fails_alone():
    async def use(llm):
        llm.engine.submit, submit = lambda *a, **k: 1 / 0, llm.engine.submit
        with pytest.raises(ZeroDivisionError):
            await llm.generate("L")
        llm.engine.submit = submit
        return await llm.generate("L")
    assert run(use).text == "yz"


def test_a_full_queue_refuses():
    async def use(llm):
        results = await asyncio.gather(*(llm.generate("r", GREEDY) for _ in range(12)), return_exceptions=True)
        assert (await llm.generate("L")).text == "yz"
        return results
    results = run(use, slow=0.002, max_rows=2, max_waiting=3)
    refused = [r for r in results if isinstance(r, OverloadError)]
    assert 0 < len(refused) < 12
    assert all(r.text == "r" * 20 for r in results if not isinstance(r, OverloadError))


def test_service_reaches_the_engine():
    async def use(llm):
        fast = ServiceParams(priority=-1)
        await llm.generate("L", service=fast, request_id="a")
        late = await llm.generate("r", LONG, service=ServiceParams(timeout=0.02))
        return llm.engine.services["a"] == fast, late.completions[0].finish_reason, len(late.text)
    same, reason, tokens = run(use, slow=0.001)
    assert (same, reason) == (True, "timeout")
    assert tokens < 240


@pytest.mark.parametrize("hand_back", [False, True])
def test_drain(hand_back):
    async def use(llm):
        tasks = [asyncio.create_task(llm.generate("r", GREEDY, request_id=f"r{i}")) for i in range(6)]
        await asyncio.sleep(0.01)
        drain = asyncio.create_task(llm.drain(hand_back))
        await asyncio.sleep(0.005)
        with pytest.raises(OverloadError, match="draining"):
            await llm.generate("L")
        assert not drain.done()
        names = await drain
        assert not llm.engine.has_work
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await llm.drain()  # nothing to wait for
        await llm.resume()
        assert (await llm.generate("L")).text == "yz"
        return names, ["back" if isinstance(r, OverloadError) else r.text for r in results]
    names, results = run(use, slow=0.004)
    assert names == (["r4", "r5"] if hand_back else [])
    assert results == ["r" * 20] * 4 + ["back" if hand_back else "r" * 20] * 2


def test_a_drain_that_nobody_waits_for_any_more_and_one_of_a_failing_engine():
    async def use(llm):
        task = asyncio.create_task(llm.generate("r", LONG))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.drain(), 0.01)
        with pytest.raises(JinferError, match="on fire"):
            await llm.drain()
        with pytest.raises(JinferError, match="on fire"):
            await llm.resume()
        return await asyncio.gather(task, return_exceptions=True)
    assert "on fire" in str(run(use, slow=0.004, fail_at=30)[0])


def test_pin():
    async def use(llm):
        name = await llm.pin("prefix")
        assert llm.engine.pins == {name: [256, *b"prefix"]}
        await llm.unpin(name)
        with pytest.raises(RequestError, match="is not pinned"):
            await llm.unpin(name)
        with pytest.raises(JinferError, match="ended as timeout"):
            await llm.pin("late", ServiceParams(timeout=1e-9))
        for _ in range(20):
            task = asyncio.create_task(llm.pin("prefix"))
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await settled(llm)
        return llm.engine.pins
    assert run(use, slow=0.0005) == {}


def test_request_ids_are_unique_while_in_use():
    async def use(llm):
        first = asyncio.create_task(llm.generate("r", LONG, request_id="a"))
        await asyncio.sleep(0.02)
        with pytest.raises(RequestError, match="a is in use"):
            await llm.generate("L", request_id="a")
        return await first
    assert len(run(use, slow=0.001).text) == 240


def test_a_cancelled_task_cancels_its_request():
    async def use(llm):
        other = asyncio.create_task(llm.generate("r", GREEDY))
        task = asyncio.create_task(llm.generate("r", LONG, request_id="mine"))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await settled(llm)
        return llm.engine.cancelled, (await other).text
    assert run(use, slow=0.002) == (["mine"], "r" * 20)


def test_a_task_cancelled_before_it_was_submitted():
    async def use(llm):
        for _ in range(50):
            task = asyncio.create_task(llm.generate("r", LONG))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await settled(llm)
    assert run(use, slow=0.002)


def test_leaving_a_stream_cancels_its_request():
    async def use(llm):
        stream = llm.stream("r", LONG, request_id="mine")
        async for _ in stream:
            break
        await stream.aclose()
        assert await settled(llm)
        return llm.engine.cancelled
    assert run(use, slow=0.001) == ["mine"]


def test_engine_failure_reaches_everybody():
    async def use(llm):
        first = await asyncio.gather(*(llm.generate("r", LONG) for _ in range(8)), return_exceptions=True)
        with pytest.raises(JinferError, match="on fire"):
            await llm.generate("L")
        return first
    errors = run(use, fail_at=5)
    assert len(errors) == 8
    for error in errors:
        assert isinstance(error, JinferError)
        assert "the engine failed: RuntimeError: the device is on fire" in str(error)


def test_closing_ends_those_who_wait():
    async def use(llm):
        tasks = [asyncio.create_task(llm.generate("r", LONG)) for _ in range(6)]
        await asyncio.sleep(0.02)
        await llm.aclose()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(JinferError, match="closed"):
            await llm.generate("L")
        return results
    for error in run(use, slow=0.005):
        assert isinstance(error, JinferError)
        assert "closed" in str(error)


def test_an_idle_engine_sleeps():
    async def use(llm):
        await llm.generate("L")
        assert await settled(llm)
        turns, busy = llm.engine.turns, time.process_time()
        await asyncio.sleep(0.2)
        return llm.engine.turns - turns, time.process_time() - busy
    turns, busy = run(use)
    assert turns == 0
    assert busy < 0.1  # a thread that spins takes all of the 0.2 seconds


def test_two_event_loops():
    llm = AsyncLLM.from_engine(FakeEngine(slow=0.001))
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(asyncio.run(llm.generate("u", GREEDY)).text))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["é漢😀!"] * 3
    asyncio.run(llm.aclose())


def test_a_loop_that_ends_while_its_request_runs():
    llm = AsyncLLM.from_engine(FakeEngine(slow=0.001))

    async def leave():
        stream = llm.stream("r", LONG)
        await anext(stream)
        llm.kept = stream  # neither closed nor collected when its loop ends

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()  # without shutdown_asyncgens

    async def after():
        text = (await llm.generate("L")).text
        assert await settled(llm)
        await llm.aclose()
        return text
    assert asyncio.run(after()) == "yz"
    assert len(llm.engine.cancelled) == 1


def test_on_the_real_engine(engines):
    """Batches, cancels and closes on jinfer's own engine and the table model."""
    engine = engines.get("table_open", max_rows=4, memory_utilization=0.5)  # one that no other test uses

    async def body():
        async with AsyncLLM.from_engine(engine) as llm:
            doomed = asyncio.create_task(llm.generate("r", LONG))
            texts = await asyncio.gather(*(llm.generate(p, GREEDY) for p in ["L", "r", "u"] * 3))
            with pytest.raises(RequestError):
                await llm.generate([999])
            doomed.cancel()
            assert await settled(llm)
            assert llm.metrics.pages_held == 0
            late = asyncio.create_task(llm.generate("r", LONG))
            await asyncio.sleep(0.01)
        with pytest.raises(JinferError, match="closed"):
            await late
        return [output.text for output in texts]
    assert asyncio.run(body()) == ["yz", "r" * 20, "é漢😀!"] * 3
