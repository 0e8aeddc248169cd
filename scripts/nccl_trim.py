#!/usr/bin/env python3
"""Makes a copy of libnccl.so.2 that compresses well and does the same on one kind of GPU:
scripts/nccl_trim.py LIBRARY COPY ARCHITECTURE

Code for other GPUs becomes zeros, its headers stay; so does what only a later link would use. ARCHITECTURE
is a number as 90. Every byte outside of that code stays.
"""

import struct
import sys

CONTAINER = 0xBA55ED50
# Machine code, as opposed to PTX.
ELF_CODE = 2


def sections(data):
    offset, = struct.unpack_from("<Q", data, 0x28)
    count, names = struct.unpack_from("<HH", data, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * n) for n in range(count)]
    text = headers[names][4]
    for name, _, _, _, start, size, *_ in headers:
        begin = text + name
        yield bytes(data[begin:data.index(b"\0", begin)]).decode(), start, start + size


def entries(data, at, end):
    """Kind, architecture and the bytes of each piece of GPU code of a section."""
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic == 0:
            at += 8
            continue
        if magic != CONTAINER:
            raise SystemExit(f"no container of GPU code at {at:#x}: this library has another layout")
        piece, at = at + header, at + header + size
        while piece < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, piece)
            architecture, = struct.unpack_from("<I", data, piece + 28)
            yield kind, architecture, piece + header, piece + header + size
            piece += header + size


def main():
    source, target, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(source, "rb") as file:
        data = bytearray(file.read())
    kept = zeroed = 0
    for name, start, end in sections(data):
        if name not in (".nv_fatbin", "__nv_relfatbin"):
            continue
        for kind, architecture, first, last in entries(data, start, end):
            if name == ".nv_fatbin" and kind == ELF_CODE and architecture == wanted:
                kept += last - first
            else:
                data[first:last] = bytes(last - first)
                zeroed += last - first
    if not kept:
        raise SystemExit(f"{source} has no code for sm_{wanted}")
    with open(target, "wb") as file:
        file.write(data)
    print(f"{target}: {kept >> 20} MiB of code for sm_{wanted} kept, {zeroed >> 20} MiB zeroed")


if __name__ == "__main__":
    main()
