"""A small worker that speaks the link and runs nothing: entry module for tests of supervision.

Each message it gets, but pings, is a line of JSON in the file named by TEST_JOURNAL. What loading a model does follows
from the model's parameter `on_load`: a signal's name (it dies of it), "refuse", "hang" (its block shows a batch that
runs), "closed" (it ends as one whose model has run and closed its descriptors), "silent" (no answer), "helper" (starts
a process that ignores everything; its pid is in the journal), or "NAME while FILE" (as long as the file exists). A file
named TEST_JOURNAL with ".refuse" behind it makes it refuse channels.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import NoReturn

import msgspec

from broker.worker import messages
from shm.sockets import close_all, receive
from shm.statistics import BATCH, STARTED, StatisticsPage


def main(link: socket.socket) -> NoReturn:
    link.setblocking(True)
    page: StatisticsPage | None = None
    with open(os.environ["TEST_JOURNAL"], "a", buffering=1) as journal:
        while True:
            link.recv(1, socket.MSG_PEEK)
            received = receive(link)
            if received is None:
                os._exit(0)
            message, fds = messages.decode_to_worker(received[0]), received[1]
            if isinstance(message, messages.Ping):
                link.send(messages.encode(messages.Acknowledged(id=message.id)))
                continue
            entry = {
                "type": type(message).__name__,
                "pid": os.getpid(),
                "fds": len(fds),
                **msgspec.to_builtins(message),
            }
            journal.write(json.dumps(entry) + "\n")
            answer: messages.LinkMessage | None = messages.Acknowledged(id=message.id)
            match message:
                case messages.Start():
                    page = StatisticsPage(fds.pop())
                    link.send(messages.encode(messages.Ready(pid=os.getpid())))
                case messages.LoadInstances():
                    assert page is not None
                    answer = _load(message, page)
                case messages.AttachChannel() if os.path.exists(os.environ["TEST_JOURNAL"] + ".refuse"):
                    answer = messages.Refused(id=message.id, code="UNAVAILABLE", message="no descriptors left")
                case messages.DetachChannel(channel=channel):
                    link.send(messages.encode(messages.ChannelBroken(channel=channel, reason="said at the detach")))
                case messages.Drain():
                    link.send(messages.encode(messages.Acknowledged(id=message.id)))
                    raise SystemExit(0)
            close_all(fds)
            if answer is not None:
                link.send(messages.encode(answer))


def _load(message: messages.LoadInstances, page: StatisticsPage) -> messages.LinkMessage | None:
    action, _, file = message.config.parameters.get("on_load", "").partition(" while ")
    if action == "refuse" and (not file or os.path.exists(file)):
        return messages.Refused(id=message.id, code="INTERNAL", message="cannot load this")
    if action == "silent":
        return None
    if action == "helper":
        helper = os.fork()
        if helper == 0:
            while True:
                signal.pause()
        with open(os.environ["TEST_JOURNAL"], "a") as journal:
            journal.write(json.dumps({"pid": helper, "type": "helper"}) + "\n")
    elif action == "hang":
        block = page.block(message.blocks[0])
        block[STARTED] = time.monotonic_ns()
        block[BATCH] = 3
    elif action == "closed":
        page.block(message.blocks[0])[STARTED] = time.monotonic_ns()
        os._exit(messages.CLOSED_DESCRIPTORS)
    elif action != "refuse" and action and (not file or os.path.exists(file)):
        signal.signal(getattr(signal, action), signal.SIG_DFL)
        os.kill(os.getpid(), getattr(signal, action))
    return messages.Acknowledged(id=message.id)
