"""What a gRPC client can take of the gateway's memory, descriptors and time, and the server options that say so.

Used by `broker.gateway.grpc.server` and `grpc.stream`.
"""

from __future__ import annotations

import resource
from typing import Any, Final

from broker.gateway.grpc.codec import MAX_MESSAGE
from broker.gateway.options import GatewayOptions
from shm.capacity import memory_limit
from shm.errors import InferError

# Of one connection; a client with more waits by itself. perf_analyzer goes to 1,000.
MAX_STREAMS: Final = 1024

# Of all connections; more are refused (RESOURCE_EXHAUSTED). Some 20 KiB each, before their messages.
MAX_RPCS: Final = 4096

# A connection that has not spoken HTTP/2 (and TLS) by then is closed: it holds a descriptor.
HANDSHAKE_MS: Final = 5000

# Names and values together, of one request; gRPC begins to refuse at the first and refuses all at the second.
METADATA_SOFT, METADATA_HARD = 16 << 10, 32 << 10

MEMORY_SHARE: Final = 4  # messages may take a quarter of the memory there is

# Times its size that a message takes while it is received: gRPC's blocks, a buffer they are copied to, and the bytes.
RECEIVING: Final = 3

_LEVELS: Final = {"none": 0, "low": 1, "medium": 2, "high": 3}


class Budget:
    """Bytes of the requests that run and of the responses that are not sent, and what they may be at most.

    gRPC itself bounds one message (`receive_limit`); this bounds what is kept of all together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Raises InferError (RESOURCE_EXHAUSTED) when there is no room for a request of `size` bytes."""
        if self.used + size > self.limit:
            raise InferError(
                "RESOURCE_EXHAUSTED",
                f"no room for a request of {size} bytes: {self.used} of {self.limit} bytes are taken by requests "
                "that run and responses that were not read. Send it again later, or use shared memory",
            )
        self.used += size

    def add(self, size: int) -> None:
        """For a response, which exists already."""
        self.used += size

    def give(self, size: int) -> None:
        """What was taken or added."""
        self.used -= size


def message_budget() -> Budget:
    """For one gateway, by the memory of the host or of the cgroup."""
    return Budget(memory_limit() // MEMORY_SHARE)


def receive_limit(options: GatewayOptions, budget: Budget) -> int:
    """Bytes of one message, before and after it is decompressed; what is received must fit into the budget.

    Triton's server takes any. Here 256 KiB of compressed zeros that said 512 MiB took 1.7 GB; the default of 256 MiB
    takes 0.9 GB, and is four times what HTTP takes.
    """
    return min(options.grpc_max_input_size, MAX_MESSAGE, budget.limit // RECEIVING)


def server_options(options: GatewayOptions, budget: Budget) -> list[tuple[str, Any]]:
    """grpc's channel arguments."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.max_receive_message_length", receive_limit(options, budget)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Else streams that just ended count, too, and a client at the limit, which cannot know, sees them refused.
        # 100,000 streams reset by hand in 0.2 s cost a neighbour no error and the gateway 14 MiB all the same.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_metadata_size", METADATA_SOFT),
        ("grpc.absolute_max_metadata_size", METADATA_HARD),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # Of each port; the other front ends and the regions need descriptors, too.
        ("grpc.max_allowed_incoming_connections", max(16, descriptors // 4)),
        ("grpc.so_reuseport", int(options.grpc_reuse_port or options.gateways > 1)),
        *options.grpc_channel_options,
    ]
    if options.grpc_compression != "none":
        # The level, not an algorithm: grpc picks one that the client accepts, as in Triton.
        arguments.append(("grpc.default_compression_level", _LEVELS[options.grpc_compression]))
    return arguments
