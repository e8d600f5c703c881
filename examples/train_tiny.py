"""Train a byte-level language model of some 3 to 4 million parameters in minutes on two cores, for kvist to serve.

    python examples/train_tiny.py TEXT... --family deepseek --out tiny-deepseek
    kvist generate tiny-deepseek 'ROMEO:'
    kvist serve tiny-deepseek

``deepseek`` is DeepSeek-V3 in small: latent attention, and 8 routed experts in 4 groups beside a shared one.
``mamba2`` has no attention: 6 recurrent layers. Both are transformers' own networks, saved as published checkpoints
are, with a tokenizer whose ids are the bytes of UTF-8. TEXT are files (plain or .gz), or directories of .txt and
.txt.gz. The last 2 % of each text are held out. The same seed, texts and threads give the same weights, also across
``--resume``.
"""

import argparse
import gzip
import hashlib
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

END = "<|endoftext|>"  # its id follows those of the 256 bytes
VOCAB = 257
HELD_OUT = 0.02
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}


def deepseek() -> nn.Module:
    """Multi-head latent attention (64 values a token, and 32 with a position), experts from the second layer on."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **TOKENS,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=512,
        first_k_dense_replace=1,
        moe_intermediate_size=96,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        num_nextn_predict_layers=0,
        max_position_embeddings=2048,
    )
    model = DeepseekV3ForCausalLM(config)
    for module in model.modules():
        if type(module).__name__ == "DeepseekV3TopkRouter":
            module.register_forward_hook(balance)
    return model


def balance(router: Any, _inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Make experts that were chosen too rarely more likely to be chosen (arXiv:2412.19437, section 2.1.2)."""
    if router.training:
        load = torch.bincount(outputs[2].flatten(), minlength=router.num_experts).float()
        router.e_score_correction_bias += 1e-3 * torch.sign(load.mean() - load)


def mamba2() -> nn.Module:
    """Eight heads of 64, each with a state of 64 x 64; scanned in chunks of 64 bytes, as plain PyTorch likes best."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        **TOKENS,
        hidden_size=256,
        num_hidden_layers=6,
        num_heads=8,
        head_dim=64,
        state_size=64,
        n_groups=1,
        chunk_size=64,
        initializer_range=0.02,
    )
    return Mamba2ForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A network and how it is trained: steps, bytes of a window, windows of a step, and whether bf16 is faster."""

    make: Callable[[], nn.Module]
    steps: int
    length: int = 256
    batch: int = 8
    bf16: bool = False


FAMILIES = {
    "deepseek": Family(make=deepseek, steps=1200),
    "mamba2": Family(make=mamba2, steps=800, bf16=True),
}


class Refused(Exception):
    """Something that the user can put right; shown as one line."""


def read_texts(names: list[Path], length: int) -> tuple[Tensor, Tensor]:
    """The bytes to train on, and those held out, each int64; texts end with the end token.

    Raises:
        Refused: a text is missing, torn or too short for a window of ``length`` bytes; names it.
    """
    train, held_out = [], []
    for path in text_files(names):
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError, gzip.zlib.error) as error:
            raise Refused(f"{path}: cannot be read: {error}") from error
        cut = len(data) - max(length + 1, int(HELD_OUT * len(data)))
        if cut <= length:
            raise Refused(
                f"{path}: {len(data)} bytes; windows of {length} need at least {2 * length + 2}: "
                f"name a longer text or a smaller --length"
            )
        ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        train += [ids[:cut], torch.tensor([256])]
        held_out.append(ids[cut:])
    return torch.cat(train), torch.cat(held_out)


def text_files(names: list[Path]) -> Iterator[Path]:
    """The files that are meant: directories stand for the texts in them."""
    for name in names:
        if not name.exists():
            raise Refused(f"{name}: no such file or directory")
        found = sorted([*name.glob("*.txt"), *name.glob("*.txt.gz")]) if name.is_dir() else [name]
        if not found:
            raise Refused(f"{name}: holds no .txt and no .txt.gz")
        yield from found


class Training:
    """A network with its optimiser, at some step.

    Attributes:
        settings: that a checkpoint must agree on, for its continuation to be the same training.
    """

    def __init__(self, args: argparse.Namespace, train: Tensor, held_out: Tensor) -> None:
        self.family = FAMILIES[args.family]
        self.out: Path = args.out
        self.train, self.held_out = train, held_out
        self.steps, self.length, self.batch, self.seed = args.steps, args.length, args.batch, args.seed
        texts = hashlib.sha256(torch.cat((train, held_out)).short().numpy().tobytes()).hexdigest()[:16]
        self.settings = {key: getattr(args, key) for key in ("family", "steps", "length", "batch", "rate", "seed")} | {
            "texts": texts
        }
        torch.manual_seed(self.seed)
        self.model = self.family.make()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95))
        self.rate = args.rate
        self.step = 0
        self.bf16 = self.family.bf16 and torch.cpu._is_avx512_bf16_supported()

    @property
    def checkpoint(self) -> Path:
        """Where an unfinished training is kept."""
        return self.out / "checkpoint.pt"

    def advance(self) -> float:
        """One step; returns its loss. Which windows it sees depends on the seed and the step's number alone."""
        choose = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.train) - self.length, (self.batch,), generator=choose)
        windows = torch.stack([self.train[start : start + self.length + 1] for start in starts])
        warm = min(1.0, (self.step + 1) / (0.05 * self.steps))
        cosine = 0.55 + 0.45 * math.cos(math.pi * self.step / self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * warm * cosine
        self.model.train()
        loss = self.loss(windows)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy in nats a byte, of windows ``[batch, length + 1]``."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.model(windows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss on up to 64 windows, spread evenly over the bytes held out."""
        self.model.eval()
        windows = min(64, len(self.held_out) // self.length)
        starts = torch.linspace(0, len(self.held_out) - self.length - 1, windows).long()
        cut = torch.stack([self.held_out[start : start + self.length + 1] for start in starts])
        return sum(self.loss(part).item() * len(part) for part in cut.split(self.batch)) / windows

    def save_checkpoint(self) -> None:
        """Keep the training as it is; the old checkpoint stays until the new one is whole."""
        written = self.checkpoint.with_suffix(".part")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({"settings": self.settings, "step": self.step, **state}, written)
        written.replace(self.checkpoint)

    def resume(self) -> None:
        """Go on from the checkpoint.

        Raises:
            Refused: there is none, it is torn, or it belongs to another training.
        """
        path = self.checkpoint
        if not path.is_file():
            raise Refused(f"{path}: no such file; nothing to resume, leave --resume out")
        try:
            saved = torch.load(path, weights_only=True)
            if saved["settings"] == self.settings:
                self.model.load_state_dict(saved["model"])
                self.optimizer.load_state_dict(saved["optimizer"])
            self.step, settings = int(saved["step"]), dict(saved["settings"])
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, LookupError, TypeError, ValueError) as error:
            raise Refused(f"{path}: torn or no checkpoint of this script; delete it and begin anew") from error
        for key, value in self.settings.items():
            if settings.get(key) != value:
                raise Refused(
                    f"{path}: of a training with {key} {settings.get(key)}, not {value}; resume with the same"
                )

    def save(self) -> None:
        """Write the model as it is published: configuration, weights in float32, tokenizer."""
        self.model.save_pretrained(self.out)
        byte_tokenizer().save_pretrained(self.out)
        self.checkpoint.unlink(missing_ok=True)


def byte_tokenizer() -> Any:
    """A tokenizer whose ids are bytes, and 256 for the end of a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The letter that stands for each byte in byte-level vocabularies: printable bytes stand for themselves, and the
    # others follow in order from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def run(training: Training) -> None:
    """Train to the last step, saying how it goes about twenty times."""
    every = max(1, training.steps // 20)
    begun, first = time.monotonic(), training.step
    with kept_when_interrupted(training):
        while training.step < training.steps:
            loss = training.advance()
            if training.step % every and training.step < training.steps:
                continue
            held_out = training.evaluate()
            training.save_checkpoint()
            each = (time.monotonic() - begun) / (training.step - first)
            left = round(each * (training.steps - training.step))
            print(
                f"step {training.step:,}/{training.steps:,} · loss {loss:.3f} · held out {held_out:.3f} nats a byte "
                f"({held_out / math.log(2):.3f} bits) · {training.batch * training.length / each:,.0f} bytes/s · "
                f"{left // 60}:{left % 60:02} left",
                flush=True,
            )


@contextmanager
def kept_when_interrupted(training: Training) -> Iterator[None]:
    """Say how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "the last checkpoint is kept: go on with --resume" if training.checkpoint.exists() else "nothing to keep"
        raise Refused(f"interrupted in step {training.step + 1}; {kept}") from None


def quiet_transformers() -> None:
    """No bars for a file of 10 MB, and no advice to install kernels that need a GPU."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """What is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help="files, or directories of .txt and .txt.gz")
    parser.add_argument("--family", choices=list(FAMILIES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for the model, and checkpoints until then")
    parser.add_argument("--steps", type=int, help="left out, as many as take minutes")
    parser.add_argument("--length", type=int, help="bytes of a window")
    parser.add_argument("--batch", type=int, help="windows of a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    args = parser.parse_args(argv)
    for key in ("steps", "length", "batch"):
        value = getattr(args, key)
        setattr(args, key, getattr(FAMILIES[args.family], key) if value is None else value)
    for key in ("steps", "length", "batch", "rate", "threads"):
        if not 0 < getattr(args, key) < math.inf:
            parser.error(f"--{key}: {getattr(args, key)} must be above 0")
    return args


def main(argv: list[str] | None = None) -> int:
    """Train as told; 0, or 1 with a line on stderr."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    try:
        if not args.resume and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise Refused(f"{args.out}: is not empty; name another --out, or --resume what was begun there")
        quiet_transformers()
        training = Training(args, *read_texts(args.texts, args.length))
        if args.resume:
            training.resume()
        args.out.mkdir(parents=True, exist_ok=True)
        count = sum(parameter.numel() for parameter in training.model.parameters())
        print(f"{args.family}: {count:,} parameters · {len(training.train):,} bytes of text · {args.steps:,} steps")
        run(training)
        training.save()
    except (Refused, ImportError) as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        return 1
    print(f"saved; try: kvist generate {args.out} 'The '")
    return 0


if __name__ == "__main__":
    sys.exit(main())
