"""Text to token ids and back, for both checkpoint formats."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.errors import CheckpointError, RequestError
from jaxinfer.io.chat_template import ChatTemplate, Message, check_messages
from jaxinfer.io.gguf_config import eos_ids
from jaxinfer.io.gguf_header import read_header
from jaxinfer.io.gguf_tokenizer import build_tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # SentencePiece's spelling of a byte it has no token for
_REPLACEMENT = "\ufffd"
_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer:
    """Encodes, decodes and lays out chats.

    Args:
        backend: does the work.
        bos_id: starts a text, or None.
        eos_ids: end a text.
        chat_template: a Jinja program, or None.
        special_tokens: what the template may call `bos_token` and so on.

    Attributes:
        bos_id: id that starts a text, or None.
        eos_ids: ids that end a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template_source = chat_template
        self._special_tokens = special_tokens or {}
        self.bos_id, self.eos_ids = bos_id, eos_ids

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_ids` works."""
        return self._template_source is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it count as such.

        Args:
            text: any string that UTF-8 can express.
            add_special_tokens: begin and end as the model was trained to.

        Raises:
            RequestError: `text` is not such a string.
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {type(text).__name__}")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("text must be valid Unicode, got a lone surrogate in it; replace it first") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token give nothing, incomplete characters U+FFFD."""
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    def chat_ids(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: dicts of `role` and `content`.
            add_generation_prompt: end with what precedes the assistant's next words.

        Raises:
            RequestError: the messages are malformed, or the model has no chat template or refuses them.
        """
        check_messages(messages)
        if self._template is None:
            raise RequestError("chat needs a chat template, which this model does not have; prompt it with plain text")
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        """An incremental `decode` for one sequence."""
        return Detokenizer(self._backend, self._special_ids if skip_special_tokens else frozenset())

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = self._template_source
        return None if source is None else ChatTemplate(source, self._special_tokens)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """Decodes one sequence as its ids arrive; all it returns, joined, is what `decode` makes of all ids.

    A byte-level decoder settles a character when its last byte comes. A SentencePiece decoder judges a run of byte
    tokens as a whole, so such a run is held back until it ends.

    Args:
        backend: decodes.
        skipped: ids that give no text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]):
        self._backend, self._skipped = backend, skipped
        self._ids: list[int] = []  # from the last token before the unsettled text; it shows how the text joins on
        self._num_shown = 0  # characters of `_ids` already returned

    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids complete."""
        return "".join(self._push_one(int(token_id)) for token_id in ids)

    def flush(self) -> str:
        """What is left at the end of the sequence, incomplete characters as U+FFFD."""
        rest = self._decode(self._ids)[self._num_shown :]
        self._ids, self._num_shown = [], 0
        return rest

    def _push_one(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        if token is None:
            return ""
        self._ids.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._ids)
        settled = text.rstrip(_REPLACEMENT)
        new = settled[self._num_shown :]
        self._num_shown = max(self._num_shown, len(settled))
        if settled == text:
            self._forget(token_id)
        return new

    def _forget(self, last_id: int) -> None:
        """Keep the last token only, if that shows how the next one joins on: not if its own text is stripped."""
        alone = self._decode([last_id])
        if alone:
            self._ids, self._num_shown = [last_id], len(alone)

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file, without any network call.

    Raises:
        CheckpointError: its files are missing or corrupt.
        UnsupportedModelError: its kind is not implemented.
    """
    path = Path(path)
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_header(path).metadata
    backend = build_tokenizer(path, metadata)
    special = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    special |= {
        "unk": metadata.get("tokenizer.ggml.unknown_token_id"),
        "pad": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    texts = {f"{name}_token": backend.id_to_token(i) for name, i in special.items() if i is not None}
    return Tokenizer(
        backend,
        bos_id=special["bos"],
        eos_ids=eos_ids(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={name: text for name, text in texts.items() if text is not None},
    )


def _from_folder(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # slow to import, and GGUF files do without

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(f"{folder} holds no tokenizer: expected tokenizer.json in it; download it again")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the many ways of many formats to be broken have no common type
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{folder} holds a tokenizer that transformers can't load: {reason}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(f"{folder} holds a tokenizer in pure Python; expected a fast one, with tokenizer.json")
    texts = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in _SPECIAL_NAMES}
    return Tokenizer(
        backend,
        bos_id=tokenizer.bos_token_id,
        eos_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
        chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
        special_tokens={name: str(text) for name, text in texts.items() if text is not None},
    )
