"""The composition root: makes every part of the broker, starts them in order, and takes them down again.

process set-up → run directory → parts → listen (sessions are told "starting") → start-up load → ready
SIGTERM → no new connections, no new requests → workers drain → sessions end → exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import sys
import time
from importlib.metadata import version as distribution_version
from typing import final

from broker import logs, process_setup
from broker.channels import Channels
from broker.control import Control
from broker.listener import Sessions
from broker.models import UNAVAILABLE, Models
from broker.options import Options, region_memory_bytes
from broker.plans import Plans
from broker.quota import MAX_REGIONS, Quota
from broker.registry import Registry
from broker.repository.protocol import LoadRequest
from broker.repository.scan import misplaced, unreadable
from broker.run_directory import RunDirectory, RunDirectoryError
from broker.statistics_blocks import StatisticsBlocks
from broker.status import StatusDocument
from broker.supervision import TRUNCATED_REGIONS, Truncations
from broker.workers import Workers
from shm.capacity import memory_limit
from shm.errors import InferError
from shm.run_directory import default_directory
from shm.statistics import StatisticsPage

log = logging.getLogger(__name__)

ORPHANS_S = 30.0
GIVE_BACK_S = 2.0  # for sessions to give back what they hold, once no worker is left


@final
class Server:
    """One broker. Make it inside a running loop."""

    def __init__(self, options: Options, run: RunDirectory) -> None:
        self._options = options
        self._run = run
        self._stop = asyncio.Event()
        version = distribution_version("tensorbroker")
        epoch = secrets.token_hex(8)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # a worker's limit as well
        quota = Quota(
            region_memory_bytes(options.region_memory, memory_limit()),
            max_regions=min(MAX_REGIONS, descriptors // 2),
            max_descriptors=descriptors // 2,  # sessions and channels need some too
        )
        blocks = StatisticsBlocks(StatisticsPage.create())
        self._workers = Workers(blocks, model_load_deaths=options.model_load_deaths)
        self._models = Models(
            self._workers,
            LoadRequest(
                repositories=options.model_repository,
                strict=options.strict_model_config,
                default_max_batch_size=options.default_max_batch_size,
            ),
            control_mode=options.model_control_mode,
            startup_models=options.load_model,
        )
        self._registry = Registry(quota)
        plans = Plans(self._models, self._registry)
        self._channels = Channels(self._workers.of, quota)
        status = StatusDocument(
            directory=run.path,
            epoch=epoch,
            version=version,
            workers=self._workers,
            models=self._models,
            registry=self._registry,
            plans=plans,
            channels=self._channels,
            worker_block=lambda key: blocks.page.block(blocks.take((key, 0), 1)[0]),
        )
        self._control = Control(
            models=self._models,
            registry=self._registry,
            plans=plans,
            channels=self._channels,
            status=status,
            epoch=epoch,
            version=version,
        )
        self._sessions = status.sessions = Sessions(self._control)
        self._workers.plans = plans
        self._workers.on_channel_broken = self._channel_broken
        self._truncations = Truncations()
        self._workers.on_region_shrunk = self._region_shrunk

    async def run(self) -> int:
        """Serve until told to stop. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._sessions.listen(self._run.listen())
        orphans = asyncio.create_task(_reap_orphans(), name="orphans")
        try:
            problem = await self._start()
            if problem:
                log.error("%s", problem)
            elif not self._stop.is_set():
                self._control.started()
                log.info("Started session service at %s", self._run.socket_path)
                print(f"tensorbroker is ready: {self._run.socket_path}", flush=True)
                await self._stop.wait()
        finally:
            orphans.cancel()
            in_time = await self._shut_down()
        return 1 if problem or not in_time else 0

    async def _start(self) -> str:
        """Load the models, or be told to stop meanwhile. Returns why the server cannot be, "" if it can."""
        for repository in self._options.model_repository:
            if hint := misplaced(repository):
                log.warning("%s", hint)
        if errors := unreadable(self._options.model_repository):
            if self._options.exit_on_error:
                return f"error: creating server: Internal - {'; '.join(errors)}"
            for error in errors:
                log.error("%s", error)
        load = asyncio.create_task(self._models.start(self._control.report), name="start-up load")
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((load, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not load.done():
            load.cancel()
            await asyncio.wait((load,))
            return ""
        try:
            await load
        except InferError as error:
            return f"error: creating server: Internal - {error.message}"
        if self._options.log_info:
            print(self._models.table(), file=sys.stderr, flush=True)
        if self._options.exit_on_error and any(model.state == UNAVAILABLE for model in self._models.all()):
            return (
                "error: creating server: Internal - failed to load all models (--exit-on-error=false serves those that "
                "can be loaded)"
            )
        return ""

    async def _shut_down(self) -> bool:
        """Finish what was accepted, then end everything. False when that took longer than it may."""
        began, limit = time.monotonic(), float(self._options.exit_timeout_secs)
        self._sessions.stop_listening()
        self._control.exiting = True
        await self._workers.stop(limit)
        in_time = time.monotonic() - began < limit
        if not in_time:
            log.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
        try:
            await asyncio.wait_for(self._sessions.end_all("the broker is shutting down"), GIVE_BACK_S)
        except TimeoutError:
            log.warning("some sessions did not give everything back in %.0f s", GIVE_BACK_S)
        self._registry.close()
        return in_time

    def _signalled(self, number: int) -> None:
        log.info("Signal (%d) received.", number)
        if self._stop.is_set():  # the second one: whoever sends it does not want to wait
            self._run.release()
            os._exit(1)
        self._stop.set()

    def _channel_broken(self, channel: int, reason: str) -> None:
        session = self._sessions.get(self._channels.session_of(channel))
        if session is not None:
            session.hang_up(f"channel {channel}: {reason}")

    def _region_shrunk(self, region: int, generation: int) -> None:
        entry = self._registry.expel(generation)
        if entry is None or entry.source is not None:  # whoever opened it by a token is a victim like the worker
            return
        session = self._sessions.get(entry.session)
        if session is not None and self._truncations.region(entry.session, generation, time.monotonic_ns()):
            reason = (
                f"{TRUNCATED_REGIONS} regions of this session were truncated while a worker had them mapped, within "
                f"60 s; the last one was '{entry.name}'. Unregister a region before its shared memory is made smaller"
            )
            log.error("session %d is hung up: %s", entry.session, reason)
            session.hang_up(reason)


async def _reap_orphans() -> None:
    orphans = process_setup.Orphans()
    while True:
        await asyncio.sleep(ORPHANS_S)
        for pid in orphans.reap():
            log.info("reaped process %d, left behind by a worker", pid)


def serve(options: Options) -> int:
    """The life of a broker process. Returns its exit status."""
    logs.set_up(options)
    process_setup.prepare()
    process_setup.complain_about_runtimes()
    if options.without_effect:
        log.warning("accepted for compatibility, without effect here: %s", ", ".join(options.without_effect))
    try:
        run = RunDirectory.claim(options.directory or default_directory())
    except RunDirectoryError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        return asyncio.run(_serve(options, run))
    except RunDirectoryError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        run.release()


async def _serve(options: Options, run: RunDirectory) -> int:
    return await Server(options, run).run()
