"""Rows R-14 … R-17, R-21 and H-05: many regions, their ends, and what sessions know of each other's."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

import clientlib
from shm.errors import Code
from tests.fakes.broker import HandClient, descriptor, pool
from tests.faults import child, raw
from tests.faults.lab import Lab, eventually, scaled
from tests.faults.measure import holdings, resident_bytes

PIPELINED = 64  # requests on their way at once


def _ask_many(client: HandClient, requests: Iterator[tuple[str, list[int], dict[str, Any]]]) -> dict[str, int]:
    """Outcomes of all `requests`, counted by code."""
    counts: dict[str, int] = {}
    waiting = 0
    ended = False
    while waiting or not ended:
        while not ended and waiting < PIPELINED:
            request = next(requests, None)
            if request is None:
                ended = True
                break
            kind, fds, fields = request
            client.send(kind, fds, **fields)
            waiting += 1
        if waiting:
            code, text = raw.outcome(client.receive())
            counts[code] = counts.get(code, 0) + 1
            assert code != "hung up", text
            waiting -= 1
    return counts


# --- caps ----------------------------------------------------------------------------------------------------


def _register_to_the_cap(cap: int) -> dict[str, Any]:
    client, other = raw.session(), raw.session()
    with descriptor(pool(4096)) as fd:
        counts = _ask_many(
            client, (("RegisterPool", [fd], {"name": f"r{i}", "byte_size": 64}) for i in range(cap + 10))
        )
        refused = raw.outcome(other.ask("RegisterPool", [fd], name="one more", byte_size=64))
        client.ask("Unregister", name="r7")
        instead = raw.outcome(other.ask("RegisterPool", [fd], name="instead", byte_size=64))
        client.ask("Unregister")
    return {"counts": counts, "refused": refused, "instead": instead}


def test_r14_regions_of_one_uid_end_at_its_cap(lab: Lab) -> None:
    """[R-14] cap + 1 regions, over all sessions of a uid; one given back makes room for one."""
    status = lab.status()
    cap, canary_s = status["quotas"]["regions_per_uid"], len(status["regions"])
    found = lab.offend(_register_to_the_cap, cap=cap, timeout_s=100)
    assert set(found["counts"]) == {"RegionInfo", "UNAVAILABLE"}
    assert found["counts"]["RegionInfo"] == cap - canary_s, "the canary's are of the same uid"
    assert found["refused"][0] == "UNAVAILABLE"
    assert f"the limit is {cap}" in found["refused"][1]
    assert found["instead"] == ["RegionInfo", ""]
    lab.settled()


def _register_to_the_quota(step: int) -> dict[str, Any]:
    client = raw.session()
    fds = []
    outcomes = []
    for number in range(64):
        fds.append(pool(step))
        outcomes.append(raw.outcome(client.ask("RegisterPool", [fds[-1]], name=f"r{number}", byte_size=step)))
        if outcomes[-1][0] != "RegionInfo":
            break
    huge = raw.outcome(client.ask("RegisterPool", [fds[0]], name="huge", byte_size=1 << 40))
    client.ask("Unregister", name="r0")
    again = raw.outcome(client.ask("RegisterPool", [fds[0]], name="again", byte_size=step))
    client.ask("Unregister")
    return {"outcomes": outcomes, "huge": huge, "again": again}


def test_r14_region_memory_is_a_quota(tmp_path: Path) -> None:
    """[R-14, H-08] --region-memory: refused with asked, used and limit; somebody else's requests go on."""
    with Lab(tmp_path, "--region-memory", "64M") as lab:
        found = lab.offend(_register_to_the_quota, step=4 << 20)
        assert {code for code, _ in found["outcomes"][:-1]} == {"RegionInfo"}
        code, text = found["outcomes"][-1]
        assert code == "UNAVAILABLE"
        assert f"asked {4 << 20} bytes, used " in text
        assert f"limit {64 << 20}" in text
        assert found["huge"][0] == "INVALID_ARG"
        assert found["again"] == ["RegionInfo", ""]
        lab.settled()


# --- over and over -------------------------------------------------------------------------------------


def _be_refused(turns: int) -> dict[str, int]:
    client = raw.session()
    good, plain = pool(4096), os.memfd_create("plain")
    read, write = os.pipe()
    sparse = posix_ipc.SharedMemory("/sparse", posix_ipc.O_CREX, size=256 << 20)
    with raw.named_memory(4096) as key:
        cases: list[tuple[str, list[int], dict[str, Any]]] = [
            ("RegisterPool", [plain], {"name": "unsealed", "byte_size": 4096}),
            ("RegisterPool", [good], {"name": "too long", "byte_size": 8192}),
            ("RegisterPool", [good], {"name": "quota", "byte_size": 64 << 40}),
            ("RegisterPool", [good, good], {"name": "two", "byte_size": 4096}),
            ("RegisterPool", [read], {"name": "pipe", "byte_size": 4096}),
            ("RegisterSystem", [], {"name": "size", "key": key, "byte_size": 4097}),
            ("RegisterSystem", [], {"name": "offset", "key": key, "byte_size": 4096, "offset": 1}),
            ("RegisterSystem", [], {"name": "none", "key": "/none", "byte_size": 4096}),
            ("RegisterSystem", [], {"name": "sparse", "key": "/sparse", "byte_size": 256 << 20}),
        ]
        counts = _ask_many(client, (case for _ in range(turns // len(cases)) for case in cases))
    for fd in (good, plain, read, write, sparse.fd):
        os.close(fd)
    posix_ipc.unlink_shared_memory("/sparse")
    return counts


def test_r15_refused_registrations_keep_no_descriptor(lab: Lab) -> None:
    """[R-15] a refusal costs nothing that stays."""
    if not lab.private:
        pytest.skip("a file that does not fit takes a small /dev/shm of the lab's own, which takes root")
    before = holdings(lab.broker.pid).fds
    turns = scaled(500, 11_000)
    counts = lab.offend(_be_refused, turns=9 * turns, timeout_s=1000)
    assert counts == {"INVALID_ARG": 7 * turns, "INTERNAL": turns, "UNAVAILABLE": turns}
    lab.settled()
    eventually(lambda: holdings(lab.broker.pid).fds <= before, "no descriptor stays")


def _register_and_unregister(turns: int) -> dict[str, int]:
    client = raw.session()
    with descriptor(pool(4096)) as fd, raw.named_memory(4096) as key:

        def cycles() -> Iterator[tuple[str, list[int], dict[str, Any]]]:
            for turn in range(turns):
                yield "RegisterPool", [fd], {"name": "r", "byte_size": 4096}
                yield "Unregister", [], {"name": "r"}
                if turn % 8 == 0:
                    yield "RegisterSystem", [], {"name": "s", "key": key, "byte_size": 4096}
                    yield "Unregister", [], {"name": "s"}

        return _ask_many(client, cycles())


def _use_and_unregister(turns: int) -> int:
    """The same, mapped by the worker and used each time."""
    client = raw.session()
    channel = raw.Channel(client)
    for turn in range(turns):
        region = raw.Region(client)
        region.floats(0, 16)[:] = turn
        plan = raw.plan(client)
        assert channel.wait(channel.submit(plan["index"], plan["generation"])) == ["0", ""]
        assert (region.floats(1024, 16) == turn + 1).all()
        assert client.ask("Unregister", name="r")["type"] == "Done"
        client.ask("Release", index=plan["index"], generation=plan["generation"])
    channel.close()
    return turns


def test_r16_register_and_unregister_leave_nothing(lab: Lab) -> None:
    """[R-16] many cycles: no mapping, no descriptor, no memory."""
    turns = scaled(2000, 1_000_000)
    lab.offend(_register_and_unregister, turns=500)
    lab.offend(_use_and_unregister, turns=50)
    lab.settled()
    before = {pid: resident_bytes(pid) for pid in (lab.broker.pid, lab.worker_pid())}
    counts = lab.offend(_register_and_unregister, turns=turns, timeout_s=1000)
    assert set(counts) == {"RegionInfo", "Done"}
    assert lab.offend(_use_and_unregister, turns=scaled(200, 20_000), timeout_s=1000) > 0
    lab.settled()
    grown = {pid: resident_bytes(pid) - rss for pid, rss in before.items()}
    assert all(bytes_more <= 1 << 20 for bytes_more in grown.values()), grown


# --- R-17, H-05: what is not one's own -----------------------------------------------------------------------------


def _own_everything() -> None:
    """Somebody with regions, a plan and a channel, who is alive and well until told otherwise."""
    client = raw.session()
    region = raw.Region(client, "victim's", 4096)
    region.floats(0, 16)[:] = 7
    plan = raw.plan(client, region="victim's")
    channel = raw.Channel(client)
    token = client.ask("ShareRegion", name="victim's")["token"]
    child.say({"plan": [plan["index"], plan["generation"]], "channel": channel.info["channel"], "token": token})
    child.hear()
    names = [row["name"] for row in client.ask("ListRegions")["regions"]]
    ending = channel.wait(channel.submit(plan["index"], plan["generation"]))
    child.say({"names": names, "ending": ending, "right": bool((region.floats(1024, 16) == 8).all())})
    child.hear()


def _grab(plan: list[int], channel: int) -> dict[str, Any]:
    client = raw.session()
    mine = raw.Region(client, "mine", 4096)
    index, generation = plan
    found: dict[str, Any] = {
        "prepare": raw.outcome(raw.plan(client, region="victim's")),
        "prepare input": raw.outcome(raw.plan(client, x={"region": "victim's"}, region="mine")),
        "prepare output": raw.outcome(raw.plan(client, y={"region": "victim's"}, region="mine")),
        "share": raw.outcome(client.ask("ShareRegion", name="victim's")),
        "open": raw.outcome(client.ask("OpenRegion", name="stolen", token="0" * 32)),
        "unregister": raw.outcome(client.ask("Unregister", name="victim's")),
        "release": raw.outcome(client.ask("Release", index=index, generation=generation)),
        "close": raw.outcome(client.ask("CloseChannel", channel=channel)),
        "listed": [row["name"] for row in client.ask("ListRegions")["regions"]],
    }
    own = raw.Channel(client)
    # Every plan number around the victim's, before and after there are any of one's own.
    found["submitted"] = [own.wait(own.submit(i, g)) for i in range(3) for g in range(3)]
    found["beyond"] = [own.wait(own.submit(i, g)) for i, g in ((2**32 - 1, 2**32 - 1), (4096, 1), (0, 2**32 - 1))]
    prepared = raw.plan(client, region="mine")
    mine.floats(0, 16)[:] = 1
    found["own"] = own.wait(own.submit(prepared["index"], prepared["generation"]))
    found["own right"] = bool((mine.floats(1024, 16) == 2).all())
    found["unregister all"] = raw.outcome(client.ask("Unregister"))
    found["after"] = own.wait(own.submit(prepared["index"], prepared["generation"]))
    own.close()
    return found


def test_h05_r17_regions_plans_and_channels_of_another_session(lab: Lab) -> None:
    """[H-05] [R-17] names and numbers are per session: another's do not exist, and nothing done reaches them."""
    victim = lab.start(_own_everything)
    numbers = victim.heard()
    found = lab.offend(_grab, plan=numbers["plan"], channel=numbers["channel"])
    unknown = ["NOT_FOUND", "Unable to find shared memory region: 'victim's'"]
    for case in ("prepare", "prepare input", "prepare output", "share"):
        assert found[case] == unknown, case
    assert found["unregister"] == found["unregister all"] == ["Done", ""]
    for case in ("open", "release", "close"):
        assert found[case][0] == "NOT_FOUND", case
    assert found["listed"] == ["mine"]
    for code, note in (*found["submitted"], *found["beyond"]):
        assert code == str(int(Code.NOT_FOUND)), note
        assert note
    assert found["own"] == ["0", ""]
    assert found["own right"]
    assert found["after"] == [str(int(Code.NOT_FOUND)), "Unable to find shared memory region: 'mine'"]
    victim.tell("how do you do")
    assert victim.heard() == {"names": ["victim's"], "ending": ["0", ""], "right": True}
    victim.tell("enough")
    victim.result()
    lab.settled()


def _guess_channels(count: int) -> list[str]:
    client = raw.session()
    return sorted({raw.outcome(client.ask("CloseChannel", channel=number))[0] for number in range(count)})


def _guess_plans(count: int) -> list[str]:
    client = raw.session()
    asked = ((i, g) for i in range(count) for g in range(4))
    return sorted({raw.outcome(client.ask("Release", index=i, generation=g))[0] for i, g in asked})


@pytest.mark.parametrize("guess", [_guess_channels, _guess_plans])
def test_h05_guessed_numbers(lab: Lab, guess: Any) -> None:
    """[H-05] every channel and plan number there is, the canary's among them."""
    assert lab.offend(guess, count=200) == ["NOT_FOUND"]
    lab.settled()


# --- a name that comes to mean something else -----------------------------------------------------------------


def _recreate() -> dict[str, Any]:
    """Unlink a registered object, make another of the same name; data of both, as the worker sees it."""

    def make(value: float) -> mmap.mmap:
        memory = posix_ipc.SharedMemory("/recreated", posix_ipc.O_CREX, size=8192)
        mapping = mmap.mmap(memory.fd, 8192)
        os.close(memory.fd)
        np.frombuffer(mapping, np.float32)[:] = value
        return mapping

    def infer(region: clientlib.Region) -> float:
        inputs = {"x": region.tensor((1, 16), "FP32")}
        outputs = {"y": region.tensor((1, 16), "FP32", offset=4096)}
        return float(client.prepare("add1", inputs=inputs, outputs=outputs).infer(timeout=40)["y"][0, 0])

    with clientlib.connect() as client:
        old = make(10)
        first = client.register_system_shm("first", key="/recreated", byte_size=8192)
        found: dict[str, Any] = {"before": infer(first)}
        posix_ipc.unlink_shared_memory("/recreated")
        found["unlinked"] = infer(first)
        new = make(20)
        found["old region"] = infer(first)
        found["same name"] = child.refusal(client.register_system_shm, "first", key="/recreated", byte_size=8192)
        second = client.register_system_shm("second", key="/recreated", byte_size=8192)
        found["new region"] = infer(second)
        found["old again"] = infer(first)
        found["in memory"] = [float(np.frombuffer(m, np.float32)[1024]) for m in (old, new)]
        client.unregister("first")
        third = client.register_system_shm("first", key="/recreated", byte_size=8192)
        found["registered again"] = infer(third)
        posix_ipc.unlink_shared_memory("/recreated")
    return found


def test_r21_unlinked_and_made_again(lab: Lab) -> None:
    """[R-21] a region is the object that was registered, not whatever its name means later."""
    found = lab.offend(_recreate)
    assert (found["before"], found["unlinked"], found["old region"], found["old again"]) == (11, 11, 11, 11)
    assert found["same name"] == ["ALREADY_EXISTS", "shared memory region 'first' already in manager"]
    assert (found["new region"], found["registered again"]) == (21, 21)
    assert found["in memory"] == [11, 21]
    lab.settled()
