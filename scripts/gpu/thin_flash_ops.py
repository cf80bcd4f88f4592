#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes FA3's library small enough to carry to a machine without a network: 1 GB packs to 12 MB instead of 90.

    python3 scripts/gpu/thin_flash_ops.py sgl_kernel/flash_ops.abi3.so THIN.so && xz -9 THIN.so

Of the device code it keeps what the bench's peer `fa3_cascade` runs: for sm_90, MLA in bf16 (head dim 64, V 512) and
all that is no attention main loop (combining, scheduling, merging). Every other image is replaced by a valid cubin
that does nothing, for a card that is not there, so the library loads and a kernel that is gone fails at its launch.
Needs nvcc.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAIN_LOOP = b"CollectiveMainloopFwd"
WANTED = b"ILi64EEESA_SA_EEELi512ENS_10bfloat16_tE"
"""In the mangled name of the main loop of head dim 64, V 512, bf16."""
FATBIN_MAGIC, FATBIN_HEADER = 0xBA55ED50, struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI")
"""Kind, flags, header size, image size, and after four more fields the architecture."""
KEPT_ARCH, OTHER_ARCH = 90, 120


class Image(NamedTuple):
    """One piece of device code in the file."""

    entry: int  # offset of its header
    start: int
    size: int
    arch: int


def section(data: mmap.mmap, wanted: str) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit ELF file.

    Raises:
        ValueError: it has none of that name.
    """
    table, entry_size, count, names_at = struct.unpack_from("<Q10xHHH", data, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, offset, size in headers:
        end = data.find(b"\0", names + name)
        if data[names + name : end].decode() == wanted:
            return offset, size
    raise ValueError(f"no section {wanted}")


def images(data: mmap.mmap) -> Iterator[Image]:
    """Every image of every fat binary."""
    at, size = section(data, ".nv_fatbin")
    end = at + size
    while at < end:
        magic, _, header, body = FATBIN_HEADER.unpack_from(data, at)
        if magic != FATBIN_MAGIC:  # padding
            at += 8
            continue
        entry, at = at + header, at + header + body
        while entry < at:
            _, _, entry_header, image, *_, arch = ENTRY.unpack_from(data, entry)
            yield Image(entry, entry + entry_header, image, arch)
            entry += entry_header + image


def is_wanted(data: mmap.mmap, image: Image) -> bool:
    """Whether the bench may run code of this image on an H100 or H200."""
    code = data[image.start : image.start + image.size]
    return image.arch == KEPT_ARCH and (WANTED in code or MAIN_LOOP not in code)


def nothing() -> bytes:
    """A cubin with one empty kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "nothing.cu"), Path(folder, "nothing.cubin")
        source.write_text("__global__ void nothing() {}\n", encoding="utf-8")
        subprocess.run(["nvcc", "-cubin", f"-arch=sm_{OTHER_ARCH}", "-o", str(cubin), str(source)], check=True)
        return cubin.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("thin", type=Path, help="written")
    args = parser.parse_args()
    shutil.copyfile(args.library, args.thin)
    kept, blanked, empty = 0, 0, nothing()
    with args.thin.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for image in images(data):
            if is_wanted(data, image) or len(empty) > image.size:
                kept += image.size
                continue
            struct.pack_into("<I", data, image.entry + ENTRY.size - 4, OTHER_ARCH)
            data[image.start : image.start + image.size] = empty + bytes(image.size - len(empty))
            blanked += image.size
    print(f"{args.thin}: {kept / 1e6:.0f} MB of device code kept, {blanked / 1e6:.0f} MB blanked")


if __name__ == "__main__":
    main()
