"""One block of a decoder: a mixer and a product for each token, with the norms around them."""

from torch import Tensor

from kvist.model.feed_forward import feed_forward_of
from kvist.model.mixers import Pass, Places, mixer_of
from kvist.model.network import Block, Norm
from kvist.model.norms import AnyNorm, LayerNorm, RMSNorm, Stream
from kvist.model.weights import Checkpoint


class Layer:
    """One block: a mixer, then a product for each token, each added to the stream of residuals."""

    def __init__(self, checkpoint: Checkpoint, block: Block, hidden: int, places: Places) -> None:
        def norm(described: Norm | None) -> AnyNorm | None:
            return None if described is None else norm_of(checkpoint, described, hidden)

        self.before_mixer, self.after_mixer = norm(block.before_mixer), norm(block.after_mixer)
        self.before_mlp, self.after_mlp = norm(block.before_mlp), norm(block.after_mlp)
        self.mixer = None if block.mixer is None else mixer_of(checkpoint, block.mixer, places)
        self.mlp = None if block.mlp is None else feed_forward_of(checkpoint, block.mlp)
        self.parallel, self.scale = block.parallel, block.scale

    def __call__(self, stream: Stream, step: Pass, rows: Tensor | None = None) -> Stream:
        """Add to the stream ``[tokens, hidden]`` and return it; stores what the layer remembers of the tokens.

        With ``rows`` nothing but these is computed behind the mixer, and returned.
        """
        seen = change = None
        if self.mixer is not None:
            seen = stream.normed(self.before_mixer)
            change = self.mixer(seen, step, rows)
        if rows is not None:
            stream = stream.rows(rows)
        if change is not None:
            stream.add(self._scaled(change), self.after_mixer)
        if self.mlp is not None:
            if not self.parallel or seen is None:
                seen = stream.normed(self.before_mlp)
            elif rows is not None:
                seen = seen.index_select(0, rows)
            stream.add(self._scaled(self.mlp(seen)), self.after_mlp)
        return stream

    def _scaled(self, change: Tensor) -> Tensor:
        return change if self.scale is None else change * self.scale


def norm_of(checkpoint: Checkpoint, norm: Norm, width: int) -> AnyNorm:
    """Read a norm of so many elements."""
    if norm.kind != "rms":
        bias = checkpoint.vector(f"{norm.name}.bias", width) if norm.kind == "layer" else None
        return LayerNorm(checkpoint.vector(f"{norm.name}.weight", width), bias, norm.eps)
    return RMSNorm(checkpoint.norm(f"{norm.name}.weight", width), norm.eps)
