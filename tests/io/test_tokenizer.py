from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxinfer.errors import CheckpointError, RequestError, UnsupportedModelError
from jaxinfer.io.chat_template import ChatTemplate, check_messages
from jaxinfer.io.gguf_tokenizer import build_tokenizer
from jaxinfer.io.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
HERE = Path("m.gguf")
TEXTS = [
    "Hello, world!",
    "def f(x):\n\treturn {'a': 12345}  # done\n\n\n",
    "naïve café — “quotes” … №5",
    "你好。世界 👩‍👩‍👧 🇫🇷 مرحبا नमस्ते",
    "  leading, trailing  ",
    "<|im_start|>user\nhi<|im_end|>",
]


def byte_level_metadata(**more: object) -> dict:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "hell"), ("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "Ġ")]
    tokens = ["<|end|>", "<tool>", *alphabet, *dict.fromkeys(a + b for a, b in pairs)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, USER] + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        **more,
    }


def sentencepiece_metadata(**more: object) -> dict:
    pieces = ["▁h", "el", "lo", "ello", "▁hello", "▁▁", "he", "▁", *"helo wrd▁é"]
    pieces = list(dict.fromkeys(piece for piece in pieces if piece != " "))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def wrap(metadata: dict) -> Tokenizer:
    return Tokenizer(build_tokenizer(HERE, metadata), bos_id=1, eos_ids=(2,))


BYTE_LEVEL = wrap(byte_level_metadata())
SENTENCEPIECE = wrap(sentencepiece_metadata())


def pieces(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text, **options)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "default"])
def test_byte_level_round_trip(pre: str, text: str):
    tokenizer = wrap(byte_level_metadata(**{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", [" hell", "1234"]),
        ("smollm", [" hell", "1", "2", "3", "4"]),
        ("qwen2", [" hell", "1", "2", "3", "4"]),
        ("llama-bpe", [" hell", "123", "4"]),
        ("default", [" hell", "123", "4"]),
    ],
)
def test_pre_tokenizers_cut_numbers_each_their_way(pre: str, expected: list[str]):
    tokenizer = wrap(byte_level_metadata(**{"tokenizer.ggml.pre": pre}))
    assert pieces(tokenizer, " hell1234", add_special_tokens=False) == expected


def test_special_tokens_split_the_text_and_only_control_ones_are_skipped():
    ids = BYTE_LEVEL.encode("he<tool>he<|end|>")
    assert ids[1] == 1 and ids[-1] == 0
    assert BYTE_LEVEL.decode(ids) == "he<tool>he"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "he<tool>he<|end|>"


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_ends_are_added_as_the_file_asks(bos: bool, eos: bool):
    flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    for metadata in (byte_level_metadata(**flags), sentencepiece_metadata(**flags)):
        first, last = (metadata[f"tokenizer.ggml.{end}_token_id"] for end in ("bos", "eos"))
        tokenizer = wrap(metadata)
        plain = tokenizer.encode("hello", add_special_tokens=False)
        assert tokenizer.encode("hello") == [first] * bos + plain + [last] * eos


def test_sentencepiece_prefers_the_prefixed_word_and_falls_back_to_bytes():
    metadata = sentencepiece_metadata()
    assert pieces(SENTENCEPIECE, "hello") == ["<s>", "hello"]
    assert SENTENCEPIECE.encode("hello", add_special_tokens=False) == [
        metadata["tokenizer.ggml.tokens"].index("▁hello")
    ]
    emoji = SENTENCEPIECE.encode("👋", add_special_tokens=False)
    assert emoji == [metadata["tokenizer.ggml.tokens"].index("▁"), *(3 + byte for byte in "👋".encode())]


def best_pair_first(text: str, metadata: dict) -> list[str]:
    """SentencePiece's BPE by its definition: join the best-scored neighbours, leftmost first, until none join."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    parts = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            return parts
        _, i = min(joins)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]


@given(st.text("helo wrdé", max_size=25))
def test_sentencepiece_merges_by_score(text: str):
    metadata = sentencepiece_metadata()
    expected = best_pair_first("▁" + text.replace(" ", "▁"), metadata) if text else []
    index = metadata["tokenizer.ggml.tokens"].index
    assert SENTENCEPIECE.encode(text, add_special_tokens=False) == [index(part) for part in expected]


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_round_trip(text: str):
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text)) == text


def test_sentencepiece_without_space_prefix_adds_none():
    tokenizer = wrap(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert pieces(tokenizer, "hello", add_special_tokens=False) == ["h", "ello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata(**{"tokenizer.ggml.pre": "tekken"}), "'tekken'"),
        (byte_level_metadata(**{"tokenizer.ggml.pre": None}), "None"),
        (byte_level_metadata(**{"tokenizer.ggml.model": "bert"}), "'bert'"),
        (sentencepiece_metadata(**{"tokenizer.ggml.remove_extra_whitespaces": True}), "normalises"),
        (byte_level_metadata(**{"tokenizer.ggml.merges": []}), "merges"),
        (byte_level_metadata(**{"tokenizer.ggml.tokens": []}), "vocabulary"),
        (byte_level_metadata(**{"tokenizer.ggml.tokens": ["a", "a"]}), "'a' twice"),
        (byte_level_metadata(**{"tokenizer.ggml.token_type": [1]}), "token_type"),
        (sentencepiece_metadata(**{"tokenizer.ggml.bos_token_id": 10**6}), "bos"),
    ],
)
def test_tokenizers_that_cannot_be_built_are_refused_by_name(metadata: dict, message: str):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_tokenizer(HERE, metadata)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_never_holds_half_a_character(tokenizer: Tokenizer, text: str):
    stream, ids = tokenizer.detokenizer(), tokenizer.encode(text)
    chunks = [stream.push([i]) for i in ids]
    assert not any("\ufffd" in chunk for chunk in chunks)
    assert "".join(chunks) + stream.flush() == text


def test_streamed_words_come_at_once_with_their_spaces():
    stream = SENTENCEPIECE.detokenizer()
    ids = SENTENCEPIECE.encode("hello hello", add_special_tokens=False)
    assert [stream.push([i]) for i in ids] == ["hello", " hello"]


def test_flush_shows_incomplete_bytes_once():
    stream = BYTE_LEVEL.detokenizer()
    ids = BYTE_LEVEL.encode("a👋")
    assert stream.push(ids[:-1]) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def check_streaming(tokenizer: Tokenizer, ids: list[int], skip: bool, size: int) -> None:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    parts = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 1), max_size=30), st.booleans(), st.integers(1, 4))
def test_pushes_and_flush_join_to_decode_byte_level(ids: list[int], skip: bool, size: int):
    check_streaming(BYTE_LEVEL, ids, skip, size)


SP_IDS = st.one_of(
    st.integers(0, SENTENCEPIECE.vocab_size + 1),
    st.integers(259, 275),
    st.sampled_from([3 + b for b in "é👋你".encode()]),
)


@given(st.lists(SP_IDS, max_size=30), st.booleans(), st.integers(1, 4))
def test_pushes_and_flush_join_to_decode_sentencepiece(ids: list[int], skip: bool, size: int):
    check_streaming(SENTENCEPIECE, ids, skip, size)


@given(st.text(max_size=40))
def test_any_text_round_trips(text: str):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False) == text


def test_lone_surrogate_is_refused():
    with pytest.raises(RequestError, match="lone surrogate"):
        BYTE_LEVEL.encode("\ud800")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ {'<': 'é'} | tojson }}{% if tools %}{{ tools }}{% endif %}"
)


def test_template_is_rendered_as_by_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "hi <there>"}, {"role": "assistant", "content": "yes"}]
    for prompt in (True, False):
        rendered, _ = render_jinja_template(
            [messages], chat_template=TEMPLATE, add_generation_prompt=prompt, bos_token="<s>"
        )
        assert (
            ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(messages, add_generation_prompt=prompt) == rendered[0]
        )


def test_template_refusals_and_mistakes_are_told():
    template = ChatTemplate(TEMPLATE, {})
    with pytest.raises(RequestError, match="no system role"):
        template.render([{"role": "system", "content": ""}], add_generation_prompt=True)
    with pytest.raises(CheckpointError, match="valid Jinja"):
        ChatTemplate("{% if %}", {})
    unsafe = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(RequestError):
        unsafe.render([{"role": "user", "content": ""}], add_generation_prompt=True)


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        3,
        [],
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "u", "content": "", "x": 1}],
    ],
)
def test_malformed_messages_are_refused(messages: object):
    with pytest.raises(RequestError, match="messages must be a list of"):
        check_messages(messages)


def test_chat_without_template_is_refused():
    assert not BYTE_LEVEL.has_chat_template
    with pytest.raises(RequestError, match="chat template, which this model does not have"):
        BYTE_LEVEL.chat_ids([{"role": "user", "content": "hi"}])


def save_folder(folder: Path, **config: object) -> Path:
    from transformers import PreTrainedTokenizerFast

    backend = build_tokenizer(HERE, byte_level_metadata())
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **config)
    fast.save_pretrained(folder)
    return folder


def test_folder_equals_transformers(tmp_path: Path):
    from transformers import AutoTokenizer

    folder = save_folder(tmp_path, chat_template=TEMPLATE, bos_token="<|end|>")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    messages = [{"role": "user", "content": "hello"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat_ids(messages) == expected
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (0, (0,), len(theirs))


def test_stored_truncation_does_not_cut_prompts(tmp_path: Path):
    backend = tokenizers.Tokenizer.from_file(str(save_folder(tmp_path) / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("hello you")) == "hello you"


def test_folder_without_or_with_broken_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't load"):
        load_tokenizer(tmp_path)


def test_metaspace_decoder_streams_like_it_decodes():
    backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁": 2}, []))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, bos_id=None, eos_ids=())
    for ids in ([0, 1, 0], [2, 2, 0], [1, 2, 1, 0], [0]):
        check_streaming(tokenizer, ids, True, 1)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def test_smollm2_ids_are_the_models_own(smollm2: Tokenizer):
    assert smollm2.encode("Hello, world! 123") == [19556, 28, 905, 17, 216, 33, 34, 35]
    assert smollm2.encode(" 👋 你好") == [15107, 235, 229, 216, 18645, 250, 48392, 138]
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, (2,), 49152)
    assert smollm2.encode("<|im_end|>") == [2]


def test_smollm2_chat_is_laid_out_by_its_template(smollm2: Tokenizer):
    text = smollm2.decode(smollm2.chat_ids([{"role": "user", "content": "Hi"}]), skip_special_tokens=False)
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trip_and_streaming(smollm2: Tokenizer, text: str):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    check_streaming(smollm2, ids, True, 1)
