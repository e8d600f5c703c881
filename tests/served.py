"""Networks with random weights in transformers' own code, and the same served from kvist's cache: for all families.

A module ``served_*.py`` lists cases of some families; ``test_served.py`` runs each through everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvist.batch import Request
from kvist.cache.grouping import groups_of
from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.engine.runner import Runner
from kvist.planning.capacity import allocated_bytes
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

VOCAB = 320
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network.

    Attributes:
        model: transformers' class, such as ``LlamaForCausalLM``.
        config: what differs from :data:`COMMON`; a value of None leaves a key out.
        spread: deviation of the random weights: large enough that attention chooses and experts differ.
        nulls: keys that are there and say nothing.
    """

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    spread: float = 0.12
    nulls: tuple[str, ...] = ()


@dataclass
class Served:
    """A case as both sides have it."""

    directory: Path
    oracle: Any
    runner: Runner
    groups: tuple[Group, ...]
    layout: ArenaLayout


def build(case: Case, directory: Path) -> Served:
    """Save the network, and open it again with kvist in float32."""
    import transformers

    network = getattr(transformers, case.model)
    keys = {key: value for key, value in {**COMMON, **case.config}.items() if value is not None}
    keys |= dict.fromkeys(case.nulls)
    config = network.config_class(**keys)
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    oracle = network(config).eval()
    with torch.no_grad():
        for name, tensor in (*oracle.named_parameters(), *_corrections(oracle)):
            # Norms and biases that differ from the defaults.
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif "embed" not in name and "wte" not in name and "wpe" not in name:
                tensor.normal_(0, case.spread)
    oracle.save_pretrained(directory, max_shard_size="300KB")
    return open_saved(directory, oracle)


def _corrections(oracle: Any) -> list[tuple[str, torch.Tensor]]:
    """What balances experts, which is no parameter."""
    return [(name, tensor) for name, tensor in oracle.named_buffers() if name.endswith("e_score_correction_bias")]


def open_saved(
    directory: Path, oracle: Any, *, dtype: str = "f32", memory: int = 2**26, fmt: CacheFormat | None = None
) -> Served:
    """Open what :func:`build` saved, in another type or stored in another format if wanted."""
    spec = ModelSpec.read(directory)
    fmt = CacheFormat(key=dtype, value=dtype) if fmt is None else fmt.computed_in(dtype)
    groups = groups_of(spec.computed_in(dtype), fmt)
    layout = ArenaLayout.of(groups, memory)
    return Served(directory, oracle, Runner(spec, groups, layout, dtype=dtype), groups, layout)


def prompts_of(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, behind ``shared`` tokens that all have in common."""
    rng = np.random.default_rng(sum(lengths))
    prefix = rng.integers(3, VOCAB, shared).tolist()
    return [prefix + rng.integers(3, VOCAB, length).tolist() for length in lengths]


class Session:
    """A scheduler and a cache for a runner: what the engine is, without tokenizer and threads."""

    def __init__(self, served: Served, *, budget: int = 2048, prefix_cache: bool = True, **limits: int) -> None:
        self.served = served
        self.manager = CacheManager(served.groups, served.layout, prefix_cache=prefix_cache)
        limits = {"max_batch_tokens": budget, "max_context": 2048, **limits}
        self.scheduler = Scheduler(manager=self.manager, limits=Limits(**limits))
        self.logits: dict[str, list[torch.Tensor]] = {}

    def run(self, prompts: Sequence[Sequence[int]], *, steps: int = 6) -> list[Request]:
        """Answer prompts greedily; what each holds is held against the plan in every step."""
        begun = len(self.logits)
        requests = [
            self.scheduler.add(str(begun + number), np.array(prompt, np.int32), steps)
            for number, prompt in enumerate(prompts)
        ]
        self.logits |= {request.id: [] for request in requests}
        runner = self.served.runner
        while self.scheduler.has_work():
            batch = self.scheduler.step()
            runner.copy(batch.copies)
            out = runner.run(batch)
            runner.copy(self.scheduler.commit(batch))
            for row, chunk in zip(out, [c for c in batch.chunks if c.samples], strict=True):
                sequence = chunk.request.sequence
                assert self.manager.held_bytes(sequence) == allocated_bytes(self.served.groups, sequence.length)
                self.logits[chunk.request.id].append(row.clone())
                self.scheduler.append(chunk.request, int(row.argmax()))
                if chunk.request.generated == steps:
                    self.scheduler.finish(chunk.request)
        return requests

    def worst_error(self, requests: Sequence[Request]) -> float:
        """Largest difference of a logit from the oracle's, relative to the largest logit of its answer."""
        worst = 0.0
        for request in requests:
            tokens = request.sequence.known()
            expected = oracle_logits(self.served.oracle, tokens[:-1])[request.prompt_tokens - 1 :]
            ours = torch.stack(self.logits[request.id])
            assert torch.isfinite(ours).all()
            worst = max(worst, float((expected - ours).abs().max() / expected.abs().max()))
            assert expected.argmax(-1).tolist() == tokens[request.prompt_tokens :].tolist()
        return worst


def oracle_logits(oracle: Any, tokens: np.ndarray[Any, Any]) -> torch.Tensor:
    """What transformers computes in one pass without a cache, ``[tokens, vocab]``."""
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return logits
