"""The same clients over a wire: gRPC, HTTP and ZeroMQ.

    RemoteClient ── Remote (what is said, what is known; no I/O) ── Transport (one per wire, for threads or for a loop)

Imported only when `connect` is given such a URL; each transport's package only when that transport is.
"""
