"""`AsyncClient` against a small broker: hundreds at once, queueing, deadlines, cancellation, a broker that goes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes.small_broker import SmallBroker


@pytest.fixture
def loop_client(small_broker):
    """`run(test)` runs `test(client)` on an event loop of its own."""

    def run(test, **options):
        async def main():
            client = await clientlib.connect_async(f"ipc://{small_broker.directory}", **options)
            try:
                async with asyncio.timeout(60):
                    await test(client)
            finally:
                await client.close()

        asyncio.run(main())

    return run


async def doubling(client, slots=1):
    region = await client.create_region("r", 4096)
    region.array((8, 4), np.float32)[:] = np.arange(32).reshape(8, 4)
    x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=2048)
    return region, await client.prepare("double", {"x": x}, {"y": y}, slots=slots)


async def until(condition):
    while not condition():  # noqa: ASYNC110 (the broker's thread makes it true)
        await asyncio.sleep(0)


def test_the_same_verbs(loop_client):
    async def test(client):
        region = await client.create_region("a", 64)
        assert set(await client.models()) >= {"double", "echo"}
        model = await client.model("double")
        assert (model.name, model.inputs[0].name, model.zero_copy) == ("double", "x", True)
        assert (await model({"x": np.ones((1, 2), np.float32)}))["y"].tolist() == [[2, 2]]
        assert await region.share() == "token"
        assert (await client.open_region("token", name="b")).name == "b"
        assert {record.name for record in await client.regions()} >= {"a", "b"}
        assert await client.statistics() == [{"name": "double"}]
        await client.load("double")
        await client.unload("double")
        await client.unregister("a")
        with pytest.raises(InferError, match="cannot register 'gpu'"):
            await client.register_cuda_shm("gpu")
        with pytest.raises(InferError, match="'nosuch' is not found"):
            await client.infer("nosuch", {"x": np.ones(1, np.float32)})

    loop_client(test)


def test_hundreds_at_once_each_its_own_answer(loop_client, small_broker):
    async def test(client):
        for _ in range(3):
            asked = (client.infer("double", {"x": np.full((1, 8), k, np.float32)}) for k in range(600))
            answers = await asyncio.gather(*asked)
            assert all((answer["y"] == 2 * k).all() for k, answer in enumerate(answers))
        assert client.native.link.lanes.all()[0].channel.lost_wakeups == 0

    loop_client(test)
    assert small_broker.calls.count("Prepare") == 1
    assert small_broker.calls.count("OpenChannel") == 1


def test_a_full_channel_queues_in_order(loop_client, small_broker):
    async def test(client):
        _, plan = await doubling(client, slots=(1, 8))
        small_broker.hold = True
        pending = [await plan.submit(output_slot=k) for k in range(8)]  # two slots: six wait
        assert pending[7].cancel()
        with pytest.raises(InferError, match="cancelled"):
            await pending[7]
        with pytest.raises(InferError, match="timeout expired"):
            await plan.infer(output_slot=7, timeout=0.02)
        small_broker.release()
        ended = []
        await asyncio.gather(*(note(each, k, ended) for k, each in enumerate(pending[:7])))
        assert ended == sorted(ended)

    async def note(pending, k, ended):
        await pending
        ended.append(k)

    loop_client(test, slots=2)


def test_the_queue_goes_on_when_a_look_for_free_memory_reaped(loop_client, small_broker):
    async def test(client):
        _, plan = await doubling(client, slots=(1, 2))
        await plan.infer()
        small_broker.hold = True
        first, queued = await plan.submit(), await plan.submit(output_slot=1)
        completed = small_broker.completed
        small_broker.release()
        while small_broker.completed == completed:  # the loop gets no turn meanwhile
            pass
        last = await plan.submit()  # finds its position free only by looking
        assert first.done()
        for pending in (queued, last):
            await pending.result(timeout=60)

    loop_client(test, slots=1)


def test_waiting_and_deadlines(loop_client, small_broker):
    async def test(client):
        _, plan = await doubling(client)
        small_broker.hold = True
        pending = await plan.submit()
        with pytest.raises(TimeoutError, match="goes on"):
            await pending.result(timeout=0.01)
        with pytest.raises(InferError, match="overlaps"):
            await plan.submit()
        assert not pending.done()
        small_broker.release()
        result = await pending
        assert await pending.result() is result
        assert result["y"].tolist() == [[0, 2, 4, 6]]
        assert not pending.cancel()
        small_broker.hold = True
        with pytest.raises(InferError, match="timeout expired") as caught:
            await plan.infer(timeout=0.02)
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(InferError, match="overlaps"):
            await plan.infer()
        completed = small_broker.completed
        small_broker.release()
        await until(lambda: small_broker.completed > completed)
        await plan.infer()

    loop_client(test)


def test_cancelling_the_awaiting_task_cancels_the_request(loop_client, small_broker):
    async def test(client):
        _, plan = await doubling(client)
        small_broker.hold = True
        task = asyncio.create_task(plan.infer())
        await until(lambda: plan.prepared and plan.prepared.layout.ranges.live)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not plan.prepared.layout.ranges.live)
        small_broker.release()
        assert small_broker.completed == 0
        await plan.infer()

    loop_client(test)


def test_quiet_loops_are_rung(loop_client, small_broker):
    async def test(client):
        _, plan = await doubling(client)
        for _ in range(5):
            small_broker.hold = True
            pending = await plan.submit()
            await asyncio.sleep(0.002)  # long enough for the poller to rest
            small_broker.release()
            assert (await pending)["y"].shape == (1, 4)

    loop_client(test)


def test_results_of_unknown_size_and_strings(loop_client):
    async def test(client):
        assert (await client.infer("spread", {"x": np.arange(3, dtype=np.float32)}))["y"].shape == (120_000,)
        values = np.array([b"a\0", "ü"], object)
        assert (await client.infer("echo", {"x": values}))["y"].tolist() == [b"a\0", "ü".encode()]
        region, _ = await doubling(client)
        plan = await client.prepare("spread", {"x": region.tensor((3,), "FP32")})
        assert (await plan.infer())["y"].shape == (120_000,)

    loop_client(test)


def test_plans_that_a_reload_closed_are_made_again(loop_client, small_broker):
    async def test(client):
        x = np.ones((1, 2), np.float32)
        await client.infer("double", {"x": x})
        small_broker.reload()
        answers = await asyncio.gather(*(client.infer("double", {"x": x}) for _ in range(20)))
        assert all(answer["y"].tolist() == [[2, 2]] for answer in answers)
        assert small_broker.calls.count("Prepare") == 2

    loop_client(test)


def test_places_are_waited_for(loop_client):
    async def test(client):
        big = np.ones((1, 1 << 20), np.float32)  # room for two or four of them
        answers = await asyncio.gather(*(client.infer("double", {"x": big * k}) for k in range(8)))
        assert all((answer["y"] == 2 * k).all() for k, answer in enumerate(answers))
        region = await client.create_region("r", 4 << 20)
        plan = await client.prepare("double", {"x": region.tensor((1, 1 << 20), "FP32")})
        held = [await plan.submit() for _ in range(plan.prepared.layout.bank.places)]
        with pytest.raises(InferError, match="timeout expired"):
            await plan.infer(timeout=0.02)
        task = asyncio.create_task(plan.infer())
        await asyncio.sleep(0)
        while held:
            await held.pop()
        assert (await task)["y"].shape == (1, 1 << 20)

    loop_client(test)


def test_one_error_at_most_when_the_broker_goes_and_comes(loop_client, small_broker):
    async def test(client):
        region, plan = await doubling(client)
        await client.infer("double", {"x": np.ones((1, 1), np.float32)})
        view = region.array((4,), np.float32)
        small_broker.hold = True
        pending = await plan.submit()
        small_broker.stop()
        with pytest.raises(InferError, match="broker went away") as caught:
            await pending
        assert caught.value.code == "UNAVAILABLE"
        small_broker.hold = False
        waiting = asyncio.create_task(plan.infer())  # while nobody is there
        await asyncio.sleep(0.03)
        view[:] = 9
        small_broker.start()
        assert (await waiting)["y"].tolist() == [[18] * 4]
        assert (await client.infer("double", {"x": np.ones((1, 1), np.float32)}))["y"].tolist() == [[2]]

    loop_client(test)


def test_still_starting_and_nobody_there(small_broker, tmp_path_factory):
    async def test():
        small_broker.starting = True
        with pytest.raises(InferError, match="starting: 3 of 7 models"):
            await clientlib.connect_async(f"ipc://{small_broker.directory}", timeout=0.5)
        with pytest.raises(InferError, match="no broker at"):
            await clientlib.connect_async(f"ipc://{tmp_path_factory.mktemp('empty')}")

    asyncio.run(test())


def test_closing_ends_what_is_outstanding(loop_client, small_broker):
    async def test(client):
        region, plan = await doubling(client)
        kept = (await client.infer("double", {"x": np.ones((1, 2), np.float32)}))["y"]
        small_broker.hold = True
        task = asyncio.create_task(plan.infer())
        await until(lambda: plan.prepared.layout.ranges.live)
        await client.close()
        with pytest.raises(InferError, match="closed"):
            await task
        for call in (plan.infer, client.models, region.share):
            with pytest.raises(InferError, match="closed"):
                await call()
        assert kept.tolist() == [[2, 2]]

    loop_client(test)


def test_a_client_lives_on_its_loop(small_broker: SmallBroker):
    async def make():
        return await clientlib.connect_async(f"ipc://{small_broker.directory}")

    arrays = {"x": np.ones((1, 8), np.float32)}

    async def begin(client):
        region, plan = await doubling(client)
        for _ in range(2):
            await plan.infer()
            await client.infer("double", arrays)
        stream = await client.stream("double", arrays)
        small_broker.hold = True
        return region, plan, stream, await plan.submit()

    async def use(client, region, plan, stream, pending):
        for call in (
            client.models,
            client.close,
            region.share,
            plan.infer,
            plan.submit,
            plan.release,
            pending.result,
            functools.partial(client.infer, "double", arrays),
            functools.partial(client.infer, "double", {"x": np.ones((1, 9), np.float32)}),
            client.stream("double", arrays).__anext__,
            plan.stream().__anext__,
            stream.__anext__,
        ):
            with pytest.raises(InferError, match=r"lives on another event loop: connect_async\(\) on this one"):
                async with asyncio.timeout(30):
                    await call()

    def elsewhere(*used):
        asyncio.run(use(*used))

    async def both(client):
        used = client, *await begin(client)
        await asyncio.to_thread(elsewhere, *used)
        small_broker.release()
        assert (await used[-1])["y"].shape == (1, 4)
        return used

    with asyncio.Runner() as first:
        client = first.run(make())
        used = first.run(both(client))
    with asyncio.Runner() as second:
        with pytest.raises(InferError, match="lives on another event loop"):
            second.run(used[2].infer())
        second.run(client.close())  # which nothing else can do any more
        with pytest.raises(InferError, match="closed"):
            second.run(client.models())


def test_no_helper_threads(loop_client):
    async def test(client):
        before = threading.active_count()
        await asyncio.gather(*(client.infer("double", {"x": np.ones((1, 8), np.float32)}) for _ in range(100)))
        assert threading.active_count() <= before

    loop_client(test)


def test_dropped_on_the_way(loop_client, small_broker):
    async def test(client):
        _, plan = await doubling(client)
        small_broker.hold = True
        await plan.submit()  # nobody keeps it
        gc.collect()
        small_broker.release()
        await until(lambda: not plan.prepared.layout.ranges.live)
        with contextlib.suppress(InferError):
            await plan.infer()

    loop_client(test)
