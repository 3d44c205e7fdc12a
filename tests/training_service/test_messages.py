import importlib.util
import os
import subprocess
from importlib.metadata import distributions

import pytest
from google.protobuf import descriptor_pb2

from hybridrl.training_service.messages import messages

SDK, SDK_PYTHON = "0.38.", "HYBRIDRL_TINKER_PYTHON"


def sdk_schema():
    """The schema of another environment's SDK, whose module is loaded alone."""
    if (python := os.environ.get(SDK_PYTHON)) is None:
        pytest.skip(f"{SDK_PYTHON} is not set: make environments")
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    [found] = distributions(name="tinker", path=[site])
    path = found.locate_file("tinker/proto/tinker_public_pb2.py")
    spec = importlib.util.spec_from_file_location("tinker_public_pb2_alone", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return found.version, module.DESCRIPTOR


def by_message(descriptor, *, names):
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    for message in file.message_type:
        for field in [*message.field, *(field for entry in message.nested_type for field in entry.field)]:
            field.ClearField("json_name")
    enums = {enum.name: [(value.name, value.number) for value in enum.value] for enum in file.enum_type}
    return {m.name: m for m in file.message_type if m.name in names}, enums


def test_the_schema_is_that_of_the_installed_sdk():
    version, theirs = sdk_schema()
    ours = messages()["Datum"].DESCRIPTOR.file
    assert version.startswith(SDK)
    assert by_message(ours, names=messages()) == by_message(theirs, names=messages())
