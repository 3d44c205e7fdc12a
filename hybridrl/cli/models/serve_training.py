"""`hybridrl serve-training`: a model that clients train by Tinker's API."""

import argparse
import sys
from dataclasses import fields

from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.training_service.http.routes import TrainingEndpoint
from hybridrl.training_service.program import ServiceOptions, serve_forever
from hybridrl.workers.engine.model_files import check_model


def serve_training(arguments: argparse.Namespace) -> None:
    """Run `hybridrl serve-training` until Ctrl-C."""
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port={arguments.port}: must be from 0 (any free port) to 65535")
    trust = arguments.trust_remote_code
    tokenizer = load_tokenizer(arguments.model, key="model", trust_remote_code=trust)
    check_model(arguments.model, key="model", tokenizer=tokenizer, trust_remote_code=trust)
    names = {field.name for field in fields(ServiceOptions)} - {"num_threads"}  # the options of the command
    options = ServiceOptions(**{name: getattr(arguments, name) for name in names})
    serve_forever(options, host=arguments.host, port=arguments.port, on_start=_print_address)


def _print_address(endpoint: TrainingEndpoint) -> None:
    name = endpoint.service.settings.base_model
    show(f"training {name} at http://{endpoint.host}:{endpoint.port}\n")
    sys.stdout.flush()
