"""What is compared: formats, pruning methods with their budgets, and cartridges."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvist.spec.formats import CODECS, CacheFormat
from kvist.spec.pruning import METHODS, Pruning

PAIRS = (("int8", "int8"), ("int8", "int4"), ("int4", "int8"), ("int4", "int4"))
SHARES = (0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to hold the cache.

    Attributes:
        format: of keys and values; None for the type of computation, the full cache's.
        pruning: None drops nothing.
        cartridge: name of a trained cache in the place of the text; None reads it.
        cartridge_format: in which it is stored; None: as what is asked behind it.
    """

    format: CacheFormat | None = None
    pruning: Pruning | None = None
    cartridge: str | None = None
    cartridge_format: CacheFormat | None = None

    @property
    def full(self) -> bool:
        """Whether nothing is shrunk."""
        return self.format is None and self.pruning is None and self.cartridge is None

    @property
    def evict(self) -> str:
        """As ``--evict`` writes it."""
        return "none" if self.pruning is None else str(self.pruning)

    def computed_in(self, dtype: str) -> "Setting":
        """The same; a format that is the type of computation is none."""
        fmt = self.format
        # With a tail too: what is sealed would be what it was.
        whole = fmt is not None and fmt.uniform and fmt.computed_in(dtype).plain == CacheFormat(key=dtype, value=dtype)
        return replace(self, format=None) if whole else self

    def label(self, dtype: str) -> str:
        """In a few words; ``dtype`` is the type of computation."""
        words = [] if self.format is None else [str(self.format)]
        if self.pruning is not None:
            words.append(str(self.pruning))
        if self.cartridge is not None:
            stored = "" if self.cartridge_format is None else f" in {self.cartridge_format}"
            words.append(f"cartridge {self.cartridge}{stored}")
        return " + ".join(words) or f"{dtype}/{dtype}"


def usual() -> list[Setting]:
    """Four pairs of formats with rotation and without, and each pruning method at two budgets."""
    formats = [
        Setting(format=CacheFormat(key=key, value=value, rotate=rotate))
        for key, value in PAIRS
        for rotate in (False, True)
    ]
    methods = [name for name, method in METHODS.items() if method.variant_of is None]
    return [*formats, *(Setting(pruning=Pruning(method=name, share=share)) for name in methods for share in SHARES)]


def every_format() -> list[Setting]:
    """Every pair of codecs that some group of layers stores, with rotation where a side can be rotated."""
    pairs = [(key, value) for key in CODECS for value in CODECS]
    formats = [CacheFormat(key=key, value=value, rotate=rotate) for key, value in pairs for rotate in (False, True)]
    return [Setting(format=fmt) for fmt in dict.fromkeys(fmt for fmt in formats if fmt.rotates == fmt.rotate)]


def together(
    formats: Sequence[CacheFormat], prunings: Sequence[Pruning], cartridges: Sequence[str] = ()
) -> list[Setting]:
    """Each format with each pruning, and with each cartridge."""
    pruned = [Setting(format=fmt, pruning=pruning) for fmt in formats for pruning in prunings]
    return [*pruned, *(Setting(format=fmt, cartridge=name) for fmt in formats for name in cartridges)]
