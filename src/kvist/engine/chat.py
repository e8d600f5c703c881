"""Messages to a prompt, through the chat template that the model brings.

A template is a Jinja program written for Hugging Face's ``apply_chat_template``; it runs here in the same sandbox
with the same settings, filters and globals (source: transformers, utils/chat_template_utils.py).

What a client sends must stay text: a message that contains ``<|im_end|>`` must not end its own turn. So every
control token in the client's strings is *fenced* before the template runs (a character that Unicode reserves for
internal use is put between its letters), and the fence is taken out again piece by piece, where the prompt is
encoded (:meth:`Fence.pieces`). Two things are left to the template: a control token of a single letter cannot be
fenced, and one that is half client, half template is not seen.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from re import Pattern
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist.errors import InputError, UnsupportedModel

# U+FDD0 to U+FDEF are never assigned: "noncharacters", for internal use (The Unicode Standard, section 23.7).
_FENCES = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ChatTemplate:
    """The chat template of one model.

    Args:
        sources: template by name; ``default``, and ``tool_use`` where there is another one for tools.
        variables: what templates may read besides the messages, such as ``bos_token``.
        model: what messages call the model.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], model: str) -> None:
        self._sources = sources
        self._variables = variables
        self._model = model
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt as text.

        Args:
            messages: ``{"role", "content"}`` and whatever else the template reads. A content that is a list of
                ``{"type": "text", "text"}`` parts is joined with newlines.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: JSON schemas of functions.

        Raises:
            InputError: a message is malformed, or the template refuses the messages.
            UnsupportedModel: the model has no chat template, or one that cannot be compiled.
        """
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        try:
            return template.render(
                messages=[_plain_message(index, message) for index, message in enumerate(_listed(messages))],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise InputError(f"messages: the model's chat template says: {error}", key="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"messages: the model's chat template cannot take them ({type(error).__name__}: {error}); "
                f"use roles system, user and assistant with a text as content",
                key="messages",
            ) from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._sources:
            raise UnsupportedModel(
                f"messages: {self._model} has no chat template; send one prompt to /v1/completions "
                f"(`kvist generate --raw`), or choose an instruction-tuned model",
                key="messages",
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise UnsupportedModel(
                    f"chat_template of {self._model}: line {error.lineno}: {error.message}", key="chat_template"
                ) from error
        return self._compiled[name]


class Piece(NamedTuple):
    """A run of a prompt: one control token that the template wrote, or text."""

    text: str
    control: bool


@dataclass(frozen=True, kw_only=True)
class Fence:
    """Keeps control tokens that a client wrote apart from those that the template wrote.

    Attributes:
        char: what stands between the letters of a client's control token; None where no client wrote any.
        control: matches the text of every control token of two letters or more.
    """

    char: str | None
    control: Pattern[str]

    def pieces(self, prompt: str) -> list[Piece]:
        """Cut a rendered prompt at the template's control tokens; the pieces hold no fence any more."""
        found: list[Piece] = []
        at = 0
        for match in self.control.finditer(prompt):
            found += [Piece(prompt[at : match.start()], False), Piece(match[0], True)]
            at = match.end()
        found.append(Piece(prompt[at:], False))
        if self.char is not None:
            found = [Piece(piece.text.replace(self.char, ""), piece.control) for piece in found]
        return [piece for piece in found if piece.text]


class Fenced(NamedTuple):
    """A client's values with their control tokens fenced."""

    values: Any
    fence: Fence


def fence_control_tokens(values: Any, control: Pattern[str]) -> Fenced:
    """Fence every control token in the strings of ``values`` (nested lists and dicts, keys included).

    ``control`` must match two letters or more: nothing fits between the letters of one.

    Raises:
        InputError: the strings use up all characters that could serve as a fence.
    """
    texts = list(_strings(values))
    if not any(control.search(text) for text in texts):
        return Fenced(values, Fence(char=None, control=control))
    used = set().union(*texts)
    char = next((fence for fence in _FENCES if fence not in used), None)
    if char is None:
        raise InputError("messages: contain all of U+FDD0 to U+FDEF, which are no characters", key="messages")

    def fenced(text: str) -> str:
        # Until none is left, since tokens may overlap.
        while control.search(text):
            text = control.sub(lambda match: char.join(match[0]), text)
        return text

    return Fenced(_map_strings(values, fenced), Fence(char=char, control=control))


def _strings(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _strings(key)
            yield from _strings(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _strings(value)


def _map_strings(values: Any, change: Callable[[str], str]) -> Any:
    if isinstance(values, str):
        return change(values)
    if isinstance(values, Mapping):
        return {_map_strings(key, change): _map_strings(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_map_strings(value, change) for value in values]
    return values


def _listed(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(
            'messages: at least one is needed, such as [{"role": "user", "content": "Hello"}]', key="messages"
        )
    return messages


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Check one message and join its text parts; keys without a value are left out, as templates expect."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"messages[{index}]: {message!r:.80} is no object with a role", key="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "\n".join(_part_text(index, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise InputError(
            f"messages[{index}].content: {content!r:.80} is neither a text nor a list of text parts", key="messages"
        )
    return plain


def _part_text(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InputError(
            f'messages[{index}].content: {kind!r:.80} is no text part; only {{"type": "text", "text": "…"}} is read',
            key="messages",
        )
    return str(part["text"])


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (declared by jinja2 as it is)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which models have not seen in JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
