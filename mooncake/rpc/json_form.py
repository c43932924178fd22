"""Messages as JSON, for scripts and for browsers."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def json_form(message: Message) -> dict[str, object]:
    """Every field by its name in the .proto file. What counts (uint64) is a number, and what only names something
    (fixed64) the text that protobuf's JSON has for both: many readers keep 53 bits of a number."""
    said = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _count(said, message.DESCRIPTOR)
    return said


def _count(said: dict[str, Any], form: Any) -> None:
    """``form`` is the descriptor of the message that ``said`` is."""
    for name, value in said.items():
        field = form.fields_by_name[name]
        entries = field.message_type
        if entries is not None and entries.GetOptions().map_entry:
            of_value = entries.fields_by_name["value"]
            said[name] = {key: _counted(each, of_value) for key, each in value.items()}
        elif isinstance(value, list):
            said[name] = [_counted(each, field) for each in value]
        else:
            said[name] = _counted(value, field)


def _counted(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        _count(value, field.message_type)
    return int(value) if field.type == FieldDescriptor.TYPE_UINT64 else value
