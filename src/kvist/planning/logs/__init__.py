"""Start-up logs of other engines: what they say of the cache, held against the account of that engine.

One module an engine, each with a reader of lines and a ``hold``; nothing here runs an engine.
"""
