"""v12 hands work tiles from block to block: not a bit of its results may differ from v11's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.catalog import all_steps
from common.problem import Shape
from common.runtime.backend import empty_outputs, run
from common.runtime.cpu import CpuBackend
from verify.cases import find_cases

V11, V12 = (next(step for step in all_steps() if step.name == name) for name in ("v11", "v12"))


# On 4 multiprocessors 6 work tiles are shares of one and a half: every other share ends with one.
@pytest.mark.parametrize(
    ("name", "shape", "multiprocessors"),
    [
        ("shares_walks", Shape(1, 7, 7, 20, 1400, 64), 3),
        ("shares_walks_far", Shape(1, 6, 2, 20, 1400, 64), 4),
        ("shares_128", Shape(1, 13, 13, 20, 1400, 128), 9),
    ],
)
def test_bits_are_v11s(name: str, shape: Shape, multiprocessors: int) -> None:
    (case,) = find_cases([name])
    case = replace(case, shape=shape)
    inputs = case.make("cpu")
    backend = CpuBackend(0)
    backend.multiprocessors = multiprocessors
    expected, found = (run(backend, step, *inputs, **case.arguments) for step in (V11, V12))
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_workspaces_are_used_again() -> None:
    """Call after call, in a CUDA graph, and on two streams at once."""
    from common.runtime.gpu import GpuBackend

    backend = GpuBackend()
    (case,) = find_cases(["shares_gpu"])
    inputs = case.make(backend.device)
    expected = run(backend, V11, *inputs, **case.arguments)

    def assert_right(outputs: list[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        for a, b in zip(expected, outputs, strict=True):
            assert torch.equal(a, b)

    for _ in range(20):
        assert_right(run(backend, V12, *inputs, **case.arguments))

    outputs = empty_outputs(V12.operation, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.launch(V12, *inputs, *outputs, **case.arguments)
    for _ in range(20):
        for output in outputs:
            output.zero_()
        graph.replay()
        assert_right(outputs)

    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(backend, V12, *inputs, **case.arguments))
    for result in results:
        assert_right(result)
