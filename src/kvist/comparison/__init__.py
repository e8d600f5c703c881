"""Every way to shrink the cache, held against the full one on a user's own model and text."""
