"""A remote client on a transport without a wire: what it says, what it makes of answers, whose memory is in use."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

from clientlib.remote import transport
from clientlib.remote.async_client import AsyncRemoteClient
from clientlib.remote.transport import InferAnswer, OutputTensor
from shm.errors import Code, ConnectionLost, InferError
from tests.fakes.remote import ADDRESS, AsyncFakeTransport, FakeTransport, answer, client_on, doubled, plan_of


@pytest.fixture
def fake():
    return FakeTransport()


@pytest.fixture
def client(fake):
    with client_on(fake) as client:
        yield client


def vector(*values):
    return np.array([values], np.float32)


class TestSaid:
    def test_arrays_alone_ask_nothing_first(self, client, fake):
        fake.said.clear()
        result = client.infer("double", {"x": vector(1, 2)}, timeout=3000, priority=3)
        assert result["y"].tolist() == [[2, 4]]
        assert result.copied_bytes == 16
        assert fake.said == []
        (request,) = fake.requests
        assert (request.outputs, request.priority) == (None, 3)
        assert 2900e6 < request.timeout_us <= 3000e6

    def test_a_sequence(self, client, fake):
        _, plan = plan_of(client)
        plan.infer(sequence_id=2**64 - 1, sequence_start=True)
        request = fake.requests[-1]
        assert (request.sequence_id, request.sequence_start, request.sequence_end) == (2**64 - 1, True, False)
        assert request.timeout_us == 0

    def test_regions_are_nobodys_business_where_memory_is_not_shared(self, client, fake):
        fake.said.clear()
        client.create_region("a", 64)
        client.unregister()
        assert fake.said == []

    def test_models(self, client, fake):
        found = client.models()
        assert (found["double"].max_batch_size, found["double"].state) == (8, "READY")
        assert (found["never"].state, found["never"].inputs) == ("UNAVAILABLE", ())
        client.load("double")
        client.unload("double")
        assert fake.said[-2:] == [transport.Load("double"), transport.Unload("double")]

    def test_placed_outputs_ask_for_metadata_once_and_again_after_an_error(self, client, fake):
        region = client.create_region("r", 4096)
        place = {"y": region.tensor((1, 1), "FP32")}
        for _ in range(2):
            client.infer("double", {"x": vector(1)}, place)
        assert fake.said.count(transport.Metadata("double")) == 1
        fake.answers = lambda request: InferError(Code.INVALID_ARG, "it was reloaded")
        with pytest.raises(InferError, match="reloaded"):
            client.infer("double", {"x": vector(1)}, place)
        fake.answers = doubled
        client.infer("double", {"x": vector(1)}, place)
        assert fake.said.count(transport.Metadata("double")) == 2

    def test_a_server_that_is_not_ready(self, fake):
        fake.refuses[transport.Live] = InferError(Code.UNAVAILABLE, "Server exiting")
        with pytest.raises(InferError, match="Server exiting"):
            client_on(fake)
        assert fake.said == [transport.Live()]

    def test_a_first_connection_that_breaks_is_made_again_once(self, fake):
        fake.refuses[transport.Live] = ConnectionLost("broken")
        with pytest.raises(ConnectionLost, match="broken"):
            client_on(fake)
        assert fake.said == [transport.Live()] * 2


class TestAnswers:
    @pytest.mark.parametrize(
        ("made", "text"),
        [
            (answer(b"\0" * 12, (1, 4)), "has 12 bytes for output 'y', FP32 .1,4. takes 16"),
            (answer(None, (1, 4)), "has no data for output 'y'"),
            (answer(b"", (1, -4)), "every dimension must be 0 or more"),
            (answer(b"", (2**62, 2**62)), "more elements than any memory holds"),
            (answer(b"\0" * 16, (1, 4), "FP99"), "unknown datatype 'FP99'"),
            (answer(b"\5\0\0\0a", (1, 1), "BYTES"), "incomplete string data for output 'y'"),
        ],
    )
    def test_that_cannot_be(self, client, fake, made, text):
        fake.answers = lambda request: made
        with pytest.raises(InferError, match=text):
            client.infer("double", {"x": vector(1)})

    @pytest.mark.parametrize(
        ("made", "text"),
        [
            (answer(b"\0" * 32, (1, 8)), "'y' [(]16 bytes[)] should be at least 32 bytes"),
            (answer(b"\0" * 32, (1, 4), "FP64"), "data-type is 'FP32', but the model gives 'FP64'"),
            (answer(b"\0" * 16, (1, 4), name="z"), "has no output 'y'"),
            (InferAnswer([]), "has no output 'y'"),
            (
                InferAnswer([OutputTensor("y", "FP32", (1, 4), b"\1" * 16), OutputTensor("w", "FP32", (1,), None)]),
                "no data for output 'w'",
            ),
        ],
    )
    def test_that_do_not_fit_a_place_leave_it_alone(self, client, fake, made, text):
        region, plan = plan_of(client)
        fake.answers = lambda request: made
        for _ in range(2):  # the place is free again
            with pytest.raises(InferError, match=text):
                plan.infer()
        with pytest.raises(InferError, match=text):
            plan.submit().result()
        assert not region.array((64,), np.uint8, 1024).any()

    def test_smaller_than_the_place(self, client, fake):
        region, plan = plan_of(client)
        fake.answers = lambda request: answer(b"\1" * 8, (1, 2))
        result = plan.infer()["y"]
        assert result.shape == (1, 2)
        assert np.shares_memory(result, region.array((1, 2), np.float32, 1024))
        assert region.array((16,), np.uint8, 1024).tolist() == [1] * 8 + [0] * 8

    def test_writable_bytes_are_taken_as_they_are(self, client, fake):
        data = bytearray(16)
        fake.answers = lambda request: answer(data, (1, 4))
        assert np.shares_memory(client.infer("double", {"x": vector(1)})["y"], np.frombuffer(data, np.uint8))


class TestInFlight:
    def test_ranges_are_in_use_until_the_end(self, client, fake):
        fake.answers = None
        region, plan = plan_of(client, slots=2)
        other = client.prepare(
            "double", {"x": region.tensor((1, 4), "FP32", 1024)}, {"y": region.tensor((1, 4), "FP32")}
        )
        pending = plan.submit()
        for start in (plan.submit, lambda: plan.submit(output_slot=0), other.submit):
            with pytest.raises(InferError, match="has not ended") as caught:
                start()
            assert caught.value.code == "INVALID_ARG"
        plan.submit(output_slot=1)
        fake.end(answer(b"\0" * 16, (1, 4)))
        assert pending.done()
        plan.submit()

    def test_a_request_that_did_not_start_holds_nothing(self, client, fake, monkeypatch):
        _, plan = plan_of(client)

        def refuse(*_):
            raise transport.lost(ADDRESS, "it broke")

        with monkeypatch.context() as patched:
            patched.setattr(fake, "submit", refuse)
            with pytest.raises(InferError, match="it broke"):
                plan.submit()
        assert plan.infer()["y"].tolist() == [[2] * 4]

    def test_an_answer_after_the_deadline_is_not_written(self, client, fake):
        fake.answers = None
        fake._cancel = lambda ended: None
        region, plan = plan_of(client)
        pending = plan.submit(timeout=0.01)
        with pytest.raises(InferError, match="Request timeout expired"):
            pending.result()
        fake.end(answer(b"\1" * 16, (1, 4)))
        with pytest.raises(InferError, match="Request timeout expired"):
            pending.result()
        assert not region.array((16,), np.uint8, 1024).any()

    def test_slots(self, fake):
        fake.answers = None
        with client_on(fake, slots=2) as client:
            region = client.create_region("r", 64)
            plan = client.prepare("double", {"x": region.tensor((1, 4), "FP32")})
            pending = [plan.submit() for _ in range(2)]
            with pytest.raises(InferError, match="all 2 slots of this client are taken"):
                plan.submit(timeout=0.01)
            timer = threading.Timer(0.05, fake.end, [answer(b"\0" * 16, (1, 4))])
            timer.start()
            plan.submit(timeout=30)
            timer.join()
            assert pending[0].done()

    def test_close_ends_them(self, client, fake):
        fake.answers = None
        _, plan = plan_of(client)
        pending = plan.submit()
        client.close()
        with pytest.raises(InferError, match="the client was closed"):
            pending.result()
        assert fake.closed

    def test_every_thread_gets_the_result(self, client, fake):
        fake.answers = None
        _, plan = plan_of(client)
        pending = plan.submit()
        found = []
        threads = [threading.Thread(target=lambda: found.append(pending.result(30))) for _ in range(4)]
        for thread in threads:
            thread.start()
        fake.end(answer(b"\0" * 16, (1, 4)))
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert all(result is found[0] for result in found)

    def test_a_client_that_nobody_closed_lets_go(self, fake):
        client = client_on(fake)
        region, plan = plan_of(client)
        plan.infer()
        del client, region, plan
        gc.collect()
        assert fake.closed


class TestLoop:
    def run(self, body, **options):
        async def main():
            fake = AsyncFakeTransport(**options)
            async with AsyncRemoteClient(ADDRESS, fake, 2) as client:
                region = await client.create_region("r", 4096)
                x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", 1024)
                await body(fake, client, region, await client.prepare("double", {"x": x}, {"y": y}, slots=(1, 8)))

        asyncio.run(main())

    def test_inputs_are_read_at_submit(self):
        async def body(fake, client, region, plan):
            region.array((4,), np.float32)[:] = 1
            pending = await plan.submit()
            region.array((4,), np.float32)[:] = 9
            assert (await pending)["y"].tolist() == [[2] * 4]

        self.run(body)

    def test_cancelling_who_waits_cancels_the_request(self):
        async def body(fake, client, region, plan):
            fake.gate = asyncio.Event()
            task = asyncio.create_task(plan.infer())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            fake.gate = None
            assert (await plan.infer())["y"].shape == (1, 4)

        self.run(body)

    @pytest.mark.parametrize("shares_memory", [False, True])
    def test_the_deadline_answers_and_only_shared_memory_stays_in_use(self, shares_memory):
        async def body(fake, client, region, plan):
            fake.gate = gate = asyncio.Event()
            fake.inner.answers = lambda request: answer(None if shares_memory else b"\0" * 16, (1, 4))
            asked = asyncio.create_task(plan.infer(timeout=30)) if shares_memory else await plan.submit(timeout=30)
            while not fake.waiting:  # noqa: ASYNC110  (only what has begun stays in use)
                await asyncio.sleep(0)
            asyncio.get_running_loop().time = lambda: time.monotonic() + 60
            with pytest.raises(InferError, match="Request timeout expired"):
                await asked
            fake.gate = None
            if shares_memory:
                with pytest.raises(InferError, match="has not ended"):
                    await plan.infer()
                gate.set()
                for _ in range(8):  # turns that the end takes to get through the tasks
                    await asyncio.sleep(0)
            assert (await plan.infer())["y"].shape == (1, 4)

        self.run(body, shares_memory=shares_memory)

    def test_slots_are_given_in_turn(self):
        async def body(fake, client, region, plan):
            fake.gate = asyncio.Event()
            for k in range(2):
                await plan.submit(output_slot=k)
            with pytest.raises(InferError, match="Request timeout expired"):
                await plan.submit(timeout=0.01, output_slot=2)
            waiting = [asyncio.create_task(plan.submit(output_slot=k)) for k in range(2, 8)]
            await asyncio.sleep(0)
            fake.gate.set()
            results = [await (await task) for task in waiting]
            assert [result["y"].shape for result in results] == [(1, 4)] * 6

        self.run(body)

    def test_another_loop(self):
        async def connect():
            return AsyncRemoteClient(ADDRESS, AsyncFakeTransport(), 2)

        client = asyncio.run(connect())
        with pytest.raises(InferError, match="another event loop"):
            asyncio.run(client.models())
