"""Regions as an application holds them, and the memory that the client makes for itself."""

from __future__ import annotations

import asyncio
import gc
import random

import numpy as np
import pytest

from clientlib.arena import Bank, Store, owning
from clientlib.async_claims import take_place
from clientlib.region import MappedRegion
from shm.errors import InferError
from shm.regions import create_pool


def region(byte_size: int = 4096, name: str = "r") -> MappedRegion:
    return MappedRegion(name, create_pool(byte_size), 0, byte_size, True, kind="pool", key="")


class TestArena:
    def bank(self, places: int, owner: MappedRegion | None = None) -> tuple[Bank, Store]:
        store = Store()
        store.add(owner or region())
        block = store.allocate(64 * places)
        assert block is not None
        return Bank(block, places), store

    def test_a_chunk_added_while_another_thread_adds_one(self):
        store = Store()
        second, third = region(name="second"), region(name="third")

        class First:
            byte_size = 4096
            looks = 0

            @property
            def retired(self):  # `add` looks at the chunks there are, and the other thread comes between
                self.looks += 1
                if self.looks == 1:
                    store.add(second)
                return ""

        first = First()
        store.add(first)
        store.add(third)
        assert {id(each) for each in store.regions()} == {id(first), id(second), id(third)}

    def test_places_come_back_when_their_arrays_go(self):
        bank, _ = self.bank(2)
        first, second = bank.take(), bank.take()
        assert (first.place, second.place) == (0, 1)
        assert bank.take() is None
        del first
        assert bank.take().place == 0

    def test_an_array_holds_its_place_and_its_memory(self):
        owner = region()
        bank, store = self.bank(1, owner)
        view = owner.array((4,), np.float32)
        view[:] = [1, 2, 3, 4]
        array = owning(view, bank.take())
        assert bank.take() is None
        part = array[1:3]
        del array, view, owner, store
        gc.collect()
        np.testing.assert_array_equal(part, [2, 3])
        assert bank.take() is None
        del part
        gc.collect()
        assert bank.take() is not None

    def test_one_place_for_all_arrays_of_a_result(self):
        owner = region()
        bank, _ = self.bank(1, owner)
        lease = bank.take()
        arrays = [owning(owner.array((2,), np.int64, offset=at), lease) for at in (0, 16)]
        del lease
        arrays.pop()
        assert bank.take() is None
        arrays.pop()
        assert bank.take() is not None

    def test_bfloat16_stays_bfloat16(self):
        owner = region()
        bank, _ = self.bank(1, owner)
        view = owner.array((4,), "BF16")
        assert owning(view, bank.take()).dtype == view.dtype

    def test_a_quarter_always_serves_requests(self):
        bank, _ = self.bank(4)
        leases = [bank.take() for _ in range(2)]
        assert bank.can_spare()
        leases.append(bank.take())
        assert not bank.can_spare()

    def test_who_waits_goes_before_who_comes(self):
        bank, _ = self.bank(1)
        lease = bank.take()
        called = []
        first, second = (bank.wait(lambda number=number: called.append(number)) for number in range(2))
        assert bank.take() is None
        del lease
        assert called == [0]
        assert bank.take() is None, "the first has not gone on yet"
        lease = bank.leave(first)
        assert lease.place == 0
        assert bank.leave(second) is None
        assert bank.take() is None
        del lease, first
        assert bank.take().place == 0

    def test_a_place_for_somebody_who_has_left_is_the_next_one_s(self):
        bank, _ = self.bank(1)
        lease = bank.take()
        first, second = (bank.wait(lambda: None) for _ in range(2))
        del lease
        bank.leave(first)
        del first
        assert bank.leave(second).place == 0

    @pytest.mark.parametrize("seed", range(20))
    def test_tasks_go_on_in_the_order_in_which_they_asked(self, seed):
        """Whatever is given back, cancelled or asked meanwhile, and whenever."""
        bank, _ = self.bank(4)
        rng = random.Random(seed)
        order, tasks, cancelled, held = [], [], set(), []

        async def ask(number):
            lease = bank.take() or await take_place(bank, 0)
            order.append(number)
            held.append(lease)

        async def test():
            while len(tasks) < 200 or len(order) + len(cancelled) < 200:
                act = rng.random()
                if act < 0.5 and len(tasks) < 200:
                    tasks.append(asyncio.create_task(ask(len(tasks))))
                elif act < 0.8 and held:
                    held.pop(rng.randrange(len(held)))
                elif act < 0.85 and len(tasks) < 200:
                    waiting = [n for n in range(len(tasks)) if not tasks[n].done() and n not in cancelled]
                    if waiting and tasks[number := rng.choice(waiting)].cancel():
                        cancelled.add(number)
                else:
                    await asyncio.sleep(0)
                cancelled.difference_update(order)
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(asyncio.wait_for(test(), 30))
        assert order == sorted(order)
        held.clear()
        assert sorted(lease.place for lease in [bank.take() for _ in range(4)]) == [0, 1, 2, 3]

    def test_blocks_come_back_when_their_banks_go(self):
        bank, store = self.bank(64)
        assert store.allocate(64) is None
        del bank
        assert store.allocate(4096) is not None

    def test_a_retired_chunk_gives_nothing(self):
        owner = region()
        _, store = self.bank(1, owner)
        owner.retired = "lost"
        assert store.allocate(64) is None
        assert store.regions() == []


class TestRegion:
    def test_arrays_outlive_the_region(self):
        made = region()
        array = made.array((4,), "INT32", offset=100)
        array[:] = 7
        made.release_fd()
        del made
        gc.collect()
        np.testing.assert_array_equal(array, 7)

    def test_tensors_know_their_size_and_step(self):
        ref = region().tensor((1, 3, 2), "FP32", offset=8)
        assert (ref.byte_size, ref.stride, ref.offset) == (24, 24, 8)
        assert region().tensor((4,), np.uint8, stride=0).stride == 0
        assert region().tensor((1, -1), "INT64", byte_size=512).byte_size == 512
        assert region().tensor((2,), "BYTES", byte_size=100).datatype == "BYTES"

    def test_a_tensor_shows_its_positions(self):
        made = region()
        made.array((8,), np.float32)[:] = range(8)
        np.testing.assert_array_equal(made.tensor((2,), "FP32").array(3), [6, 7])

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (((2,), "FP31"), "FP31"),
            (((2,), "BYTES"), "byte_size"),
            (((2,), "FP32", -1), "offset"),
            (((2,), "FP32", 0, -4), "stride"),
            (((2, "x"), "FP32"), "shape"),
            ((3, "FP32"), "shape"),
            (((2**62, 4), "FP32"), "memory"),
            (((2,), np.dtype("c16")), "complex128"),
        ],
    )
    def test_nonsense_is_refused_in_words(self, arguments, text):
        with pytest.raises(InferError, match=text) as caught:
            region().tensor(*arguments)
        assert caught.value.code == "INVALID_ARG"

    @pytest.mark.parametrize("arguments", [((2000,), "FP32"), ((1,), "FP32", 4094), ((1,), object), ((-1,), "FP32")])
    def test_no_view_leaves_the_region(self, arguments):
        with pytest.raises(InferError):
            region().array(*arguments)
