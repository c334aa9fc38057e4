"""Answers to KeepLoaded and LetGo, and what ends with a session: leases on models. Part of `broker.control`."""

from __future__ import annotations

from typing import Protocol

from broker.leases import Leases
from broker.model_memory import ModelMemory
from broker.records import Peer
from broker.sessions import Answer
from shm.errors import Code, InferError
from shm.lease_messages import KeepLoaded, LetGo
from shm.messages import Done, ModelMetadata


class Models(Protocol):
    """What is needed of the models."""

    leases: Leases
    memory: ModelMemory

    @property
    def explicit(self) -> bool:
        """Are models loaded when somebody asks?"""

    async def load(self, model: str, parameters: int = -1) -> None:
        """Raises InferError with Triton's texts."""

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Raises InferError with Triton's lookup texts."""


async def keep_loaded(models: Models, peer: Peer, request: KeepLoaded) -> None:
    """With the lease held already: load the model unless it serves. Raises InferError, and the lease has ended then."""
    session, lease = peer.session, request.lease
    try:
        if models.explicit and not _serves(models, request):
            await models.load(request.model)
        models.metadata(request.model, request.version)
    except BaseException:
        models.leases.end(session, lease)
        raise
    if not models.leases.is_held(session, lease):
        raise InferError(Code.UNAVAILABLE, f"the lease on '{request.model}' was ended while it was loading")


async def let_go(models: Models, peer: Peer, request: LetGo) -> Answer:
    """One that is not held is no error."""
    ended(models, {models.leases.end(peer.session, request.lease)})
    return Answer(Done())


def end(models: Models, session: int) -> None:
    """It has ended, and its leases with it."""
    ended(models, models.leases.end_all(session))


def ended(models: Models, names: set[str]) -> None:
    """So long they were in use."""
    for name in names:
        models.memory.wanted(name)


def _serves(models: Models, request: KeepLoaded) -> bool:
    try:
        models.metadata(request.model, request.version)
    except InferError:
        return False
    return True
