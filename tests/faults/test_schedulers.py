"""Rows about what a worker keeps between requests: sequences, runs of ensembles, answers of the cache.

They extend C-02, C-03, W-01 … W-04 and T-01 to models whose requests are not all alike.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.faults import child, scheduled
from tests.faults.lab import SAME, Lab, eventually, scaled

SPACE = 4096


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), scheduled.CACHE_FLAG, models=scheduled.write) as lab:
        yield lab


class Sums:
    """Sequences of the model that adds up, in places of a region of this session."""

    def __init__(self, client: clientlib.Client, places: int = 1) -> None:
        region = client.create_region("sums", 2 * SPACE)
        self.x, self.y = region.array((places, 1, 1), "INT32"), region.array((places, 1, 1), "INT32", SPACE)
        inputs, outputs = {"INPUT": region.tensor((1, 1), "INT32")}, {"OUTPUT": region.tensor((1, 1), "INT32", SPACE)}
        self.plan = client.prepare("sums", inputs, outputs, slots=places)

    def submit(self, number: int, value: int, place: int = 0, **ends: bool) -> clientlib.Pending:
        self.x[place] = value
        return self.plan.submit(input_slot=place, output_slot=place, sequence_id=number, timeout=50, **ends)

    def step(self, number: int, value: int, **ends: bool) -> int:
        self.submit(number, value, **ends).result(timeout=60)
        return int(self.y[0, 0, 0])

    def steps(self, number: int, values: Sequence[int], start: bool = True, end: bool = False) -> list[int]:
        """One after the other, a place for each; all are sent at once, so that it is not idle in between."""
        last = len(values) - 1
        pending = [
            self.submit(number, value, at, sequence_start=start and at == 0, sequence_end=end and at == last)
            for at, value in enumerate(values)
        ]
        for one in pending:
            one.result(timeout=60)
        return [int(sum_) for sum_ in self.y[: len(values), 0, 0]]


# --- sequences --------------------------------------------------------------------------------------------------------


def begin_and_stop() -> None:
    """Begin as many sequences as there are slots, with the numbers that others use, and never end them."""
    with clientlib.connect() as client:
        sums = Sums(client)
        for number in range(1, scheduled.SLOTS + 1):
            assert sums.step(number, 1000, sequence_start=True) == 1000
        child.say("begun")
        child.hear()


def whole_sequences(count: int) -> list[int]:
    with clientlib.connect() as client:
        sums = Sums(client, 4)
        return [total for number in range(1, count + 1) for total in sums.steps(number, (1, 2, 3, 4), end=True)]


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_c02_who_began_a_sequence_and_is_gone(lab: Lab, how: str) -> None:
    """[C-02] [C-06] the slots are free after the idle time-out; equal numbers of another client are other sequences."""
    offender = lab.start(begin_and_stop, valid=False)
    offender.heard()
    if how == "dies":
        offender.kill()
    else:
        offender.signal(signal.SIGSTOP)
    assert lab.offend(whole_sequences, count=3) == [1, 3, 6, 10] * 3
    lab.settled()


def more_sequences_than_slots(count: int) -> dict[str, Any]:
    """Begin so many at once; then end them. Which sums came, and which errors."""
    told: Counter[str] = Counter()
    with clientlib.connect(slots=count) as client:
        sums = Sums(client, count)
        pending = [
            sums.submit(place + 1, place, place, sequence_start=True, sequence_end=True) for place in range(count)
        ]
        for place, one in enumerate(pending):
            code, _ = child.refusal(one.result, timeout=60)
            right = code == "OK" and int(sums.y[place, 0, 0]) == place
            told["right" if right else code] += 1
        # And without an end: whoever waits gets the slot of one that has become idle.
        starts = [sums.submit(place + 1, place, place, sequence_start=True) for place in range(6)]
        for place, one in enumerate(starts):
            one.result(timeout=60)
            told["begun"] += int(sums.y[place, 0, 0]) == place
    return dict(told)


def test_l01_more_sequences_than_slots(lab: Lab) -> None:
    """[L-01] they wait for each other and all are served, also behind sequences that nobody ends."""
    count = scaled(128, 512)
    assert lab.offend(more_sequences_than_slots, count=count, timeout_s=120) == {"right": count, "begun": 6}
    lab.settled()


def sequence_over_a_death() -> list[Any]:
    with clientlib.connect() as client:
        sums = Sums(client, 2)
        told: list[Any] = sums.steps(7, (1, 2))
        child.say("running")
        child.hear()
        told.append(child.refusal(sums.step, 7, 4))
        told.append(sums.steps(7, (8, 16), end=True))
        return told


def test_w01_a_worker_that_held_sequences(lab: Lab) -> None:
    """[W-01] ✱ what is lost is said, with the number; nothing goes on with a sum that is not its own."""
    offender = lab.start(sequence_over_a_death)
    offender.heard()
    victim = lab.worker_pid()
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: lab.worker_pid() not in (0, victim), "a new worker")
    offender.tell("go on")
    first, second, (code, message), again = offender.result()
    assert [first, second] == [1, 3]
    assert code == "INVALID_ARG"
    assert "sequence 7 to model 'sums' must specify the START flag" in message
    assert again == [8, 24]
    lab.settled(replaced=SAME)


# --- ensembles --------------------------------------------------------------------------------------------------------


def run_the_chain(count: int, orders: bool) -> dict[str, int]:
    """Requests to the ensemble, so many at once, `orders`: after a word, until told to stop."""
    told: Counter[str] = Counter()
    with clientlib.connect(slots=count) as client:
        region = client.create_region("chain", 2 * SPACE)
        x, y = region.array((count, 1, 1), "FP32"), region.array((count, 1, 1), "FP32", SPACE)
        inputs, outputs = {"IN": region.tensor((1, 1), "FP32")}, {"OUT": region.tensor((1, 1), "FP32", SPACE)}
        plan = client.prepare("chain", inputs, outputs, slots=count)
        while True:
            x[:, 0, 0] = np.random.default_rng().random(count)
            pending = [plan.submit(input_slot=place, output_slot=place, timeout=50) for place in range(count)]
            if orders:
                child.say("submitted")
            for place, one in enumerate(pending):
                code, message = child.refusal(one.result, timeout=60)
                right = code == "OK" and y[place, 0, 0] == x[place, 0, 0]
                told["right" if right else f"{code} {message}"] += 1
            if not orders or child.hear() == "stop":
                return dict(told)


def test_c03_who_asked_an_ensemble_and_is_gone(lab: Lab) -> None:
    """[C-03] the runs end in the middle or at their end, and leave nothing."""
    for _ in range(scaled(5, 200)):
        offender = lab.start(run_the_chain, count=16, orders=True, valid=False)
        offender.heard()
        offender.kill()
        offender.close()
        lab.children.remove(offender)
    assert lab.offend(run_the_chain, count=16, orders=False) == {"right": 16}
    lab.settled()


def test_w03_a_worker_that_runs_ensembles(lab: Lab) -> None:
    """[W-03] ✱ the whole of each run is done again."""
    offender = lab.start(run_the_chain, count=16, orders=True)
    offender.heard()
    os.kill(lab.worker_pid(), signal.SIGKILL)
    offender.tell("stop")
    assert offender.result() == {"right": 16}
    lab.settled(replaced=SAME)


# --- answers that are kept --------------------------------------------------------------------------------------------


def rewrite_while_it_is_kept(turns: int) -> dict[str, Any]:
    """A thread writes 1 and 2 over the input while it is read; afterwards each has its own answer."""
    with clientlib.connect() as client:
        region = client.create_region("kept", 2 * SPACE)
        x, y = region.array((1, 512), "FP32"), region.array((1, 512), "FP32", SPACE)
        plan = client.prepare(
            "kept", {"x": region.tensor((1, 512), "FP32")}, {"y": region.tensor((1, 512), "FP32", SPACE)}
        )
        stop = threading.Event()

        def rewrite() -> None:
            while not stop.is_set():
                x[:] = 1
                x[:] = 2

        thread = threading.Thread(target=rewrite)
        thread.start()
        seen = Counter[str]()
        for _ in range(turns):
            plan.infer(timeout=50)
            seen["whole" if len(np.unique(y)) == 1 else "mixed"] += 1  # it wrote it itself
        stop.set()
        thread.join()
        told: dict[str, Any] = {"asked": sum(seen.values())}
        for value in (1.0, 2.0):
            told[str(value)] = np.unique(
                client.infer("kept", {"x": np.full((1, 512), value, np.float32)})["y"]
            ).tolist()
        (found,) = client.statistics("kept")
        told["hits"] = found["inference_stats"]["cache_hit"]["count"]
        return told


def test_t01_inputs_that_change_while_their_answer_is_kept(lab: Lab) -> None:
    """[T-01] an answer is kept for the input that it was computed from, whatever its client writes meanwhile."""
    told = lab.offend(rewrite_while_it_is_kept, turns=scaled(500, 50_000), timeout_s=120)
    assert told["1.0"] == [2.0]
    assert told["2.0"] == [3.0]
    assert told["hits"] > 0
    lab.settled()
