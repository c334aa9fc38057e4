"""The one exception of the loader: this model cannot be served, and why."""

from __future__ import annotations

from typing import final


@final
class ModelError(Exception):
    """Ends the loading of one model. The text becomes `LoadFailure.reason`, so it is written for the operator."""
