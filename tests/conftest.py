"""Fixtures for many tests: a tiny model with a real tokenizer, a small Ray cluster, real raw data.

Every process uses one thread. Tests marked `vllm` or `gpu` are skipped, with the reason, where it is missing.
"""

import os

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the package; each would compile it
os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"
)  # before torch is imported
# Ray starts its workers with nice 15: beside another busy test file they would hardly run.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name is Ray's
os.environ["HYBRIDRL_CHECK_STAGES"] = "1"  # every stage is compared with its declaration, see run/column_check.py

import gc
import logging
import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
gc.set_threshold(20_000)  # new objects between two collections; with Python's 700 they take a tenth of the tests' time
sys.dont_write_bytecode = False  # this process has read the variable

# The files that take longest, by seconds: pytest-xdist hands files out in this order, so that none of them begins
# when the other processes have nothing left to do.
LONG_FILES = (
    "end_to_end/test_main_ppo.py",
    "framework/parallel/test_runner.py",
    "end_to_end/test_images.py",
    "end_to_end/test_dynamic_sampling.py",
    "config/test_gguf_models.py",
    "single_controller/test_failures.py",
    "end_to_end/test_lag.py",
    "test_main_job.py",
    "test_imports.py",
    "families/test_families.py",
    "workers/rollout/test_request_engine.py",
    "examples/test_examples.py",
    "testing/test_engine.py",
    "single_controller/test_ray_worker_group.py",
    "single_controller/test_call_cycles.py",
    "end_to_end/test_algorithms.py",
    "sdk/test_runtime.py",
    "workers/rollout/test_vllm.py",
    "driver/cluster/test_holder.py",
    "driver/test_supervisor.py",
    "training_service/test_service.py",
    "end_to_end/test_distill.py",
    "end_to_end/test_megatron.py",
    "testing/test_rollout.py",
    "end_to_end/test_leaving.py",
    "trainer/recovery/test_snapshots.py",
    "workers/rollout/sampling/test_sampler.py",
    "workers/engine/megatron/test_engine.py",
    "rewards/test_process_pool.py",
    "end_to_end/test_main_dpo.py",
    "config/test_load.py",
    "end_to_end/test_rollout_correction.py",
    "testing/test_transport.py",
)
NUM_CPUS = 4  # worker slots, on any machine: two ranks of two roles
OBJECT_STORE_BYTES = 200 * 1024**2
SHARED_DATA = "HYBRIDRL_TEST_DATA"  # environment variable: a directory with the raw data
VOCABULARY_SIZE = 400
TEXTS = [
    "Tom buys 3 boxes of 4 pens and gives 2 away. How many pens does he have? <<3*4=12>> <<12-2=10>> #### 10",
    "Anna earns 5 dollars a day for 6 days and spends 8. How much is left? <<5*6=30>> <<30-8=22>> #### 22",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = {}
    if find_spec("vllm") is None:
        absent["vllm"] = "vLLM is not installed (pip install -e '.[vllm]')"
    if not torch.cuda.is_available() and "GPU_TESTS_ON" not in os.environ:
        absent["gpu"] = "this machine has no CUDA device"
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if "PYTEST_XDIST_WORKER" in os.environ:
        turn = {str(Path(__file__).parent / name): number for number, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: turn.get(str(item.path), len(turn)))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, with one thread, whatever ran before it in this process."""
    torch.set_num_threads(1)  # a run in this process has chosen its own number
    if logging.root.level != logging.INFO:  # each change of it empties what all loggers remember
        logging.root.setLevel(logging.INFO)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def vllm_groups() -> Iterator[None]:
    """vLLM keeps its process groups per process: a file with other sizes, or after another world, makes its own."""
    yield
    state = sys.modules.get("vllm.distributed.parallel_state")
    for name, value in [] if state is None else [*vars(state).items()]:
        if isinstance(value, state.GroupCoordinator):
            setattr(state, name, None)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray cluster on this machine for the whole session, without dashboard."""
    import ray

    from tests.support.ray_forks import forked_workers

    if ray.is_initialized():
        yield
        return
    with forked_workers(tmp_path_factory.mktemp("ray")):
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        yield
        ray.shutdown()


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager in which no file of this process can grow (RLIMIT_FSIZE)."""

    @contextmanager
    def limited() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a two-layer Qwen2, random weights, and a byte-level BPE tokenizer with a chat template."""
    return make_tiny_qwen2(tmp_path_factory.mktemp("tiny_qwen2"))


def make_tiny_qwen2(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _train_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 32, the minimum of vLLM on the CPU
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_qwen2: Path):
    """The tokenizer of `tiny_qwen2`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_qwen2)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory with real raw data (gsm8k_train.jsonl and others); tests that need it are skipped without it."""
    places = [Path(os.environ[SHARED_DATA])] if SHARED_DATA in os.environ else []
    places.append(Path(__file__).parents[2] / "shared" / "data")  # beside the checkout
    for place in places:
        if (place / "gsm8k_train.jsonl").exists():
            return place
    pytest.skip(f"no raw data: set {SHARED_DATA} to a directory with gsm8k_train.jsonl")


def _train_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
