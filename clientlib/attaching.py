"""What a new session is told first: the regions that were registered on the one before.

Run by `clientlib.native` when the broker was reached again.
"""

from __future__ import annotations

from collections.abc import Iterable

from clientlib.cuda_region import CudaRegion
from clientlib.region import MappedRegion
from clientlib.session import Call, Procedure, Unanswered
from shm import messages
from shm.errors import Code, ConnectionLost, InferError
from shm.sockets import close_all


def attach_regions(regions: dict[str, MappedRegion], own: Iterable[MappedRegion]) -> Procedure[None]:
    """Register the application's `regions` and the client's `own` again; those that the broker refuses are lost.

    Raises InferError when the broker does not answer in time: that says nothing about the region, and another session
    is to be tried with all of them.
    """
    for region in (*regions.values(), *own):
        try:
            _, fds = yield _registration(region)
            close_all(fds)  # the region has its memory
        except (ConnectionLost, Unanswered):
            raise
        except InferError as error:
            region.retired = f"lost when the broker was reached again: {error.message}"
            regions.pop(region.name, None)


def _registration(region: MappedRegion) -> Call:
    if isinstance(region, CudaRegion):
        return region.registration()
    if region.memory.fd is not None and region.offset == 0:
        return Call(messages.RegisterPool(name=region.name, byte_size=region.byte_size), (region.memory.fd,))
    if region.key:
        return Call(
            messages.RegisterSystem(name=region.name, key=region.key, byte_size=region.byte_size, offset=region.offset),
            expects=1,
        )
    raise InferError(Code.NOT_FOUND, "its token has ended; ask its owner for a new one")
