"""``kvist models --html``: one page that needs nothing else, with two pictures and all numbers.

The page draws itself from the JSON that is put into ``models.html``; it loads nothing from anywhere.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.planning.catalogue import Listing, listings, storable
from kvist.planning.kinds import KINDS
from kvist.spec.formats import CacheFormat

_TEMPLATE = Path(__file__).with_name("models.html")
_PLACE = "/*DATA*/null"

# Lengths at which the curves are known: two each time the length doubles, from 256 to 1M.
LENGTHS = tuple(sorted({round(2 ** (half / 2)) for half in range(16, 41)}))
# What the second picture begins with where no models were chosen: a model of each kind of memory.
_CHOSEN = (
    "llama-2-7b", "llama-3-70b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "deepseek-v4-pro",
    "kimi-linear", "mamba-1.4b",
)  # fmt: skip
# Names that are written into the first picture as far as there is room, the first ones first.
_NAMED = (
    "gpt2", "llama-3-8b", "deepseek-v3", "opt-175b", "llama-2-7b", "gemma-3-27b-it", "kimi-linear-48b-a3b-instruct",
    "deepseek-v4-pro", "gpt2-xl", "falcon-7b", "llama-3.1-405b", "mamba-1.4b", "command-r", "gpt-oss-120b",
    "nemotron-3-nano-30b-a3b", "kimi-k3", "llama-7b", "jamba-v0.1", "deepseek-v2", "llama-4-maverick", "qwen3-32b",
    "gemma-4-31b", "mistral-7b-v0.1", "glm-5", "minimax-text-01", "pythia-12b", "gpt-j-6b", "qwen3.5-397b-a17b",
    "llama-2-70b", "falcon-180b", "gpt-neox-20b", "smollm2-135m", "mimo-v2-flash", "gemma-3-270m", "olmo-2-7b",
    "phi-4", "qwen2-0.5b", "rwkv-7-world-2.9b", "glm-4.5", "chatglm3-6b", "starcoder2-3b", "inkling",
)  # fmt: skip


def write_page(path: str, fmt: CacheFormat, *, chosen: Sequence[Listing] = ()) -> None:
    """Write the page; ``chosen`` are the models of its second picture.

    Raises:
        BadFile: it cannot be written.
    """
    try:
        Path(path).write_text(page(fmt, chosen=chosen), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadFile(f"{path or repr(path)}: cannot be written: {reason}", key="html") from error


def page(fmt: CacheFormat, *, chosen: Sequence[Listing] = ()) -> str:
    """The page as text."""
    every, _ = storable(listings(sort="released"), fmt)
    rows = [_row(each, fmt) for each in every]
    known = {row["name"] for row in rows}
    rows += [_row(each, fmt) for each in chosen if _name(each) not in known]
    aliases = {alias: each.spec.name for each in every for alias in each.aliases}
    usual = (aliases.get(name, name) for name in _CHOSEN)
    content = {
        "format": fmt.words,
        "kinds": KINDS,
        "lengths": LENGTHS,
        "named": _NAMED,
        "chosen": [_name(each) for each in chosen] or [name for name in usual if name in known],
        "models": rows,
    }
    # A name cannot end the script that it stands in.
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_PLACE, text, 1)


def _name(each: Listing) -> str:
    return each.spec.name if each.spec.exact else f"{each.spec.name} (assumed)"


def _row(each: Listing, fmt: CacheFormat) -> dict[str, Any]:
    spec = each.spec
    return {
        "name": _name(each),
        "by": (each.hub or "").partition("/")[0],
        "since": each.released or each.seen,
        "seen": each.released is None and each.seen is not None,
        "like": each.like,
        "kind": each.kind,
        "parameters": spec.parameters,
        "append": float(spec.append_bytes_per_token(fmt)),
        "retained": float(spec.retained_bytes_per_token(fmt)),
        "state": spec.state_bytes(fmt),
        "limit": spec.max_context,
        "bytes": [spec.sequence_bytes(tokens, fmt) for tokens in LENGTHS],
    }
