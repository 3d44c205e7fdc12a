"""`hybridrl serve`: a model, or a checkpoint's policy, behind an endpoint."""

import argparse
import os
from typing import Any

from hybridrl.cli.arguments import check_port
from hybridrl.cli.models.export import model_directory
from hybridrl.driver.cluster.ray_cluster import start_ray
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.serving.openai.server import Endpoint
from hybridrl.serving.openai.standalone import StandaloneModel, one_replica, replicas_on_ray, serve_forever
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.workers.engine.model_files import check_model
from hybridrl.workers.rollout.base import rollout_class


def serve(arguments: argparse.Namespace) -> None:
    """Run `hybridrl serve` until Ctrl-C."""
    if arguments.replicas < 1:
        raise ConfigError(f"--replicas={arguments.replicas}: must be 1 or more")
    check_port(arguments.port)
    with model_directory(arguments.model, trust_remote_code=arguments.trust_remote_code) as path:
        model = loaded_model(arguments, path)
        if arguments.replicas > 1:
            start_ray()
        setup, num = model.setup(), arguments.replicas
        replicas = one_replica(setup) if num == 1 else replicas_on_ray(setup, [num])
        serve_forever(model, replicas, host=arguments.host, port=arguments.port, on_start=_print_address)


def _print_address(endpoint: Endpoint) -> None:
    show(f"serving {endpoint.served.name} at http://{endpoint.host}:{endpoint.port}/v1\n")


def loaded_model(arguments: argparse.Namespace, path: str) -> StandaloneModel:
    """Return the model in a directory as the arguments of `serve` and `chat` describe it.

    Raises:
        ConfigError: The engine cannot serve requests, or the model cannot be used.
    """
    if not rollout_class(arguments.engine, setting="--engine").capabilities.requests:
        raise ConfigError(
            f"--engine={arguments.engine}: needs the capability requests, which it does not declare; use hf"
        )
    return StandaloneModel(
        path=path,
        name=os.path.basename(os.path.normpath(arguments.model)),
        tokenizer=checked_tokenizer(path, trust_remote_code=arguments.trust_remote_code),
        trust_remote_code=arguments.trust_remote_code,
        engine=arguments.engine,
        max_length=arguments.max_length,
        device=arguments.device,
    )


def checked_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    """Return a model's tokenizer. Raises ConfigError if the model cannot be used."""
    tokenizer = load_tokenizer(path, key="model", trust_remote_code=trust_remote_code)
    check_model(path, key="model", tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    return tokenizer
