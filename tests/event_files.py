"""TensorBoard's event files, read by hand: bytes flow in, records and their fields flow out."""

import struct

from flowgrpo.report.events import masked_crc


def records(data: bytes) -> list[bytes]:
    """What a file holds, whose checksums are right."""
    found = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + size]
        sums = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + size : 16 + size])
        assert sums == (masked_crc(data[:8]), masked_crc(body))
        found, data = [*found, body], data[16 + size :]
    return found


def fields(data: bytes) -> list[tuple[int, object]]:
    """The fields of a message and their values, nested ones as bytes."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value, shift = value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        size = {0: 0, 1: 8, 5: 4}.get(key & 7)
        value: object = varint() if key & 7 in (0, 2) else None
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        elif size:
            value, at = struct.unpack("<d" if size == 8 else "<f", data[at : at + size])[0], at + size
        found.append((key >> 3, value))
    return found
