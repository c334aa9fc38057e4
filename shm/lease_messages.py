"""Session messages of leases on models. Part of the protocol that `shm.messages` describes."""

from __future__ import annotations

from shm.message_values import Id, Message, Text


class KeepLoaded(Message, frozen=True, kw_only=True, tag=True):
    """Load the model if it is not loaded (in control mode explicit) and keep it so, until LetGo or the session's end.

    `lease`: a number of the client's choice. Asking again with the same one and the same model waits for the load.
    """

    lease: Id
    model: Text
    version: Text = ""


class LetGo(Message, frozen=True, kw_only=True, tag=True):
    """The lease has ended; one that is not held succeeds."""

    lease: Id
