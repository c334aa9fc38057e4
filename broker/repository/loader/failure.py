"""The one exception of the loader: this model cannot be served, and why."""

from __future__ import annotations

from typing import final


@final
class ModelError(Exception):
    """Ends the loading of one model. The text becomes `LoadFailure.reason`, so it is written for the operator.

    `versions`: those that cannot be served, where the configuration's own text is not to blame; `cause`: the one whose
    file is, 0 where it is none's. `field`, `value`: where it
    stands in that text, as `broker.repository.pbtxt_lines` has it: how the path begins, and the value ("": any).
    """

    versions: tuple[int, ...] = ()
    cause: int = 0

    def __init__(self, text: str, field: str = "", value: str = "") -> None:
        super().__init__(text)
        self.field = field
        self.value = value
