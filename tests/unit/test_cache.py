"""The response cache alone: what is the same request, what goes first, what is never kept."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from broker.cache_flags import cache_byte_size
from broker.flags import Given, UsageError
from broker.worker.cache import ENTRY_BYTES, Input, Output, Response, ResponseCache, key_of
from shm import statistics

OWNER = ("m", 1, 1)
X = Input("x", "FP32", (1, 2), b"12345678")
Z = Input("z", "BYTES", (1,), b"ab")


def response(size: int, mark: int = 0) -> Response:
    return Response((Output("y", (size,), bytes([mark]) * size),))


def test_requests_are_the_same_whatever_the_order_of_their_tensors():
    assert key_of(OWNER, [X, Z], ["y", "w"]) == key_of(OWNER, [Z, X], ["w", "y"])
    assert key_of(OWNER, [X._replace(data=memoryview(b"12345678"))], ["y"]) == key_of(OWNER, [X], ["y"])


def test_whatever_an_answer_depends_on_makes_another_request():
    keys = [
        key_of(OWNER, [X, Z], ["y"]),
        key_of(("n", 1, 1), [X, Z], ["y"]),
        key_of(("m", 2, 1), [X, Z], ["y"]),
        key_of(("m", 1, 2), [X, Z], ["y"]),
        key_of(OWNER, [X], ["y"]),
        key_of(OWNER, [X, Z], ["y", "w"]),
        key_of(OWNER, [X._replace(name="w"), Z], ["y"]),
        key_of(OWNER, [X._replace(datatype="INT32"), Z], ["y"]),
        key_of(OWNER, [X._replace(shape=(2, 1)), Z], ["y"]),
        key_of(OWNER, [X._replace(data=b"12345679"), Z], ["y"]),
        key_of(OWNER, [X._replace(data=b"12345678a"), Z._replace(data=b"b")], ["y"]),  # the same bytes in a row
    ]
    assert len(set(keys)) == len(keys)


def test_what_was_not_asked_for_the_longest_goes_first():
    cache = ResponseCache(3 * (ENTRY_BYTES + 10), words := [0] * 32)
    keys = [key_of(OWNER, [X._replace(data=bytes([at]) * 8)], ["y"]) for at in range(4)]
    for at in range(3):
        assert cache.put(keys[at], response(10, at))
    assert cache.get(keys[0]) == response(10, 0)
    assert cache.put(keys[3], response(10, 3))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert words[statistics.CACHE_EVICTIONS] == 1


def test_a_response_larger_than_the_cache_is_not_kept_and_drives_nothing_out():
    cache = ResponseCache(ENTRY_BYTES + 10, [0] * 32)
    first, second = (key_of(OWNER, [tensor], ["y"]) for tensor in (X, Z))
    assert cache.put(first, response(10))
    assert not cache.put(second, response(11))
    assert cache.get(first) is not None
    assert cache.get(second) is None


def test_a_model_that_is_gone_takes_its_answers_with_it():
    cache = ResponseCache(1 << 20, words := [0] * 32)
    other = ("m", 1, 2)
    for owner in (OWNER, other):
        assert cache.put(key_of(owner, [X], ["y"]), response(10))
    cache.drop(OWNER)
    assert cache.get(key_of(OWNER, [X], ["y"])) is None
    assert cache.get(key_of(other, [X], ["y"])) is not None
    assert (words[statistics.CACHE_ENTRIES], cache.used) == (1, ENTRY_BYTES + 10)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_never_larger_than_allowed_and_gives_only_what_was_put_in(seed):
    choice = random.Random(seed)
    limit = 4 * ENTRY_BYTES
    cache, known = ResponseCache(limit, words := [0] * 32), OrderedDict[bytes, Response]()
    keys = {
        bytes([at]): key_of((f"m{at % 3}", 1, 1), [Input("x", "UINT8", (1,), bytes([at]))], ["y"]) for at in range(12)
    }
    for step in range(2000):
        name = choice.choice(sorted(keys))
        if choice.random() < 0.01:
            owner = keys[name][0]
            cache.drop(owner)
            known = OrderedDict((each, kept) for each, kept in known.items() if keys[each][0] != owner)
        elif choice.random() < 0.5:
            answer = response(choice.randrange(2 * ENTRY_BYTES), step % 256)
            size = ENTRY_BYTES + len(answer.outputs[0].data)
            assert cache.put(keys[name], answer)
            known.pop(name, None)
            while sum(ENTRY_BYTES + len(kept.outputs[0].data) for kept in known.values()) + size > limit:
                known.popitem(last=False)
            known[name] = answer
        else:
            assert cache.get(keys[name]) == known.get(name)
            if name in known:
                known.move_to_end(name)
        assert cache.used == sum(ENTRY_BYTES + len(kept.outputs[0].data) for kept in known.values()) <= limit
        assert words[statistics.CACHE_ENTRIES] == len(cache) == len(known)


# --- flags --------------------------------------------------------------------------------------------------------


def given(**flags: str | tuple[str, ...]) -> Given:
    return Given(
        (name.replace("_", "-"), (values,) if isinstance(values, str) else values) for name, values in flags.items()
    )


def test_the_size_comes_from_either_flag():
    assert cache_byte_size(given()) == 0
    assert cache_byte_size(given(cache_config="local,size=1048576")) == 1 << 20
    assert cache_byte_size(given(response_cache_byte_size="8192")) == 8192
    assert cache_byte_size(given(cache_config=f"local,size={1 << 33}")) == 1 << 33


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"cache_config": "local,size=1", "response_cache_byte_size": "1"},
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided."
            " Please provide one or the other.",
        ),
        ({"cache_config": "size=1"}, "No cache specified. --cache-config option format is"),
        (
            {"cache_config": "local,size"},
            "--cache-config option format is '<cache name>,<setting>=<value>'. Got local,size",
        ),
        ({"cache_config": "local,size="}, "--cache-config option format is"),
        ({"cache_config": "local,size=many"}, "invalid value for --cache-config: many"),
        ({"cache_config": "local,size=-1"}, "invalid value for --cache-config: -1"),
        ({"cache_config": "local,bytes=1"}, "unknown setting 'bytes' of cache 'local'"),
        ({"cache_config": "redis,host=h"}, "cache 'redis' is not supported"),
        ({"cache_config": ("local,size=1", "redis,host=h")}, "multiple cache configurations"),
        ({"response_cache_byte_size": "1M"}, "invalid value for --response-cache-byte-size: 1M"),
    ],
)
def test_what_cannot_be_followed_is_said(flags, text):
    with pytest.raises(UsageError) as raised:
        cache_byte_size(given(**flags))
    assert text in str(raised.value)
