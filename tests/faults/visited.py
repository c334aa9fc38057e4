"""A lab with network front ends, and an unmodified tritonclient beside the native canary: S3 over HTTP and gRPC.

Gateways are processes like the others: S2 and S4 hold for them, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from tests.faults import visitor
from tests.faults.front_doors import FrontDoors
from tests.faults.lab import eventually
from tests.faults.measure import Holdings, alive, holdings
from tests.faults.nursery import LIMIT_S, Child
from tests.faults.repository import OTHER, SAME


class VisitedLab(FrontDoors):
    """`settled(lost=True)`: a gateway was killed, and with it whichever of the visitor's requests were in it."""

    _visitor: Child | None = None
    _gateways: tuple[int, ...] = ()

    def _warm_up(self) -> None:
        super()._warm_up()
        if self._visitor is None:  # not before: the warm-up unregisters all that its uid has
            self._start_visitor()

    def _start_visitor(self) -> None:
        models = {SAME: "add1", OTHER: "other"}
        self._visitor = self.start(visitor.run, valid=False, http=self.http, grpc=self.grpc, models=models)
        self.children.remove(self._visitor)  # rows end with their offenders, this goes on
        self._heard: dict[str, Any] = self._visitor_report()

    def end_children(self) -> None:
        if self._visitor is not None:
            self._visitor.close()
            self._visitor = None
        super().end_children()

    def remember(self) -> None:
        self._gateways = self.gateway_pids()
        super().remember()

    def gateway_pids(self) -> tuple[int, ...]:
        return tuple(row["pid"] or 0 for row in self.status()["gateways"])

    def gateway_log_lines(self) -> int:
        return self.broker.log().count("\n")

    def end_offenders(self) -> None:
        """As the lab does, but the visitor's memory stays."""
        while len(self.children) > 1:
            self.children.pop().close()
        for name in os.listdir(self.shm) if self.private else ():
            if name != visitor.KEY.strip("/"):
                with contextlib.suppress(IsADirectoryError):
                    os.unlink(name, dir_fd=self.shm)

    def settled(self, *, replaced: str = "", holders: int = 0, lost: bool = False) -> None:
        if lost:
            eventually(self._gateways_serve, "gateways are back")
            self._gateways = self.gateway_pids()
            self._held = {name: held for name, held in self._held.items() if not name.startswith("gateway")}
        assert self.gateway_pids() == self._gateways, f"S2: a gateway was replaced\n{self.broker.log()[-4000:]}"
        super().settled(replaced=replaced, holders=holders)
        self._check_visitor(replaced, lost)

    def _gateways_serve(self) -> bool:
        """Alive, too: just after a death the status still names the dead one."""
        return all(row["state"] == "serving" and alive(row["pid"]) for row in self.status()["gateways"])

    def _check_visitor(self, replaced: str, lost: bool) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            report = self._visitor_report()
            if all(side["ok"] > self._heard[worker]["ok"] + 8 for worker, side in report.items()):
                break
            assert time.monotonic() < deadline, f"S3: the visitor gets no answers: {report}"
        for worker, side in report.items():
            known = self._heard[worker]["errors"]
            errors = {code for code, count in side["errors"].items() if count > known.get(code, 0)}
            allowed = {"503", "UNAVAILABLE"} if worker == replaced or lost else set()
            allowed |= {"LOST"} if lost else set()
            assert side["wrong"] == 0, f"S3: {worker} gave the visitor wrong answers: {side}"
            assert errors <= allowed, f"S3: the visitor's requests to {worker} failed: {side}"
        self._heard = report

    def _visitor_report(self) -> dict[str, Any]:
        assert self._visitor is not None
        self._visitor.tell("report")
        report: dict[str, Any] = self._visitor.heard()
        return report

    def _holdings(self) -> dict[str, Holdings]:
        pids = {f"gateway {index}": pid for index, pid in enumerate(self._gateways)}
        return {**super()._holdings(), **{name: holdings(pid) for name, pid in pids.items() if alive(pid)}}
