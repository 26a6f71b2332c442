"""Little kernels for the tests of the SIMT runtime: written, run, and caught doing wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.lengths import Lengths
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step, read_step

SOURCE = """\
// {name} -- a kernel to test the runtime with
// change: none
// why: none
// limits: bf16, fp16, fp32; head_dim 8-256 by 8; sm_75
{taken}#include "{header}.cuh"

{globals}

struct Layout {{
    {layout}
}};

extern "C" {{
__constant__ LaunchDescriptor launch_descriptor = {{
    .alignment = {alignment},
    .kernels = {{{in_front}{{.name = "test_kernel",
                 .grid = {{{{SEQ_Q, 1}}}},
                 .threads = {threads},
                 .smem_bytes = sizeof(Layout)}}}},
    .workspace = {{{{.element_bytes = 4, .shape = {{{{SEQ_Q, 1}}}}}}}},
    {boxes}
}};

// One block a query.
__global__ void test_kernel(const __grid_constant__ {params} p) {{
    const int t = threadIdx.x;
    const int block = blockIdx.x;
    Layout& smem = shared_memory<Layout>();
    [[maybe_unused]] float* scores = static_cast<float*>(p.workspace[0]);
{body}
}}
}}
"""


def write_step(
    folder: Path,
    name: str,
    body: str,
    *,
    threads: int = 48,
    globals_: str = "",
    layout: str = "float first[32], second[32]; int counter;",
    boxes: str = "",
    in_front: str = "",
    takes_lengths: bool = False,
    takes_divisors: bool = False,
) -> Step:
    """boxes: fields of the launch descriptor, each before a comma; in_front: kernels, likewise."""
    path = folder / f"{name}.cu"
    header, params = "attention", "AttentionParams"
    if takes_lengths:
        header, params = "attention_lengths", "LengthsParams"
    if takes_divisors:
        header, params = "attention_divisors", "DivisorsParams"
    path.write_text(
        SOURCE.format(
            name=name,
            taken="// taken: only for lengths and windows; a test is for them\n"
            if takes_lengths
            else "",
            header=header,
            params=params,
            body=body,
            threads=threads,
            globals=globals_,
            layout=layout,
            boxes=boxes,
            in_front=in_front,
            alignment=16 if boxes else "sizeof(Element)",
        )
    )
    return read_step(path)


def run(
    step: Step,
    backend: CpuBackend,
    q: torch.Tensor | None = None,
    *,
    o: torch.Tensor | None = None,
    num_lse: int = 1,
    scenario: int = 0,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse [num_lse] of test_kernel with k = v = q; scenario is its p.softmax_scale."""
    q = torch.zeros(1, 1, 2, 8) if q is None else q
    o = torch.zeros_like(q) if o is None else o
    lse = torch.zeros(num_lse)
    backend.launch(step, q, q, q, o, lse, causal=False, lengths=lengths, softmax_scale=scenario)
    return o, lse


@dataclass(frozen=True)
class Fault:
    """What the threads execute, and what the report says."""

    name: str
    statement: str
    report: str  # a regular expression; @ stands for the statement's place
    seed: int = 0


def write_scenarios(folder: Path, name: str, bodies: Sequence[str], setup="", **source) -> Step:
    """A step that executes one of the bodies, after the setup: run()'s scenario is its index."""
    cases = "\n".join(f"case {i}: {{ {body} }} break;" for i, body in enumerate(bodies))
    body = f"{setup}\n    switch (int(p.softmax_scale)) {{\n{cases}\n}}"
    return write_step(folder, name, body, **source)


def write_faults(folder: Path, faults: Sequence[Fault], setup: str = "", **source) -> Step:
    bodies = [fault.statement for fault in faults]
    return write_scenarios(folder, "faults", bodies, setup, **source)


def expect_report(step: Step, faults: Sequence[Fault], fault: Fault, **arguments) -> None:
    """Runs one fault of a step that write_faults() made of all; the arguments are run()'s."""
    number = [known.name for known in faults].index(fault.name)
    lines = step.path.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.startswith(f"case {number}:"))
    with pytest.raises(SimtError) as error:
        run(step, CpuBackend(fault.seed), scenario=number, **arguments)
    report = fault.report.replace("@", rf"\(faults.cu:{line}\)")
    assert re.search(report, str(error.value)), f"{error.value}\n--- does not match\n{report}"
    assert str(error.value).startswith("faults (d")
    assert " in kernel test_kernel" in str(error.value).splitlines()[0]
