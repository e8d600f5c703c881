"""Small models to train cartridges for: with a byte-level tokenizer, so that they read documents."""

from pathlib import Path
from typing import Any

import torch
from served import Case, build
from tiny_tokenizers import byte_level, write_directory

from kvist.cartridges.distillation import Targets
from kvist.cartridges.self_study import Item
from kvist.cartridges.student import Batch, Student
from kvist.cartridges.training import Lesson

LLAMA = Case(
    model="LlamaForCausalLM",
    config={"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2},
)
TEXT = (
    "The Varde Light was built in 1911 by the engineer Ida Holm. It stands on the island of Hesja, 84 metres above the "
    "sea. The first keeper was Anton Brekke, who stayed for 19 years. Its lens was made in Paris and weighs 740 kilos."
)


def reading_model(directory: Path, case: Case = LLAMA) -> tuple[Path, Any]:
    """A network with random weights and a tokenizer, and transformers' own."""
    served = build(case, directory)
    write_directory(directory, byte_level())
    return directory, served.oracle


def taught(student: Student, document: list[int], items: list[list[int]]) -> list[Lesson]:
    """Lessons whose teacher is the student that reads the whole document."""
    segments = student.read(document)
    lessons = []
    for tokens in items:
        batch = Batch(tokens=torch.tensor([tokens[:-1]]), rows=torch.arange(len(tokens) - 1))
        with torch.no_grad():
            targets = Targets.of(student.logits(segments, batch))
        lessons.append(Lesson(item=Item(kind="test", chunk=0, tokens=tuple(tokens), learnt=1), targets=targets))
    return lessons
