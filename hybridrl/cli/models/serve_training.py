"""`hybridrl serve-training`: a model that clients train by Tinker's API."""

import argparse
from dataclasses import fields

from hybridrl.cli.arguments import check_port
from hybridrl.cli.models.serve import checked_tokenizer
from hybridrl.driver.terminal import show
from hybridrl.training_service.http.routes import TrainingEndpoint
from hybridrl.training_service.program import ServiceOptions, serve_forever


def serve_training(arguments: argparse.Namespace) -> None:
    """Run `hybridrl serve-training` until Ctrl-C."""
    check_port(arguments.port)
    checked_tokenizer(arguments.model, trust_remote_code=arguments.trust_remote_code)
    names = {field.name for field in fields(ServiceOptions)} - {"num_threads"}  # the options of the command
    options = ServiceOptions(**{name: getattr(arguments, name) for name in names})
    serve_forever(options, host=arguments.host, port=arguments.port, on_start=_print_address)


def _print_address(endpoint: TrainingEndpoint) -> None:
    name = endpoint.service.settings.base_model
    show(f"training {name} at http://{endpoint.host}:{endpoint.port}\n")
