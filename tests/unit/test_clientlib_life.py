"""A client's life against a small broker: verbs, a broker that goes and comes, close."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

import clientlib
from shm import messages
from shm.errors import Code, InferError
from tests.fakes.small_broker import connect, doubling


class TestBroker:
    def test_verbs(self, client):
        region = client.create_region("a", 64)
        assert set(client.models()) >= {"double", "echo"}
        model = client.model("double")
        assert (model.name, model.inputs[0].name, model.outputs[0].datatype, model.max_batch_size, model.zero_copy) == (
            "double", "x", "FP32", 0, True,
        )  # fmt: skip
        assert region.share() == "token"
        opened = client.open_region("token", name="b")
        assert opened.array((4,), np.int32).tolist() == [0] * 4
        assert {record.name for record in client.regions()} == {"a", "b"}
        assert client.statistics("double") == [{"name": "double"}]
        client.load("double")
        client.unload("double")
        with pytest.raises(InferError, match="already in manager") as caught:
            client.create_region("a", 64)
        assert caught.value.code == "ALREADY_EXISTS"
        with pytest.raises(InferError, match="cannot register 'gpu'") as caught:
            client.register_cuda_shm("gpu", object())
        assert caught.value.code in ("UNSUPPORTED", "INVALID_ARG")  # by whether this machine has a GPU

    def test_unregister(self, client):
        region, plan = doubling(client)
        array = plan.infer()["y"]
        client.unregister("nosuch")
        client.unregister("r")
        assert array.tolist() == [[0, 2, 4, 6]]
        with pytest.raises(InferError, match="'r': it was unregistered") as caught:
            client.prepare("double", {"x": region.tensor((1, 4), "FP32")})
        assert caught.value.code == "NOT_FOUND"
        client.create_region("r", 64)
        client.infer("double", {"x": np.ones((1, 1), np.float32)})
        client.unregister()
        client.infer("double", {"x": np.ones((1, 1), np.float32)})  # the client's own memory is not the application's

    def test_nobody_there(self, tmp_path):
        with pytest.raises(InferError, match=r"no broker at .*broker\.sock.*tensorbroker serve") as caught:
            clientlib.connect(f"ipc://{tmp_path}")
        assert caught.value.code == "UNAVAILABLE"

    def test_still_starting(self, small_broker):
        small_broker.starting = True
        with pytest.raises(InferError, match="starting: 3 of 7 models"):
            connect(small_broker, timeout=0.5)

    def test_a_reply_that_never_comes(self, client, small_broker):
        small_broker.answers["LoadModel"] = lambda asked: None
        with pytest.raises(InferError, match="no answer to LoadModel"):
            client.load("double", timeout=0.05)
        client.models()

    def test_one_error_at_most_when_the_broker_goes_and_comes(self, client, small_broker):
        region, plan = doubling(client)
        client.infer("double", {"x": np.ones((1, 1), np.float32)})
        view = region.array((4,), np.float32)
        small_broker.hold = True
        pending = plan.submit()
        small_broker.stop()
        with pytest.raises(InferError, match="broker went away") as caught:
            pending.result(10)
        assert caught.value.code == "UNAVAILABLE"
        small_broker.hold = False
        small_broker.start()
        view[:] = 9
        assert plan.infer(timeout=60)["y"].tolist() == [[18] * 4]
        assert client.infer("double", {"x": np.ones((1, 1), np.float32)})["y"].tolist() == [[2]]
        client.create_region("new", 64)

    def test_a_look_finds_what_a_broker_that_went_leaves_behind(self, client, small_broker):
        _, plan = doubling(client)
        small_broker.hold = True
        pending = plan.submit()
        assert not pending.done()
        small_broker.stop()
        assert pending.done()
        with pytest.raises(InferError, match="broker went away"):
            pending.result()
        small_broker.start()

    def test_a_call_finds_the_new_broker_by_itself(self, client, small_broker):
        small_broker.stop()
        small_broker.start()
        assert "double" in client.models()

    def test_a_broker_that_stays_away(self, client, small_broker):
        _, plan = doubling(client)
        small_broker.stop()
        with pytest.raises(InferError, match=r"went away|no broker at"):
            plan.infer(timeout=0.05)
        with pytest.raises(InferError, match=r"went away|no broker at") as caught:
            plan.infer(timeout=0.05)
        assert caught.value.code == "UNAVAILABLE"
        small_broker.start()

    def test_a_plan_stays_off_a_region_that_took_its_regions_name(self, client, small_broker):
        _, plan = doubling(client)
        plan.infer()
        client.unregister("r")
        other = client.create_region("r", 4096)
        other.array((4096,), np.uint8)[:] = 7
        small_broker.stop()
        small_broker.start()
        client.models()
        with pytest.raises(InferError, match="'r': it was unregistered") as caught:
            plan.infer(timeout=60)
        assert caught.value.code == "NOT_FOUND"
        assert (other.array((4096,), np.uint8) == 7).all()

    def test_a_region_the_new_broker_refuses(self, client, small_broker):
        region, _ = doubling(client)
        small_broker.stop()

        def refuse(asked: messages.RegisterPool):
            raise InferError(Code.UNAVAILABLE, "no memory quota")

        small_broker.answers["RegisterPool"] = refuse
        small_broker.start()
        client.models()
        with pytest.raises(InferError, match=r"'r': it was lost.*no memory quota"):
            client.prepare("double", {"x": region.tensor((1, 4), "FP32")})

    def test_a_region_is_not_lost_because_the_new_broker_is_late(self, monkeypatch, client, small_broker):
        _, plan = doubling(client)
        small_broker.stop()
        small_broker.answers["RegisterPool"] = lambda asked: None  # no answer
        small_broker.start()
        with monkeypatch.context() as patch:
            patch.setattr("clientlib.client.RECONNECT_S", 0.2)
            with pytest.raises(InferError, match=r"no answer to (Hello|RegisterPool)"):
                client.load("double", timeout=0.2)
        del small_broker.answers["RegisterPool"]
        assert plan.infer(timeout=60)["y"].tolist() == [[0, 2, 4, 6]]


class TestLostSessions:
    """Their channels go with the last request on them, without Python looking for cycles."""

    @pytest.fixture(autouse=True)
    def _no_collector(self):
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    def lanes_of(self, client):
        return [weakref.ref(lane) for lane in client.native.link.lanes.all()]

    def test_of_a_thread_that_goes_on(self, client, small_broker):
        _, plan = doubling(client)
        plan.infer()
        client.infer("double", {"x": np.ones((1, 1), np.float32)})
        (lane,) = self.lanes_of(client)
        small_broker.stop()
        small_broker.start()
        client.models()
        assert lane() is None

    def test_of_one_that_waits(self, client, small_broker):
        _, plan = doubling(client)
        plan.infer()
        small_broker.hold = True
        pending = plan.submit()
        (lane,) = self.lanes_of(client)
        small_broker.stop()
        small_broker.hold = False
        small_broker.start()
        client.models()
        assert lane() is not None
        with pytest.raises(InferError, match="broker went away"):
            pending.result(60)
        del pending
        assert lane() is None

    def test_of_one_that_ended(self, client, small_broker):
        _, plan = doubling(client)
        thread = threading.Thread(target=plan.infer)
        thread.start()
        thread.join()
        (lane,) = self.lanes_of(client)
        small_broker.stop()
        small_broker.start()
        client.models()
        assert lane() is None

    def test_of_an_event_loop(self, small_broker):
        async def main():
            client = await clientlib.connect_async(f"ipc://{small_broker.directory}")
            await client.infer("double", {"x": np.ones((1, 1), np.float32)})
            (lane,) = self.lanes_of(client)
            small_broker.stop()
            small_broker.start()
            await client.models()
            async with asyncio.timeout(60):
                while lane() is not None:  # noqa: ASYNC110  the loop has to see that the worker is gone
                    await asyncio.sleep(0)
            await client.close()

        asyncio.run(main())

    def test_closing_tells_who_waits_on_one(self, small_broker):
        client = connect(small_broker)
        _, plan = doubling(client)
        small_broker.hold = True
        pending = plan.submit()
        client.native.lose(client.native.link)  # the worker has not let go of the channel
        client.models()
        client.close()
        with pytest.raises(InferError, match="closed"):
            pending.result(60)


class TestClosing:
    def test_arrays_outlive_the_client(self, small_broker):
        client = connect(small_broker)
        region, plan = doubling(client)
        own = client.infer("double", {"x": np.ones((1, 2), np.float32)})["y"]
        placed = plan.infer()["y"]
        client.close()
        client.close()
        del client, plan, region
        gc.collect()
        assert own.tolist() == [[2, 2]]
        assert placed.tolist() == [[0, 2, 4, 6]]

    def test_everything_says_so_afterwards(self, small_broker):
        client = connect(small_broker)
        region, plan = doubling(client, slots=(1, 2))
        plan.infer()
        small_broker.hold = True
        pending = plan.submit(output_slot=1)
        client.close()
        for call in (plan.infer, client.models, region.share, pending.result, lambda: client.create_region("x", 64)):
            with pytest.raises(InferError, match="closed") as caught:
                call()
            assert caught.value.code == "UNAVAILABLE"

    def test_a_client_that_is_only_dropped(self, small_broker):
        client = connect(small_broker)
        _, plan = doubling(client)
        plan.infer()
        client.infer("double", {"x": np.ones((1, 2), np.float32)})
        del client, plan
        gc.collect()  # the fixture counts descriptors, and warnings of unclosed sockets are errors

    def test_closing_wakes_who_waits(self, small_broker):
        client = connect(small_broker)
        _, plan = doubling(client)
        small_broker.hold = True
        pending = plan.submit()
        errors = []

        def wait():
            try:
                pending.result(60)
            except InferError as error:
                errors.append(error.message)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(60)
        assert len(errors) == 3
        assert all("closed" in message for message in errors)
