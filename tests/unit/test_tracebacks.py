"""What is logged of exceptions in a model's own code: once per place and ten seconds, and nothing of anybody else's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.worker import tracebacks as module
from broker.worker.backends import find
from broker.worker.link_log import LinkLog
from broker.worker.messages import Logged
from broker.worker.tracebacks import EVERY_NS, Tracebacks
from shm.errors import Code, InferError
from tests.fakes.workers import config as config_of

CODE = """
def first():
    raise ValueError("one\\ntwo")

def second(): raise KeyError(1)

def through(call):
    call()

def load(context):
    pass
"""


@pytest.fixture
def config(tmp_path: Path):
    (tmp_path / "backend.py").write_text(CODE)
    return replace(config_of("m"), directory=str(tmp_path))


def raised(call, *arguments) -> Exception:
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.fixture
def own(config):
    return find(config)


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_each_place_is_logged_once_in_a_while(config, own, caplog):
    clock = Clock()
    seen = Tracebacks(clock)
    for _ in range(5):
        seen.report(config, raised(own.first))
        seen.report(config, raised(own.second))
    texts = [record.getMessage() for record in caplog.records]
    assert [text.splitlines()[0] for text in texts] == ["model 'm' raised ValueError", "model 'm' raised KeyError"]
    assert f'File "{config.directory}/backend.py", line 3, in first' in texts[0]
    assert texts[0].endswith("ValueError: one\ntwo")
    clock.now += EVERY_NS
    seen.report(config, raised(own.first))
    assert caplog.records[-1].getMessage().splitlines()[0] == (
        "model 'm' raised ValueError (4 times more since it was logged last)"
    )
    seen.report(config, raised(own.first))
    assert len(caplog.records) == 3


def test_what_is_not_the_models_own_leaves_nothing(config, own, caplog):
    def elsewhere():
        raise OSError

    seen = Tracebacks()
    seen.report(config, raised(elsewhere))
    seen.report(config, InferError(Code.INVALID_ARG, "no"))
    assert not caplog.records
    seen.report(config, raised(own.through, elsewhere))  # that called what failed
    assert len(caplog.records) == 1


def test_what_is_remembered_and_logged_is_bounded(config, own, caplog, monkeypatch):
    monkeypatch.setattr(module, "PLACES", 3)
    seen = Tracebacks()
    for number in range(10):
        seen.report(replace(config, name=str(number)), raised(own.first))
    assert len(seen._seen) == 3

    def deeper(left):
        own.through(lambda: deeper(left - 1)) if left else own.first()

    caplog.clear()
    seen.report(config, raised(deeper, 100))
    assert len(caplog.text.splitlines()) < 60


def test_the_log_goes_to_the_broker_at_a_bounded_rate():
    sent, now = [], [0.0]
    log = LinkLog(sent.append, lambda: now[0])
    logger = logging.Logger("worker")
    logger.addHandler(log)
    for number in range(30):
        logger.warning("number %d", number)
    logger.info("nobody needs this")
    assert sent[:2] == [Logged(level=30, text="number 0"), Logged(level=30, text="number 1")]
    assert len(sent) == 20
    now[0] = 1.0
    logger.error("x" * 10000)
    logger.error("last")
    assert [len(message.text) for message in sent[20:]] == [8000 + len(" (10 messages before it were dropped)"), 4]
