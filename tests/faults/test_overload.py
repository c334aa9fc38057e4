"""Rows L-01 … L-04, L-07, L-09, D-07, D-09: more than a model can do, and inputs that ask for more than there is.

L-05, L-06 and L-08 are in `test_front_floods`. L-10 has nothing to try: no client of ours asks again by itself.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

import clientlib
from tests.faults import child, front_doors, scheduled
from tests.faults.lab import SAME, Lab, scaled
from tests.faults.measure import resident_bytes
from tests.faults.visited import VisitedLab

MIB = 1 << 20
EXPIRED = "Request timeout expired"
FULL = "Exceeds maximum queue size"
BODY = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}]}'


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with VisitedLab(tmp_path_factory.mktemp("lab"), scheduled.CACHE_FLAG, models=scheduled.write) as lab:
        yield lab


class Many:
    """A plan of one of the busy models with `count` places; element k of the input is k."""

    def __init__(self, client: clientlib.Client, model: str, count: int, name: str = "r") -> None:
        region = client.create_region(name, 1 << 16)
        self.x, self.y = region.array((count, 1, 1), "FP32"), region.array((count, 1, 1), "FP32", 32768)
        self.x[:, 0, 0] = np.arange(count)
        self.y[:] = -1
        places = {"INPUT0": region.tensor((1, 1), "FP32")}, {"OUTPUT0": region.tensor((1, 1), "FP32", 32768)}
        self.plan = client.prepare(model, *places, slots=count)

    def submit(self, place: int, **options: Any) -> clientlib.Pending:
        return self.plan.submit(input_slot=place, output_slot=place, **options)

    def outcome(self, place: int, pending: clientlib.Pending) -> str:
        """ "right", "wrong", or the error's text."""
        code, message = child.refusal(pending.result, timeout=60)
        if code != "OK":
            return f"{code} {message}"
        return "right" if self.y[place, 0, 0] == place else "wrong"


def inferences(client: clientlib.Client, model: str) -> int:
    (found,) = client.statistics(model)
    count: int = found["inference_count"]
    return count


# --- L-01, L-02 -------------------------------------------------------------------------------------------------------


def submit_many(model: str, count: int, patient: int = 0, **options: Any) -> dict[str, Any]:
    """So many at once, the first `patient` of them without a time-out. How often each outcome came; how many ran."""
    with clientlib.connect(slots=count) as client:
        before = inferences(client, model)
        many = Many(client, model, count)
        pending = [many.submit(place, **options if place >= patient else {}) for place in range(count)]
        outcomes = Counter(many.outcome(place, one) for place, one in enumerate(pending))
        deadline = time.monotonic() + 40
        while (ran := inferences(client, model) - before) < outcomes["right"] and time.monotonic() < deadline:
            child.hear(0.01)
        return {"outcomes": dict(outcomes), "ran": ran}


def test_l01_a_queue_that_is_full(lab: Lab) -> None:
    """[L-01] who finds no place is told at once, in Triton's words; the others are served."""
    told = lab.offend(submit_many, model="bounded", count=64)
    refused = [text for text in told["outcomes"] if text != "right"]
    assert len(refused) == 1
    assert refused[0].startswith("UNAVAILABLE ")
    assert FULL in refused[0]
    assert scheduled.QUEUE <= told["outcomes"]["right"] < 64
    assert told["ran"] == told["outcomes"]["right"]
    lab.settled()


@pytest.mark.parametrize(("model", "timeout"), [("impatient", 20), ("busy", 0.1)])
def test_l02_who_waits_too_long(lab: Lab, model: str, timeout: float) -> None:
    """[L-02] by the model's policy or by the request's own time-out: told so, and never run."""
    told = lab.offend(submit_many, model=model, count=64, patient=4, timeout=timeout)
    right = told["outcomes"].pop("right")
    assert right > 0
    assert any(EXPIRED in text for text in told["outcomes"])
    assert all(text.startswith("UNAVAILABLE ") for text in told["outcomes"]), told["outcomes"]
    running = 4 if model == "busy" else 0  # the request's own time-out also ends the wait for one that runs
    assert right <= told["ran"] <= right + running
    lab.settled()


# --- L-03 -------------------------------------------------------------------------------------------------------------


def leave_before_it_runs(http: int, grpc_port: int) -> dict[str, Any]:
    """Requests behind one that runs, whose callers go: over HTTP by hang-up, over gRPC by deadline."""
    head = b"POST /v2/models/slowly/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    request = service_pb2.ModelInferRequest(model_name="slowly", raw_input_contents=[np.float32(1).tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    with clientlib.connect() as client, grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as wire:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(wire)
        many = Many(client, "slowly", 1)
        for _ in range(5):  # until all were gone while the first still ran: a busy gateway may be slow to hear of it
            before = inferences(client, "slowly")
            first = many.submit(0)
            calls = [stub.ModelInfer.future(request, timeout=0.1) for _ in range(8)]
            with contextlib.ExitStack() as stack:
                for _ in range(8):
                    connection = stack.enter_context(socket.create_connection(("127.0.0.1", http)))
                    connection.sendall(head + BODY)
                child.hear(0.1)
            codes = Counter(call.code().name for call in calls)
            stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60)  # when this is answered it knows of all others
            front_doors.ask_http(http, "GET", "/v2/health/live")
            while not first.done() and client.statistics("slowly")[0]["pending"]:
                child.hear(0.01)
            in_time = not first.done()
            told: dict[str, Any] = {"codes": dict(codes), "first": many.outcome(0, first)}
            told["last"] = many.outcome(0, many.submit(0))  # behind those that are left, if any were
            told["ran"] = inferences(client, "slowly") - before
            if in_time:
                break
        return told


def test_l03_callers_that_go_before_their_request_runs(lab: VisitedLab) -> None:
    """[L-03] what they asked for is not done."""
    told = lab.offend(leave_before_it_runs, http=lab.http, grpc_port=lab.grpc)
    assert told == {"codes": {"DEADLINE_EXCEEDED": 8}, "first": "right", "last": "right", "ran": 2}
    lab.settled()


# --- L-04, L-07, L-09 -------------------------------------------------------------------------------------------------


def overload(seconds: float) -> dict[str, Any]:
    """Ten times what the model can do, each request with a deadline. How often each outcome came; one afterwards."""
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + seconds

    def ask(client: clientlib.Client, name: str) -> None:
        many = Many(client, "busy", 32, name)
        while time.monotonic() < end:
            pending = []
            with contextlib.suppress(clientlib.InferError):  # its time has passed before there was a free slot
                for place in range(32):
                    pending.append(many.submit(place, timeout=0.2))
            outcomes.update(many.outcome(place, one) for place, one in enumerate(pending))

    with clientlib.connect() as client:
        threads = [threading.Thread(target=ask, args=(client, f"r{number}")) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        x = np.zeros((1, 1), np.float32)
        return {
            "outcomes": dict(outcomes),
            "afterwards": child.refusal(client.infer, "busy", {"INPUT0": x}, timeout=50),
        }


def test_l04_ten_times_what_it_can_do(lab: Lab) -> None:
    """[L-04] every request ends, right or expired; nothing piles up; it serves as before right afterwards."""
    before = resident_bytes(lab.worker_pid())
    told = lab.offend(overload, seconds=scaled(2, 600), timeout_s=660)
    assert told["outcomes"].pop("right") > 0
    assert all(EXPIRED in text for text in told["outcomes"]), told["outcomes"]
    assert told["afterwards"] == ["OK", ""]
    assert resident_bytes(lab.worker_pid()) - before < 32 * MIB
    lab.settled()


def hold_the_queue(count: int) -> int:
    """A greedy client: says when all of its requests are in the queue, then how many were answered when asked."""
    with clientlib.connect(slots=count) as client:
        many = Many(client, "busy", count)
        pending = [many.submit(place) for place in range(count)]
        child.say("queued")
        child.hear()
        answered = sum(one.done() for one in pending)
        for one in pending:
            one.cancel()
        for one in pending:
            child.refusal(one.result, timeout=60)
        return answered


def ask_politely() -> list[str]:
    with clientlib.connect() as client:
        child.say("here")
        child.hear()
        return child.refusal(client.infer, "busy", {"INPUT0": np.zeros((1, 1), np.float32)}, timeout=50)


def test_l07_one_client_asks_for_all(lab: Lab) -> None:
    """[L-07] who asks once need not wait for the 1000 requests that another one has in the queue."""
    for _ in range(5):  # what is answered goes on being answered: a busy machine may be slow to ask for it
        polite = lab.start(ask_politely, valid=False)
        assert polite.heard() == "here"
        greedy = lab.start(hold_the_queue, count=1000)
        greedy.heard()
        polite.tell("ask")
        assert polite.result() == ["OK", ""]
        greedy.tell("how many?")
        if (answered := greedy.result()) < 750:
            break
    assert answered < 750
    lab.settled()


def flood_a_gateway(http: int, grpc_port: int) -> int:
    """A greedy process, until told: 100 requests under way on one gRPC connection, and one each on 60 of HTTP, of which
    30 are new ones for each request.
    """
    wire = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
    stub = service_pb2_grpc.GRPCInferenceServiceStub(wire)
    request = service_pb2.ModelInferRequest(model_name="singly", raw_input_contents=[np.float32(1).tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    ends, answered = threading.Event(), Counter[str]()

    def again(call: Any = None) -> None:
        if call is not None:
            answered["gRPC"] += 1
        if not ends.is_set():
            stub.ModelInfer.future(request).add_done_callback(again)

    def over_http(keep: bool) -> None:
        connection = HTTPConnection("127.0.0.1", http, timeout=60)
        while not ends.is_set():
            connection.request("POST", "/v2/models/singly/infer", BODY)
            assert connection.getresponse().read()
            answered["HTTP"] += 1
            if not keep:
                connection.close()  # it opens again
        connection.close()

    threads = [threading.Thread(target=over_http, args=(keep,)) for keep in (True, False) for _ in range(30)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        again()
    while len(answered) < 2:
        child.hear(0.01)
    child.say("flooded")
    child.hear()
    ends.set()
    for thread in threads:
        thread.join()
    wire.close()
    return answered.total()


def ask_at_the_door(door: str, port: int) -> int:
    """How many others ran while a polite process waited for an answer; the median of several."""
    with clientlib.connect() as control:

        def ran_meanwhile(ask: Callable[[], object]) -> int:
            before = inferences(control, "singly")
            ask()
            return inferences(control, "singly") - before - 1

        x = np.zeros((1, 1), np.float32)
        with clientlib.connect(f"{door}://127.0.0.1:{port}") if port else clientlib.connect() as client:
            return sorted(ran_meanwhile(lambda: client.infer("singly", {"INPUT0": x}, timeout=50)) for _ in range(9))[4]


@pytest.mark.parametrize("door", ["http", "grpc", "native"])
def test_l07_one_process_floods_a_gateway(lab: VisitedLab, door: str) -> None:
    """[L-07] whoever asks once, by whichever way, waits for what runs and for two turns of the other process, whose 31
    connections that stay are one party, and all that are new another: 160 requests that wait. What runs while it looks
    at the count is in the count.
    """
    greedy = lab.start(flood_a_gateway, http=lab.http, grpc_port=lab.grpc)
    assert greedy.heard() == "flooded"
    assert lab.offend(ask_at_the_door, door=door, port={"http": lab.http, "grpc": lab.grpc}.get(door, 0)) <= 8
    greedy.tell("enough")
    assert greedy.result() > 0
    lab.settled()


def mix_of_deadlines() -> dict[str, Any]:
    """Four that may wait, four that may not, one after the other, behind a batch that runs; levels likewise."""
    with clientlib.connect() as client:
        many = Many(client, "busy", 40)
        pending = [many.submit(place, timeout=0.03 if place % 8 >= 4 else 20) for place in range(40)]
        late = Counter(many.outcome(place, one) for place, one in enumerate(pending) if place % 8 >= 4)
        patient = Counter(many.outcome(place, one) for place, one in enumerate(pending) if place % 8 < 4)
        other = Many(client, "levels", 40, "levels")
        for _ in range(20):  # until this process was not kept from looking for as long as all of them take
            low = [other.submit(place, priority=2) for place in range(32)]
            high = [other.submit(place, priority=1) for place in range(32, 40)]
            for one in high:
                one.result(timeout=60)
            if waiting := sum(not one.done() for one in low):
                break
            for one in low:
                one.result(timeout=60)
        told = {"late": dict(late), "patient": dict(patient), "low still waiting": waiting}
        told["low"] = dict(Counter(other.outcome(place, one) for place, one in enumerate(low)))
        return told


def test_l09_expired_members_and_priorities(lab: Lab) -> None:
    """[L-09] an expired request takes nobody along; level 1 is not behind level 2."""
    told = lab.offend(mix_of_deadlines)
    assert told["patient"] == {"right": 20}
    assert all(text == "right" or EXPIRED in text for text in told["late"])
    assert any(EXPIRED in text for text in told["late"])
    assert told["low still waiting"] > 0
    assert told["low"] == {"right": 32}
    lab.settled()


# --- D-07, D-09 -------------------------------------------------------------------------------------------------------


def odd_patterns() -> dict[str, Any]:
    """Bytes that are no truth values, and every pattern of 16 bits."""
    with clientlib.connect() as client:
        region = client.create_region("r", 4096)
        x, y = region.array((1, 256), "UINT8"), region.array((1, 256), "UINT8", 1024)
        x[0] = np.arange(256)
        places = {"x": region.tensor((1, 256), "BOOL")}, {"y": region.tensor((1, 256), "BOOL", 1024)}
        told = {"bool": child.refusal(client.prepare("flags", *places).infer, timeout=20)}
        told["0 and 1"] = [int(value) for value in y[0, :2]]  # type: ignore[list-item]
        halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(1, -1)
        back = client.infer("identity_fp16", {"x": halves}, timeout=20)["y"]
        told["fp16"] = bool(np.array_equal(back.view(np.uint16), halves.view(np.uint16)))  # type: ignore[assignment]
        return told


def test_d07_patterns_that_are_no_values(lab: Lab) -> None:
    """[D-07] answered, whatever it means."""
    assert lab.offend(odd_patterns) == {"bool": ["OK", ""], "0 and 1": [1, 0], "fp16": True}
    lab.settled()


SHAPES = [[2**40, 1], [2**20, 2**20], [2**31, 2**31], [-1, 4], [2**62, 2], [-(2**63), 1], [0, 2**40]]


def expand(shapes: list[list[int]]) -> list[list[str]]:
    with clientlib.connect() as client:
        x = np.ones(1, np.float32)
        return [
            child.refusal(client.infer, "expand", {"x": x, "shape": np.array(shape, np.int64)}, timeout=20)
            for shape in shapes
        ]


def test_d09_shapes_that_ask_for_too_much(lab: Lab) -> None:
    """[D-09] an error; the worker neither dies of it nor keeps memory."""
    before = resident_bytes(lab.worker_pid())
    for shape, (code, message) in zip(SHAPES, lab.offend(expand, shapes=SHAPES), strict=True):
        assert code == "OK" if 0 in shape else code in ("INTERNAL", "INVALID_ARG", "UNAVAILABLE"), (shape, message)
    assert lab.offend(expand, shapes=[[2, 3]]) == [["OK", ""]]
    assert lab.worker_pid() == lab._workers[SAME]
    assert resident_bytes(lab.worker_pid()) - before < 64 * MIB
    lab.settled()
