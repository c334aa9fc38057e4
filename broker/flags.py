"""Reading values of command line flags, with tritonserver's spellings and refusals.

Used by `broker.options` and `broker.gateway_flags`.
"""

from __future__ import annotations

from typing import final

MAX_INTEGER = 2**31 - 1


class UsageError(Exception):
    """A command line that cannot be followed; the text is what the user is told."""


def boolean(text: str) -> bool:
    """Triton's spellings of a bool."""
    if text.lower() in ("true", "on", "1"):
        return True
    if text.lower() in ("false", "off", "0"):
        return False
    raise UsageError(f"invalid value for bool option: {text}")


def integer(name: str, text: str) -> int:
    """A C int. Raises UsageError."""
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"invalid value for --{name}: {text} (expected an integer)") from None
    if abs(number) > MAX_INTEGER:
        raise UsageError(f"invalid value for --{name}: {text} (expected at most {MAX_INTEGER})")
    return number


@final
class Given(dict[str, tuple[str, ...]]):
    """What the command line says, by flag; of a repeated flag the last one counts, except where all do."""

    def all(self, name: str) -> tuple[str, ...]:
        """Every value, in order."""
        return self.get(name, ())

    def text(self, name: str, default: str) -> str:
        """The value as it is."""
        return self[name][-1] if name in self else default

    def flag(self, name: str, default: bool) -> bool:
        """A bool. Raises UsageError."""
        return boolean(self[name][-1]) if name in self else default

    def integer(self, name: str, default: int) -> int:
        """Raises UsageError."""
        return integer(name, self[name][-1]) if name in self else default

    def at_least(self, least: int, name: str, default: int) -> int:
        """A number that must not be smaller. Raises UsageError."""
        number = self.integer(name, default)
        if number < least:
            raise UsageError(f"invalid value for --{name}: {number} (expected at least {least})")
        return number

    def port(self, name: str, default: int) -> int:
        """A TCP port; 0 turns the service off. Raises UsageError."""
        number = self.integer(name, default)
        if not 0 <= number <= 65535:
            raise UsageError(f"invalid value for --{name}: {number} (expected a port, or 0 for none)")
        return number
