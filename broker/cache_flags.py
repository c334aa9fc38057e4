"""The response cache's flags of tritonserver. Used by `broker.options`."""

from __future__ import annotations

from broker.flags import Given, UsageError

_MAX = 2**48


def cache_byte_size(given: Given) -> int:
    """Bytes of the cache, 0 for none: --cache-config local,size=N or --response-cache-byte-size. Raises UsageError."""
    old, settings = "response-cache-byte-size" in given, given.all("cache-config")
    if old and settings:
        raise UsageError(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. Please provide one"
            " or the other."
        )
    if old:
        return _bytes("response-cache-byte-size", given.text("response-cache-byte-size", "0"))
    parsed = [_parse(argument) for argument in settings]
    if len({cache for cache, _, _ in parsed}) > 1:
        raise UsageError("multiple cache configurations are not supported: only --cache-config local,… is")
    size = 0
    for cache, name, value in parsed:
        if cache != "local":
            raise UsageError(f"cache '{cache}' is not supported, only 'local' is: --cache-config local,size=<bytes>")
        if name != "size":
            raise UsageError(f"unknown setting '{name}' of cache 'local': it has 'size', in bytes")
        size = _bytes("cache-config", value)
    return size


def _parse(argument: str) -> tuple[str, str, str]:
    """`<cache name>,<setting>=<value>`."""
    cache, comma, assignment = argument.partition(",")
    if not comma or not cache:
        raise UsageError(
            f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {argument}"
        )
    name, _, value = assignment.partition("=")
    if not name or not value:
        raise UsageError(f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {argument}")
    return cache, name, value


def _bytes(flag: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _MAX:
        raise UsageError(f"invalid value for --{flag}: {text} (expected bytes)")
    return int(text)
