"""Every memory that a death can leave behind, for tests of recovery.

`Stores` traces what `shm.worker_channel` and `shm.recovery` do, bytecode by bytecode, and notes channel and ledger
after each store: the states in which a SIGKILL could have left them. `World` is one channel with a living client and
the requests it makes; `explore` lets worker after worker die in every state that any of them leaves, until nothing new
comes.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from shm import publishing, recovery, worker_channel
from shm.admission import BoundPlan, Request
from shm.errors import Code
from shm.layout import ARMED, CODE_MASK, COMPLETION, CONSUMED, CTAIL, FINAL, LEDGER_CTAIL, MARK, WAITING
from shm.recovery import DIED, recover
from shm.worker_channel import WorkerChannel
from tests.fakes.channel import NOW, PLAN, Plan, Twin

LATER = NOW + 1_000_000  # the time in every life but the first
DEADLINE = NOW + 1
FRAGILE = PLAN + 1  # plan word of a model that must not run twice
_TRACED = {worker_channel.__file__, publishing.__file__, recovery.__file__}
_STORING = {code for name, code in dis.opmap.items() if name == "STORE_SUBSCR" or name.startswith("CALL")}


class Ask:
    """A request that the client will make, and the endings it was told of: (code, "the worker died").

    `responses`: how many the model sends before its end; such a request must not run twice.
    """

    def __init__(self, cancel: str = "", deadline: int = 0, plan_word: int = PLAN, responses: int = 0) -> None:
        self.cancel = cancel  # "early": at once; "late": at the client's next step
        self.deadline = deadline
        self.plan_word = FRAGILE if responses else plan_word
        self.responses = responses
        self.heard = 0
        self.endings: tuple[tuple[Code, bool], ...] = ()

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        assert not self.endings, "something came after the ending"
        if not entry[2] & FINAL:
            assert entry[2] == Code.OK
            self.heard += 1
            assert self.heard <= self.responses
            return
        self.endings += ((Code(entry[2] & CODE_MASK), note.startswith(DIED.encode())),)


class State(NamedTuple):
    """All there is: the two memories, how often each request ran, and what the client knows."""

    channel: bytes
    ledger: bytes
    runs: tuple[int, ...]
    idents: tuple[int, ...]
    endings: tuple[tuple[tuple[Code, bool], ...], ...]
    heard: tuple[int, ...]
    client: tuple[Any, ...]


class World:
    """One channel, its client, and the requests the client makes as room allows; request i has output position i.

    `batch` is the largest a worker runs; 0: it runs what it finds at once where it can.
    """

    def __init__(self, twin: Twin, asks: list[Ask], batch: int = 2) -> None:
        self.twin = twin
        self.asks = asks
        self.batch = batch
        self.client = twin.client()
        self.observer = twin.worker({})  # maps the memories for the test; takes nothing
        self.runs = [0] * len(asks)
        self.idents: list[int] = []
        self.stores: Stores | None = None
        self._channel_bytes = (self.observer.geometry.notes + 64 * 2 * twin.slots) * 8
        self._ledger_view = self.observer.ledger.cast("B")[: (MARK + twin.slots) * 8]

    def memories(self) -> tuple[bytes, bytes]:
        return self.observer.memory[: self._channel_bytes], bytes(self._ledger_view)

    def save(self) -> State:
        client = self.client
        return State(
            *self.memories(),
            tuple(self.runs),
            tuple(self.idents),
            tuple(ask.endings for ask in self.asks),
            tuple(ask.heard for ask in self.asks),
            (client._tail, client._consumed, (*client._free,), (*client._positions,), (*client._pending,)),
        )

    def restore(self, state: State) -> None:
        client = self.client
        self.observer.memory[: self._channel_bytes] = state.channel
        self._ledger_view[:] = state.ledger
        self.runs, self.idents = list(state.runs), list(state.idents)
        for ask, endings, heard in zip(self.asks, state.endings, state.heard, strict=True):
            ask.endings, ask.heard = endings, heard
        client._tail, client._consumed = state.client[:2]
        client._free, client._positions, client._pending = map(list, state.client[2:])

    def essence(self, state: State) -> tuple[object, ...]:
        """`state` without stamps and the completions that nobody is going to read again."""
        geometry = self.observer.geometry
        words, ledger = memoryview(state.channel).cast("Q"), memoryview(state.ledger).cast("Q")
        base = geometry.completions * 8
        numbers = range(min(ledger[LEDGER_CTAIL], words[CONSUMED]), words[CTAIL])
        places = [base + 64 * (number & geometry.completion_mask) for number in numbers]
        before = bytearray(state.channel[:base])
        for stamp in (8 * ARMED, 8 * WAITING):
            before[stamp : stamp + 8] = bool(words[stamp // 8]).to_bytes(8, sys.byteorder)
        return bytes(before), *(state.channel[at : at + 64] for at in places), state[1:]

    def client_step(self) -> None:
        """The client reads what has ended, cancels what it meant to, and asks for more."""
        self.client.reap()
        for ask, ident in zip(self.asks, self.idents, strict=False):
            if ask.cancel == "late" and not ask.endings:
                self.client.cancel(ident)
        while len(self.idents) < len(self.asks):
            index = len(self.idents)
            ask = self.asks[index]
            ident = self.client.submit(ask, ask.plan_word, 0, index, 0, ask.deadline, request_id=index)
            if not ident:
                break
            self.idents.append(ident)
            if ask.cancel == "early":
                self.client.cancel(ident)
        if self.stores is not None:
            self.stores.look(whole=True)

    def committed(self) -> set[int]:
        """Idents of the endings that are published and not read."""
        words, geometry = self.observer.words, self.observer.geometry
        numbers = range(self.client._consumed, words[CTAIL])
        places = [8 * (geometry.completions + 8 * (number & geometry.completion_mask)) for number in numbers]
        entries = [COMPLETION.unpack_from(self.observer.memory, place) for place in places]
        return {entry[1] for entry in entries if entry[2] & FINAL}

    def marks(self) -> dict[int, tuple[int, int]]:
        """ident → (attempts, state)"""
        words = self.observer.ledger[MARK : MARK + self.twin.slots]
        return {word >> 16 << 16 | slot: (word >> 8 & 0xFF, word & 0xFF) for slot, word in enumerate(words) if word}

    def run(self, worker: WorkerChannel, batch: list[Request], now: int) -> None:
        """What a worker does with a batch that it has started; the model checks that it may see these requests."""
        committed = self.committed()
        for request in batch:
            index = request.request_id
            ask = self.asks[index]
            assert not ask.endings, "ran after its ending was read"
            assert self.idents[index] not in committed, "ran after its ending was published"
            assert ask.cancel != "early", "ran though it was cancelled before it was taken"
            assert not ask.deadline or now < ask.deadline, "ran after its deadline"
            assert not self.runs[index] or len(batch) == 1, "a suspect ran in company"
            self.runs[index] += 1
            assert self.runs[index] <= (2 if ask.plan_word == PLAN else 1), "ran too often"
        if self.stores is not None:
            self.stores.look(whole=True)
        for request in batch:
            for _ in range(self.asks[request.request_id].responses):
                while not worker.respond(request):
                    self.client_step()
        worker.complete(batch)

    def life(self, now: int) -> None:
        """A worker takes over, works until everything has ended, and goes."""
        positions = len(self.asks)
        plans: dict[int, BoundPlan] = {
            PLAN: Plan(output_positions=positions),
            FRAGILE: Plan(output_positions=positions, retryable=False),
        }
        worker = self.twin.worker(plans)
        suspects, fresh = recover(worker, now)
        assert all(request.attempts == 1 for request in suspects)
        assert all(request.attempts == 0 for request in fresh)
        for some in (suspects, fresh):
            assert [request.position for request in some] == sorted(request.position for request in some)
        for request in suspects:
            worker.start([request])
            self.run(worker, [request], now)
        queue = fresh
        turns = 0
        while queue or worker.pending() or self.client.outstanding or len(self.idents) < len(self.asks):
            turns += 1
            assert turns < 20, "a request is lost"
            if not self.batch and not queue and worker.pending() and (usual := worker.peek(now)):
                worker.begin(usual)
                self.client_step()
                self.run(worker, [usual], now)
                continue
            for request, admitted in worker.take(100, now, queue):
                if admitted:
                    assert request in queue
                    queue.remove(request)
                    request.fail(Code.CANCELLED, "the request was cancelled")
                worker.complete([request])
            self.client_step()
            assert [request.request_id for request in queue] == sorted(request.request_id for request in queue)
            batch, queue = queue[: self.batch or 1], queue[self.batch or 1 :]
            for request in batch:
                worker.start([request])
            if batch:
                self.run(worker, batch, now)
        assert (worker.broken, worker.refused) == ("", 0)
        worker.close()


class Stores:
    """While active, collects the states of `world` between the stores of the traced modules, each once.

    `half_done`: stores of several words (a completion, a note) are seen in part too.
    """

    def __init__(self, world: World, half_done: bool = False) -> None:
        self.states: dict[State, None] = {}
        self._world = world
        self._half_done = half_done
        self._last = world.memories()
        self._stored = False
        self._codes: dict[CodeType, bytes] = {}
        self._previous: Any = None

    def __enter__(self) -> Stores:
        self._previous = sys.gettrace()
        self._world.stores = self
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)
        self._world.stores = None
        self.look()

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in _TRACED:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if self._stored:
            self.look()
        code = frame.f_code
        if code not in self._codes:
            self._codes[code] = code.co_code
        self._stored = self._codes[code][frame.f_lasti] in _STORING
        return self._opcode

    def look(self, whole: bool = False) -> None:
        """Note the state if it is a new one. `whole`: what changed is not the worker's doing, or no memory."""
        now = self._world.memories()
        if now == self._last and not whole:
            return
        state = self._world.save()
        if self._half_done and not whole:
            for channel in _half_done(self._last[0], now[0]):
                self.states[state._replace(channel=channel)] = None
        self.states[state] = None
        self._last = now


def _half_done(before: bytes, after: bytes) -> Iterator[bytes]:
    """Memories in which only the first, the first half, or all but the last of the changed words are stored."""
    changed = [at for at in range(0, len(before), 8) if before[at : at + 8] != after[at : at + 8]]
    for count in sorted({1, len(changed) // 2, len(changed) - 1}):
        if 0 < count < len(changed):
            torn = bytearray(before)
            for at in changed[:count]:
                torn[at : at + 8] = after[at : at + 8]
            yield bytes(torn)


def explore(world: World, *steps: Callable[[World, State], None]) -> list[State]:
    """Every state that deaths at any store of `steps`, any number of times, lead to from the client's first step.

    States that differ only in completions that are not published, or read and redone, count as one.
    """
    world.client_step()
    first = world.save()
    found = {world.essence(first): first}
    unseen = [first]
    while unseen:
        state = unseen.pop()
        for step in steps:
            world.restore(state)
            with Stores(world) as stores:
                step(world, state)
            for left in stores.states:
                if found.setdefault(world.essence(left), left) is left:
                    unseen.append(left)
    return list(found.values())
