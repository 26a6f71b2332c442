"""What is known of one step, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..metrics import OPCODES, num_conflicts, smem_bytes, spill_bytes
from ..operation import operation_of
from ..record_schema import FA3, TRAININGS
from ..text import kib, listed, markdown, megabytes
from .derived import derived, static_derived


def measured(record: dict) -> str:
    """What was measured, one line each."""
    numbers, operation = derived(record), operation_of(record["step"])
    beyond = listed(each.name for each in operation.inputs)
    fa3 = record["peers"][FA3]
    lines = [
        ("time", f"{record['time_ms']:.4g} ms"),
        ("p25 - p75", f"{record['time_p25_ms']:.4g} - {record['time_p75_ms']:.4g} ms"),
        ("rate", f"{record['tflops']:.4g} TFLOP/s"),
        (
            "of FA3",
            f"FlashAttention-3 is missing: {fa3['missing']}"
            if numbers["fa3_share"] is None
            else f"{numbers['fa3_share']:.1%}",
        ),
        ("peak memory", f"{megabytes(record['peak_memory_bytes'])} beyond {beyond}"),
        (
            f"max error of {operation.outputs[0].name}",
            f"{numbers['error']:.1e}; torch in {record['shape']['dtype']}: "
            f"{numbers['torch_error']:.1e}",
        ),
    ]
    if baseline := record["baseline"]:
        lines.append(("step gain", f"{numbers['gain']:.2f} x over {baseline['step']}"))
    lines += [(name, _resources(kernel)) for name, kernel in record["resources"].items()]
    return _labelled(lines)


def compiled(record: dict) -> str:
    """What the compiler made of the kernels, by a static record."""
    made = record["compiled"]
    if isinstance(made, str):
        return _labelled([("compiled", made)])
    counts = static_derived(record)["sass"]
    lines = [("compiled", f"for {made['arch']} by nvcc {made['toolkit']}")]
    for name, kernel in made["resources"].items():
        lines.append((name, _resources(kernel)))
        if isinstance(counts, str):
            lines.append(("", f"instructions {counts}"))
        else:
            told = (
                f"{counts[name][opcode]} {opcode}" for opcode in OPCODES if counts[name][opcode]
            )
            lines.append(("", f"{counts[name]['instructions']} instructions: {', '.join(told)}"))
    return _labelled(lines)


def bank_conflicts(places: list[dict]) -> str:
    """The banks of a static record: one row per place in the source."""
    columns = ["access", ">accesses", ">least wavefronts", ">wavefronts", ">conflicts", "code"]
    rows = [
        [
            place["operation"],
            *(str(place[key]) for key in ("accesses", "ideal", "wavefronts")),
            str(num_conflicts(place)),
            place["code"],
        ]
        for place in places
    ]
    return markdown(columns, rows) if rows else "  no wrapper accesses shared memory"


def losses(by_training: Mapping[str, Sequence[float]]) -> str:
    """A row for each step: the loss of each training, in nats a byte."""
    columns = [">step", *(f">{name}" for name in by_training)]
    rows = [
        [str(step), *(f"{loss:.4f}" for loss in of_step)]
        for step, of_step in enumerate(zip(*by_training.values(), strict=True), 1)
    ]
    return markdown(columns, rows)


def training(record: dict) -> str:
    """How the trainings of a record went, one line each."""
    return _labelled((name, _training(record[name])) for name in TRAININGS)


def _training(numbers: dict) -> str:
    return (
        f"loss {numbers['loss']:.4f}, held out {numbers['held_out_loss']:.4f} nats a byte; "
        f"{numbers['ms_per_step']:.4g} ms a step, {megabytes(numbers['peak_memory_bytes'])}; "
        f"{numbers['route']}"
    )


def _labelled(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"  {label:18}  {text}" for label, text in lines)


def _resources(kernel: dict) -> str:
    return (
        f"{kernel['registers']} registers, {kib(smem_bytes(kernel))} shared memory, "
        f"{spill_bytes(kernel)} B spills, {kernel['stack_bytes']} B stack"
    )
