"""The training loop: items in batches, Adam on the cartridge alone, and a place to go on from.

Training can be interrupted: a checkpoint beside the file holds items, targets, the cartridge and Adam's moments, and
batches are drawn from the seed and the number of the epoch, so that a resumed training is the uninterrupted one.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvist.cartridges.distillation import Targets, divergence
from kvist.cartridges.self_study import Item
from kvist.cartridges.student import Batch, Student
from kvist.errors import BadFile, InputError
from kvist.store.cartridge_file import read_tensors, write_tensors

_KEY = "kvist.training"
_BETAS, _EPS = (0.9, 0.999), 1e-8
# Elements of a batch's logits: 512 MiB.
_MOST_LOGITS = 2**27


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How it is trained; a checkpoint is only resumed with the same.

    Attributes:
        steps: of Adam; None where ``minutes`` say when to end.
        minutes: after which it ends, resumed ones included; None for none.
        rate: Adam's, at its highest.
        warmup: steps until it is.
        batch_tokens: of items in a step, filled up to the longest.
        frozen: leading tokens that stay: the first draws attention whatever it says (arXiv:2506.06266).
        seed: of batches.
    """

    steps: int | None = 200
    minutes: float | None = None
    rate: float = 2e-2
    warmup: int = 5
    batch_tokens: int = 512
    frozen: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise InputError("steps: give steps or minutes, one of them", key="steps")


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """An item and what its teacher expects of it."""

    item: Item
    targets: Targets


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training is.

    Attributes:
        step: steps done.
        share: of the whole, 0 … 1.
        loss: of the last step; None before the first.
        held_out: last divergence on held-out items.
        tokens: of items, without what fills them up, learnt from so far in this run.
        seconds: since this run began.
    """

    step: int
    share: float
    loss: float | None
    held_out: float
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    number: int
    first_step: int
    batches: list[list[int]]


class Training:
    """One cartridge in the making.

    Args:
        student: that computes with it.
        segments: to begin with (:meth:`Student.read`).
        lessons: to learn from.
        held_out: to measure with.
        settings: how.
        told: what else its checkpoints say of what it is.

    Attributes:
        segments: the cartridge, by layer.
        step: steps done.
        elapsed: seconds of training, those before a resumption included.
        losses: divergence on held-out items: ``before``, and ``after`` so far.
    """

    def __init__(
        self,
        student: Student,
        segments: Mapping[int, Tensor],
        lessons: Sequence[Lesson],
        held_out: Sequence[Lesson],
        settings: Settings,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        if not lessons or not held_out:
            raise InputError("items: there are none to learn from, or none held out; ask for more", key="items")
        self.student = student
        self.settings = settings
        self.lessons, self.held_out = list(lessons), list(held_out)
        self.segments = {layer: tensor.clone().requires_grad_() for layer, tensor in segments.items()}
        self.optimizer = torch.optim.Adam(
            self.segments.values(), lr=settings.rate, betas=_BETAS, eps=_EPS, foreach=True
        )
        self.step = 0
        self.elapsed = 0.0
        self.losses: dict[str, float] = {}
        self.told = dict(told or {})
        self._epoch = _Epoch(number=-1, first_step=0, batches=[])

    # -- steps ----------------------------------------------------------------------------------------------

    def run(
        self,
        told: Callable[[Progress], None] = lambda progress: None,
        *,
        checkpoint: Path | None = None,
        every: float = 60.0,
        measure: int = 20,
    ) -> None:
        """Train to the end.

        Args:
            told: hears of every step.
            checkpoint: written every so many seconds, and when it is interrupted.
            every: seconds between checkpoints.
            measure: steps between measurements on held-out items.
        """
        begun = saved = time.monotonic()
        before, tokens = self.elapsed, 0
        if "before" not in self.losses:
            self.losses["before"] = self.losses["after"] = self.measured()
        loss: float | None = None
        try:
            while True:
                self.elapsed = before + time.monotonic() - begun
                share = self.share()
                told(
                    Progress(
                        step=self.step, share=share, loss=loss, held_out=self.losses["after"], tokens=tokens,
                        seconds=time.monotonic() - begun,
                    )
                )  # fmt: skip
                if share >= 1:
                    break
                batch = self._batch()
                loss = self.advance(batch)
                tokens += sum(len(self.lessons[index].item.tokens) for index in batch)
                if self.step % measure == 0:
                    self.losses["after"] = self.measured()
                if checkpoint is not None and time.monotonic() - saved > every:
                    self.save(checkpoint)
                    saved = time.monotonic()
            self.losses["after"] = self.measured()
        except BaseException:
            if checkpoint is not None:
                self.save(checkpoint)
            raise

    def share(self) -> float:
        """How much of the training is done, 0 … 1."""
        if self.settings.minutes is not None:
            return min(1.0, self.elapsed / (60 * self.settings.minutes))
        return min(1.0, self.step / (self.settings.steps or 1))

    def rate(self) -> float:
        """Adam's rate now: up in the first steps, then down along half a cosine to a tenth."""
        warm = min(1.0, (self.step + 1) / max(1, self.settings.warmup))
        return self.settings.rate * warm * (0.55 + 0.45 * math.cos(math.pi * self.share()))

    def advance(self, batch: Sequence[int]) -> float:
        """One step of Adam on these lessons; returns their divergence before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.zero_grad()
        loss = self._loss([self.lessons[index] for index in batch])
        loss.backward()  # type: ignore[no-untyped-call]
        for segment in self.segments.values():
            assert segment.grad is not None
            segment.grad[:, : self.settings.frozen] = 0
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def measured(self, segments: Mapping[int, Tensor] | None = None) -> float:
        """Mean divergence over all learnt tokens of the held-out items, in nats."""
        total, rows = 0.0, 0
        with torch.no_grad():
            for batch in _batches(self.held_out, range(len(self.held_out)), self.settings.batch_tokens, self._vocab):
                lessons = [self.held_out[index] for index in batch]
                count = sum(len(lesson.targets.ids) for lesson in lessons)
                total += self._loss(lessons, segments).item() * count
                rows += count
        return total / rows

    def _loss(self, lessons: Sequence[Lesson], segments: Mapping[int, Tensor] | None = None) -> Tensor:
        logits = self.student.logits(segments or self.segments, batch_of([lesson.item for lesson in lessons]))
        ids = torch.cat([lesson.targets.ids for lesson in lessons])
        logs = torch.cat([lesson.targets.logs for lesson in lessons])
        return divergence(logits, Targets(ids=ids, logs=logs))

    @property
    def _vocab(self) -> int:
        return self.student.decoder.vocab

    def _batch(self) -> list[int]:
        """The next lessons: every epoch all of them, those of a batch about equally long."""
        epoch = self._epoch
        while self.step >= epoch.first_step + len(epoch.batches):
            number = epoch.number + 1
            rng = random.Random(f"{self.settings.seed} {number}")
            order = list(range(len(self.lessons)))
            rng.shuffle(order)
            order.sort(key=lambda index: len(self.lessons[index].item.tokens) * rng.uniform(0.8, 1.2))
            batches = list(_batches(self.lessons, order, self.settings.batch_tokens, self._vocab))
            rng.shuffle(batches)
            epoch = _Epoch(number=number, first_step=epoch.first_step + len(epoch.batches), batches=batches)
        self._epoch = epoch
        return epoch.batches[self.step - epoch.first_step]

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write all that a resumption needs.

        Raises:
            InputError: it cannot be written.
        """
        tensors = pack("lessons", self.lessons) | pack("held_out", self.held_out)
        for layer, segment in self.segments.items():
            tensors[f"segment.{layer}"] = segment.detach()
            state = self.optimizer.state.get(segment)
            if state:
                tensors[f"mean.{layer}"], tensors[f"square.{layer}"] = state["exp_avg"], state["exp_avg_sq"]
        content = {
            "settings": asdict(self.settings),
            "step": self.step,
            "elapsed": self.elapsed,
            "losses": self.losses,
            "told": self.told,
        }
        write_tensors(path, tensors, {_KEY: json.dumps(content)})

    @classmethod
    def resume(cls, student: Student, path: Path, settings: Settings, told: Mapping[str, Any]) -> "Training":
        """Go on from a checkpoint.

        Raises:
            InputError: there is none, or it is of another training; names what differs.
            BadFile: it is torn or of another kind.
        """
        tensors, metadata = read_tensors(path, what="checkpoint of a training")
        try:
            content = json.loads(metadata[_KEY])
            theirs = {**content["settings"], **content["told"]}
        except (KeyError, ValueError, TypeError) as error:
            raise BadFile(f"{path}: no checkpoint of a training") from error
        for key, value in {**asdict(settings), **told}.items():
            if theirs.get(key) != value:
                raise InputError(
                    f"resume: {path} was begun with {key} {theirs.get(key)}, not {value}; say the same, or remove it",
                    key="resume",
                )
        segments = {int(name[8:]): tensors[name] for name in tensors if name.startswith("segment.")}
        lessons, held_out = (unpack(part, tensors) for part in ("lessons", "held_out"))
        training = cls(student, dict(sorted(segments.items())), lessons, held_out, settings, content["told"])
        training.step, training.elapsed = content["step"], content["elapsed"]
        training.losses = content["losses"]
        if training.step:
            for layer, segment in training.segments.items():
                training.optimizer.state[segment] = {
                    "step": torch.tensor(float(training.step)),
                    "exp_avg": tensors[f"mean.{layer}"],
                    "exp_avg_sq": tensors[f"square.{layer}"],
                }
        return training


def batch_of(items: Sequence[Item]) -> Batch:
    """Items side by side; wanted are the logits before each token that is learnt."""
    length = max(len(item.tokens) for item in items) - 1
    tokens = torch.zeros(len(items), length, dtype=torch.int64)
    rows = []
    for number, item in enumerate(items):
        read = len(item.tokens) - 1
        tokens[number, :read] = torch.tensor(item.tokens[:-1])
        rows.append(torch.arange(number * length + item.learnt - 1, number * length + read))
    return Batch(tokens=tokens, rows=torch.cat(rows))


def _batches(lessons: Sequence[Lesson], order: Sequence[int], most: int, vocab: int) -> Iterator[list[int]]:
    """Cut an order in batches of at most ``most`` tokens, what fills them up included."""
    batch: list[int] = []
    longest = rows = 0
    for index in order:
        length, own = len(lessons[index].item.tokens), len(lessons[index].targets.ids)
        if batch and (max(longest, length) * (len(batch) + 1) > most or (rows + own) * vocab > _MOST_LOGITS):
            yield batch
            batch, longest, rows = [], 0, 0
        batch.append(index)
        longest, rows = max(longest, length), rows + own
    yield batch


def pack(name: str, lessons: Sequence[Lesson]) -> dict[str, Tensor]:
    """Lessons as tensors of a file."""
    items = [lesson.item for lesson in lessons]
    kinds = "\n".join(item.kind for item in items).encode()
    return {
        f"{name}.tokens": torch.tensor([token for item in items for token in item.tokens], dtype=torch.int32),
        f"{name}.shape": torch.tensor([[item.chunk, len(item.tokens), item.learnt, item.answer] for item in items]),
        f"{name}.kinds": torch.frombuffer(bytearray(kinds), dtype=torch.uint8),
        f"{name}.ids": torch.cat([lesson.targets.ids for lesson in lessons]),
        f"{name}.logs": torch.cat([lesson.targets.logs for lesson in lessons]),
    }


def unpack(name: str, tensors: Mapping[str, Tensor]) -> list[Lesson]:
    """The way back from :func:`pack`."""
    shape = tensors[f"{name}.shape"].tolist()
    kinds = bytes(tensors[f"{name}.kinds"].tolist()).decode().split("\n")
    tokens = torch.split(tensors[f"{name}.tokens"], [length for _, length, _, _ in shape])
    rows = [length - learnt for _, length, learnt, _ in shape]
    ids, logs = (torch.split(tensors[f"{name}.{part}"], rows) for part in ("ids", "logs"))
    lessons = []
    for kind, (chunk, _, learnt, answer), own, own_ids, own_logs in zip(kinds, shape, tokens, ids, logs, strict=True):
        item = Item(kind=kind, chunk=chunk, tokens=tuple(own.tolist()), learnt=learnt, answer=answer)
        lessons.append(Lesson(item=item, targets=Targets(ids=own_ids, logs=own_logs)))
    return lessons
