"""Families that are read from GGUF headers alone, which give every size and every layer's window outright.

Their own configurations say the same by keys of their own (SmallThinker's layouts), or say it wrongly (PLaMo prints a
number of KV heads that it does not have), so that none of these names is a ``model_type`` of a published file.
Source: the file of each in ``src/models`` of llama.cpp, and its conversion script.
"""

from kvist.spec.families.dense import Dense, readers_of
from kvist.spec.families.windows import everywhere

_FULL = Dense(context=None)
_WINDOWS = Dense(context=None, rule=everywhere(), window=1)

_GGUF_FAMILIES = {
    "gguf:plamo": _FULL,
    "gguf:codeshell": _FULL,
    "gguf:cogvlm": _FULL,
    "gguf:grovemoe": _FULL,
    "gguf:maincoder": _FULL,
    "gguf:pangu-embedded": _FULL,
    "gguf:talkie": _FULL,
    "gguf:maple": _WINDOWS,
    "gguf:plamo3": _WINDOWS,
    "gguf:smallthinker": _WINDOWS,
    "gguf:spark2_5": _WINDOWS,
}

GGUF_ONLY = readers_of(_GGUF_FAMILIES)
