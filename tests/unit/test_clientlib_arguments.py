"""What people pass by mistake: an InferError INVALID_ARG that names the argument, never a traceback from below."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest

import clientlib
from clientlib.arguments import seconds, shown
from clientlib.session import Call
from shm import messages
from shm.errors import InferError
from tests.fakes.small_broker import SmallBroker, doubling

X = np.ones((1, 2), np.float32)
NAMES = [None, 5, b"r", "", "r" * 257, "\ud800", ["r"]]
NUMBERS = [None, "64", 1.5, -1, 2**64, [1], np.zeros(2, int)]


def refused(what, call, *arguments, **options) -> str:
    """The text with which `call` refuses its argument `what`."""
    with pytest.raises(InferError, match=what) as caught:
        call(*arguments, **options)
    assert caught.value.code == "INVALID_ARG"
    assert "protocol" not in caught.value.message
    assert "`$" not in caught.value.message
    return caught.value.message


class TestNumbers:
    @pytest.mark.parametrize(
        ("name", "value"),
        [(name, value) for name in ("input_slot", "output_slot") for value in (1.0, "1", -1, [0], np.zeros(2))]
        + [
            ("input_slot", None),
            ("output_slot", np.array(1)),
            ("sequence_start", np.zeros(2)),
            ("sequence_end", np.ones(2)),
        ]
        + [(name, value) for name in ("priority", "rows", "sequence_id") for value in (None, 1.0, "1", -1, 2**70)],
    )
    def test_of_a_request(self, client, name, value):
        _, plan = doubling(client, slots=2)
        for call in (plan.infer, plan.submit):
            refused(name, call, **{name: value})
        assert plan.infer(**{name: np.int64(name.endswith("slot"))})["y"].shape == (1, 4)

    def test_of_arrays(self, client):
        for value in (None, "1", 1.0, -1, 65536):
            refused("priority", client.infer, "double", {"x": X}, priority=value)
        assert client.infer("double", {"x": X}, priority=np.int8(3))["y"].tolist() == [[2, 2]]

    def test_of_a_loop(self, small_broker: SmallBroker):
        async def main() -> None:
            async with await clientlib.connect_async(small_broker.directory, slots=2) as client:
                region = await client.create_region("r", np.int64(4096))
                x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=2048)
                plan = await client.prepare("double", {"x": x}, {"y": y}, slots=8)
                wrong = [
                    {"priority": None},
                    {"rows": 1.0},
                    {"input_slot": "1"},
                    {"input_slot": 1.0},
                    {"output_slot": 5.0},
                ]
                small_broker.hold = True
                for full in (False, True):  # when the channel is full, requests wait in the client
                    for options in wrong:
                        for call in (plan.infer, plan.submit):
                            with pytest.raises(InferError, match=next(iter(options))) as caught:
                                await call(**{"output_slot": 7, **options})
                            assert caught.value.code == "INVALID_ARG"
                    if not full:
                        held = [await plan.submit(output_slot=k) for k in range(3)]
                small_broker.release()
                for pending in held:
                    assert (await pending.result(30))["y"].shape == (1, 4)

        asyncio.run(main())

    def test_of_regions(self, client):
        region = client.create_region("r", np.int64(4096))
        assert (region.byte_size, type(region.byte_size)) == (4096, int)
        for value in (*NUMBERS, 0):
            refused("byte_size", client.create_region, "s", value)
            refused("byte_size", client.register_system_shm, "s", "k", value)
        for value in NUMBERS:
            refused("offset", client.register_system_shm, "s", "k", 64, value)
            refused("offset", region.array, (1,), "FP32", value)
            refused("offset", region.tensor, (1,), "FP32", value)
            if value is not None:
                refused("stride", region.tensor, (1,), "FP32", 0, value)
            refused("position", region.tensor((1,), "FP32").array, value)
        tensor = region.tensor((np.int64(1), 4), "FP32", np.int32(8), np.int64(16), np.uint8(16))
        assert [type(n) for n in (tensor.offset, tensor.stride, tensor.byte_size, *tensor.shape)] == [int] * 5

    def test_of_system_memory(self, client, small_broker):
        asked = []

        def note(request):
            asked.append(request)
            raise InferError("NOT_FOUND", "none")

        small_broker.answers["RegisterSystem"] = note
        with pytest.raises(InferError, match="none"):
            client.register_system_shm("s", "k", np.int64(64), np.uint32(8))
        assert (asked[0].byte_size, asked[0].offset) == (64, 8)

    def test_of_connections(self, small_broker):
        for value in (None, "64", 1.5, 0, 4096):
            refused("slots", clientlib.connect, small_broker.directory, slots=value)
        for value in (None, "64", -1, float("nan"), np.zeros(2)):
            refused("spin_us", clientlib.connect, small_broker.directory, spin_us=value)

    @pytest.mark.parametrize("shape", [None, 3, "ab", (1.0,), (-2,), (1,) * 65, (2**64,), [[1]]])
    def test_shapes(self, client, shape):
        region = client.create_region("r", 4096)
        refused("shape", region.array, shape, "FP32")
        refused("shape", region.tensor, shape, "FP32")

    @pytest.mark.parametrize(
        "dtype", [None, 5, "", "FP31", b"FP32", {"a": 1}, "f4,(", [("a",)], object(), [1], "M8[x]"]
    )
    def test_datatypes(self, client, dtype):
        region = client.create_region("r", 4096)
        refused("datatype", region.array, (1,), dtype)
        refused("datatype", region.tensor, (1,), dtype)


class TestNames:
    @pytest.mark.parametrize("name", NAMES)
    def test_of_regions(self, client, name):
        refused("name", client.create_region, name, 64)
        refused("name", client.register_system_shm, name, "k", 64)
        refused("token", client.open_region, name)
        if name is not None:
            refused("name", client.open_region, "token", name)
            refused("name", client.unregister, name)
        if name != "r" * 257:
            refused("key", client.register_system_shm, "r", name, 64)
        refused("region", client.share, name)

    @pytest.mark.parametrize("name", [*NAMES[:-3], "r" * 4097, "\ud800", ["r"]])
    def test_of_models(self, client, name):
        ref = client.create_region("r", 64).tensor((1, 2), "FP32")
        for call in (client.model, client.load, client.unload):
            refused("model", call, name)
        refused("model", client.infer, name, {"x": X})
        refused("model", client.prepare, name, {"x": ref})
        if name != "":
            refused("model", client.statistics, name)

    def test_of_tensors(self, client):
        ref = client.create_region("r", 64).tensor((1, 2), "FP32")
        for name in (None, 5, b"x", "", "x" * 257):
            refused("name of an input", client.infer, "double", {name: X})
            refused("name of an input", client.prepare, "double", {name: ref})
            refused("name of an output", client.prepare, "double", {"x": ref}, {name: None})
            refused("name of an output", client.infer, "double", {"x": X}, [name])
        for outputs in (5, "y", b"y", np.array(1), np.array(["y"])):
            refused("outputs", client.infer, "double", {"x": X}, outputs)
        assert list(client.infer("double", {"x": X}, (name for name in ["y"]))) == ["y"]

    def test_a_version_may_be_a_number(self, client, small_broker):
        versions = []

        def note(asked):
            versions.append(asked.version)
            return messages.Failure(code="NOT_FOUND", message="noted")

        small_broker.answers["GetModel"] = note
        for version in (1, "1", np.int64(1)):
            for call in (
                lambda version=version: client.model("double", version),
                lambda version=version: client.infer("double", {"x": X}, version=version),
            ):
                with pytest.raises(InferError, match="noted"):
                    call()
        assert versions == ["1"] * 6
        for version in (None, 1.0, True, -1, b"1", "1" * 4097):
            refused("version", client.model, "double", version)
            refused("version", client.infer, "double", {"x": X}, version=version)

    def test_inputs_that_are_no_arrays(self, client):
        class Gpu:
            def __array__(self, *_: object, **__: object) -> np.ndarray:
                raise RuntimeError("copy it to the host first")

        assert "copy it to the host first" in refused("'x'", client.infer, "double", {"x": Gpu()})
        for parameters in (5, 0, np.zeros(2), "a"):
            refused("parameters", client.infer, "double", {"x": X}, parameters=parameters)
        assert client.infer("double", {"x": X}, parameters={})["y"].shape == (1, 2)

    def test_what_slips_through_is_told_in_plain_words(self, client):
        session = client.native.link.session
        for wrong, told in ((5, "name: Expected `str`, got `int`"), (2**70, "bad argument"), (object(), "object")):
            call = Call(messages.ShareRegion(name=wrong))
            assert told in refused("ShareRegion", session.call, call, 1e9)

    def test_no_error_is_as_long_as_its_cause(self):
        for value in ("x" * 100_000, [0] * 100_000, 10**100_000, np.zeros((1000, 1000)), b"x" * 9999):
            assert len(shown(value)) < 100


class TestPlaces:
    def test_a_run_directory_is_a_place(self, small_broker, monkeypatch):
        directory = small_broker.directory
        monkeypatch.chdir(directory.parent)
        for place in (directory, str(directory), f"{directory}/", f"ipc://{directory}", f"./{directory.name}"):
            with clientlib.connect(place) as client:
                assert "double" in client.models()

    @pytest.mark.parametrize("place", [5, b"/tmp", "", "localhost:8000", "ipc://tmp", "/a\0b", ["/tmp"], object()])
    def test_what_is_none_is_told_what_would_be(self, place):
        message = refused("cannot connect to", clientlib.connect, place)
        assert message.endswith("or nothing for the default one")
        for accepted in ("--directory", "'/run/directory'", "pathlib.Path", "'ipc:///run/directory'"):
            assert accepted in message


class TestTimeouts:
    @pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1", True, np.True_, 1j, [1], np.ones(2), float("-inf")])
    def test_that_are_none(self, client, small_broker, timeout):
        _, plan = doubling(client)
        for call, arguments in (
            (plan.infer, ()),
            (plan.submit, ()),
            (client.infer, ("double", {"x": X})),
            (client.load, ("double",)),
            (clientlib.connect, (small_broker.directory,)),
        ):
            message = refused("timeout", call, *arguments, timeout=timeout)
            assert "a number of seconds greater than 0, got" in message

    @pytest.mark.parametrize("timeout", [float("inf"), 1e300, 10**400, 1e9, np.float32(60), 60])
    def test_however_long(self, client, small_broker, timeout):
        _, plan = doubling(client)
        assert plan.infer(timeout=timeout)["y"].shape == (1, 4)
        assert plan.submit(timeout=timeout).result(timeout=60)["y"].shape == (1, 4)
        assert client.infer("double", {"x": X}, timeout=timeout)["y"].shape == (1, 2)
        client.load("double", timeout=timeout)
        clientlib.connect(small_broker.directory, timeout=timeout).close()

    def test_of_a_wait(self, client, small_broker):
        _, plan = doubling(client)
        small_broker.hold = True
        pending = plan.submit()
        for timeout in (float("nan"), "1", True, [1]):
            refused("timeout", pending.result, timeout)
        for timeout in (0, -1, 1e-3):
            with pytest.raises(TimeoutError):
                pending.result(timeout)
        small_broker.release()
        assert pending.result(float("inf"))["y"].shape == (1, 4)

    def test_on_a_loop(self, small_broker):
        async def main() -> None:
            async with await clientlib.connect_async(small_broker.directory, timeout=float("inf")) as client:
                assert (await client.infer("double", {"x": X}, timeout=1e300))["y"].shape == (1, 2)
                await client.load("double", timeout=float("inf"))
                region = await client.create_region("r", 4096)
                x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=2048)
                plan = await client.prepare("double", {"x": x}, {"y": y})
                small_broker.hold = True
                pending = await plan.submit(timeout=float("inf"))
                for timeout in (float("nan"), "1", True):
                    with pytest.raises(InferError, match="timeout"):
                        await pending.result(timeout)
                with pytest.raises(TimeoutError):
                    await pending.result(0)
                small_broker.release()
                assert (await pending.result(1e300))["y"].shape == (1, 4)

        asyncio.run(main())

    def test_in_seconds(self):
        assert (seconds(0.5), seconds(float("inf"))) == (0.5, 1e9)


class TestOtherProcesses:
    def test_what_stays_here_says_what_to_do_there(self, client):
        region, plan = doubling(client)
        pending = plan.submit()
        for thing, way in (
            (client, "clientlib.connect()"),
            (region, "region.share()"),
            (region.tensor((1,), "FP32"), "open_region(token)"),
            (plan, "prepare() there"),
            (client.model("double"), "model() there"),
            (pending, "arrays"),
        ):
            for protocol in (0, pickle.HIGHEST_PROTOCOL):
                with pytest.raises(TypeError, match=r"belongs to the process that made it") as caught:
                    pickle.dumps(thing, protocol)
                assert way in str(caught.value)

    def test_results_and_errors_travel(self, client):
        result = pickle.loads(pickle.dumps(client.infer("double", {"x": X})))
        assert result["y"].tolist() == [[2, 2]]
        error = InferError("NOT_FOUND", "it's gone")
        assert repr(error) == repr(pickle.loads(pickle.dumps(error))) == """InferError('NOT_FOUND', "it's gone")"""
        assert repr(clientlib.ConnectionLost("gone")) == "ConnectionLost('UNAVAILABLE', 'gone')"
