"""What recurrences keep of a state from one token to a later one: exponentials of sums that are 0 or negative."""

import torch.nn.functional as F
from torch import Tensor

# Decays below exp(-40) are 0: what they leave is less than rounding, and its products would be numbers so small that
# processors take a hundred times as long over them.
_FORGOTTEN = -40.0


def decayed(sums: Tensor) -> Tensor:
    """``exp(sums)``, and 0 where next to nothing is left; a new tensor of the same shape."""
    return F.threshold(sums, _FORGOTTEN, float("-inf")).exp_()
