"""GGUF files: their headers, read without their tensors, and what they say under Hugging Face's names."""

from kvist.spec.gguf.files import read_gguf
from kvist.spec.gguf.header import GGML_TYPES, GGUFArray, GGUFHeader, GGUFTensor

__all__ = ["GGML_TYPES", "GGUFArray", "GGUFHeader", "GGUFTensor", "read_gguf"]
