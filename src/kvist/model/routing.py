"""Which experts a token goes to, and with which weights."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.model.weights import Checkpoint

# DeepSeek-V3's, so that a token whose scores are all 0 divides by something.
_TINY = 1e-20


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen.

    ============================  =======  ========  =====  ==========  ========
    Family                        score    renormed  scale  groups      on_input
    ============================  =======  ========  =====  ==========  ========
    Mixtral, gpt-oss              softmax  yes
    Qwen 2 and 3 with experts     softmax  as told
    DeepSeek-V2                   softmax            yes    best of 1
    DeepSeek-V3                   sigmoid  as told   yes    best of 2
    Llama 4                       sigmoid                               yes
    ============================  =======  ========  =====  ==========  ========

    A softmax of the chosen experts' logits alone, as gpt-oss has it, is the renormed softmax over all.

    Attributes:
        name: of the router's tensors, without ``.weight`` and ``.bias``.
        chosen: experts of one token.
        score: what logits become.
        renormed: weights are divided by their sum.
        scale: factor of the weights, ``routed_scaling_factor``.
        groups: of equally many neighbouring experts.
        kept_groups: that a token may choose from.
        group_best: a group is as good as the sum of this many of its best scores.
        correction: name of a vector that is added to the scores while experts are chosen, and not in their weights
            (arXiv:2408.15664); None for none.
        bias: whether the logits have one.
        on_input: weights multiply what goes into an expert instead of what comes out.
    """

    name: str
    chosen: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormed: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    correction: str | None = None
    bias: bool = False
    on_input: bool = False


class Router:
    """Scores of all experts, in float32 whatever the compute type.

    Args:
        checkpoint: to read from.
        net: what is computed.
        hidden: width of the stream.
        count: of experts.
    """

    def __init__(self, checkpoint: Checkpoint, net: Routing, hidden: int, count: int) -> None:
        self.net = net
        self.weight = checkpoint.vector(f"{net.name}.weight", count, hidden)
        self.bias = checkpoint.vector(f"{net.name}.bias", count) if net.bias else None
        self.correction = None if net.correction is None else checkpoint.vector(net.correction, count)
        self.grouped = net.kept_groups < net.groups
        # The exponentials of a softmax keep the order of its logits, and what is left out falls out of the sum.
        self.late = net.score == "softmax" and net.renormed and not self.grouped and self.correction is None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose for ``[tokens, hidden]``.

        Returns:
            Experts, int64, and their weights, float32, each ``[tokens, chosen]``.
        """
        net = self.net
        logits = F.linear(x.float(), self.weight, self.bias)
        if self.late:
            best, experts = logits.topk(net.chosen)
            weights = best.softmax(-1)
        else:
            scores = logits.softmax(-1) if net.score == "softmax" else logits.sigmoid()
            choice = scores if self.correction is None else scores + self.correction
            if self.grouped:
                choice = self._of_best_groups(choice)
            experts = choice.topk(net.chosen).indices
            weights = scores.gather(1, experts)
            if net.renormed:
                weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return experts, weights if net.scale == 1.0 else weights * net.scale

    def _of_best_groups(self, choice: Tensor) -> Tensor:
        net = self.net
        groups = choice.view(len(choice), net.groups, choice.shape[1] // net.groups)
        worth = groups.topk(net.group_best).values.sum(-1)
        left_out = worth.topk(net.groups - net.kept_groups, largest=False).indices
        hidden = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, left_out, True)
        return groups.masked_fill(hidden[..., None], float("-inf")).view(choice.shape)
