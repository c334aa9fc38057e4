"""Plans that a reload made useless, plans that the application lets go, and the memory that they share."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from shm.messages import ModelMetadata, TensorMetadata
from tests.fakes.small_broker import MODELS, SmallBroker, connect, doubling

X = np.ones((1, 2), np.float32)


class TestReloads:
    @pytest.fixture
    def reloaded(self, small_broker, monkeypatch):
        """Reload `double` for vectors instead of matrices, when called."""

        def reload() -> None:
            x, y = (TensorMetadata(name=name, datatype="FP32", shape=(-1,), symbols=("n",)) for name in "xy")
            monkeypatch.setitem(MODELS, "double", ModelMetadata(name="double", version="2", inputs=(x,), outputs=(y,)))
            small_broker.reload()

        return reload

    def test_a_model_object_follows(self, client, reloaded):
        model = client.model("double", 1)
        assert model({"x": X[:, :1]})["y"].shape == (1, 1)
        assert client.infer("double", {"x": X}, version="1")["y"].shape == (1, 2)
        reloaded()
        assert model({"x": X[:, :1]})["y"].tolist() == [2]
        assert (model.name, model.inputs[0].shape, model.outputs[0].shape) == ("double", (-1,), (-1,))
        assert repr(model) == "<model 'double' version 2, READY>"

    def test_one_that_is_reloaded_all_the_time_is_no_plan_of_the_caller(self, client, small_broker, monkeypatch):
        prepare = SmallBroker._prepare

        def outdated(self, session, asked):
            reply = prepare(self, session, asked)
            self.reload()
            return reply

        monkeypatch.setattr(SmallBroker, "_prepare", outdated)
        with pytest.raises(InferError, match=r"reloaded.*ask again") as caught:
            client.model("double")({"x": X})
        assert caught.value.code == "UNAVAILABLE"
        assert "plan" not in caught.value.message
        assert small_broker.calls.count("Prepare") == 2

    def test_on_a_loop(self, small_broker, reloaded):
        async def main() -> None:
            async with await clientlib.connect_async(small_broker.directory) as client:
                model = await client.model("double")
                await model({"x": X[:, :1]})
                reloaded()
                await model({"x": X[:, :1]})
                assert model.inputs[0].shape == (-1,)

        asyncio.run(main())


class TestRelease:
    def refused(self, plan):
        for call in (plan.infer, plan.submit):
            with pytest.raises(InferError, match="was released: prepare another") as caught:
                call()
            assert caught.value.code == "UNAVAILABLE"

    def test_a_plan_is_let_go_at_the_broker_and_refuses_what_comes_later(self, client, small_broker):
        _, plan = doubling(client)
        plan.infer()
        plan.release()
        assert small_broker.calls[-1] == "Release"
        self.refused(plan)
        plan.release()
        del plan
        client.infer("double", {"x": X})
        assert small_broker.calls.count("Release") == 1

    @pytest.mark.parametrize("again", [False, True])
    def test_requests_in_flight_come_first(self, client, small_broker, again):
        _, plan = doubling(client)
        small_broker.hold = True
        pending = plan.submit()
        plan.release()
        self.refused(plan)
        assert small_broker.calls.count("Release") == 0
        small_broker.release()
        assert pending.result(60)["y"].shape == (1, 4)
        if again:
            plan.release()
            assert small_broker.calls[-1] == "Release"
        del plan, pending
        gc.collect()  # the tracebacks of what was refused
        client.infer("double", {"x": X})
        assert small_broker.calls.count("Release") == 1

    def test_what_has_ended_unseen_is_not_in_flight(self, client, small_broker):
        _, plan = doubling(client)
        pending = plan.submit()
        while not small_broker.completed:
            pass
        plan.release()
        assert small_broker.calls[-1] == "Release"
        assert pending.result(60)["y"].shape == (1, 4)

    def test_its_memory_comes_back(self, client):
        ref = client.create_region("r", 64).tensor((1, 2), "FP32")
        with client.prepare("double", {"x": ref}) as plan:
            chunk = plan.prepared.layout._block.chunk
            full = chunk.arena.free_bytes
            kept = plan.infer()["y"]
        assert chunk.arena.free_bytes == full  # the array's
        del kept
        assert chunk.arena.free_bytes > full
        self.refused(plan)

    def test_one_that_grows_after_it_stays_released(self, client):
        x = client.create_region("r", 8192).tensor((2048,), "FP32")
        plan = client.prepare("spread", {"x": x})
        with pytest.raises(InferError, match="should be at least") as caught:
            plan.submit().result(60)
        plan.release()
        client.grow(plan, caught.value, 0)  # what `infer` of another thread would do
        self.refused(plan)
        assert plan.prepared is None

    def test_with_nobody_to_tell(self, client, small_broker):
        plan = doubling(client)[1]
        other = client.prepare("double", {"x": client.create_region("s", 64).tensor((1, 2), "FP32")})
        small_broker.stop()
        plan.release()
        self.refused(plan)
        client.close()
        other.release()
        small_broker.start()

    def test_on_a_loop(self, small_broker):
        async def main() -> None:
            async with await clientlib.connect_async(small_broker.directory) as client:
                region = await client.create_region("r", 4096)
                x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=2048)
                async with await client.prepare("double", {"x": x}, {"y": y}) as plan:
                    await plan.infer()
                assert small_broker.calls[-1] == "Release"
                for call in (plan.infer, plan.submit):
                    with pytest.raises(InferError, match="was released: prepare another"):
                        await call()
                await plan.release()
                assert small_broker.calls.count("Release") == 1

        asyncio.run(main())


class TestChunks:
    def held(self, client) -> list[int]:
        return [record.byte_size for record in client.regions() if record.name.startswith("clientlib.")]

    def test_begin_small_and_grow_with_what_is_needed(self, client):
        for rows in (1, 2, 3):
            client.infer("double", {"x": np.ones((rows, 1), np.float32)})
        assert self.held(client) == [1 << 20], "one chunk for all small plans"
        for rows in range(4, 44):
            client.infer("double", {"x": np.ones((rows, 1 << 12), np.float32)})
        held = self.held(client)
        assert held == sorted(held)
        assert held[:3] == [1 << 20, 1 << 20, 2 << 20]
        assert held[-1] == 16 << 20
        client.infer("double", {"x": np.ones((5, 1 << 20), np.float32)})
        assert self.held(client)[-1] == 2 * 2 * 5 * 4 << 20  # two places of an input and an output

    def test_of_threads_that_begin_at_once_are_one(self, small_broker):
        both = threading.Barrier(2)
        with connect(small_broker) as client:
            create = client.native._create

            def create_together(name, byte_size):
                if name.startswith("clientlib."):
                    both.wait(60)
                return create(name, byte_size)

            client.native._create = create_together
            threads = [
                threading.Thread(target=client.infer, args=("double", {"x": np.ones((rows, 1), np.float32)}))
                for rows in (1, 2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert self.held(client) == [1 << 20]
            assert small_broker.calls.count("Unregister") == 1
            assert [region.name for region in client.native._store.regions()] == [r.name for r in client.regions()]
