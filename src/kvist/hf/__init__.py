"""kvist's paged, quantised cache inside Hugging Face's ``model.generate`` (extra ``kvist[hf]``).

::

    from kvist.hf import KvistCache

    fmt = kvist.CacheFormat(key="int8", value="int8")
    model.generate(**inputs, past_key_values=KvistCache(model.config, format=fmt))
"""

try:
    from kvist.hf.cache import KvistCache
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("torch", "transformers"):
        raise
    raise ImportError(f"{missing} is not installed; kvist.hf needs it: pip install 'kvist[hf]'") from None

__all__ = ["KvistCache"]
