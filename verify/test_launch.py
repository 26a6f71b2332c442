"""The structs that Python shares with C++ are laid out alike."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from common import launch, tensor_map
from common.build import host_compiler
from common.step import ROOT

STRUCTS = {
    "Strides": launch._Strides,
    "AttentionParams": launch.AttentionParams,
    "Extent": launch._Extent,
    "KernelLaunch": launch._KernelLaunch,
    "Workspace": launch._Workspace,
    "Box": launch.Box,
    "LaunchDescriptor": launch.LaunchDescriptor,
    "simt::TensorMapFields": tensor_map.TensorMapFields,
}
PROGRAM = """
#include <stddef.h>
#include <stdio.h>
using Element = uint16_t;
#include "launch.h"
#include "simt/tensor_map.h"
int main() {{
    {statements}
    printf("%d\\n", simt::VALID_TENSOR_MAP);
}}
"""


def field_names(struct: type[ctypes.Structure]) -> list[str]:
    return [name for name, _ in struct._fields_ if name != "_padding"]


@pytest.fixture(scope="module")
def told_by_cpp(tmp_path_factory) -> list[int]:
    """Of each struct its size and each field's offset and size, then the magic number."""
    statements = []
    for name, struct in STRUCTS.items():
        statements.append(f'printf("%zu\\n", sizeof({name}));')
        statements += [
            f'printf("%zu %zu\\n", offsetof({name}, {field}), sizeof({name}::{field}));'
            for field in field_names(struct)
        ]
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.cpp").write_text(PROGRAM.format(statements="\n    ".join(statements)))
    command = [*host_compiler(), "-std=c++20", "-include", "stdint.h", f"-I{ROOT / 'common'}"]
    subprocess.run([*command, folder / "layout.cpp", "-o", folder / "layout"], check=True)
    printed = subprocess.run([folder / "layout"], check=True, capture_output=True, text=True)
    return [int(number) for number in printed.stdout.split()]


def test_structs_have_the_same_layout_in_python_and_cpp(told_by_cpp) -> None:
    numbers = iter(told_by_cpp)
    for name, struct in STRUCTS.items():
        assert next(numbers) == ctypes.sizeof(struct), name
        for field in field_names(struct):
            place = getattr(struct, field)
            assert (next(numbers), next(numbers)) == (place.offset, place.size), f"{name}.{field}"
    assert next(numbers) == tensor_map.VALID_TENSOR_MAP
    assert ctypes.sizeof(launch.AttentionParams) % 128 == 0, "nvcc's alignas(128)"
