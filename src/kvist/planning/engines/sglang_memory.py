"""The share of a GPU that SGLang gives to weights and cache where ``--mem-fraction-static`` is left out.

Source: ``sglang/srt/arg_groups/memory_hook.py`` of 0.5.23, for one server without draft models, DP attention or DeepEP.
"""

MIB = 2**20


def chunked_prefill_default(gpu_mib: int) -> int:
    """Most prompt tokens of a step, by the memory of the GPU."""
    for below, tokens in ((20, 2048), (60, 4096), (160, 8192)):
        if gpu_mib < below * 1024:
            return tokens
    return 16384


def decode_graph_default(gpu_mib: int, tp_size: int) -> int:
    """Largest batch for which a decode step is captured."""
    few, many = 8, 8
    for below, few_ranks, many_ranks in ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512)):
        if gpu_mib < below * 1024:
            few, many = few_ranks, many_ranks
            break
    else:
        few = many = 512
    return few if tp_size < 4 else many


def prefill_graphs(most: int) -> int:
    """Number of prompt lengths up to ``most`` tokens for which a step is captured."""
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, most + 1, 512),
    ]
    return sum(1 for size in sizes if size <= most)


def static_fraction(
    device_bytes: int,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    chunked_prefill_size: int | None = None,
    max_running_requests: int | None = None,
    latent: bool = False,
) -> float:
    """``round((gpu - reserved) / gpu, 3)``, in MiB.

    Reserved are 512, 1.5 for each token of a step (at least 2,048), 1,024 for each 8 ranks, 2 for each sequence of the
    largest captured decode step and 8 for each captured prompt length (MLA: 1,536 for all); at least 10 GiB above 60.

    Args:
        device_bytes: of one GPU.
        tp_size: ranks that share heads.
        pp_size: ranks that share layers.
        chunked_prefill_size: most prompt tokens of a step; by default by the memory.
        max_running_requests: a bound on the captured decode steps.
        latent: the model has MLA.
    """
    gpu = device_bytes // MIB
    chunk = chunked_prefill_default(gpu) if chunked_prefill_size is None else chunked_prefill_size
    batch = decode_graph_default(gpu, tp_size)
    if max_running_requests is not None:
        batch = min(batch, max_running_requests)
    reserved = 512 + max(chunk, 2048) * 1.5 + tp_size * pp_size / 8 * 1024 + batch * 2
    reserved += 1536 if latent else prefill_graphs(chunk) * 8
    if gpu > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((gpu - reserved) / gpu, 3)
