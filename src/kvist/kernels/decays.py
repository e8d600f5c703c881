"""What recurrences keep of a state from one token to a later one: exponentials of sums that are 0 or negative."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Decays below exp(-40) are 0: what they leave is less than rounding, and its products would be numbers so small that
# processors take a hundred times as long over them.
_FORGOTTEN = -40.0


def decayed(sums: Tensor) -> Tensor:
    """``exp(sums)``, and 0 where next to nothing is left; a new tensor of the same shape."""
    return F.threshold(sums, _FORGOTTEN, float("-inf")).exp_()


def decays_of(logs: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens leave of each other and of the state before them.

    Args:
        logs: logarithms of what each token keeps of the state, 0 or negative, ``[..., tokens]``.

    Returns:
        ``[..., tokens, tokens]``: of what a column's token added, what is left behind a row's token, 0 for tokens to
        come; and ``[..., tokens]``: of the state before them all, what is left behind each.
    """
    # What lies between two tokens is the difference of two sums, each of which may be thousands of times as large.
    sums = logs.double().cumsum(-1)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(logs.dtype)
    tokens = logs.shape[-1]
    above = torch.full((tokens, tokens), float("-inf"), dtype=logs.dtype).triu_(1)
    return decayed(between.add_(above)), decayed(sums.to(logs.dtype))
