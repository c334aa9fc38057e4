"""`preserve_ordering`: batches end in any order, answers leave in that of the queue."""

from __future__ import annotations

import random

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
