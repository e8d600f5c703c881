"""The rotation that spreads what is large in a vector over all its elements (QuaRot, arXiv:2404.00456, section 3)."""

import torch
from torch import Tensor


def hadamard(dim: int, dtype: torch.dtype) -> Tensor:
    """Sylvester's Hadamard matrix, normalised: symmetric, orthogonal, and so its own inverse.

    Args:
        dim: of a head; where that is no power of two, blocks of the largest that divides it lie along the diagonal.
        dtype: of the elements, which are all of one size in a block.

    Returns:
        ``[dim, dim]``.
    """
    size = dim & -dim
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < size:
        signs = torch.cat((torch.cat((signs, signs), dim=1), torch.cat((signs, -signs), dim=1)))
    return torch.kron(torch.eye(dim // size, dtype=torch.float64), signs * size**-0.5).to(dtype)
