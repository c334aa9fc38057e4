"""gRPC's RPCs other than inference: the messages that the service's plain data becomes, and the settings' types."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from broker.gateway.grpc.calls import CALLS
from broker.gateway.grpc.limits import Budget
from broker.gateway.kserve import Caller
from shm.errors import InferError
from shm.message_values import RegionRecord
from tests.fakes.kserve import FakeService

ME = Caller("grpc")


def call(service: Any, name: str, /, **fields: Any) -> Any:
    return asyncio.run(CALLS[name].answer(service, CALLS[name].request(**fields), ME))


def refused(name: str, /, **fields: Any) -> tuple[str, str]:
    service = FakeService()
    before = (dict(service.log), dict(service.trace))
    with pytest.raises(InferError) as caught:
        call(service, name, **fields)
    assert (service.log, service.trace) == before
    assert not service.loads
    return caught.value.code, caught.value.message


def test_all_rpcs_are_there() -> None:
    methods = {each.name for each in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert methods == {*CALLS, "ModelInfer", "ModelStreamInfer"}
    for name, each in CALLS.items():
        assert each.request.DESCRIPTOR.name == f"{name}Request"


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"CudaSharedMemoryRegister"}))
def test_every_rpc_answers_with_its_message(name: str) -> None:
    field = "model_name" if name.startswith("RepositoryModel") else "name"
    takes_a_model = name.startswith(("Model", "RepositoryModel"))
    response = call(FakeService(), name, **{field: "add1"} if takes_a_model else {})
    assert response.DESCRIPTOR.name == f"{name}Response"


def test_metadata() -> None:
    found = call(FakeService(), "ModelMetadata", name="add1")
    assert (found.name, list(found.versions), found.platform) == ("add1", ["1"], "onnxruntime_onnx")
    assert [(each.name, each.datatype, list(each.shape)) for each in found.inputs] == [("x", "FP32", [-1, 4])]
    assert [each.name for each in found.outputs] == ["y"]


def test_configurations_keep_every_kind_of_value() -> None:
    config = {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2**40], "reshape": {"shape": ["16"]}}],
        "version_policy": {"specific": {"versions": ["1", 9007199254740993]}},
        "dynamic_batching": {
            "max_queue_delay_microseconds": "18446744073709551615",
            "default_queue_policy": {"default_timeout_microseconds": 2**63},
        },
        "parameters": {"k": {"string_value": "v"}},
        "response_cache": {"enable": False},
        "from_a_newer_release": 1,
    }

    class Configured(FakeService):
        async def config(self, model: str, version: str) -> dict[str, Any]:
            return config

    found = call(Configured(), "ModelConfig", name="m").config
    assert list(found.input[0].dims) == [-1, 2**40]
    assert list(found.input[0].reshape.shape) == [16]
    assert list(found.version_policy.specific.versions) == [1, 9007199254740993]
    assert found.dynamic_batching.max_queue_delay_microseconds == 2**64 - 1
    assert found.dynamic_batching.default_queue_policy.default_timeout_microseconds == 2**63
    assert found.parameters["k"].string_value == "v"
    assert found.input[0].data_type == model_config_pb2.TYPE_FP32
    # What the broker itself writes as JSON, protobuf's own way, comes back the same.
    config = json_format.MessageToDict(
        found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert call(Configured(), "ModelConfig", name="m").config == found

    config = {"max_batch_size": "no number"}
    with pytest.raises(InferError) as caught:
        call(Configured(), "ModelConfig", name="m")
    assert caught.value.code == "INTERNAL"


def test_statistics() -> None:
    class Decoupled(FakeService):
        async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
            (found,) = await super().statistics(model, version)
            found["last_inference"] = 2**63
            found["response_stats"] = {"0": {"compute_infer": {"count": 1, "ns": 7}, "cancel": {"count": 0, "ns": 0}}}
            found["batch_stats"] = [{"batch_size": 4, "compute_infer": {"count": 2, "ns": 3}}]
            found["memory_usage"] = [{"type": "GPU", "id": 0, "byte_size": 2**40}]
            return [found]

    (found,) = call(Decoupled(), "ModelStatistics", name="add1").model_stats
    assert (found.name, found.last_inference, found.inference_count, found.execution_count) == ("add1", 2**63, 4, 5)
    assert (found.inference_stats.queue.count, found.inference_stats.cache_miss.ns) == (1, 2)
    assert found.response_stats["0"].compute_infer.ns == 7
    assert (found.batch_stats[0].batch_size, found.batch_stats[0].compute_infer.count) == (4, 2)
    assert found.memory_usage[0].byte_size == 2**40


def test_index() -> None:
    found = call(FakeService(), "RepositoryIndex").models
    assert [(each.name, each.version, each.state, each.reason) for each in found] == [
        ("add1", "1", "READY", ""),
        ("never", "", "", ""),
    ]
    assert len(call(FakeService(), "RepositoryIndex", ready=True).models) == 1


@pytest.mark.parametrize("name", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"])
def test_repositories_cannot_be_named(name: str) -> None:
    assert refused(name, repository_name="r") == ("UNSUPPORTED", "'repository_name' specification is not supported")


def test_load_and_unload_parameters() -> None:
    service = FakeService()
    parameters = {"config": {"string_param": "{}"}, "file:1/model.onnx": {"bytes_param": b"\0\xff"}}
    call(service, "RepositoryModelLoad", model_name="add1", parameters=parameters)
    call(service, "RepositoryModelUnload", model_name="add1")
    call(service, "RepositoryModelUnload", model_name="add1", parameters={"unload_dependents": {"bool_param": True}})
    assert service.loads == [
        ("add1", {"config": "{}", "file:1/model.onnx": b"\0\xff"}),
        ("add1", {"unload_dependents": False}),
        ("add1", {"unload_dependents": True}),
    ]


@pytest.mark.parametrize(
    ("name", "parameter", "value", "text"),
    [
        (
            "Load",
            "config",
            {"bytes_param": b""},
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "Load",
            "file:a",
            {"string_param": ""},
            "invalid value type for load parameter 'file:a', expected bytes_param.",
        ),
        ("Load", "other", {"string_param": ""}, "unrecognized load parameter 'other'."),
        (
            "Unload",
            "unload_dependents",
            {"string_param": "true"},
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
    ],
)
def test_load_parameters_that_are_refused(name: str, parameter: str, value: dict[str, Any], text: str) -> None:
    fields = {"model_name": "add1", "parameters": {parameter: value}}
    assert refused(f"RepositoryModel{name}", **fields) == ("INVALID_ARG", text)


def test_regions() -> None:
    service = FakeService()
    call(service, "SystemSharedMemoryRegister", name="r", key="/k", offset=4096, byte_size=2**40)
    (found,) = call(service, "SystemSharedMemoryStatus").regions.values()
    assert (found.name, found.key, found.offset, found.byte_size) == ("r", "/k", 4096, 2**40)
    call(service, "SystemSharedMemoryUnregister", name="r")
    assert not call(service, "SystemSharedMemoryStatus").regions
    service.held["c"] = RegionRecord(name="c", kind="cuda", key="1", byte_size=64)
    (cuda,) = call(service, "CudaSharedMemoryStatus", name="c").regions.values()
    assert (cuda.name, cuda.device_id, cuda.byte_size) == ("c", 1, 64)


@pytest.mark.parametrize("length", [0, 63, 64, 100_000])
def test_handles_of_any_length_reach_the_service(length: int) -> None:
    handle = b"\xff" * length
    came: list[Any] = []

    class Noting(FakeService):
        async def register_cuda(self, caller: Caller, name: str, handle: bytes, device: int, byte_size: int) -> None:
            came.append((name, handle, device, byte_size))

    call(Noting(), "CudaSharedMemoryRegister", name="c", raw_handle=handle, device_id=-1, byte_size=64)
    assert came == [("c", handle, -1, 64)]


def test_log_settings() -> None:
    settings = {
        "log_info": {"bool_param": False},
        "log_verbose_level": {"uint32_param": 3},
        "log_format": {"string_param": "ISO8601"},
        "unheard_of": {"bool_param": True},
    }
    found = call(FakeService(), "LogSettings", settings=settings).settings
    values = {name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in found.items()}
    assert values == {
        "log_file": "",
        "log_info": False,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 3,
        "log_format": "ISO8601",
    }


@pytest.mark.parametrize(
    ("name", "value", "code", "text"),
    [
        (
            "log_file",
            {"string_param": "x"},
            "UNSUPPORTED",
            "log file location can not be updated through network protocol",
        ),
        ("log_info", {"uint32_param": 1}, "INVALID_ARG", "expect boolean for 'log_info'"),
        ("log_verbose_level", {"bool_param": True}, "INVALID_ARG", "expect int32 for 'log_verbose_level'"),
        ("log_format", {}, "INVALID_ARG", "expect string for 'log_format'"),
        ("log_format", {"string_param": "xml"}, "INVALID_ARG", "invalid argument for log_format, got: xml"),
    ],
)
def test_log_settings_that_are_refused(name: str, value: dict[str, Any], code: str, text: str) -> None:
    assert refused("LogSettings", settings={"log_error": {"bool_param": False}, name: value}) == (code, text)


def test_trace_settings() -> None:
    settings = {
        "trace_level": {"value": ["TIMESTAMPS", "TENSORS"]},
        "trace_rate": {"value": ["2"]},
        "trace_count": {},
        "unheard_of": {"value": ["1"]},
    }
    came: list[Any] = []

    class Noting(FakeService):
        async def trace_settings(self, model: str, update: Any) -> dict[str, Any]:
            came.append((model, update))
            return await super().trace_settings(model, {})

    found = call(Noting(), "TraceSetting", settings=settings, model_name="add1").settings
    changes = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "2", "trace_count": None}
    assert came == [("add1", {}), ("add1", changes)]
    assert {name: list(value.value) for name, value in found.items()} == {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
    }


@pytest.mark.parametrize(
    ("name", "values", "code", "text"),
    [
        ("trace_rate", ["1", "2"], "INVALID_ARG", "expect only 1 value for 'trace_rate'"),
        ("log_frequency", ["1", "2"], "INVALID_ARG", "expect only 1 value for 'log_frequency'"),
        (
            "trace_file",
            ["x"],
            "UNSUPPORTED",
            "trace file location can not be updated through network protocol",
        ),
    ],
)
def test_trace_settings_that_are_refused(name: str, values: list[str], code: str, text: str) -> None:
    settings = {"trace_level": {"value": ["TENSORS"]}, name: {"value": values}}
    assert refused("TraceSetting", settings=settings) == (code, text)
    unknown = ("INVALID_ARG", "Request for unknown model : nope")
    assert refused("TraceSetting", settings=settings, model_name="nope") == unknown


def test_the_budget_refuses_requests_and_counts_responses() -> None:
    budget = Budget(100)
    budget.take(60)
    budget.add(50)
    with pytest.raises(InferError) as caught:
        budget.take(1)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert "use shared memory" in caught.value.message
    budget.give(50)
    budget.take(40)
    assert budget.used == 100
