"""Chat templates: untrusted Jinja programs that lay a conversation out as text."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxinfer.errors import CheckpointError, RequestError

Message = Mapping[str, str]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's words for training and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The marked part itself."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template, run in a sandbox with what transformers offers templates.

    Args:
        source: the Jinja program.
        special_tokens: names such as `bos_token`, and their text.

    Raises:
        CheckpointError: the program has a syntax error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the model's chat template must be valid Jinja, but {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Lay out a conversation.

        Args:
            messages: dicts of `role` and `content`.
            add_generation_prompt: end with what precedes the assistant's next words.

        Raises:
            RequestError: the messages are malformed, or the template refuses them.
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error


def check_messages(messages: Any) -> None:
    """Check that this is a conversation.

    Raises:
        RequestError: it is not a non-empty sequence of {"role": str, "content": str}.
    """
    form = 'messages must be a list of {"role": str, "content": str}'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"{form}, got {type(messages).__name__}")
    if not messages:
        raise RequestError(f"{form}, got an empty one; pass at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"{form}, got {type(message).__name__} at index {index}")
        if set(message) != {"role", "content"}:
            raise RequestError(f"{form}, got the keys {sorted(map(str, message))} at index {index}")
        for key, value in message.items():
            if not isinstance(value, str):
                raise RequestError(f"{form}, got {type(value).__name__} as {key} at index {index}")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
