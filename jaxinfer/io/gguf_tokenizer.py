"""Tokenizers from GGUF metadata, equal to the `tokenizer.json` the file was converted from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.errors import CheckpointError, UnsupportedModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of llama.cpp's token types, those that matter here
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST
_LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST
# llama.cpp's fallback, which cuts with each pattern in turn.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer a GGUF file describes.

    Args:
        path: names the file in errors.
        metadata: of the file.

    Raises:
        CheckpointError: the vocabulary is missing or inconsistent.
        UnsupportedModelError: the kind of tokenizer is not implemented.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedModelError(f"{path} has a tokenizer of model {kind!r}; expected one of {', '.join(builders)}")
    tokens = _vocabulary(path, metadata)
    tokenizer = builders[kind](path, metadata, tokens)
    types = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, special=type_ == _CONTROL, normalized=False)
        for token, type_ in zip(tokens, types, strict=False)
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    _add_ends(path, metadata, tokens, tokenizer)
    return tokenizer


def _vocabulary(path: Path, metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{path} lacks the metadata tokenizer.ggml.tokens; it has no vocabulary")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise CheckpointError(f"{path} lists the token {twice!r} twice in its vocabulary; expected every token once")
    for key in ("token_type", "scores"):
        values = metadata.get(f"tokenizer.ggml.{key}")
        if values is not None and len(values) != len(tokens):
            raise CheckpointError(
                f"{path} must give tokenizer.ggml.{key} for {len(tokens)} tokens, got {len(values)} of them"
            )
    return tokens


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """BPE over bytes, as GPT-2 introduced it."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not merges:
        raise CheckpointError(f"{path} lacks the metadata tokenizer.ggml.merges, which its BPE tokenizer needs")
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None and metadata.get("general.architecture") == "gpt2":
        pre = "gpt-2"
    vocab = {token: i for i, token in enumerate(tokens)}
    # a merge is two tokens with a space between; neither holds one, but the first may start with it
    pairs = [(merge[: (at := merge.index(" ", 1))], merge[at + 1 :]) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=_is_llama3(pre)))
    tokenizer.pre_tokenizer = _pre_tokenizer(path, pre)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _is_llama3(pre: str | None) -> bool:
    return pre in ("llama-bpe", "llama3", "llama-v3")


def _pre_tokenizer(path: Path, pre: str | None) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated")
    if pre == "gpt-2":
        return gpt2
    if pre in ("smollm", "starcoder", "refact"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in ("qwen2", "deepseek-r1-qwen"):
        return pre_tokenizers.Sequence([split(_QWEN2), to_bytes])
    if _is_llama3(pre):
        return pre_tokenizers.Sequence([split(_LLAMA3), to_bytes])
    if pre == "default":
        return pre_tokenizers.Sequence([*map(split, _DEFAULT), to_bytes])
    raise UnsupportedModelError(
        f"{path} has the pre-tokenizer tokenizer.ggml.pre {pre!r}, which is not implemented; "
        "expected one of default, gpt-2, llama-bpe, qwen2, smollm"
    )


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE with byte fallback, as Llama 1 and 2 and Mistral use it."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise CheckpointError(f"{path} lacks the metadata tokenizer.ggml.scores, which its tokenizer needs")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces") or metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModelError(f"{path} normalises text before it tokenizes, which is not implemented")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            _merges(tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    tokenizer.add_special_tokens([AddedToken(unknown, special=True, normalized=False)])
    return tokenizer


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token: best-scored result first, then longest left part, as transformers."""
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, score, type_ in zip(tokens, scores, types, strict=True):
        if type_ != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -len(left), vocab[left], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_ends(path: Path, metadata: Mapping[str, Any], tokens: list[str], tokenizer: Tokenizer) -> None:
    """Make encoding add the beginning and end tokens that the file asks for."""
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    starts = is_sentencepiece or _is_llama3(metadata.get("tokenizer.ggml.pre"))
    ends: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", starts), ("eos", False)):
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token_id is None or not 0 <= token_id < len(tokens):
                raise CheckpointError(
                    f"{path} adds a {name} token, so tokenizer.ggml.{name}_token_id must be below {len(tokens)}, "
                    f"got {token_id}"
                )
            ends[name] = (tokens[token_id], token_id)
    if ends:
        template = [*(ends[n][0] for n in ("bos",) if n in ends), "$A", *(ends[n][0] for n in ("eos",) if n in ends)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=list(ends.values())
        )
