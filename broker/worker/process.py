"""Entry point of a worker process, called by the zygote in the forked child."""

from __future__ import annotations

import os
import select
import socket
from typing import NoReturn

from broker.worker import last_words, link_log
from broker.worker.control import Control
from broker.worker.link import Link
from broker.worker.messages import Start
from shm.prctl import undumpable
from shm.statistics import StatisticsPage

START_S = 30.0


def main(sock: socket.socket) -> NoReturn:
    """Serve the broker at the other end of `sock`. Never returns."""
    undumpable()  # other processes of this uid must not reach clients' memory through /proc/PID/fd or ptrace
    link = Link(sock)
    select.select([link], [], [], START_S)
    received = link.receive()
    if received is None:
        os._exit(2)
    start, fds = received
    if not isinstance(start, Start) or len(fds) != 1:
        os._exit(2)
    link_log.set_up(link.send, start.worker)
    try:
        Control(link, StatisticsPage(fds[0]), start).run()
    except OSError as error:
        if not last_words.is_closed(error):
            raise
        last_words.end(error)
    os._exit(0)
