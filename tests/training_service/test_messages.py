import importlib.util
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from google.protobuf import descriptor_pb2

from hybridrl.training_service.messages import messages

SDK = "0.38."


def sdk_schema():
    """The schema in the installed SDK. Its module is loaded alone: the SDK itself needs more packages."""
    try:
        found = distribution("tinker")
    except PackageNotFoundError:
        pytest.skip("the SDK is not installed (pip install 'tinker>=0.38,<0.39')")
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
