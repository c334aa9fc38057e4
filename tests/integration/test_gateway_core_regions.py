"""The gateway's core on principals' shared memory: in place, what is refused, output ranges that requests share."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from broker.gateway.kserve import InferRequest, InputTensor, RequestedOutput
from broker.gateway.regions import DISABLED
from tests.fakes import models
from tests.fakes.gateway_core import LOCAL, OTHER, REMOTE, SIZE, arrays, asked, posix_memory, refused, request, served
from tests.fakes.lender import Lending

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def lending(tmp_path_factory):
    repository = models.write_repository(
        tmp_path_factory.mktemp("repository"), {"add1": models.add1(), "two_input": models.two_input()}
    )
    models.write_model(repository, "nonzero", models.nonzero(), config=models.NONZERO_CONFIG)
    with Lending(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def memory():
    with posix_memory() as make:
        yield make


def count_copies(service):
    copied = Counter()
    service.on_copied = lambda reason, byte_size: copied.update({reason: byte_size})
    return copied


ANONYMOUS = r"\[request id: <id_unknown>\] "


# --- in place --------------------------------------------------------------------------------------------------------


def test_a_model_reads_and_writes_the_region_itself(lending, memory):
    key, _, array = memory()
    array[:4] = (1, 2, 3, 4)

    async def test(service):
        copied = count_copies(service)
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        response = await service.infer(asked(), LOCAL)
        (output,) = response.outputs
        assert (output.name, output.datatype, output.shape, output.data) == ("y", "FP32", (1, 4), None)
        assert array[1024:1028].tolist() == [2, 3, 4, 5]
        assert not copied
        await service.infer(asked(y=4096 + 4, room=1000), LOCAL)  # more room than it takes
        assert array[1024:1030].tolist() == [2, 2, 3, 4, 5, 0]

    served(lending, test)


def test_plans_go_with_their_regions(lending, memory):
    key, _, array = memory()
    other, _, _ = memory("other")

    async def test(service):
        plans = service.inference.plans
        for name, where in (("r", key), ("keep", other)):
            await service.register_system(LOCAL, name, where, SIZE, 0)
        await service.infer(request("add1", {"x": np.ones((1, 4), np.float32)}), LOCAL)
        await service.infer(asked(), LOCAL)
        await service.infer(asked(region="keep", target="r"), LOCAL)
        await service.infer(asked(region="keep"), LOCAL)
        assert (len(plans), len(plans._of_region)) == (4, 2)
        await service.unregister(LOCAL, "system", "r")
        assert (len(plans), len(plans._of_region)) == (2, 1)
        await service.infer(asked(region="keep"), LOCAL)
        await service.unregister(LOCAL, "system", "")
        assert (len(plans), len(plans._of_region)) == (1, 0)
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        array[:4] = 7
        await service.infer(asked(), LOCAL)
        assert array[1024:1028].tolist() == [8] * 4

    served(lending, test)


def test_a_window_at_any_offset(lending, memory):
    key, _, array = memory()
    array[25:29] = (1, 2, 3, 4)

    async def test(service):
        await service.register_system(LOCAL, "r", key, 1000, 100)
        await service.infer(asked(x=0, y=64), LOCAL)
        assert array[41:45].tolist() == [2, 3, 4, 5]

    served(lending, test)


def test_regions_and_inline_tensors_mix(lending, memory):
    key, _, array = memory()
    array[:4] = (1, 2, 3, 4)

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        inline = np.full((1, 4), 10, np.float32)
        mixed = InferRequest(
            "two_input",
            inputs=[
                InputTensor("a", "FP32", (1, 4), region="r", offset=0, byte_size=16),
                InputTensor("b", "FP32", (1, 4), data=inline.tobytes()),
            ],
            outputs=[RequestedOutput("difference"), RequestedOutput("total", region="r", offset=64, byte_size=64)],
        )
        for _ in range(100):
            response = await service.infer(mixed, LOCAL)
            assert [output.name for output in response.outputs] == ["difference", "total"]
            assert arrays(response)["difference"].tolist() == [[-9, -8, -7, -6]]
            assert array[16:21].tolist() == [11, 12, 13, 14, 0]

    served(lending, test)


def test_results_of_a_size_that_only_running_tells(lending, memory):
    key, _, array = memory()
    array[:4] = (1, 0, 1, 1)

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        question = asked("nonzero", room=24)
        question.inputs[0].shape = (4,)
        (output,) = (await service.infer(question, LOCAL)).outputs
        assert output.shape == (1, 3)
        assert array[1024:1030].view(np.int64).tolist() == [0, 2, 3]
        array[1024:1040] = 9
        for room in (16, 0):
            question.outputs[0].byte_size = room
            with refused(
                "INTERNAL",
                rf"{ANONYMOUS}shared memory size specified with the request for output 'y' \({room} bytes\) should be "
                "at least 24 bytes to hold the results",
            ):
                await service.infer(question, LOCAL)
        assert array[1024:1040].tolist() == [9] * 16, "nothing was written"

    served(lending, test)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_ranges_and_sizes(lending, memory):
    key, _, array = memory()

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        for question, message in (
            (asked(x=SIZE), "Invalid offset for shared memory region: 'r'"),
            (asked(y=2**64 - 32), "Invalid offset for shared memory region: 'r'"),
            (asked(y=SIZE - 8), r"Invalid offset \+ byte size for shared memory region: 'r'"),
            (asked(y=32, room=2**64 - 1), "Integer overflow detected: byte_size .*"),
        ):
            with refused("INVALID_ARG", message):
                await service.infer(question, LOCAL)
        question = asked()
        question.inputs[0].byte_size = 32
        with refused(
            "INVALID_ARG", f"{ANONYMOUS}input byte size mismatch for input 'x' for model 'add1'. Expected 16, got 32"
        ):
            await service.infer(question, LOCAL)
        question.inputs[0].offset = SIZE - 16  # and outside the region too
        with refused("INVALID_ARG", f"{ANONYMOUS}input byte size mismatch .*"):
            await service.infer(question, LOCAL)
        with refused(
            "INTERNAL",
            rf"{ANONYMOUS}shared memory size specified with the request for output 'y' \(15 bytes\) should be at least "
            "16 bytes to hold the results",
        ):
            await service.infer(asked(room=15), LOCAL)
        assert not array.any()

    served(lending, test)


@pytest.mark.parametrize("y", [0, 1, 8, 15])
def test_an_output_over_an_input_of_the_same_request(lending, memory, y):
    key, _, array = memory()

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        await service.register_system(LOCAL, "again", key, SIZE, 0)
        for target in ("r", "again"):
            with refused("INVALID_ARG", rf"{ANONYMOUS}overlapping tensors for model 'add1': output 'y' overlaps .*"):
                await service.infer(asked(y=y, target=target), LOCAL)
        assert not array.any()

    served(lending, test)


def test_two_outputs_over_each_other(lending, memory):
    key, _, _ = memory()

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        row = np.zeros((1, 4), np.float32)
        outputs = [RequestedOutput(n, region="r", offset=o, byte_size=16) for n, o in (("total", 0), ("difference", 8))]
        with refused(
            "INVALID_ARG", rf"{ANONYMOUS}overlapping tensors .*: output 'difference' overlaps output 'total'.*"
        ):
            await service.infer(request("two_input", {"a": row, "b": row}, outputs), LOCAL)

    served(lending, test)


def test_others_regions_are_nobodys(lending, memory):
    key, _, _ = memory()

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        await service.infer(asked(), LOCAL)
        for caller in (OTHER, REMOTE):
            with refused("NOT_FOUND", "Unable to find shared memory region: 'r'"):
                await service.infer(asked(), caller)
        assert await service.regions(OTHER, "system", "") == []
        await service.unregister(OTHER, "system", "")
        assert [record.name for record in await service.regions(LOCAL, "system", "")] == ["r"]
        with refused("UNSUPPORTED", DISABLED):
            await service.register_system(REMOTE, "s", key, SIZE, 0)

    served(lending, test)


def test_switched_off(lending, memory):
    key, _, _ = memory()

    async def test(service):
        with refused("UNSUPPORTED", DISABLED):
            await service.register_system(LOCAL, "r", key, SIZE, 0)
        assert await service.regions(LOCAL, "system", "") == []
        with refused("NOT_FOUND", "Unable to find shared memory region: 'r'"):
            await service.infer(asked(), LOCAL)

    served(lending, test, allow_client_shm=False)


# --- the same output range in many requests --------------------------------------------------------------------------


def test_requests_that_share_their_output_range_are_all_answered_whole(lending, memory):
    key, _, array = memory()
    columns, callers = 500, 8
    for n in range(callers):
        array[n * 8] = n
    expected = {float(n + 1) for n in range(callers)}

    async def test(service):
        copied = count_copies(service)
        await service.register_system(LOCAL, "r", key, SIZE, 0)

        async def ask(n):
            # x (1, 500) of equal values, inline; y is where everybody's is
            question = request(
                "add1",
                {"x": np.full((1, columns), n, np.float32)},
                [RequestedOutput("y", region="r", offset=4096, byte_size=4 * columns)],
            )
            for _ in range(50):
                await service.infer(question, LOCAL)
                found = set(array[1024 : 1024 + columns].tolist())
                assert len(found) == 1, "an answer is whole"
                assert found <= expected

        await asyncio.gather(*(ask(n) for n in range(callers)))
        assert copied["shared_output"] > 0

    served(lending, test)


def test_ranges_that_overlap_in_part(lending, memory):
    key, _, array = memory()
    array[:8] = 1

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        await service.register_system(LOCAL, "again", key, SIZE, 0)
        questions = [asked(y=4096), asked(y=4100), asked(y=4096, target="again"), asked(x=16, y=4104)]
        await asyncio.gather(*(service.infer(question, LOCAL) for question in questions * 50))
        assert set(array[1024:1030].tolist()) == {2.0}

    served(lending, test)
