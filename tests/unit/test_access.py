"""Restricted APIs: which answer for which header, on which front end."""

from __future__ import annotations

import pickle
from typing import get_args

import pytest
from tritonclient.grpc import service_pb2

from broker.gateway.access import CATEGORIES, Access, Restricted
from broker.gateway.grpc.calls import CALLS
from broker.gateway.kserve import Caller, Category, Transport
from shm.errors import InferError

HTTP = {"shared-memory": ("x-key", "s3cret")}
GRPC = {"shared-memory": ("triton-grpc-protocol-key", "other"), "health": ("triton-grpc-protocol-key", "other")}
ACCESS = Access(HTTP, GRPC)


def answer(category: Category, transport: Transport, **headers: str) -> str:
    try:
        ACCESS.check(category, Caller(transport, headers={name.replace("_", "-"): v for name, v in headers.items()}))
    except Restricted as error:
        return error.message
    return ""


def test_http_answers_with_tritons_words() -> None:
    assert answer("shared-memory", "http") == "This API is restricted, expecting header 'x-key'"
    assert answer("shared-memory", "http", x_key="wrong") == "This API is restricted, expecting header 'x-key'"
    assert answer("shared-memory", "http", x_key="s3cret") == ""


def test_grpc_has_settings_and_words_of_its_own() -> None:
    expected = "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    assert answer("shared-memory", "grpc", x_key="s3cret") == expected
    assert answer("health", "grpc") == expected
    assert answer("health", "grpc", triton_grpc_protocol_key="other") == ""
    assert answer("health", "http") == ""


def test_zeromq_is_no_way_around_either() -> None:
    assert "'x-key'" in answer("shared-memory", "zmq")
    assert answer("shared-memory", "zmq", x_key="s3cret") == ""
    assert "'triton-grpc-protocol-key'" in answer("health", "zmq")
    assert answer("inference", "zmq") == ""


@pytest.mark.parametrize("value", ["", "S3CRET", "s3cret ", "s3cre", "s3crett", "\u017f3cret", "\udcff"])
def test_nothing_like_the_value_will_do(value: str) -> None:
    assert answer("shared-memory", "http", x_key=value)


@pytest.mark.parametrize("transport", ["http", "grpc", "zmq"])
def test_every_category_can_be_restricted(transport: Transport) -> None:
    rules = {category: ("h", "v") for category in CATEGORIES}
    access = Access(rules, rules)
    for category in get_args(Category):
        with pytest.raises(Restricted):
            access.check(category, Caller(transport))
        access.check(category, Caller(transport, headers={"h": "v"}))


def test_every_grpc_method_has_a_category() -> None:
    methods = set(service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name)
    assert methods == set(CALLS) | {"ModelInfer", "ModelStreamInfer"}
    assert {call.category for call in CALLS.values()} | {"inference"} == set(CATEGORIES)


def test_the_error_is_an_infer_error_that_travels() -> None:
    copy = pickle.loads(pickle.dumps(Restricted("text")))
    assert (type(copy), copy.code, copy.message) == (Restricted, "UNAVAILABLE", "text")
    assert isinstance(copy, InferError)
