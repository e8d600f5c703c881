"""What a device holds beside weights and cache: a runtime, the activations of a step, sampling."""

from dataclasses import dataclass
from math import ceil

from kvist.hardware import Accelerator
from kvist.planning.sharding import LayerRange
from kvist.spec.parameters import Inventory
from kvist.units import counted

_GIB = 2**30

# Sequences that a step samples at most, the default limit of vLLM and of kvist's scheduler.
MAX_SAMPLED = 256

# Copies of a sequence's f32 logits at the peak of sampling. Llama-3-8B took 1.19 to 1.26 GiB for 256 sequences of
# 128,256 logits, Qwen3-8B 1.45 GiB for 151,936: start-up logs of vLLM 0.6 to 0.8 ("PyTorch activation peak memory").
_LOGIT_COPIES = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A part of a device's memory: how much, how it comes about, and whose numbers went in."""

    what: str
    size: int
    formula: str
    source: str


def runtime_of(accelerator: Accelerator | None, devices: int) -> tuple[Cost, ...]:
    """What driver, context, communication and graphs take of a device.

    Nothing is known of a memory without a device, and nothing is set aside there.
    """
    if accelerator is None:
        return ()
    elsewhere = (
        "" if accelerator.vendor == "NVIDIA" else f"; taken for {accelerator.vendor} too, of which none is published"
    )
    together = devices > 1
    return (
        Cost(
            what="driver",
            size=ceil(0.9 * _GIB),
            formula="0.9 GiB that nvidia-smi counts and CUDA does not give",
            source="0.4 to 0.9 GiB between the totals of both on T4, L4, A100, H100, RTX 4090, 5090, in public logs"
            + elsewhere,
        ),
        Cost(
            what="context",
            size=ceil((3.58 if together else 1.79) * _GIB),
            formula=f"{'3.58 GiB, several ranks' if together else '1.79 GiB'}: context, libraries, communication",
            source="memory beside PyTorch's of Llama-3-8B on H100, one rank and two: vllm-project/vllm#10511"
            + elsewhere,
        ),
        Cost(
            what="graphs",
            size=2 * MAX_SAMPLED * 2**20,
            formula=f"2 MiB x {MAX_SAMPLED} sequences of the largest graph",
            source="what SGLang sets aside for CUDA graphs" + elsewhere,
        ),
    )


def activations_of(inventory: Inventory, part: LayerRange, tp: int, *, chunk: int, width: int) -> Cost:
    """What a step of ``chunk`` tokens holds at its peak, on a rank.

    The residual and what is computed from it, and in the widest block the outputs of all its matrices and the product
    that the last one reads: of an MLP, gate, up, their product and the output. Of experts, the chosen ones.
    The formula gives 1.92 GiB for Qwen2.5-1.5B and 32,768 tokens where vLLM measured 2.02 GiB.

    Args:
        inventory: the model's shapes.
        part: layers of the stage.
        tp: ranks.
        chunk: tokens of the step.
        width: bytes of an element.
    """
    hidden = inventory.table.shape[1]
    blocks: dict[tuple[str, int], int] = {}
    for placed in inventory.stage(part.first, part.end):
        tensor = placed.tensor
        if not placed.layers or len(tensor.shape) != 2 or tensor.role not in ("linear", "router"):
            continue
        out, into = tensor.shape
        share = tensor.share(out, 1 if tensor.rows else tp)
        read = tensor.share(into, tp) if tensor.rows else 0
        key = (tensor.block, placed.layers[0])
        blocks[key] = blocks.get(key, 0) + tensor.used * (share + read)
    (block, _), widest = max(blocks.items(), key=lambda entry: entry[1], default=(("", 0), 0))
    return Cost(
        what="activations",
        size=chunk * width * (2 * hidden + widest),
        formula=(
            f"{counted(chunk, 'token')} x {width} B x "
            f"(2 x {hidden:,} + {widest:,} of the widest block, {block or 'none'})"
        ),
        source="shapes; the peak of a step, within 6 % of start-up logs of vLLM",
    )


def sampled_bytes(inventory: Inventory) -> int:
    """Bytes of a sequence's logits while it is sampled."""
    return inventory.table.shape[0] * 4 * _LOGIT_COPIES


def sampling_cost(each: int, sequences: int) -> Cost:
    """The part of a stage's overhead that sampling takes, with so many bytes for each sequence."""
    logits = each // (4 * _LOGIT_COPIES)
    return Cost(
        what="sampling",
        size=sequences * each,
        formula=f"{counted(sequences, 'sequence')} x {logits:,} logits x 4 B x {_LOGIT_COPIES} copies",
        source="peaks of sampling in start-up logs of vLLM",
    )
