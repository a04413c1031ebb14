"""`config.json` to ModelConfig: both spellings mean the same, and nothing that matters is passed over."""

import json
import math
import warnings

import numpy as np
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.errors import UnsupportedModelError
from jaxinfer.models.registry import MODEL_TYPES, family_of
from tests.tiny import FAMILIES, VARIANTS, make_variant

SLIDING, FULL = "sliding_attention", "full_attention"

# As the hub has them: written by transformers 4.
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LINEAR_LLAMA = {**LLAMA_3_2_1B, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 10000.0}
YARN_LLAMA = {
    **LLAMA_3_2_1B,
    "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SLIDING_QWEN2 = {**QWEN2_5_0_5B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PYTHIA_70M = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 20000,
    "rotary_pct": 0.5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
OPT_350M = {
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": False,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.20.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
HUB = {
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "llama-linear": LINEAR_LLAMA,
    "llama-yarn": YARN_LLAMA,
    "Mistral-7B-v0.1": MISTRAL_7B,
    "Qwen2.5-0.5B": QWEN2_5_0_5B,
    "qwen2-sliding": SLIDING_QWEN2,
    "Qwen3-0.6B": QWEN3_0_6B,
    "pythia-70m": PYTHIA_70M,
    "opt-350m": OPT_350M,
    "gpt2": GPT2,
}
BY_FAMILY = {hf["model_type"]: hf for hf in reversed(HUB.values())}  # the first of each


def translate(hf) -> ModelConfig:
    return family_of(hf).translate(hf)


def edited(hf, **changes):
    """The config with fields changed, or left out where the change is `...`."""
    return {name: value for name, value in {**hf, **changes}.items() if value is not ...}


@pytest.mark.parametrize("name", HUB)
def test_both_spellings_translate_alike(name, tmp_path):
    """The file as the hub has it, and as transformers 5 saves what it read from it."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(HUB[name]))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "torch_dtype" not in saved and "rope_theta" not in saved  # else this tests nothing
    assert translate(saved) == translate(HUB[name])


def test_every_family_is_covered():
    assert BY_FAMILY.keys() == MODEL_TYPES.keys() == FAMILIES.keys()


def test_values_of_real_models():
    """Against their published descriptions, where a mistake would be shared with the oracle's defaults."""
    mistral, qwen = translate(MISTRAL_7B), translate(SLIDING_QWEN2)
    assert mistral.windows == (4096,) * 32 and (mistral.num_kv_heads, mistral.head_dim) == (8, 128)
    assert qwen.windows == (None,) * 20 + (4096,) * 4 and qwen.qkv_bias and not qwen.out_bias
    assert translate(QWEN2_5_0_5B).windows == ()
    assert translate(QWEN3_0_6B).qk_norm and translate(QWEN3_0_6B).head_dim == 128
    pythia, opt, gpt2 = translate(PYTHIA_70M), translate(OPT_350M), translate(GPT2)
    assert pythia.rope is not None and pythia.rope.rotary_dim == 32 and pythia.residual == "parallel"
    assert math.isclose(pythia.rope.inv_freq[1], 20000 ** (-1 / 16))
    assert (opt.residual, opt.final_norm, opt.embed_dim, opt.num_position_rows) == ("post", False, 512, 2050)
    assert gpt2.intermediate_size == 3072 and gpt2.num_position_rows == 1024 and gpt2.activation == "gelu_tanh"
    assert gpt2.attention_scale(3) == 1 / 8 and gpt2.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mistral", {"sliding_window": None}, {"windows": ()}),
        ("mistral", {"sliding_window": ...}, {"windows": (4096,) * 32}),
        ("mistral", {"head_dim": 80}, {"head_dim": 80}),
        ("llama", {"num_key_value_heads": ...}, {"num_kv_heads": 32}),
        ("llama", {"head_dim": None}, {"head_dim": 64}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, {"windows": ()}),
        ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        (
            "qwen3",
            {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True},
            {"windows": (8, None)},
        ),
        ("gpt_neox", {"use_parallel_residual": False}, {"residual": "pre"}),
        ("gpt_neox", {"attention_bias": False}, {"qkv_bias": False, "out_bias": False, "mlp_bias": True}),
        ("opt", {"do_layer_norm_before": True}, {"residual": "pre", "final_norm": True}),
        ("opt", {"do_layer_norm_before": True, "_remove_final_layer_norm": True}, {"final_norm": False}),
        ("opt", {"word_embed_proj_dim": ...}, {"embed_dim": None}),
        ("opt", {"enable_bias": False}, {"qkv_bias": False, "out_bias": False, "mlp_bias": False}),
        ("gpt2", {"n_inner": 100}, {"intermediate_size": 100}),
        ("gpt2", {"scale_attn_weights": False}, {"attention_scales": (1.0,) * 12}),
        ("gpt2", {"reorder_and_upcast_attn": True}, {"attention_scales": ()}),
    ],
)
def test_settings_act(family, changes, expected):
    config = translate(edited(BY_FAMILY[family], **changes))
    assert {name: getattr(config, name) for name in expected} == expected


def test_scale_by_inverse_layer():
    config = translate({**GPT2, "scale_attn_by_inverse_layer_idx": True})
    np.testing.assert_allclose(config.attention_scales, [1 / 8 / (layer + 1) for layer in range(12)])


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"hidden_size": ...}, "hidden_size"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act.*quick_gelu"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type.*dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_type.*longrope"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "linear.*factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "novelty": 1}}, "novelty"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ("llama", {"rope_scaling": None, "rope_parameters": {FULL: {"rope_theta": 1e4}}}, FULL),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mistral", {"layer_types": [FULL, SLIDING] * 16}, "layer_types"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen2", {"layer_types": [SLIDING] * 24}, "layer_types"),
        ("qwen2", {"layer_types": [FULL]}, "layer_types"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(family, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        translate(edited(BY_FAMILY[family], **changes))


@pytest.mark.parametrize("model_type", ["gemma3", None])
def test_unknown_architecture_is_refused_by_name(model_type):
    with pytest.raises(UnsupportedModelError, match=f"model_type.*{model_type}"):
        family_of({"model_type": model_type})


@pytest.mark.parametrize("family", sorted(MODEL_TYPES))
def test_unknown_fields_warn_by_name(family):
    with pytest.warns(UserWarning, match="attention_novelty"):
        translate({**BY_FAMILY[family], "attention_novelty": True})


def test_files_transformers_writes_hold_nothing_unknown(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, (family, overrides) in VARIANTS.items():
        if name != "opt-no-affine":
            config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                translate(json.loads(config.to_json_string()))


def test_a_variant_without_norm_parameters_is_refused(tmp_path):
    hf = json.loads((make_variant("opt-no-affine", tmp_path) / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="layer_norm_elementwise_affine"):
        translate(hf)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("original", [4, 64, 4096])
def test_frequencies_equal_transformers(kind, original):
    """At the base's extremes too, where YaRN's ramp has no width or lies outside the table."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    transformers = pytest.importorskip("transformers")
    fields = {
        "default": {},
        "linear": {"factor": 8.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 8.0},
    }[kind]
    rope = {"rope_type": kind, "rope_theta": 10000.0, **fields}
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = original
    hf = {**LLAMA_3_2_1B, "rope_scaling": None, "rope_parameters": rope}
    theirs = llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**edited(hf, rope_scaling=..., rope_theta=...)))
    ours = translate(hf).rope
    assert ours is not None and ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq.to(torch.float64).numpy(), rtol=2e-6)
