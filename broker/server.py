"""The composition root: makes every part of the broker, starts them in order, and takes them down again.

process set-up → run directory → parts → listen (sessions are told "starting"), gateways import → start-up load →
    sessions are welcome → gateways listen → ready
SIGTERM → no new connections, no new requests → gateways and workers drain → sessions end → exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Coroutine
from importlib.metadata import version as distribution_version
from typing import Any, final

from msgspec.structs import replace

from broker import logs, process_setup
from broker.catalogue import UNAVAILABLE
from broker.channels import Channels
from broker.control import Control
from broker.gateway.options import LogOptions
from broker.gateways import CannotServe, Gateways, check_ports
from broker.gpus import Gpus
from broker.listener import Sessions
from broker.metrics import MetricsDocument
from broker.models import Models
from broker.options import Options, region_memory_bytes
from broker.plans import Plans
from broker.quota import MAX_REGIONS, Quota
from broker.registry import Registry
from broker.repository.protocol import LoadRequest
from broker.repository.scan import misplaced, unreadable
from broker.run_directory import RunDirectory, RunDirectoryError
from broker.settings import LogState, TraceState
from broker.startup_tables import backend_table, option_table
from broker.statistics_blocks import StatisticsBlocks
from broker.status import StatusDocument
from broker.step_sessions import StepSessions
from broker.supervision import TRUNCATED_REGIONS, Truncations
from broker.workers import Workers
from shm.capacity import memory_limit
from shm.errors import InferError
from shm.run_directory import default_directory
from shm.statistics import StatisticsPage

log = logging.getLogger(__name__)

ORPHANS_S = 30.0
HEAD_START = 0.5  # of the time there is: gateways' before workers take no new requests. Most need next to none of it
WRITE_S = 2.0  # for gateways to pass on the last answers
LAST_WORDS_S = 1.0  # the same, when there is no time left
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
        blocks = StatisticsBlocks(StatisticsPage.create())
        self._gpus = Gpus()
        self._workers = _workers(options, blocks)
        self._workers.gpu_uuid = self._gpus.uuid
        self._models = Models(
            self._workers,
            LoadRequest(
                repositories=options.model_repository,
                strict=options.strict_model_config,
                default_max_batch_size=options.default_max_batch_size,
                config_name=options.model_config_name,
                explain=True,  # `tensorbroker explain` asks what serves, whose files may have changed since
            ),
            control_mode=options.model_control_mode,
            startup_models=options.load_model,
            directory=run.path,
            loads=options.model_load_threads,
            retries=options.model_load_retries,
            gpus=self._gpus,
            memory_limit=options.model_memory_limit,
            remote_code=options.allow_code_overrides,
        )
        quota = _quota(options)
        self._registry = Registry(quota)
        self._registry.cuda_devices, self._registry.cuda_reason = self._gpus.uuids, self._gpus.reason
        plans = Plans(self._models, self._registry)
        self._channels = Channels(self._workers.of, quota)
        status = self._status(epoch, version, plans, blocks)
        self._control = Control(
            models=self._models,
            registry=self._registry,
            plans=plans,
            channels=self._channels,
            status=status,
            epoch=epoch,
            version=version,
            strict_readiness=options.strict_readiness,
            waits_for=self._workers.loads.waits_for,
            log_state=LogState(options.log, self._log),
            trace_state=TraceState(options.trace.file, options.trace.settings),
        )
        self._control.cuda_worker = self._workers.on_gpu
        self._sessions = status.sessions = Sessions(self._control)
        self._workers.plans = plans
        self._workers.on_channel_broken = self._channel_broken
        self._workers.on_session_wanted = StepSessions(self._sessions).open
        self._gateways = Gateways(replace(options.gateway, directory=run.path, broker_uid=os.getuid()), self._sessions)
        self._control.trace_state.apply = self._gateways.trace
        status.gateways = self._gateways.rows
        self._control.on_serving = self._gateways.on_serving
        self._control.metrics = self._metrics(blocks)
        self._truncations = Truncations()
        self._workers.on_region_shrunk = self._region_shrunk

    def _status(self, epoch: str, version: str, plans: Plans, blocks: StatisticsBlocks) -> StatusDocument:
        return StatusDocument(
            directory=self._run.path,
            epoch=epoch,
            version=version,
            workers=self._workers,
            models=self._models,
            registry=self._registry,
            plans=plans,
            channels=self._channels,
            worker_block=blocks.of_worker,
            cuda=self._gpus.facts,
            slow_load=self._workers.loads.of,
        )

    def _metrics(self, blocks: StatisticsBlocks) -> MetricsDocument:
        return MetricsDocument(
            models=self._models,
            blocks=blocks,
            workers=self._workers,
            registry=self._registry,
            channels=self._channels,
            sessions=self._sessions,
            gateways=self._gateways,
            gpus=self._gpus.facts,
        )

    async def run(self) -> int:
        """Serve until told to stop. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._sessions.listen(self._run.listen())
        tasks = [
            asyncio.create_task(_reap_orphans(), name="orphans"),
            asyncio.create_task(self._workers.loads.keep_telling(), name="slow loads"),
        ]
        problem = ""
        try:
            problem = await self._until_stopped(self._start())
            if problem:
                log.error("%s", problem)
            elif not self._stop.is_set():
                log.info("Started session service at %s", self._run.socket_path)
                logs.say(f"tensorbroker is ready: {self._run.socket_path}")
                if self._options.model_control_mode == "poll" and self._options.repository_poll_secs:
                    polling = self._models.keep_polling(self._options.repository_poll_secs)
                    tasks.append(asyncio.create_task(polling, name="polling"))
                await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            in_time = await self._shut_down()
            self._models.close()
        return 1 if problem or not in_time else 0

    async def _until_stopped(self, start: Coroutine[None, None, str]) -> str:
        """What `start` returns, "" when the broker is told to stop before."""
        starting = asyncio.create_task(start, name="start")
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.wait((starting,))
        return ""

    async def _start(self) -> str:
        """Load the models, open the front ends. Returns why the server cannot be, "" if it can."""
        try:
            check_ports(self._options.gateway)
        except CannotServe as error:
            return str(error)
        self._gateways.start()
        if problem := await self._load():
            return problem
        self._control.started()
        self._gateways.welcome()
        try:
            for line in await self._gateways.serving():
                log.info("%s", line)
        except CannotServe as error:
            return str(error)
        return ""

    async def _load(self) -> str:
        """The start-up load. Returns why the server cannot be, "" if it can."""
        for repository in self._options.model_repository:
            if hint := misplaced(repository):
                log.warning("%s", hint)
        if errors := unreadable(self._options.model_repository):
            if self._options.exit_on_error:
                return f"error: creating server: Internal - {'; '.join(errors)}"
            for error in errors:
                log.error("%s", error)
        await self._look_for_gpus()
        try:
            await self._models.start(self._control.report)
        except InferError as error:
            return f"error: creating server: Internal - {error.message}"
        logs.table(log, backend_table(self._models.backends(), self._options))
        logs.table(log, self._models.table())
        logs.table(log, option_table(self._options))
        if self._options.exit_on_error and any(model.state == UNAVAILABLE for model in self._models.all()):
            return (
                "error: creating server: Internal - failed to load all models (--exit-on-error=false serves those that "
                "can be loaded)"
            )
        return ""

    async def _look_for_gpus(self) -> None:
        status = await self._gpus.look()
        if status.kind == "ok":
            total = sum(device.total_memory for device in status.devices)
            limit = region_memory_bytes(self._options.cuda_region_memory, total, "cuda-region-memory")
            self._registry.quota.cuda_limit = limit

    async def _shut_down(self) -> bool:
        """Finish what was accepted, then end everything. False when that took longer than it may."""
        began, limit = time.monotonic(), float(self._options.exit_timeout_secs)
        log.info("Waiting for in-flight requests to complete.")
        count_down = asyncio.create_task(self._count_down(), name="count-down")
        self._sessions.stop_listening()
        self._gateways.exiting()
        await self._models.stop()
        # What gateways have accepted may still wait for its turn there, and must reach the workers before these drain.
        await self._gateways.ended(limit * HEAD_START)
        self._control.exiting = True
        await self._workers.stop(max(0.0, limit - (time.monotonic() - began)))
        left = limit - (time.monotonic() - began)
        await self._gateways.ended(min(max(left, LAST_WORDS_S), WRITE_S))
        in_time = left > 0 and time.monotonic() - began < limit
        await self._gateways.end()
        count_down.cancel()
        if not in_time:
            log.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
        try:
            await asyncio.wait_for(self._sessions.end_all("the broker is shutting down"), GIVE_BACK_S)
        except TimeoutError:
            log.warning("some sessions did not give everything back in %.0f s", GIVE_BACK_S)
        self._registry.close()
        return in_time

    async def _count_down(self) -> None:
        """Say once a second what is waited for."""
        for left in range(self._options.exit_timeout_secs, -1, -1):
            counts = self._models.in_flight()
            log.info("Timeout %d: Found %d model versions that have in-flight inferences", left, len(counts))
            for (name, version), count in counts.items():
                log.info("Model '%s' (version %s) has %d in-flight inferences", name, version, count)
            await asyncio.sleep(1.0)

    def _signalled(self, number: int) -> None:
        log.info("Signal (%d) received.", number)
        if self._stop.is_set():  # the second one: whoever sends it does not want to wait
            self._run.release()
            os._exit(1)
        self._stop.set()

    def _log(self, options: LogOptions) -> None:
        logs.set_up(options)
        self._gateways.log(options)

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


def _workers(options: Options, blocks: StatisticsBlocks) -> Workers:
    return Workers(
        blocks,
        model_load_deaths=options.model_load_deaths,
        model_loads=options.model_load_threads,
        load_s=options.model_load_timeout_s,
        cache_byte_size=options.cache_byte_size,
        rate_limit=options.rate_limit,
        cuda_peers=options.cuda_peer_access,
    )


def _quota(options: Options) -> Quota:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # a worker's limit as well
    return Quota(
        region_memory_bytes(options.region_memory, memory_limit()),
        max_regions=min(MAX_REGIONS, descriptors // 2),
        max_descriptors=descriptors // 2,  # sessions and channels need some too
    )


async def _reap_orphans() -> None:
    orphans = process_setup.Orphans()
    while True:
        await asyncio.sleep(ORPHANS_S)
        for pid in orphans.reap():
            log.info("reaped process %d, left behind by a worker", pid)


def serve(options: Options) -> int:
    """The life of a broker process. Returns its exit status."""
    try:
        logs.set_up(options.log)
    except OSError as error:
        print(f"cannot write --log-file {options.log.log_file}: {error.strerror}", file=sys.stderr)
        return 1
    process_setup.prepare()
    process_setup.complain_about_runtimes()
    if options.without_effect:
        log.warning("accepted for compatibility, without effect here: %s", ", ".join(options.without_effect))
    if options.deprecated:
        log.warning("%s", options.deprecated)
    try:
        run = RunDirectory.claim(options.directory or default_directory())
    except RunDirectoryError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        return _run(_serve(options, run))
    except RunDirectoryError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        run.release()


def _run(life: Coroutine[Any, Any, int]) -> int:
    runner = asyncio.Runner()
    try:
        return runner.run(life)
    finally:
        with contextlib.suppress(RuntimeError):  # the threads of its executor are ended by one that may not start
            runner.close()


async def _serve(options: Options, run: RunDirectory) -> int:
    return await Server(options, run).run()
