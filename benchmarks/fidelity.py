"""What every format does to a model's answers: divergence from the unquantised cache, agreement, perplexity.

    python benchmarks/fidelity.py [--model smollm2-135m] [--tokens 2048] [--pairs int8/int4 …] [--tails 32 …] [--write]

Two texts are read from an empty cache, the beginnings of two files, with the cache in bf16 and in each format, with and
without rotation (``kvist.evaluate``). ``--write`` puts the numbers into ``src/kvist/spec/fidelity.json`` as they come,
in the place of those of the same model and format; ``kvist formats`` shows them from there.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from kvist.engine.loading import with_weights
from kvist.engine.tokenizer import Tokenizer
from kvist.evaluate import drift
from kvist.spec.fidelity import Fidelity, read_measured
from kvist.spec.formats import KEY_CODECS, CacheFormat
from kvist.spec.model import ModelSpec

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT.parent / "shared/data/text"
FILE = ROOT / "src/kvist/spec/fidelity.json"
PAIRS = (
    ("fp8", "fp8"), ("int8", "int8"), ("int8", "int4a"), ("int8", "int4"), ("int4a", "int4a"), ("int4a", "int4"),
    ("int4", "int8"), ("int4", "int4"), ("fp8", "int4"), ("bf16", "int4"), ("int4", "bf16"), ("bf16", "int8"),
    ("int8", "bf16"), ("int4c", "int4"), ("int4c", "int8"), ("int4c", "bf16"),
)  # fmt: skip
# Copies of the weights that fit into memory beside each other.
TOGETHER = 5


def rows(
    model: str, tokens: int, names: list[str], pairs: list[tuple[str, str]], tails: list[int]
) -> Iterator[list[Fidelity]]:
    """Measure these pairs and tails, with and without rotation; as many formats at a time as fit together."""
    spec = with_weights(ModelSpec.read(model))
    tokenizer = Tokenizer.read(spec)
    texts = []
    for name in names:
        text = gzip.decompress((TEXTS / name).read_bytes()).decode()[: 12 * tokens]
        texts.append(tokenizer.encode(text)[:tokens])
    formats = [
        CacheFormat(key=key, value=value, rotate=turned, tail=tail)
        for key, value in pairs
        for tail in tails
        for turned in (False, True)
    ]
    # Of keys by channel there are none without a tail, and where nothing would be turned there is no second.
    formats = [fmt for fmt in formats if fmt.rotates == fmt.rotate and (fmt.tail or fmt.key not in KEY_CODECS)]
    for begin in range(0, len(formats), TOGETHER):
        started = time.perf_counter()
        found = []
        for each in drift(spec, texts, formats[begin : begin + TOGETHER], dtype="bf16"):
            found.append(
                Fidelity(
                    model=model,
                    key=each.format.key,
                    value=each.format.value,
                    rotate=each.format.rotate,
                    kl=float(f"{each.kl:.4g}"),
                    top1_agreement=round(each.top1_agreement, 4),
                    perplexity_ratio=round(each.perplexity_ratio, 4),
                    tokens=each.tokens,
                    tail=each.format.tail,
                )
            )
            print(
                f"| {each.format} | {each.kl:.5f} | {each.top1_agreement:.2%} | {each.perplexity:.3f} | "
                f"{each.perplexity_ratio - 1:+.2%} | {time.perf_counter() - started:.0f} |",
                flush=True,
            )
        yield found


def write(found: list[Fidelity]) -> None:
    """Put these into the package's file: model by model, in the order of ``PAIRS``."""

    def format_of(entry: Fidelity) -> tuple[str, str, str, int, bool]:
        return entry.model, entry.key, entry.value, entry.tail, entry.rotate

    entries = {format_of(each): each for each in (*read_measured(FILE), *found)}
    models = list(dict.fromkeys(model for model, *_ in entries))
    ordered = sorted(
        entries.values(),
        key=lambda each: (models.index(each.model), PAIRS.index((each.key, each.value)), each.tail, each.rotate),
    )
    lines = ",\n".join(json.dumps(asdict(each)) for each in ordered)
    FILE.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--texts", nargs="+", default=["paradise_lost.txt.gz", "jargon_file_4.4.7.txt.gz"])
    parser.add_argument("--pairs", nargs="+", choices=["/".join(pair) for pair in PAIRS], help="only these")
    parser.add_argument("--tails", nargs="+", type=int, default=[0, 32, 128], help="tokens that are sealed at once")
    parser.add_argument("--write", action="store_true", help="into the package's file")
    args = parser.parse_args()
    print(f"{args.model}, {args.tokens:,} tokens each of {', '.join(args.texts)}, computed in bf16\n")
    print("| format | KL, nats | same likeliest | perplexity | against bf16 | seconds |")
    print("|---|---|---|---|---|---|")
    pairs = [pair for pair in PAIRS if args.pairs is None or "/".join(pair) in args.pairs]
    for found in rows(args.model, args.tokens, args.texts, pairs, args.tails):
        if args.write:
            write(found)


if __name__ == "__main__":
    main()
