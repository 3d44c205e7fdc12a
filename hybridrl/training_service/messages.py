"""The protobuf schema of Tinker's API, as SDK 0.38 has it.

`wire` uses it. A test compares `SCHEMA` with the installed SDK. The server therefore needs protobuf, and not the SDK.
"""

import functools
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
# message -> fields: number, name and type. `*` repeated, `?` optional, `/g` a member of the oneof g, `map:V` from str.
SCHEMA = {
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes?, 3 topk_prompt_logprobs TopkLogprobs?, "
    "4 prompt_cache_hit_tokens int32, 5 target_prompt_logprobs Tensor?, 6 prompt_alt_tokens PromptAltTokens?",
    "PromptAltTokens": "1 tokens Tensor, 2 logprobs Tensor",
    "SampledSequence": "1 stop_reason StopReason, 2 tokens bytes, 3 logprobs bytes?, "
    "4 topk_sampled_logprobs TopkLogprobs?",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes/encoding, 2 sparse_csr SparseCsr/encoding, 3 dtype DType, 4 shape int64*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype DType, 4 trailing_shape int64*",
    "ArrayRecord": "1 type_tag string, 2 fields map:BatchedTensor, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics map:double",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config map:double, 6 forward_only bool, 7 loss_fn_config_v2 map:LossConfigValue",
    "LossConfigValue": "1 number double/value, 2 text string/value",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs map:Tensor, 3 model_input_spans ProvenanceSpan*, "
    "4 loss_fn_input_spans ProvenanceSpan*",
    "ProvenanceSpan": "1 prompt_tokens PromptProvenanceSpan/span, 2 sampled_tokens SampledProvenanceSpan/span",
    "PromptProvenanceSpan": "1 sequence_id string, 2 offset int64, 3 length int64",
    "SampledProvenanceSpan": "1 sequence_id string, 2 offset int64, 3 length int64",
    "Chunk": "1 encoded_text EncodedTextChunk/chunk, 2 image ImageChunk/chunk, 3 dmel DmelChunk/chunk",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes, 2 format string, 3 expected_tokens int32?, 4 override_dimensions ImageDimensions?",
    "ImageDimensions": "1 width uint32, 2 height uint32",
    "DmelChunk": "1 dmel bytes",
}
ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
STOPPED, LENGTH = 0, 1  # of StopReason
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # of DType
_Field = descriptor_pb2.FieldDescriptorProto


@functools.cache
def messages() -> Mapping[str, Any]:
    """Return the message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"hybridrl/{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in SCHEMA.items():
        _add_fields(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in SCHEMA}


def _add_fields(message: Any, fields: str) -> None:
    groups: list[str] = []
    optional: list[Any] = []
    for text in fields.split(", "):
        number, name, kind = text.split()
        kind, _, group = kind.partition("/")
        added = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
        if group:
            groups += [group] if group not in groups else []
            added.oneof_index = groups.index(group)
        if kind.startswith("map:"):
            kind = _add_entry(message, name, kind.removeprefix("map:")) + "*"
        if kind.endswith("*"):
            added.label = _Field.LABEL_REPEATED
        if kind.endswith("?"):
            optional.append(added)
        _set_type(added, kind.rstrip("*?"))
    for group in groups:
        message.oneof_decl.add(name=group)
    for added in optional:  # each has a oneof of its own, after the others
        added.proto3_optional, added.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{added.name}")


def _add_entry(message: Any, name: str, kind: str) -> str:
    """Add the entry type of a map to a message and return its name."""
    title = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    entry = message.nested_type.add(name=title)
    entry.options.map_entry = True
    for number, field_name, field_kind in ((1, "key", "string"), (2, "value", kind)):
        added = entry.field.add(name=field_name, number=number, label=_Field.LABEL_OPTIONAL)
        _set_type(added, field_kind)
    return f"{message.name}.{title}"


def _set_type(added: Any, kind: str) -> None:
    if kind[0].islower():
        added.type = getattr(_Field, f"TYPE_{kind.upper()}")
        return
    added.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
    added.type_name = f".{PACKAGE}.{kind}"
