"""The gateway's core on a real broker, with tensors in the request: answers, errors, deadlines, reloads, bounds."""

from __future__ import annotations

import asyncio
import struct

import numpy as np
import onnx
import pytest

from broker.gateway.kserve import InferRequest, InputTensor, RequestedOutput
from broker.gateway.plan_cache import PlanCache
from shm.datatypes import decode_bytes
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.gateway_core import OTHER, REMOTE, arrays, request, served
from tests.fakes.lender import Lending
from tests.fakes.processes import until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def lending(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    models.write_repository(
        repository,
        {
            "add1": models.add1(),
            "two_input": models.two_input(),
            "topk": models.topk(),
            "half": models.identity(onnx.TensorProto.FLOAT16),
            "strings": models.identity(onnx.TensorProto.STRING),
        },
    )
    models.write_model(repository, "nonzero", models.nonzero(), config=models.NONZERO_CONFIG)
    labelled = models.write_model(
        repository, "labelled", models.add1(), config='output { name: "y" label_filename: "names" }'
    )
    (labelled / "names").write_text("cat\n\ndog\n")
    held = "max_batch_size: 9 dynamic_batching { preferred_batch_size: 9 max_queue_delay_microseconds: 60000000 }"
    models.write_model(repository, "held", models.add1(), config=held)
    with Lending(
        repository, tmp_path_factory.mktemp("run"), "--model-control-mode=explicit", "--load-model=*"
    ) as broker:
        yield broker.ready()


ROW = np.arange(4, dtype=np.float32).reshape(1, 4)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_answer(lending):
    async def test(service):
        response = await service.infer(request("add1", {"x": ROW}, id="7"), REMOTE)
        assert (response.model, response.version, response.id) == ("add1", "1", "7")
        assert [(o.name, o.datatype, o.shape) for o in response.outputs] == [("y", "FP32", (1, 4))]
        assert arrays(response)["y"].tolist() == [[1, 2, 3, 4]]
        assert len(response.outputs[0].data) == 16, "bytes, whatever the datatype"

    served(lending, test)


def test_outputs_come_in_the_order_in_which_they_were_asked_for(lending):
    async def test(service):
        inputs = {"a": ROW, "b": ROW}
        for names in (["total", "difference"], ["difference", "total"], ["difference"]):
            asked = [RequestedOutput(name) for name in names]
            response = await service.infer(request("two_input", inputs, asked), REMOTE)
            assert [output.name for output in response.outputs] == names
            assert arrays(response)["difference"].tolist() == [[0, 0, 0, 0]]
        response = await service.infer(request("two_input", inputs), REMOTE)
        assert [output.name for output in response.outputs] == ["total", "difference"]

    served(lending, test)


def test_answers_stay_what_they_are_while_more_are_asked_for(lending):
    async def test(service):
        kept = [await service.infer(request("add1", {"x": ROW + n}), REMOTE) for n in range(200)]
        for number, response in enumerate(kept):
            assert arrays(response)["y"].tolist() == [[number + 1, number + 2, number + 3, number + 4]]

    served(lending, test)


def test_hundreds_of_a_new_kind_at_once_share_one_plan(lending):
    async def test(service):
        asked = [service.infer(request("add1", {"x": np.full((1, 11), n, np.float32)}), REMOTE) for n in range(300)]
        for number, response in enumerate(await asyncio.gather(*asked)):
            assert arrays(response)["y"].tolist() == [[number + 1] * 11]
        assert len(service.inference.plans) == 1

    served(lending, test)


def test_strings_pass_through_undecoded(lending):
    async def test(service):
        data = b"".join(struct.pack("<I", len(text)) + text for text in (b"a", b"", b"xyz\0"))
        asked = InferRequest("strings", inputs=[InputTensor("x", "BYTES", (1, 3), data=data)])
        (output,) = (await service.infer(asked, REMOTE)).outputs
        assert (output.datatype, output.shape, bytes(output.data)) == ("BYTES", (1, 3), data)

    served(lending, test)


def test_results_of_a_size_that_only_running_tells(lending):
    async def test(service):
        for count in (0, 3, 20_000):  # the last one is more than was reserved
            x = np.zeros(30_000, np.float32)
            x[:count] = 1
            (output,) = (await service.infer(request("nonzero", {"x": x}), REMOTE)).outputs
            assert output.shape == (1, count)
            assert np.frombuffer(output.data, np.int64).tolist() == list(range(count))

    served(lending, test)


def test_classes(lending):
    async def test(service):
        x = np.array([[1, 9, 5, 7]], np.float32)
        asked = request("add1", {"x": x}, [RequestedOutput("y", classes=2)])
        (output,) = (await service.infer(asked, REMOTE)).outputs
        assert (output.datatype, output.shape) == ("BYTES", (1, 2))
        assert output.data == b"\x0b\0\0\0" + b"10.000000:1" + b"\x0a\0\0\0" + b"8.000000:3"
        asked = request("half", {"x": x.astype(np.float16)}, [RequestedOutput("y", classes=1)])
        with pytest.raises(InferError, match="class result not available for output due to unsupported type 'FP16'"):
            await service.infer(asked, REMOTE)

    served(lending, test)


def test_classes_with_names(lending):
    async def test(service):
        x = np.array([[1, 9, 5, 7]], np.float32)
        plain = request("labelled", {"x": x}, [RequestedOutput("y")])
        assert arrays(await service.infer(plain, REMOTE))["y"].tolist() == [[2, 10, 6, 8]]
        asked = request("labelled", {"x": x}, [RequestedOutput("y", classes=4)])
        (output,) = (await service.infer(asked, REMOTE)).outputs
        found = decode_bytes(output.data, 4, "y").tolist()
        assert found == [b"10.000000:1", b"8.000000:3", b"6.000000:2:dog", b"2.000000:0:cat"]
        # As they were when the model was loaded, after a reload as they are then.
        (lending.repository / "labelled" / "names").write_text("bird\nfish\n")
        assert (await service.infer(asked, REMOTE)).outputs[0].data == output.data
        await service.load("labelled", {})
        (output,) = (await service.infer(asked, REMOTE)).outputs
        assert decode_bytes(output.data, 4, "y").tolist()[0] == b"10.000000:1:fish"

    served(lending, test)


def test_what_a_model_without_sequences_and_parameters_ignores(lending):
    async def test(service):
        for fields in (
            {"sequence_id": 5, "sequence_start": True},
            {"sequence_id": "five", "sequence_end": True},
            {"sequence_id": 2**64},
            {"sequence_start": True},
            {"priority": 3},
            {"priority": 2**40},
            {"parameters": {"mine": 1.5, "yours": "x"}},
        ):
            response = await service.infer(request("add1", {"x": ROW}, **fields), REMOTE)
            assert arrays(response)["y"][0, 0] == 1

    served(lending, test)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors_name_the_request(lending):
    async def test(service):
        wrong = {"x": ROW.astype(np.float64)}
        text = "inference input 'x' data-type is 'FP64', but model 'add1' expects 'FP32'"
        for ident, prefix in (("", "[request id: <id_unknown>] "), ("a b", "[request id: a b] ")):
            with pytest.raises(InferError) as caught:
                await service.infer(request("add1", wrong, id=ident), REMOTE)
            assert (caught.value.code, caught.value.message) == ("INVALID_ARG", prefix + text)
            assert caught.value.detail == "input 'x', inputs[0].datatype: expected FP32, got FP64"

    served(lending, test)


def test_lookups(lending):
    async def test(service):
        for model, version, code, text in (
            ("nobody", "", "INVALID_ARG", "Request for unknown model: 'nobody' is not found"),
            ("nobody", "1", "INVALID_ARG", "Request for unknown model: 'nobody' is not found"),
            ("add1", "9", "NOT_FOUND", "Request for unknown model: 'add1' version 9 is not found"),
            ("add1", "x", "INVALID_ARG", "failed to get model version from specified version string 'x' (details: "),
        ):
            verbs = [
                service.infer(request(model, {"x": ROW}, version=version), REMOTE),
                service.metadata(model, version),
                service.config(model, version),
            ]
            if code == "NOT_FOUND":  # of a model that is known
                assert not await service.model_ready(model, version)
            else:
                verbs.append(service.model_ready(model, version))
            for verb in verbs:
                with pytest.raises(InferError) as caught:
                    await verb
                assert (caught.value.code, caught.value.message[: len(text)]) == (code, text)

    served(lending, test)


def test_strings_that_are_none_are_refused_with_the_models_name(lending):
    async def test(service):
        where = "for inference input 'x' for model 'strings'"
        for data, text in (
            (b"\1\0\0", f"incomplete string length indicator {where}, expecting 4 bytes for element 0"),
            (b"\5\0\0\0abc", f"incomplete string data {where}, expecting string of length 5 for element 0"),
            (b"\1\0\0\0a" * 3, f"unexpected number of string elements 3 {where}, expecting 2"),
            (b"\1\0\0\0a", f"expected 2 string elements {where}, got 1"),
        ):
            asked = InferRequest("strings", inputs=[InputTensor("x", "BYTES", (1, 2), data=data)])
            with pytest.raises(InferError) as caught:
                await service.infer(asked, REMOTE)
            assert caught.value.message.startswith(f"[request id: <id_unknown>] {text}")

    served(lending, test)


def test_a_deadline_ends_a_request_of_zeromq_in_tritons_words(lending):
    async def test(service):
        await service.infer(request("add1", {"x": ROW}), OTHER)
        for shape in ((1, 4), (1, 5)):  # a plan that is there, and one that is not
            with pytest.raises(InferError) as caught:
                await service.infer(request("add1", {"x": np.zeros(shape, np.float32)}, timeout_us=1), OTHER)
            assert caught.value.code == "UNAVAILABLE"
            assert caught.value.message == "Request timeout expired"
        response = await service.infer(request("add1", {"x": ROW}, timeout_us=60_000_000), OTHER)
        assert arrays(response)["y"][0, 0] == 1

    served(lending, test)


def test_a_timeout_of_triton_is_no_deadline(lending):
    async def test(service):
        for shape in ((1, 4), (1, 6)):
            await service.infer(request("add1", {"x": np.zeros(shape, np.float32)}, timeout_us=1), REMOTE)

    served(lending, test)


def test_cancelled_tasks_leave_nothing_behind(lending):
    async def test(service):
        for size in (4, 6):
            tasks = [
                asyncio.create_task(service.infer(request("add1", {"x": np.zeros((1, size), np.float32)}), REMOTE))
                for _ in range(100)
            ]
            for turn, task in enumerate(tasks):
                if turn % 10 == 0:
                    await asyncio.sleep(0)
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended[:10])
            for end in ended[10:]:  # on a slow machine answers to the latest may have come before
                assert isinstance(end, asyncio.CancelledError) or arrays(end)["y"].tolist() == [[1.0] * size], end
            response = await service.infer(request("add1", {"x": np.zeros((1, size), np.float32)}), REMOTE)
            assert arrays(response)["y"].tolist() == [[1.0] * size]
        await asyncio.wait_for(service.idle(), 30)

    served(lending, test)


def test_a_server_that_exits_takes_no_new_request(lending):
    async def test(service):
        service.exiting = True
        with pytest.raises(InferError, match=r"^\[UNAVAILABLE\] Server exiting$"):
            await service.infer(request("add1", {"x": ROW}), REMOTE)

    served(lending, test)


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_reload_in_between(lending):
    async def test(service):
        stopped = asyncio.Event()

        async def ask():
            count = 0
            while not stopped.is_set() or count == 0:
                response = await service.infer(request("add1", {"x": ROW}), REMOTE)
                assert arrays(response)["y"][0, 0] == 1
                count += 1

        tasks = [asyncio.create_task(ask()) for _ in range(4)]
        for _ in range(3):
            await service.load("add1", {})
        stopped.set()
        await asyncio.gather(*tasks)
        await service.unload("add1", False)
        assert not await service.model_ready("add1", "")
        with pytest.raises(InferError, match=r"^\[NOT_FOUND\] Request for unknown model: 'add1' has no available ver"):
            await service.infer(request("add1", {"x": ROW}), REMOTE)
        await service.load("add1", {})
        assert await service.model_ready("add1", "1")
        assert arrays(await service.infer(request("add1", {"x": ROW}), REMOTE))["y"][0, 0] == 1

    served(lending, test)


def test_a_model_that_came_back_with_another_signature(lending):
    async def test(service):
        directory = lending.repository / "changing" / "1"
        directory.mkdir(parents=True)
        for build, ask in (
            (models.add1, lambda: request("changing", {"x": ROW})),
            (models.two_input, lambda: request("changing", {"a": ROW, "b": ROW})),
            (models.add1, lambda: request("changing", {"x": ROW})),
        ):
            (directory / "model.onnx").write_bytes(build().SerializeToString())
            await service.load("changing", {})
            for _ in range(2):
                await service.infer(ask(), REMOTE)

    served(lending, test)


def test_a_newer_version_is_the_latest(lending):
    async def test(service):
        for version in (1, 2):
            models.write_model(lending.repository, "versions", models.add1(), version=version)
            await service.load("versions", {})
            response = await service.infer(request("versions", {"x": ROW}), REMOTE)
            assert response.version == str(version)

    served(lending, test)


def test_what_loading_does_not_take(lending):
    async def test(service):
        with pytest.raises(InferError, match="Load parameter 'config' must be specified for model file override"):
            await service.load("add1", {"file:1/model.onnx": b"x"})
        with pytest.raises(InferError, match="Invalid config override"):
            await service.load("add1", {"config": "{"})

    served(lending, test)


def test_questions(lending):
    async def test(service):
        assert await service.live()
        assert await service.ready()
        assert (await service.metadata("add1", "")).inputs[0].shape == (-1, -1)
        assert (await service.metadata("add1", "1")).versions == ("1",)
        assert (await service.config("add1", ""))["name"] == "add1"
        assert (await service.statistics("add1", ""))[0]["name"] == "add1"
        assert "add1" in [entry.name for entry in await service.index(True)]
        assert (await service.log_settings({}))["log_info"] is True
        assert (await service.trace_settings("", {}))["trace_rate"] == "1000"
        assert service.extensions[0] == "classification"

    served(lending, test)


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_thousand_shapes_stay_within_bounds(lending):
    async def test(service):
        plans = service.inference.plans = PlanCache(service.inference._client, max_plans=100, max_bytes=4 << 20)

        async def ask(size):
            response = await service.infer(request("add1", {"x": np.full((1, size), size, np.float32)}), REMOTE)
            assert arrays(response)["y"][0, -1] == size + 1

        for start in range(1, 1000, 50):
            await asyncio.gather(*(ask(size) for size in range(start, start + 50)))
            assert len(plans) <= 100
            assert plans.byte_size <= 4 << 20
        # Dropped plans give their places back.
        await until(lambda: lending.status()["quotas"]["memory_used"] <= 16 << 20)

    served(lending, test)


def test_requests_that_come_together_all_reach_the_model_at_once(lending):
    """Whoever finds no place gets one made: he must not wait for the run of another."""
    together = 9  # fewer are no batch for a minute

    async def test(service):
        for shape in ((1, 4), (1, 7)):  # its first use: nothing is prepared
            asked = [
                service.infer(request("held", {"x": np.full(shape, n, np.float32)}), REMOTE) for n in range(together)
            ]
            answers = await asyncio.wait_for(asyncio.gather(*asked), 30)
            assert [arrays(answer)["y"][0, 0] for answer in answers] == [n + 1 for n in range(together)]

    served(lending, test)
