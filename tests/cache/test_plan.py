from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cache import plan as plan_module
from jaxinfer.cache.plan import MemoryPlan, plan_memory
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.errors import ConfigError, MemoryPlanError

CONFIG = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
)
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # k and v, layers, kv heads, head dim, float32
MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def available(monkeypatch):
    """Pretend that so many bytes are free."""
    return lambda num_bytes: monkeypatch.setattr(plan_module, "device_bytes", lambda: num_bytes)


def plan_of(*, weights: int = MIB, dtype=np.float32, gather: bool = True, config=CONFIG, **options) -> MemoryPlan:
    return plan_memory(
        config, EngineConfig(**options), weight_bytes=weights, dtype=np.dtype(dtype), gather_context=gather
    )


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("num_bytes", [60 * MIB, 100 * MIB, 8 * GIB])
def test_the_parts_add_up_to_no_more_than_there_is(available, num_bytes, gather):
    available(num_bytes)
    plan = plan_of(weights=10 * MIB, gather=gather)
    assert plan.weight_bytes + plan.page_bytes + plan.temporary_bytes <= plan.available_bytes == num_bytes
    assert plan.page_bytes == plan.num_pages * plan.page_size * PER_TOKEN
    assert plan.num_cached_tokens == plan.num_pages * plan.page_size
    assert plan.max_gathered_tokens == (plan.num_cached_tokens if gather else 0)
    assert plan.max_model_len <= plan.num_cached_tokens


@given(
    num_bytes=st.integers(1, 64 * MIB),
    weights=st.integers(0, 32 * MIB),
    max_model_len=st.none() | st.integers(1, 4096),
    kv_cache_bytes=st.none() | st.integers(1, 64 * MIB),
    page_size=st.integers(1, 64),
    gather=st.booleans(),
)
def test_a_plan_fits_or_is_refused(num_bytes, weights, max_model_len, kv_cache_bytes, page_size, gather):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "device_bytes", lambda: num_bytes)
        try:
            plan = plan_of(
                weights=weights,
                gather=gather,
                max_model_len=max_model_len,
                kv_cache_bytes=kv_cache_bytes,
                page_size=page_size,
            )
        except MemoryPlanError:
            return
    assert plan.weight_bytes + plan.page_bytes + plan.temporary_bytes <= num_bytes
    assert 1 <= plan.max_model_len <= plan.num_cached_tokens
    assert max_model_len in (None, plan.max_model_len)
    assert kv_cache_bytes is None or plan.page_bytes <= kv_cache_bytes < plan.page_bytes + page_size * PER_TOKEN


@pytest.mark.parametrize("pages", [1, 7, 1000])
def test_explicit_bytes_of_pages_are_honoured_to_the_page(available, pages):
    available(GIB)
    for extra in (0, 1, 16 * PER_TOKEN - 1):
        plan = plan_of(kv_cache_bytes=pages * 16 * PER_TOKEN + extra)
        assert plan.num_pages == pages


def test_pages_default_to_one_gib_on_cpu_or_what_all_sequences_can_use(available):
    available(64 * GIB)
    assert plan_of(max_num_seqs=4).num_cached_tokens == 4 * CONFIG.max_position_embeddings
    assert plan_of(max_num_seqs=1000).page_bytes == GIB
    long = replace(CONFIG, max_position_embeddings=1 << 23)
    assert plan_of(config=long, max_model_len=1 << 22).max_model_len == 1 << 22  # asked for, though above a GiB


def test_without_a_wish_the_context_is_the_models_or_shrinks_to_what_fits(available):
    available(GIB)
    assert plan_of().max_model_len == CONFIG.max_position_embeddings
    assert plan_of(kv_cache_bytes=10 * 16 * PER_TOKEN).max_model_len == 160


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 1000, "kv_cache_bytes": 999 * PER_TOKEN},
        {"max_model_len": 4096, "weights": GIB - 5 * MIB},
        {"weights": 2 * GIB},
        {"kv_cache_bytes": 2 * GIB},
        {"kv_cache_bytes": 1},
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence_with_the_numbers(available, options):
    available(GIB)
    with pytest.raises(MemoryPlanError) as caught:
        plan_of(**options)
    message = str(caught.value)
    assert "\n" not in message and ". " not in message and "-" not in message
    for part in ("weights", "temporaries", "1.0 GiB", "got room for", "max_model_len", "kv_cache_bytes"):
        assert part in message


def test_a_context_beyond_the_models_is_refused(available):
    """Learned positions end there, and rotary ones were never trained further."""
    available(GIB)
    with pytest.raises(ConfigError, match=r"max_model_len must be at most 4,096.* got 5,000"):
        plan_of(max_model_len=5000)


def test_a_smaller_dtype_holds_more_tokens(available):
    available(GIB)
    full, half = plan_of(kv_cache_bytes=MIB), plan_of(kv_cache_bytes=MIB, dtype=np.float16)
    assert half.kv_bytes_per_token * 2 == full.kv_bytes_per_token == PER_TOKEN
    assert half.num_cached_tokens == 2 * full.num_cached_tokens


def test_bigger_steps_take_more_temporaries(available):
    available(8 * GIB)
    small = plan_of(gather=False, max_num_batched_tokens=256, max_num_seqs=8)
    assert plan_of(gather=False, max_num_batched_tokens=512, max_num_seqs=8).temporary_bytes > small.temporary_bytes
    assert plan_of(gather=False, max_num_batched_tokens=256, max_num_seqs=16).temporary_bytes > small.temporary_bytes


def test_the_printed_plan_lists_every_part(available):
    available(GIB)
    plan = plan_of(kv_cache_bytes=2 * MIB)
    weights, pages, temporaries, total = str(plan).splitlines()
    assert weights.split() == ["weights", "1.0", "MiB"]
    assert "2.0 MiB" in pages and "256 pages of 16 tokens, 4,096 tokens in all, 512 bytes a token in float32" in pages
    assert temporaries.startswith("temporaries") and "2.0 MiB of it context copied for decoding" in temporaries
    assert "1.0 GiB" in total and total.endswith("longest context 4,096 tokens")
    for part in ("1.0 MiB weights", "2.0 MiB pages for 4,096 tokens", "temporaries", "context up to 4,096 tokens"):
        assert part in plan.summary
    assert "\n" not in plan.summary


def test_the_memory_of_this_machine_is_a_sensible_number():
    assert 64 * MIB < plan_module.device_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, value) for name in ("max_num_seqs", "max_num_batched_tokens", "page_size") for value in (0, -1, 1.0, None)]
    + [(name, value) for name in ("max_model_len", "kv_cache_bytes") for value in (0, -5, True, "8", 2.5)]
    + [("dtype", "int8"), ("dtype", "float64"), ("dtype", np.float32)],
)
def test_engine_options_out_of_range_are_refused_by_name_and_value(field, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})
    assert str(caught.value).startswith(f"{field} must be ") and str(caught.value).endswith(f"got {value!r}")


def test_engine_options_are_frozen_and_hashable():
    assert hash(EngineConfig(page_size=8)) == hash(EngineConfig(page_size=8))
    with pytest.raises(AttributeError):
        EngineConfig().page_size = 4
