"""The OpenAI-compatible server: routes, streaming, metrics and the live picture of the cache."""
