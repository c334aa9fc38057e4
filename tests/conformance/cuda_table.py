"""What the CUDA driver does, as a table of facts: {case: {fact: value}}. Run on the simulated driver and on real ones.

    python -m tests.conformance.cuda_table [case …] > table.json

`test_cuda_table.py` holds the simulator to `cuda_simulated.json`, and that to `cuda_hardware.json` as soon as a GPU's
table has been recorded there. Each case is a process of its own, so that what breaks a context stays in its case; the
other side of IPC is a second process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from shm.cuda import driver, handles

IPC_EVENT = 2 | 4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
NON_BLOCKING = 1
MIB = 1 << 20
CASE_S = 60
Facts = dict[str, Any]


def outcome(function: str, *arguments: Any) -> str:
    """How a call ends: "SUCCESS" or the error's name."""
    try:
        driver.call(function, *arguments)
    except driver.CudaError as error:
        return error.name.removeprefix("CUDA_ERROR_")
    return "SUCCESS"


def opened(handle: bytes, flags: int = handles.LAZY_ENABLE_PEER_ACCESS) -> str:
    return outcome("cuIpcOpenMemHandle", handles.handle_of("CUipcMemHandle", handle), flags)


def write(pointer: int, value: float) -> None:
    numbers = np.full(4, value, np.float32)
    driver.call("cuMemcpyHtoD", pointer, numbers.ctypes.data, numbers.nbytes)


def read(pointer: int) -> float:
    numbers = np.zeros(4, np.float32)
    driver.call("cuMemcpyDtoH", numbers.ctypes.data, pointer, numbers.nbytes)
    assert (numbers == numbers[0]).all()
    return float(numbers[0])


def allocate(byte_size: int) -> int:
    return int(driver.call("cuMemAlloc", byte_size))


# --- the other process --------------------------------------------------------------------------------------------


class Peer:
    """A second process that runs `peer_<name>`: one datagram asks, one answers; descriptors ride along."""

    def __init__(self, name: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(CASE_S)
        command = [sys.executable, "-m", "tests.conformance.cuda_table", "--peer", name, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, message: bytes, *fds: int) -> bytes:
        socket.send_fds(self.socket, [message], list(fds))
        return self.socket.recv(4096)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        self.socket.close()
        self.process.wait(CASE_S)


def peer_exporter(sock: socket.socket) -> None:
    """A: allocate so many bytes, answer the handle; P, R, F: the address of, the value in, free the n-th."""
    mine: list[int] = []
    while message := sock.recv(64):
        verb, number = message[:1], int(message[1:])
        if verb == b"A":
            mine.append(allocate(number))
            write(mine[-1], len(mine))
            sock.send(handles.export_legacy(mine[-1]))
        elif verb == b"P":
            sock.send(b"%d" % mine[number])
        elif verb == b"R":
            sock.send(b"%d" % read(mine[number]))
        else:
            sock.send(outcome("cuMemFree", mine[number]).encode())


def peer_reader(sock: socket.socket) -> None:
    """A memory handle and an event handle; for each further datagram: wait for the event on a stream, read there."""
    stream = driver.call("cuStreamCreate", NON_BLOCKING)
    numbers = np.zeros(MIB, np.uint8)
    pointer = handles.open_legacy(sock.recv(64))
    event = driver.call("cuIpcOpenEventHandle", handles.handle_of("CUipcEventHandle", sock.recv(64)))
    sock.send(b"up")
    while sock.recv(64):
        driver.call("cuStreamWaitEvent", stream, event, 0)
        driver.call("cuMemcpyDtoHAsync", numbers.ctypes.data, pointer, numbers.nbytes, stream)
        driver.call("cuStreamSynchronize", stream)
        sock.send(b"%d %d" % (numbers[0], numbers[-1]))


def peer_importer(sock: socket.socket) -> None:
    """A descriptor and a size; then R: read the memory, W: add one."""
    message, (fd,), _, _ = socket.recv_fds(sock, 64, 1)
    mapping = handles.import_vmm(fd, int(message), 0)
    os.close(fd)
    sock.send(b"up")
    while message := sock.recv(64):
        if message == b"W":
            write(mapping.pointer, read(mapping.pointer) + 1)
        sock.send(b"%d" % read(mapping.pointer))


# --- cases --------------------------------------------------------------------------------------------------------


def case_opening() -> Facts:
    peer = Peer("exporter")
    handle = peer.ask(b"A1000")
    first, second = handles.open_legacy(handle), handles.open_legacy(handle)
    base, size = driver.call("cuMemGetAddressRange", first)
    facts: Facts = {"second_open_same_pointer": first == second, "range_base_is_pointer": int(base) == first}
    facts |= {"range_size": int(size), "value": read(first)}
    write(first, 9)
    facts["exporter_sees_write"] = peer.ask(b"R0") == b"9"
    facts["closes"] = [outcome("cuIpcCloseMemHandle", first) for _ in range(3)]
    facts["value_after_reopen"] = read(handles.open_legacy(handle))
    peer.end()
    return facts


def case_small_allocations() -> Facts:
    peer = Peer("exporter")
    made = [peer.ask(b"A64"), peer.ask(b"A64"), peer.ask(b"A4096")]
    pointers = [handles.open_legacy(handle) for handle in made]
    ranges = [driver.call("cuMemGetAddressRange", pointer) for pointer in pointers]
    facts = {
        "handles_differ": len(set(made)) == 3,
        "pointers_differ": len(set(pointers)) == 3,
        "values": [read(pointer) for pointer in pointers],
        "range_sizes": [int(size) for _, size in ranges],
        "range_base_is_pointer": [int(base) == pointer for (base, _), pointer in zip(ranges, pointers, strict=True)],
    }
    peer.end()
    return facts


def case_own_process() -> Facts:
    pointer = allocate(2 * MIB)
    event = driver.call("cuEventCreate", IPC_EVENT)
    return {
        "open_own_memory": opened(handles.export_legacy(pointer)),
        "open_own_event": outcome("cuIpcOpenEventHandle", driver.call("cuIpcGetEventHandle", event)),
        "inner_handle_is_base_handle": handles.export_legacy(pointer + 4096) == handles.export_legacy(pointer),
    }


def case_bad_handles() -> Facts:
    peer = Peer("exporter")
    handle = peer.ask(b"A2097152")
    nothing = handles.handle_of("CUipcEventHandle", bytes(64))
    facts = {
        "zeros": opened(bytes(64)),
        "ones": opened(b"\xff" * 64),
        "flags_0": opened(handle, 0),
        "event_zeros": outcome("cuIpcOpenEventHandle", nothing),
        "event_not_interprocess": outcome("cuIpcGetEventHandle", driver.call("cuEventCreate", 2)),
        "interprocess_with_timing": outcome("cuEventCreate", 4),
        "close_never_opened": outcome("cuIpcCloseMemHandle", allocate(64)),
    }
    peer.end()
    return facts


def case_exporter_killed() -> Facts:
    peer = Peer("exporter")
    mapped, other = peer.ask(b"A2097152"), peer.ask(b"A2097152")
    pointer = handles.open_legacy(mapped)
    peer.kill()
    return {
        "value": read(pointer),
        "open_another": opened(other),
        "open_again": opened(mapped),
        "close": outcome("cuIpcCloseMemHandle", pointer),
    }


def case_exporter_frees() -> Facts:
    peer = Peer("exporter")
    handle = peer.ask(b"A2097152")
    pointer = handles.open_legacy(handle)
    facts: Facts = {"free": peer.ask(b"F0").decode(), "value": read(pointer)}
    facts |= {"close": outcome("cuIpcCloseMemHandle", pointer), "open_again": opened(handle)}
    peer.end()
    return facts


def case_address_used_again() -> Facts:
    """The exporter frees what is mapped here and gets the same address for other memory."""
    peer = Peer("exporter")
    old = peer.ask(b"A67108864")
    pointer = handles.open_legacy(old)
    peer.ask(b"F0")
    new = peer.ask(b"A67108864")
    facts: Facts = {"same_address": peer.ask(b"P0") == peer.ask(b"P1"), "handles_differ": old != new}
    facts["open_while_old_is_open"] = opened(new)
    facts["close_old"] = outcome("cuIpcCloseMemHandle", pointer)
    facts["value_after_close"] = read(handles.open_legacy(new))
    peer.end()
    return facts


def case_events() -> Facts:
    """A reader that waits for the event on its stream sees what was written before it was recorded."""
    memory, ballast = allocate(MIB), allocate(64 * MIB)
    stream, event = driver.call("cuStreamCreate", NON_BLOCKING), driver.call("cuEventCreate", IPC_EVENT)
    peer = Peer("reader")
    peer.socket.send(handles.export_legacy(memory))
    peer.ask(handles.handle_bytes(driver.call("cuIpcGetEventHandle", event)))
    right = pending = 0
    for value in range(1, 11):
        for _ in range(8):
            driver.call("cuMemsetD8Async", ballast, value, 64 * MIB, stream)  # keeps the stream busy
        driver.call("cuMemsetD8Async", memory, value, MIB, stream)
        driver.call("cuEventRecord", event, stream)
        pending += outcome("cuEventQuery", event) == "NOT_READY"
        right += peer.ask(b"read") == b"%d %d" % (value, value)
    peer.end()
    return {"right": right, "was_pending": pending > 0}


def case_event_of_a_context() -> Facts:
    """It says of all streams, non-blocking ones too, when they have done what they had to do by then; not more."""
    first, second = (driver.call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    event = driver.call("cuEventCreate", 2)
    gates = [threading.Event(), threading.Event()]
    callbacks = [ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _, gate=gate: gate.wait(CASE_S)) for gate in gates]
    context = driver.call("cuCtxGetCurrent")
    facts: Facts = {"idle": (outcome("cuCtxRecordEvent", context, event), outcome("cuEventSynchronize", event))}
    for stream, callback, step in zip((first, second), callbacks, ("recorded", None), strict=True):
        pointer = ctypes.cast(callback, ctypes.c_void_p).value
        driver.call("cuLaunchHostFunc", stream, driver.bindings().CUhostFn(pointer), 0)
        if step:
            facts[step] = outcome("cuCtxRecordEvent", context, event)
    facts["while_one_works"] = outcome("cuEventQuery", event)
    gates[0].set()
    facts["when_that_is_done"] = outcome("cuEventSynchronize", event)
    facts["the_later_work_goes_on"] = outcome("cuStreamQuery", second)
    gates[1].set()
    driver.call("cuCtxSynchronize")
    return facts


def case_vmm() -> Facts:
    size = handles.granularity(0)
    mapping = handles.create_vmm(0, 1)
    write(mapping.pointer, 5)
    fd = handles.export_vmm(mapping.pointer)
    with open("/dev/null") as other:
        foreign = outcome("cuMemImportFromShareableHandle", other.fileno(), handles._fd_type())
    place = handles.locate(mapping.pointer + 100)
    facts: Facts = {"granularity": size, "foreign_descriptor": foreign, "origin": place and place.origin}
    facts["range_is_mapping"] = place is not None and (place.base, place.size) == (mapping.pointer, size)
    facts["handles_of_one_are_equal"] = handles.one_allocation(mapping.pointer, mapping.pointer + size - 1)
    facts["handles_of_two_differ"] = not handles.one_allocation(mapping.pointer, handles.create_vmm(0, 1).pointer)
    facts["odd_size"] = outcome("cuMemCreate", size + 1, handles._properties(0), 0)
    facts["legacy_handle"] = outcome("cuIpcGetMemHandle", mapping.pointer)
    peer = Peer("importer")
    peer.ask(b"%d" % size, fd)
    facts["peer_reads"] = peer.ask(b"R").decode()
    peer.ask(b"W")
    facts["seen_here"] = read(mapping.pointer)
    mapping.close()
    os.close(fd)
    facts["peer_reads_after_release"] = peer.ask(b"R").decode()
    peer.end()
    return facts


def case_kinds_of_memory() -> Facts:
    stream = driver.call("cuStreamCreate", NON_BLOCKING)
    pooled = int(driver.call("cuMemAllocAsync", 4096, stream))
    driver.call("cuStreamSynchronize", stream)
    host = np.zeros(4 * MIB, np.uint8)
    pinned = (host.ctypes.data + 4095) // 4096 * 4096
    origins = [place and place.origin for place in map(handles.locate, (allocate(64), pooled, pinned))]
    facts: Facts = {"origins": origins, "legacy_handle_of_pool": outcome("cuIpcGetMemHandle", pooled)}
    facts["type_of_host"] = outcome("cuPointerGetAttribute", _memory_type(), pinned)
    facts["pin"] = [outcome("cuMemHostRegister", pinned, 2 * MIB, 0) for _ in range(2)]
    facts["type_of_pinned"] = int(driver.pointer_attribute("MEMORY_TYPE", pinned))
    facts["unpin"] = [outcome("cuMemHostUnregister", pinned) for _ in range(2)]
    return facts


def _memory_type() -> Any:
    return driver.bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE


def case_errors() -> Facts:
    facts = {"too_large": outcome("cuMemAlloc", 1 << 45), "size_0": outcome("cuMemAlloc", 0)}
    facts["free_inner"] = outcome("cuMemFree", allocate(2 * MIB) + 8)
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(outcome("cuMemAlloc", 64)))
    thread.start()
    thread.join()
    facts["thread_without_context"] = seen[0]
    child = os.fork()
    if not child:
        os._exit(outcome("cuMemAlloc", 64) != "NOT_INITIALIZED")
    facts["forked_child_is_refused"] = str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
    return facts


def case_sticky_error() -> Facts:
    memory = allocate(2 * MIB)
    facts = {"copy_past_the_end": outcome("cuMemcpyDtoD", memory, memory + 2 * MIB - 512, 1 << 30)}
    facts["afterwards"] = outcome("cuMemAlloc", 64)
    return facts


# --- running ------------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[], Facts]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}


def run(case: str) -> Facts:
    """One case in a process of its own."""
    command = [sys.executable, "-m", "tests.conformance.cuda_table", "--case", case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"died": f"no end in {CASE_S} s"}
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"died": done.stderr[-2000:]}


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--case"] or arguments[:1] == ["--peer"]:
        driver.devices("the table of the CUDA driver")
        with driver.Context(0):
            if arguments[0] == "--case":
                print(json.dumps(CASES[arguments[1]]()), flush=True)
            else:
                globals()[f"peer_{arguments[1]}"](socket.socket(fileno=int(arguments[2])))
        os._exit(0)  # what a case leaves behind is none of its facts
    table = {case: run(case) for case in arguments or CASES}
    json.dump(table, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
