"""`preserve_ordering`: batches end in any order, answers leave in that of the queue."""

from __future__ import annotations

import random
import threading

import pytest

from broker.worker.in_order import InOrder


class Channel:
    def __init__(self) -> None:
        self.published = []

    def complete(self, requests):
        self.published += requests


def test_an_early_batch_waits_for_the_one_before():
    order, channel = InOrder(), Channel()
    first, second = order.begin(), order.begin()
    order.end(second, [(channel, ["b"])])
    assert channel.published == []
    order.end(first, [(channel, ["a"])])
    assert channel.published == ["a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_ends_when_the_order_is_kept(seed):
    rng = random.Random(seed)
    order, channels, running = InOrder(), [Channel(), Channel()], []
    for count in range(200):
        running.append((order.begin(), count))
        while running and (len(running) > 4 or rng.random() < 0.4):
            number, item = running.pop(rng.randrange(len(running)))
            order.end(number, [(channels[item % 2], [item])])
    rng.shuffle(running)
    for number, item in running:
        order.end(number, [(channels[item % 2], [item])])
    assert [channel.published for channel in channels] == [list(range(0, 200, 2)), list(range(1, 200, 2))]


def test_who_ends_a_batch_while_another_is_published_does_not_wait():
    order, later = InOrder(), Channel()

    class Slow(Channel):
        def complete(self, requests):
            order.end(third, [(later, ["c"])])  # by another thread, meanwhile
            assert later.published == []
            order.end(second, [(later, ["b"])])
            super().complete(requests)

    first, second, third = (order.begin() for _ in range(3))
    slow = Slow()
    order.end(first, [(slow, ["a"])])
    assert slow.published == ["a"]
    assert later.published == ["b", "c"]


def test_threads_keep_the_order():
    order, channel = InOrder(), Channel()
    numbers = [order.begin() for _ in range(2000)]
    random.Random(1).shuffle(numbers)
    threads = [
        threading.Thread(target=lambda own: [order.end(n, [(channel, [n])]) for n in own], args=(numbers[at::8],))
        for at in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert channel.published == sorted(numbers)
