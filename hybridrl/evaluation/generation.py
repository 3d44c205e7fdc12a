"""Responses of a model to a file of prompts: `main_generation`. Runs in the driver.

Each prompt and sample is one request. A router gives requests to the rollouts as these become free. A sample depends on
the seed, its row and its number, and not on the number of rollouts or on what was generated before.
"""

import asyncio
import logging
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from typing import Any

import pyarrow as pa

from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.config.schema.data import DataConfig
from hybridrl.config.schema.generation import GenerationConfig
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.driver.cluster.ray_cluster import start_ray
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.evaluation.output_files import OutputParts
from hybridrl.serving.openai.standalone import one_replica, replicas_on_ray
from hybridrl.serving.replicas import Replicas
from hybridrl.serving.router import ReplicaRouter
from hybridrl.trainer.checkpoint.fingerprint import hash_files
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_dataset import RLHFDataset
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.workers.engine.model_files import check_model
from hybridrl.workers.images import load_processor
from hybridrl.workers.rollout.base import RolloutSetup, load_special_tokens, rollout_class
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, default_seeds

logger = logging.getLogger(__name__)
COLUMN = "responses"
MAX_OPEN = 4096  # requests at a time; a rollout runs max_num_seqs of them and keeps the others in a queue


def generate_file(config: GenerationConfig) -> None:
    """Write the rows of `data.path` with the column `responses` to `data.output_path`.

    Parts that an earlier, interrupted command has written are kept.

    Raises:
        ConfigError: The output exists and was made from something else, or the model cannot be used.
        DataError: A row is no prompt, is too long, or has images that model or rollout do not read.
    """
    model, data = config.model, config.data
    assert model.path is not None and data.output_path is not None  # the check of the settings demands it
    tokenizer = load_tokenizer(model.path, key="model.path", trust_remote_code=model.trust_remote_code)
    check_model(model.path, key="model.path", tokenizer=tokenizer, trust_remote_code=model.trust_remote_code)
    prompts = _load_prompts(config, tokenizer)
    made_from = {name: asdict(getattr(config, name)) for name in ("data", "model", "rollout")}
    del made_from["data"]["output_path"]  # a file that was moved is the same
    made_from["content"] = {"data": hash_files(data.path), "model": hash_files([model.path])}
    made_from["seed"] = {"seed": config.trainer.seed}
    parts = OutputParts(data.output_path, num_rows=len(prompts), size=data.batch_size, made_from=made_from)
    if parts.is_complete:
        show(f"{data.output_path}: is complete already, nothing is generated\n")
        return
    missing = [*parts.missing()]
    if missing:
        logger.info("%d of %d prompts have no responses yet", sum(end - start for start, end in missing), len(prompts))
        with _replicas(config) as replicas:
            asyncio.run(_generate(config, prompts, tokenizer, replicas=replicas, parts=parts))
    parts.finish()
    show(f"{data.output_path}: {len(prompts)} rows with {data.n_samples} responses each\n")


def _load_prompts(config: GenerationConfig, tokenizer: Any) -> RLHFDataset:
    """Return the prompts, with the images of a model that reads them."""
    data, rollout = config.data, config.rollout.name
    names = {entry.name for entry in fields(DataConfig)}
    shared = {entry.name: getattr(data, entry.name) for entry in fields(data) if entry.name in names}
    model = ModelConfig(path=config.model.path, trust_remote_code=config.model.trust_remote_code)
    processor = load_processor(model, tokenizer, data)
    settings = DataConfig(**shared, max_prompt_length=config.rollout.prompt_length)
    prompts = RLHFDataset(data.path, tokenizer, settings, processor)
    family = "" if processor is None else processor.model_type
    if prompts.has_images and family not in rollout_class(rollout).capabilities.images:
        raise ConfigError(
            f"rollout.name={rollout}: it does not run with images and {model.path} (model_type={family}); use "
            "rollout.name=hf (docs/images.md)"
        )
    return prompts


def _replicas(config: GenerationConfig) -> AbstractContextManager[Replicas]:
    """Return where requests are served: this process, or processes on Ray."""
    trainer = config.trainer
    if trainer.backend == "local":
        return one_replica(_setup(config), num_threads=trainer.num_threads)
    start_ray(num_nodes=trainer.nnodes)
    return replicas_on_ray(_setup(config), [trainer.n_gpus_per_node] * trainer.nnodes)


def _setup(config: GenerationConfig) -> RolloutSetup:
    model, chosen = config.model, config.rollout
    assert model.path is not None
    names = {entry.name for entry in fields(RolloutConfig)} - {"temperature"}
    shared = {entry.name: getattr(chosen, entry.name) for entry in fields(chosen) if entry.name in names}
    tokens = load_special_tokens(model.path, trust_remote_code=model.trust_remote_code)
    return RolloutSetup(
        model.path,
        RolloutConfig(**shared),
        tokens.eos_ids,
        tokens.pad_id,
        max_prompt_length=chosen.prompt_length,
        max_response_length=chosen.response_length,
        device=config.trainer.device,
        trust_remote_code=model.trust_remote_code,
        max_images=config.data.max_images_per_prompt,
    )


async def _generate(
    config: GenerationConfig, prompts: RLHFDataset, tokenizer, *, replicas: Replicas, parts: OutputParts
) -> None:
    """Write all missing parts."""
    rows, chosen = ParquetRows(config.data.path), config.rollout
    is_greedy = not chosen.do_sample or chosen.temperature == 0
    sampling = SamplingParams(
        chosen.response_length,
        temperature=chosen.temperature or 1.0,
        top_k=chosen.top_k or -1,  # 0 is off in verl
        top_p=chosen.top_p,
        do_sample=not is_greedy,
        logprobs=False,
    )
    seeds = default_seeds(config.trainer.seed, len(prompts)).tolist()
    room = asyncio.Semaphore(MAX_OPEN)
    async with ReplicaRouter(replicas) as router:

        async def respond(row: int, sample: int, prompt: dict[str, Any]) -> str:
            tokens, images = tuple(prompt["raw_prompt_ids"]), prompt.get(IMAGE_INPUTS)
            request = Request(f"{row}:{sample}", tokens, sampling, seeds[row], sample=sample, images=images)
            async with room:
                output = await router.generate(request, conversation=str(row))
            return tokenizer.decode(output.token_ids, skip_special_tokens=True)

        for start, end in parts.missing():
            num, read = config.data.n_samples, [(row, prompts[row]) for row in range(start, end)]
            texts = await asyncio.gather(*(respond(row, i, prompt) for row, prompt in read for i in range(num)))
            responses = pa.array([texts[i : i + num] for i in range(0, len(texts), num)], pa.list_(pa.string()))
            table = rows.slice(start, end)
            if COLUMN in table.column_names:
                table = table.drop_columns([COLUMN])
            parts.write(start, table.append_column(COLUMN, responses))
            logger.info("%d of %d prompts", end, len(prompts))
