"""What a worker is asked for, in words that mean something to whoever waits for it: no names of link messages.

Used by `broker.desired_state`, `broker.logical_worker` and `broker.worker_process` for errors and the log.
"""

from __future__ import annotations

from broker.worker.messages import (
    AddRegion,
    AttachChannel,
    BindPlan,
    DetachChannel,
    LinkMessage,
    LoadInstances,
    OpenSession,
    RetireRegion,
    UnloadModel,
)


def task(message: LinkMessage, *, to_all: bool = False) -> str:
    """An infinitive without "to", as "map shared memory region 'r'". `to_all`: without names that are one client's."""
    match message:
        case LoadInstances():
            return f"load model '{message.config.name}' version {message.version}"
        case UnloadModel():
            return f"unload model '{message.model}' version {message.version}"
        case AddRegion():
            what = "the events" if message.kind == "events" else "shared memory region"
            return f"map {what} '{message.name}'" if not to_all else "map memory of a client"
        case RetireRegion():
            return "let go of memory of a client"
        case BindPlan():
            return f"prepare a plan of model '{message.model}'"
        case AttachChannel():
            return "take requests of a client's thread or event loop"
        case DetachChannel():
            return "end with the requests of a client's thread or event loop"
        case OpenSession():
            return "take a session for steps of ensembles"
        case _:
            return "answer"


def task_undone(message: LinkMessage, undo: LinkMessage) -> str:
    """The same for `undo` of what `message` asked for, which knows more names."""
    if isinstance(message, AddRegion) and isinstance(undo, RetireRegion):
        what = "the events" if message.kind == "events" else "shared memory region"
        return f"let go of {what} '{message.name}'"
    return task(undo)


def overdue(message: LinkMessage, *, asked: bool = True) -> str:
    """What is said besides where it was not done in time. A process that was `asked` is killed."""
    if isinstance(message, LoadInstances):
        limit = "a load may take as long as --model-load-timeout-secs says"
        return f"{limit}; the worker is being replaced" if asked else f"{limit}, waiting for its turn included"
    return "it was stopped, or stuck, and has been killed: the worker is being replaced, so try again" if asked else ""


def silent(pid: int) -> str:
    """What can be done about a process that is left as it is, but may be stopped."""
    return f"is it stopped? `kill -CONT {pid}` lets it go on, `kill -9 {pid}` has it replaced at once"
