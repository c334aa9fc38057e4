"""The laboratory itself: what it must notice, it notices; what it starts, it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.fakes.processes import children
from tests.faults import child
from tests.faults.lab import SAME, Lab, eventually
from tests.faults.measure import alive


def _leave_somebody_behind() -> int:
    code = "import os, time; os.setsid(); time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code]).pid


def _wait_for_ever() -> None:
    child.say(os.getpid())
    child.hear(600)


def _say_nothing() -> None:
    child.hear(600)


def _crash() -> None:
    raise ValueError("on purpose")


def _keep_a_region() -> None:
    import clientlib

    client = clientlib.connect()
    client.create_region("kept", 1 << 16)
    child.say("kept")
    child.hear(600)


def test_guard_ends_offenders_and_what_they_left(tmp_path):
    before = set(children())
    with Lab(tmp_path) as lab:
        stray = lab.offend(_leave_somebody_behind)
        waiting = lab.start(_wait_for_ever).heard()
        family = [lab.broker.pid, *lab.broker.descendants()]
        assert all(alive(pid) for pid in (stray, waiting, *family))
    assert not [pid for pid in (stray, waiting, *family) if alive(pid)]
    assert set(children()) == before


def test_lab_settles_untouched(lab):
    lab.settled()


def test_offender_that_raises_or_says_nothing_fails_the_row(lab):
    with pytest.raises(AssertionError, match="on purpose"):
        lab.offend(_crash)
    with pytest.raises(AssertionError, match="said nothing"):
        lab.start(_say_nothing).result(timeout_s=0.0)
    lab.settled()


def test_giveaways_are_noticed(lab):
    for text in ("Traceback (most recent call last)", f"see {lab.repository}/x", "object at 0x7f00deadbeef"):
        with pytest.raises(AssertionError, match="S6"):
            lab.tell_tales([{"message": text}])
    lab.settled()


def test_kept_region_is_noticed(lab, monkeypatch):
    monkeypatch.setattr("tests.faults.lab.NO_MORE_THAN", 0.2)
    monkeypatch.setattr(Lab, "end_offenders", lambda lab: None)
    keeper = lab.start(_keep_a_region)
    assert keeper.heard() == "kept"
    with pytest.raises(AssertionError, match=r"S4: kept .*regions"):
        lab.settled()
    keeper.kill()
    monkeypatch.undo()
    lab.settled()


def test_replaced_worker_is_noticed(fresh_lab):
    victim = fresh_lab.worker_pid(SAME)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: fresh_lab.worker_pid(SAME) not in (0, victim), "replaced")
    with pytest.raises(AssertionError, match="S2: replaced"):
        fresh_lab.settled()
    fresh_lab.settled(replaced=SAME)
