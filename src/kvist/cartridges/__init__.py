"""Cartridges: a document as a short trained cache (arXiv:2506.06266)."""
