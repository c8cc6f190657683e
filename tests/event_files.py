"""Parse TensorBoard event files by hand: bytes to records, and records to fields."""

import io
import struct

from flowgrpo.report.tensorboard import masked_crc


def records(data: bytes) -> list[bytes]:
    """Split the bytes of an event file into its records, and assert that their checksums are right."""
    parsed = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + size]
        sums = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + size : 16 + size])
        assert sums == (masked_crc(data[:8]), masked_crc(body))
        parsed, data = [*parsed, body], data[16 + size :]
    return parsed


def varint(file: io.BytesIO) -> int:
    value = shift = 0
    while (byte := file.read(1)[0]) >= 0x80:
        value, shift = value | (byte & 0x7F) << shift, shift + 7
    return value | byte << shift


def fields(data: bytes) -> list[tuple[int, object]]:
    """The fields of a message and their values, nested ones as bytes."""
    parsed, file = [], io.BytesIO(data)
    while file.tell() < len(data):
        number, kind = divmod(varint(file), 8)
        if kind in (1, 5):
            (value,) = struct.unpack("<d" if kind == 1 else "<f", file.read(8 if kind == 1 else 4))
            parsed.append((number, value))
        else:
            parsed.append((number, varint(file) if kind == 0 else file.read(varint(file))))
    return parsed
