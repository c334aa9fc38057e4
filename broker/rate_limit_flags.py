"""The rate limiter's flags of tritonserver. Used by `broker.options`."""

from __future__ import annotations

from broker.flags import MAX_INTEGER, Given, UsageError
from broker.repository.scheduling import Allowance


def rate_limit(given: Given) -> tuple[Allowance, ...] | None:
    """What there is of each resource that --rate-limit-resource names; None: no limiter (--rate-limit=off).

    Raises UsageError.
    """
    mode = given.text("rate-limit", "off").lower()
    if mode not in ("off", "execution_count"):
        raise UsageError("invalid argument for --rate-limit")
    allowances = tuple(_parse(argument) for argument in given.all("rate-limit-resource"))
    return allowances if mode == "execution_count" else None


def _parse(argument: str) -> Allowance:
    """`<resource_name>:<count>[:<device>]`."""
    name, *numbers = argument.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(_is_count(number) for number in numbers):
        raise UsageError(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
            f"Got {argument}"
        )
    return Allowance(name=name, count=int(numbers[0]), device=int(numbers[1]) if len(numbers) == 2 else None)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= MAX_INTEGER
