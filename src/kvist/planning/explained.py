"""One number of a plan as formula and source."""

from dataclasses import dataclass
from typing import Any

from kvist.spec.rates import Rate, rate_in_json


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One number: what it is, how much, how it comes about, and whose numbers went in."""

    what: str
    value: Rate
    formula: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """As under ``explain`` in the JSON of ``kvist plan --explain``."""
        return {
            "what": self.what, "value": rate_in_json(self.value), "formula": self.formula, "source": self.source,
        }  # fmt: skip
