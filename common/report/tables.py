"""The tables of worklog.md and README.md, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..bench.ncu import readable, top_stalls
from ..bench.sass import OPCODES
from ..record_schema import NUMBER
from .expressions import NOT_MEASURED
from .record_set import (
    FA3,
    Profile,
    figures,
    grid_ratios,
    smem_bytes,
    spill_bytes,
    static_figures,
)

GROWS = 3  # memory that more than triples when the sequence doubles holds all scores


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a column whose name starts with ">" is aligned to the right."""
    names = [name.removeprefix(">") for name in columns]
    rules = ["---:" if name.startswith(">") else "---" for name in columns]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (names, rules, *cells))


def results(profile: Profile) -> str:
    """A row a step, then a row a peer, and below what they ran on."""
    columns = [
        "Version",
        "Change",
        ">Time (ms)",
        ">TFLOP/s",
        ">% of FA3",
        ">Step gain",
        ">Registers",
    ]
    columns += [">Shared memory", ">Spills", ">Peak memory", ">Max error"]
    rows = []
    for step in profile.steps:
        record = profile.records.get(step.name)
        name = f"[{step.name}](steps/{step.path.name})"
        if record is None:
            rows.append([name, step.title, NOT_MEASURED, *[""] * 8])
            continue
        derived = figures(record)
        kernels = record["resources"].values()
        rows.append(
            [
                name + (" (stale)" if step.name in profile.stale else ""),
                step.title,
                f"{record['time_ms']:.4g}",
                f"{record['tflops']:.4g}",
                _percent(derived["fa3_share"]),
                f"{derived['gain']:.2f} ×" if derived["gain"] else "",
                " / ".join(str(kernel["registers"]) for kernel in kernels),
                " / ".join(kib(smem_bytes(kernel)) for kernel in kernels),
                f"{derived['spill_bytes']} B",
                megabytes(record["peak_memory_bytes"]),
                f"{derived['error']:.1e}",
            ]
        )
    newest = profile.newest
    if newest is None:
        return markdown(columns, rows)
    fa3_ms = newest["peers"][FA3].get("time_ms")
    for name, peer in newest["peers"].items():
        if "missing" in peer:
            rows.append([name, "missing", *[""] * 9])
            continue
        share = fa3_ms / peer["time_ms"] if fa3_ms else None
        rows.append(
            [
                name,
                peer["route"],
                f"{peer['time_ms']:.4g}",
                f"{peer['tflops']:.4g}",
                _percent(share),
            ]
            + [""] * 4
            + [megabytes(peer["peak_memory_bytes"]), f"{peer['errors']['o']:.1e}"]
        )
    return markdown(columns, rows) + "\n\n" + _conditions(profile)


def _conditions(profile: Profile) -> str:
    record = profile.newest
    assert record is not None
    shape = record["shape"]
    text = (
        f"{record['device']}; batch {shape['batch']}, heads {shape['heads']}, "
        f"sequence {shape['seq_q']}, head_dim {shape['head_dim']}, {shape['dtype']}, not causal; "
        f"median of {len(record['samples_ms'])} interleaved rounds, L2 flushed before each call. "
    )
    environment = record["environment"]
    text += _clocks([environment["before"], environment["after"]])
    text += (
        "Registers and shared memory: one number a kernel. "
        "Peak memory: what one call takes beyond q, k and v. Max error: against float64; "
        f"torch in {shape['dtype']} has {record['torch_errors']['o']:.1e}. "
        "Step gain: against the step before, same run."
    )
    if len({record["run"] for record in profile.records.values()}) > 1:
        text += " The steps were not all measured in one run; the peers' rows are the latest run's."
    return text


def _clocks(states: Sequence[dict | str]) -> str:
    """The device's states in the order of time; what throttled it in any but the first."""
    if not all(isinstance(state, dict) for state in states):
        return "Clocks, power and temperature: not collected. "

    reasons = dict.fromkeys(
        reason for state in states[1:] for reason in state["throttle_reasons"] or ()
    ) or ["none"]

    def pair(key: str, unit: str) -> str:
        ends = (states[0][key], states[-1][key])
        return " → ".join("?" if end is None else f"{end:.0f}" for end in ends) + f" {unit}"

    return (
        f"Before and after: SM clock {pair('sm_clock_mhz', 'MHz')}, {pair('power_w', 'W')}, "
        f"{pair('temperature_c', '°C')}; throttle reasons after: {', '.join(reasons)}. "
    )


def memory(profile: Profile) -> str:
    """Peak memory of each step that holds all scores, and of the latest that does not, over N."""
    curves = {
        name: {entry["seq"]: entry["bytes"] for entry in record["memory"]}
        for name, record in profile.records.items()
        if name not in profile.stale
    }
    materialising = [name for name, curve in curves.items() if _holds_scores(curve)]
    fused = [name for name in curves if name not in materialising][-1:]
    if not materialising or not fused:
        return NOT_MEASURED
    naive, flash = materialising[0], fused[0]
    columns = [
        ">N",
        *(f">{name}" for name in materialising),
        f">{flash}",
        f">Saving {flash} over {naive}",
    ]
    rows = [
        [
            str(seq),
            *(megabytes(curves[name].get(seq)) for name in (*materialising, flash)),
            f"{curves[naive][seq] / curves[flash][seq]:.0f} ×"
            if curves[naive].get(seq) and curves[flash].get(seq)
            else "",
        ]
        for seq in curves[naive]
    ]
    shape = profile.records[flash]["shape"]
    return (
        markdown(columns, rows) + "\n\nMeasured peak of one call beyond q, k and v, "
        f"batch {shape['batch']}, heads {shape['heads']}, "
        f"head_dim {shape['head_dim']}, {shape['dtype']}."
    )


def _holds_scores(curve: dict[int, int | None]) -> bool:
    sizes = [size for size in curve.values() if size is not None]
    return len(sizes) > 1 and sizes[-1] > GROWS * sizes[-2]


def peers(profile: Profile) -> str:
    """The peers of the latest run."""
    columns = [
        "Peer",
        "Code",
        ">Time (ms)",
        ">p25–p75 (ms)",
        ">TFLOP/s",
        ">Peak memory",
        ">Max error",
    ]
    if profile.newest is None:
        return NOT_MEASURED
    rows = [
        [name, f"missing: {peer['missing']}", *[""] * 5]
        if "missing" in peer
        else [
            name,
            peer["route"],
            f"{peer['time_ms']:.4g}",
            f"{peer['time_p25_ms']:.4g}–{peer['time_p75_ms']:.4g}",
            f"{peer['tflops']:.4g}",
            megabytes(peer["peak_memory_bytes"]),
            f"{peer['errors']['o']:.1e}",
        ]
        for name, peer in profile.newest["peers"].items()
    ]
    return markdown(columns, rows)


def grid(profile: Profile) -> str:
    """A row a shape: the rates, and the last step's over that of the fastest peer."""
    measured = profile.grid["sources"] if profile.grid else {}
    steps = [step.name for step in profile.steps if step.name in measured]
    if not steps:
        return NOT_MEASURED
    cells, last = profile.grid["cells"], steps[-1]
    peers = [name for name in cells[0]["tflops"] if name not in measured]
    labels = [f"{name} (stale)" if name in profile.grid_stale else name for name in steps]
    columns = [">head_dim", "Mask", "Batch × heads × N", *(f">{name}" for name in labels + peers)]
    columns += [f">{labels[-1]} / fastest peer"]
    ratios = grid_ratios(profile.grid, last)
    rows = [
        [
            str(cell["head_dim"]),
            "causal" if cell["causal"] else "none",
            f"{cell['batch']} × {_heads(cell)} × {cell['seq']}",
            *(_rate(cell["tflops"].get(name)) for name in steps + peers),
            _ratio(ratios.get(cell["name"])),
        ]
        for cell in cells
    ]
    environments = [cell["environment"] for cell in cells]
    states = [environments[0]["before"], *(environment["after"] for environment in environments)]
    rounds = {len(samples) for cell in cells for samples in cell["samples_ms"].values()}
    least, most = min(rounds), max(rounds)
    text = (
        f"\n\n{labels[-1]} over the fastest peer: {_summary(ratios)}. TFLOP/s on the "
        f"{profile.grid['device']} in {profile.grid['dtype']}; where the mask is causal, half of "
        "the operations are counted. "
        f"Median of {most if least == most else f'{least} to {most}'} interleaved rounds a row, L2 "
        "flushed before each call. In bold: no slower than the fastest peer. "
        f"{_clocks(states).strip()}"
    )
    if profile.grid_previous:
        before = _summary(grid_ratios(profile.grid_previous, last))
        text += f" In the run before, of the same sources: {before}."
    return markdown(columns, rows) + text


def _heads(cell: dict) -> str:
    heads, kv_heads = cell["heads"], cell["kv_heads"]
    return str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"


def _rate(rate: float | dict | None) -> str:
    return f"{rate:.4g}" if isinstance(rate, NUMBER) else "missing"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"**{ratio:.3f} ×**" if ratio >= 1 else f"{ratio:.3f} ×"


def _summary(ratios: dict[str, float]) -> str:
    """Of the ratios by cell."""
    if not ratios:
        return NOT_MEASURED
    smallest = min(ratios, key=ratios.__getitem__)
    return (
        f"geometric mean of {len(ratios)} rows {statistics.geometric_mean(ratios.values()):.3f} ×, "
        f"smallest {ratios[smallest]:.3f} × ({smallest})"
    )


def latency(profile: Profile) -> str:
    """A row a shape: what a call takes of the device and of the host, by step and peer."""
    record = profile.latency
    if record is None:
        return NOT_MEASURED
    if profile.latency_stale:
        return f"{NOT_MEASURED} since the source changed"
    cells = record["cells"]
    first = cells[0]
    (step,) = record["sources"]
    keys = ("device_us", "missing")
    names = list(dict.fromkeys(name for key in keys for cell in cells for name in cell[key]))
    rows = [
        [
            str(cell["seq"]),
            "causal" if cell["causal"] else "none",
            *(_device_and_host(cell, name) for name in names),
        ]
        for cell in cells
    ]
    states = [first["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    return markdown([">N", "Mask", *(f">{name}" for name in names)], rows) + (
        f"\n\nMicroseconds on the {record['device']}: of the device / of the host. Batch "
        f"{first['batch']}, heads {first['heads']}, head_dim {first['head_dim']}, "
        f"{record['dtype']}. The device: events around the call, of {step} around its launch, "
        f"median of {len(first['device_us'][step])} interleaved rounds, L2 flushed before each. "
        "The host: until the call returns, while the device still computes, median of "
        f"{len(first['host_us'][step])} calls; for {step} of attention(), for the sdpa with the "
        f"choice of their backend. {_clocks(states).strip()}"
    )


def _device_and_host(cell: dict, name: str) -> str:
    if name not in cell["device_us"]:
        return "missing"
    device, host = (statistics.median(cell[key][name]) for key in ("device_us", "host_us"))
    return f"{device:.1f} / {host:.1f}"


def resources(profile: Profile, step: str) -> str:
    """A row a kernel of the step: what the compiler gave it."""
    record = profile.records.get(step)
    if record is None or step in profile.stale:
        return NOT_MEASURED
    columns = [
        "Kernel",
        ">Registers",
        ">Static shared",
        ">Dynamic shared",
        ">Stack",
        ">Spill stores",
        ">Spill loads",
    ]
    rows = [
        [
            f"`{name}`",
            str(kernel["registers"]),
            kib(kernel["static_smem"]),
            kib(kernel["dynamic_smem"]),
            *(
                f"{kernel[key]} B"
                for key in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
            ),
        ]
        for name, kernel in record["resources"].items()
    ]
    return markdown(columns, rows)


def counters(profile: Profile) -> str:
    """A row a kernel of each step: what Nsight Compute counted."""
    columns = ["Kernel", ">Duration (ms)", ">Cycles", ">SM %", ">Memory %", ">Tensor %", ">XU %"]
    columns += [">FMA %", ">LSU %", ">L1 data %", ">Occupancy %", ">Issue %", ">DRAM read (GB)"]
    columns += [
        ">DRAM written (GB)",
        ">L2 (GB)",
        ">Bank conflicts",
        ">Local loads",
        ">Local stores",
    ]
    columns += ["Top stalls"]

    def cell(value: float | None, form: str) -> str:
        return "n/a" if value is None else format(value, form)

    percents = ["sm", "memory", "tensor", "xu", "fma", "lsu", "l1_data", "occupancy", "issue"]
    numbers = [
        "dram_read_gb",
        "dram_write_gb",
        "l2_gb",
        "bank_conflicts",
        "local_loads",
        "local_stores",
    ]
    rows = []
    for step, record in profile.records.items():
        collected = record["counters"]
        if isinstance(collected, str) or step in profile.stale:
            reason = collected if isinstance(collected, str) else "stale"
            rows.append([step, reason, *[""] * (len(columns) - 2)])
            continue
        for kernel, c in readable(collected).items():
            rows.append(
                [
                    f"{step} `{kernel}`",
                    cell(c["duration_ms"], ".4g"),
                    cell(c["cycles"], ".3g"),
                    *(cell(c[f"{name}_percent"], ".0f") for name in percents),
                    *(cell(c[name], ".3g") for name in numbers),
                    ", ".join(f"{why} {n:.1f}" for why, n in top_stalls(collected[kernel])),
                ]
            )
    return markdown(columns, rows) if rows else NOT_MEASURED


def sass(profile: Profile) -> str:
    """A row a kernel of each step: what the compiler gave it, and instructions in its code."""
    columns = ["Kernel", ">Registers", ">Stack", ">Spills", ">Instructions"]
    columns += [f">{opcode}" for opcode in OPCODES]
    rows, compilers = [], set()
    for step in profile.steps:
        if step.name not in profile.static:
            continue
        record = profile.static[step.name]
        compiled = record["compiled"]
        if isinstance(compiled, str) or step.name in profile.static_stale:
            reason = compiled if isinstance(compiled, str) else "stale"
            rows.append([step.name, reason, *[""] * (len(columns) - 2)])
            continue
        compilers.add(f"{compiled['arch']} by nvcc {compiled['toolkit']}")
        counts = static_figures(record)["sass"]
        for name, kernel in compiled["resources"].items():
            rows.append(
                [
                    f"{step.name} `{name}`",
                    str(kernel["registers"]),
                    f"{kernel['stack_bytes']} B",
                    f"{spill_bytes(kernel)} B",
                    *_instructions(counts if isinstance(counts, str) else counts[name]),
                ]
            )
    if not compilers:
        return markdown(columns, rows) if rows else NOT_MEASURED
    shape = next(iter(profile.static.values()))["shape"]
    return markdown(columns, rows) + (
        "\n\nInstructions are counted as they stand in the code, however often they are executed. "
        f"Compiled for {', '.join(sorted(compilers))}: head_dim {shape['head_dim']}, "
        f"{shape['dtype']}, not causal."
    )


def _instructions(counts: dict[str, int] | str) -> list[str]:
    if isinstance(counts, str):
        return [counts, *[""] * len(OPCODES)]
    return [str(counts[name]) for name in ("instructions", *OPCODES)]


def banks(profile: Profile) -> str:
    """A row a place where a step or an experiment accesses shared memory: wavefronts, conflicts."""
    columns = ["Step", "Access", ">Wavefronts an access, least → counted", ">Bank conflicts"]
    rows = []
    for name, record in profile.static.items():
        if name in profile.static_stale:
            rows.append([name, "stale", "", ""])
            continue
        places = record["banks"]
        operations = [place["operation"] for place in places]
        for place in places:
            operation, accesses = place["operation"], place["accesses"]
            access = place["code"] if operations.count(operation) > 1 else operation
            rows.append(
                [
                    name,
                    f"`{access}`",
                    f"{place['ideal'] / accesses:.3g} → {place['wavefronts'] / accesses:.3g}",
                    str(place["wavefronts"] - place["ideal"]),
                ]
            )
    if not rows:
        return NOT_MEASURED
    shape = next(iter(profile.static.values()))["shape"]
    return markdown(columns, rows) + (
        "\n\nCounted by the SIMT runtime where a wrapper accesses shared memory: batch "
        f"{shape['batch']}, heads {shape['heads']}, {shape['seq_q']} queries, {shape['seq_k']} "
        f"keys, head_dim {shape['head_dim']}, {shape['dtype']}, not causal."
    )


def experiments(profile: Profile, step: str) -> str:
    """A row an experiment: tried, predicted, measured against the step in the same run."""
    columns = ["Experiment", "Tried", "Predicted", ">Step (ms)", ">Experiment (ms)", ">Gain"]
    columns += [">Registers", ">Stack"]
    rows = []
    for patch in profile.patches:
        if patch.step.name != step:
            continue
        row = [
            f"[{patch.name}](experiments/{patch.name}.patch)",
            patch.header.get("tries", ""),
            patch.header.get("predicts", ""),
        ]
        record = profile.experiments.get(patch.name)
        if record is None or patch.name in profile.stale:
            reason = NOT_MEASURED if record is None else f"{NOT_MEASURED} since the source changed"
            rows.append([*row, "", reason, "", "", ""])
        else:
            derived, baseline_ms = figures(record), record["baseline"]["time_ms"]
            row += [f"{baseline_ms:.4g}", f"{record['time_ms']:.4g}", f"{derived['gain']:.2f} ×"]
            rows.append([*row, str(derived["registers"]), f"{derived['stack_bytes']} B"])
    return markdown(columns, rows) if rows else "No experiments."


def kib(size: int) -> str:
    return f"{size / 1024:.4g} KiB" if size >= 1024 else f"{size} B"


def megabytes(size: int | None) -> str:
    if size is None:
        return "does not fit"
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
