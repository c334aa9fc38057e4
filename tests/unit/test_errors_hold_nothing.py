"""An error that was caught and forgotten frees what its request had at once, without Python looking for cycles.

One that is kept keeps no place of its plan. Before this was so, six threads waited for two places that nobody used.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

import clientlib
from clientlib.client import Client
from clientlib.failures import RoomNeeded
from clientlib.remote import transport
from clientlib.remote.async_client import AsyncRemoteClient
from shm import messages
from shm.errors import Code, ConnectionLost, ForkedError, InferError, ProtocolError, forget_frames, fresh
from tests.fakes.remote import ADDRESS, AsyncFakeTransport, FakeTransport, client_on
from tests.fakes.small_broker import SmallBroker, connect

Array = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refused(asked: object) -> messages.Failure:
    return messages.Failure(code="INTERNAL", message="so there")


def left(call: Callable[[Array], object]) -> object:
    """What is left of an argument of `call`, which must fail."""
    x = np.ones((1, 4), np.float32)
    reference = weakref.ref(x)
    try:
        call(x)
        raise AssertionError("it did not fail")
    except InferError:
        del x
    return reference()


async def left_async(call: Callable[[Array], Awaitable[object]]) -> object:
    x = np.ones((1, 4), np.float32)
    reference = weakref.ref(x)
    try:
        await call(x)
        raise AssertionError("it did not fail")
    except InferError:
        del x
    await asyncio.sleep(0)  # the turn of the loop that brought the error refers to it
    return reference()


@pytest.mark.parametrize(
    "error",
    [
        InferError(Code.NOT_FOUND, "no"),
        ConnectionLost("gone"),
        ForkedError(),
        ProtocolError("what"),
        RoomNeeded(Code.INVALID_ARG, "small", "y", 12),
    ],
)
def test_a_fresh_error_says_the_same(error: InferError) -> None:
    try:
        raise error
    except InferError:
        copy = fresh(error)
    assert copy is not error
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert copy.__traceback__ is None
    assert copy.__context__ is None


def test_frames_are_forgotten_wherever_an_error_came_from() -> None:
    try:
        try:
            try:
                raise KeyError("first")
            except KeyError as first:
                raise ValueError("second") from first
        except ValueError as second:
            part = second
            raise ExceptionGroup("all", [part, TypeError("third")])  # noqa: B904
    except ExceptionGroup as error:
        group, parts = error, (error, *error.exceptions, error.exceptions[0].__cause__)
    parts[2].__context__ = group  # round
    assert sum(each.__traceback__ is not None for each in parts) == 3
    forget_frames(group)
    assert [each.__traceback__ for each in parts] == [None] * 4
    assert str(parts[1]) == "second"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str


def test_frames_of_an_error_that_refuses_to_be_changed_are_forgotten_too() -> None:
    try:
        raise Frozen("for good")
    except Frozen as error:
        frozen = error
    assert frozen.__traceback__ is not None
    forget_frames(frozen)
    assert frozen.__traceback__ is None


class TestThreads:
    def test_refusals_of_the_broker(self, client: Client, small_broker: SmallBroker) -> None:
        assert left(lambda x: client.infer("nosuch", {"x": x})) is None
        for word in ("GetModel", "RegisterPool", "Prepare", "OpenChannel"):
            small_broker.answers[word] = refused
            assert left(lambda x: client.infer("double", {"x": x})) is None, word
            del small_broker.answers[word]

    def test_a_first_request_that_finds_no_channel_of_its_own(self, client: Client) -> None:
        """The refusal was handled within the handling of another error, which held the request and its result."""
        x = np.ones((1, 1 << 16), np.float32)  # two places
        client.infer("double", {"x": x}, timeout=60)  # opens one of two channels: there is one to share in any case
        ready = threading.Barrier(4)
        wrong: list[object] = []

        def work() -> None:
            ready.wait(60)
            for _ in range(5):
                try:
                    if not (client.infer("double", {"x": x}, timeout=60)["y"] == 2).all():
                        wrong.append("result")
                except InferError as error:
                    wrong.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert wrong == []

    def test_a_client_that_was_closed(self, small_broker: SmallBroker) -> None:
        client = connect(small_broker)
        client.infer("double", {"x": np.ones((1, 4), np.float32)})
        client.close()
        for _ in range(2):
            assert left(lambda x: client.infer("double", {"x": x})) is None

    def test_a_broker_that_is_not_there(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        nowhere = tmp_path_factory.mktemp("nowhere")
        assert left(lambda x: (x, clientlib.connect(nowhere, timeout=0))) is None

    def test_streams(self, client: Client, small_broker: SmallBroker) -> None:
        assert left(lambda x: next(client.stream("nosuch", {"x": x}))) is None
        small_broker.hold = True
        assert left(lambda x: next(client.stream("double", {"x": x}, timeout=0.01))) is None
        assert left(lambda x: next(client.stream("several", {"x": x.reshape(-1)}, timeout=0.01))) is None

    def test_errors_that_are_kept_keep_no_place(self, client: Client, small_broker: SmallBroker) -> None:
        region = client.create_region("r", 1 << 19)
        plan = client.prepare("double", {"x": region.tensor((1, 1 << 17), "FP32")})  # two places
        kept: list[InferError] = []
        for _ in range(3):
            small_broker.hold = True
            with pytest.raises(InferError) as expired:
                plan.infer(timeout=0.01)
            cancelled = plan.submit(timeout=30)
            assert cancelled.cancel()
            with pytest.raises(InferError) as caught:
                cancelled.result()
            kept += [expired.value, caught.value]
            small_broker.release()
            plan.infer(timeout=30)  # what expired has ended before this, or with it
        held = [plan.submit(timeout=30) for _ in range(2)]
        assert [each.result()["y"].shape for each in held] == [(1, 1 << 17)] * 2
        assert [error.code for error in kept] == ["UNAVAILABLE", "CANCELLED"] * 3


class TestLoops:
    def test_refusals_of_the_broker(self, small_broker: SmallBroker) -> None:
        async def main() -> None:
            async with await clientlib.connect_async(small_broker.directory) as client:
                assert await left_async(lambda x: client.infer("nosuch", {"x": x})) is None
                for word in ("GetModel", "RegisterPool", "Prepare", "OpenChannel"):
                    small_broker.answers[word] = refused
                    assert await left_async(lambda x: client.infer("double", {"x": x})) is None, word
                    del small_broker.answers[word]
            for _ in range(2):
                assert await left_async(lambda x: client.infer("double", {"x": x})) is None

        asyncio.run(main())

    def test_errors_that_are_kept_keep_no_place(self, small_broker: SmallBroker) -> None:
        async def main() -> None:
            async with await clientlib.connect_async(small_broker.directory) as client:
                region = await client.create_region("r", 1 << 19)
                plan = await client.prepare("double", {"x": region.tensor((1, 1 << 17), "FP32")})
                kept: list[InferError] = []
                for _ in range(3):
                    small_broker.hold = True
                    with pytest.raises(InferError) as expired:
                        await plan.infer(timeout=0.01)
                    cancelled = await plan.submit(timeout=30)
                    assert cancelled.cancel()
                    with pytest.raises(InferError) as caught:
                        await cancelled.result()
                    kept += [expired.value, caught.value]
                    small_broker.release()
                    await plan.infer(timeout=30)
                held = [await plan.submit(timeout=30) for _ in range(2)]
                assert [(await each.result())["y"].shape for each in held] == [(1, 1 << 17)] * 2
                assert [error.code for error in kept] == ["UNAVAILABLE", "CANCELLED"] * 3

        asyncio.run(main())


REFUSED = InferError(Code.INTERNAL, "so there")


class TestRemote:
    """Over a wire: `tests.fakes.remote` stands in for it."""

    def test_threads(self) -> None:
        fake = FakeTransport()
        client = client_on(fake)
        fake.requests = deque(maxlen=0)  # type: ignore[assignment]
        fake.refuses[transport.Metadata] = REFUSED
        assert left(lambda x: next(client.stream("double", {"x": x}))) is None
        fake.refuses.clear()
        fake.answers = lambda request: REFUSED
        assert left(lambda x: client.infer("double", {"x": x})) is None
        assert left(lambda x: next(client.stream("double", {"x": x}))) is None
        fake.answers = None
        assert left(lambda x: next(client.stream("double", {"x": x}, timeout=0.01))) is None
        client.close()
        assert left(lambda x: client.infer("double", {"x": x})) is None

    def test_loops(self) -> None:
        async def main() -> None:
            fake = AsyncFakeTransport()
            client = AsyncRemoteClient(ADDRESS, fake, 2)
            await client.greet(30)
            fake.inner.refuses[transport.Metadata] = REFUSED
            assert await left_async(lambda x: anext(client.stream("double", {"x": x}))) is None
            fake.inner.refuses.clear()
            fake.inner.answers = lambda request: REFUSED
            assert await left_async(lambda x: client.infer("double", {"x": x})) is None
            region = await client.create_region("r", 4096)
            plan = await client.prepare("double", {"x": region.tensor((1, 4), "FP32")})
            pending, gone = await plan.submit(), weakref.ref(plan)
            for _ in range(2):
                with pytest.raises(InferError, match="so there"):
                    await pending.result()
            del pending, plan
            await asyncio.sleep(0)
            assert gone() is None
            await client.close()
            assert await left_async(lambda x: client.infer("double", {"x": x})) is None

        asyncio.run(main())
