"""The tables of worklog.md and README.md: rows.py's values as Markdown, and what they ran on."""

from __future__ import annotations

from itertools import pairwise

from ..metrics import OPCODES
from ..operation import FORWARD
from ..problem import TRAINED
from ..quiet import QUIET
from ..record_schema import FA3_DETERMINISTIC, OURS, SDPA, SHARES, WORKLOADS
from ..step import predecessor
from ..text import kib, label, listed, markdown, megabytes
from . import rows
from .captions import (
    device_states,
    flops,
    how_measured,
    inputs,
    max_error,
    peak_memory,
    summary,
    unless_forward,
)
from .columns import (
    ERROR,
    PEAK_MEMORY,
    TFLOPS,
    TIME_MS,
    Cell,
    bold_from_one,
    code,
    first_shown,
    heads,
    kernel_name,
    linked,
    mask,
    percent,
    quartiles,
    shown,
    shown_each,
    shown_of,
    status_in,
    table_of,
)
from .derived import derived, first_that_run, peer_ratios
from .record_set import NOT_MEASURED, STALE, Ladder, RecordSet
from .rows import Row, latest_steps


def results(ladder: Ladder) -> str:
    """One row per step, then one per peer, and below what they ran on."""
    columns = {
        "Version": linked,
        "Change": first_shown(
            shown("title"), shown("route"), shown("missing", lambda _: "missing")
        ),
        ">Time (ms)": first_shown(TIME_MS, shown("status")),
        ">TFLOP/s": TFLOPS,
        ">% of FA3": shown("fa3_share", "{:.1%}".format),
        ">Step gain": shown("gain", "{:.2f} ×".format),
        ">Registers": shown_each("registers", str),
        ">Shared memory": shown_each("smem_bytes", kib),
        ">Spills": shown("spill_bytes", "{} B".format),
        ">Peak memory": PEAK_MEMORY,
        ">Max error": ERROR,
    }
    table = table_of(columns, rows.steps(ladder) + rows.peers(ladder))
    return table if ladder.newest is None else f"{table}\n\n{_conditions(ladder)}"


def _conditions(ladder: Ladder) -> str:
    record = ladder.newest
    assert record is not None
    operation, shape, environment = ladder.operation, record["shape"], record["environment"]
    states = device_states([environment["before"], environment["after"]])
    text = (
        f"{record['device']}; batch {shape['batch']}, heads {shape['heads']}, "
        f"sequence {shape['seq_q']}, head_dim {shape['head_dim']}, {shape['dtype']}, not causal; "
        f"{inputs(operation)}; median of {len(record['samples_ms'])} interleaved rounds, "
        f"L2 flushed before each call. {states} {flops(operation)}"
        "Registers and shared memory: one number per kernel. "
        f"Peak memory: {peak_memory(operation)}Max error: {max_error(operation)}; "
        f"torch in {shape['dtype']} has {derived(record)['torch_error']:.1e}. {_gains(ladder)}"
    )
    if len({record["run"] for record in ladder.measured.records.values()}) > 1:
        text += " The steps were not all measured in one run; the peers' rows are the latest run's."
    return text


def _gains(ladder: Ladder) -> str:
    """Over which step each gains: not all change the one before."""
    text = "Step gain: over the step before, same run"
    for before, step in pairwise(ladder.steps):
        changed = predecessor(step, ladder.steps)
        if changed and changed != before:
            text += f"; of {step.name} over {changed.name}"
    return f"{text}."


def memory(ladder: Ladder) -> str:
    """Peak memory of each step that holds all scores, and of the latest that does not, over N."""
    found = rows.memory(ladder)
    if not found:
        return STALE if ladder.measured.stale else NOT_MEASURED
    names = list(found[0]["bytes"])
    columns = {
        ">N": shown("seq"),
        **{f">{name}": shown_of("bytes", name, megabytes, none="does not fit") for name in names},
    }
    if "saving" in found[0]:
        title = f">Saving {names[-1]} over {names[0]}"
        columns[title] = shown("saving", "{:.0f} ×".format)
    shape = ladder.measured.records[names[-1]]["shape"]
    beyond = listed(each.name for each in ladder.operation.inputs)
    return (
        f"{table_of(columns, found)}\n\nMeasured peak of one call beyond {beyond}, "
        f"batch {shape['batch']}, heads {shape['heads']}, "
        f"head_dim {shape['head_dim']}, {shape['dtype']}."
    )


def peers(ladder: Ladder) -> str:
    """The peers of the latest run."""
    found = rows.peers(ladder)
    if not found:
        return NOT_MEASURED
    columns = {
        "Peer": shown("name"),
        "Code": first_shown(shown("route"), shown("missing", "missing: {}".format)),
        ">Time (ms)": TIME_MS,
        ">p25–p75 (ms)": quartiles,
        ">TFLOP/s": TFLOPS,
        ">Peak memory": PEAK_MEMORY,
        ">Max error": ERROR,
    }
    caption = (
        f"\n\nPeak memory: {peak_memory(ladder.operation)}Max error: {max_error(ladder.operation)}."
    )
    return table_of(columns, found) + unless_forward(ladder.operation, caption)


def grid(ladder: Ladder) -> str:
    """One row per shape: the rates, and that of attention()'s step over the fastest peer's."""
    found = rows.grid(ladder)
    if not found:
        return NOT_MEASURED
    measured = ladder.grid
    assert measured is not None
    record = measured.record
    labels = {name: label(name, stale=name in measured.stale) for name in found[0]["tflops"]}
    taken = ladder.taken()
    first = ", ".join(labels[name] for name in first_that_run(record, taken))
    columns = {
        "Cell": shown("name"),
        ">head_dim": shown("head_dim"),
        "Mask": mask,
        "Batch × heads": lambda row: f"{row['batch']} × {heads(row)}",
        ">Queries": shown("seq"),
        ">Keys": shown("seq_k"),
        **{
            f">{title}": shown_of("tflops", name, "{:.4g}".format, none="missing")
            for name, title in labels.items()
        },
        f">{first} / fastest peer": shown("ratio", bold_from_one),
    }
    return table_of(columns, found) + (
        f"\n\n{first} over the fastest peer: {summary(peer_ratios(record, *taken))}. "
        f"{_deterministic(ladder)}"
        f"TFLOP/s on the {record['device']} in {record['dtype']}; {inputs(ladder.operation)}; "
        "where the mask is causal, the operations of visible keys are counted: half of them where "
        "there are as many queries as keys. "
        f"{flops(ladder.operation)}"
        f"{how_measured(measured, lambda record: peer_ratios(record, *taken))}"
    )


def distributions(record_set: RecordSet) -> str:
    """A row for each kind of inputs, dtype and mask: the last two steps over the fastest peer."""
    found = rows.distributions(record_set)
    if not found:
        return NOT_MEASURED
    measured = record_set.distributions
    assert measured is not None
    record = measured.record
    last, *before = latest_steps(record_set, record)
    names = " ".join(
        f"({name})" if name in before else name
        for name in (label(name, stale=name in measured.stale) for name in (last, *before))
    )
    shares_known = any(cell[share] is not None for cell in record["cells"] for share in SHARES)
    columns = {"Inputs": shown("inputs", code), "dtype": shown("dtype"), "Mask": mask}
    for head_dim in dict.fromkeys(str(cell["head_dim"]) for cell in record["cells"]):
        columns[f">D {head_dim}: {names}"] = _ratios(head_dim)
        if shares_known:
            columns[f">D {head_dim}: rescaled, redone"] = _shares(head_dim)
    shape = record["cells"][0]
    shares = (
        "Rescaled and redone: the shares of the work tiles in which a row's shift was raised, and "
        f"in which some tile of S was computed again, counted in {record['repairs']['step']}. "
        if shares_known
        else "How many work tiles were rescaled or done again: not measured. "
    )
    return table_of(columns, found) + (
        f"\n\n{label(last, stale=last in measured.stale)} over the fastest peer: "
        f"{summary(peer_ratios(record, last))}. {record['device']}; batch {shape['batch']}, "
        f"N {shape['seq']}, {shape['heads'] * shape['head_dim']} / D heads. {shares}"
        "normal_s: normally distributed inputs, where s is the standard deviation of the logits; "
        "later_keys_larger: it is 2, and 8 from key 256 on; own_key: each query lies near a key of "
        "its own; first_key_sink: the first key takes nearly all weight; equal_keys: all keys are "
        f"the same ([inputs.py](verify/inputs.py)). {_trained(record)}"
        f"{how_measured(measured, lambda record: peer_ratios(record, last))}"
    )


def _trained(record: dict) -> str:
    """What trained inputs are, where there are any."""
    shape = next((cell for cell in record["cells"] if cell["inputs"] == TRAINED), None)
    return (
        "trained: q, k and v of the GPT that `make train` trains, of one head of each layer, "
        f"{shape['batch']} × {shape['heads']} × {shape['seq']}. "
        if shape
        else ""
    )


def _ratios(head_dim: str) -> Cell:
    def cell(row: Row) -> str:
        found = row["by_head_dim"].get(head_dim)
        if found is None:
            return ""
        ratio = "missing" if found["ratio"] is None else bold_from_one(found["ratio"])
        return ratio if found["before"] is None else f"{ratio} ({found['before']:.3f})"

    return cell


def _shares(head_dim: str) -> Cell:
    def cell(row: Row) -> str:
        found = row["by_head_dim"].get(head_dim, {})
        return ", ".join(percent(found[share]) for share in SHARES if found.get(share) is not None)

    return cell


def _deterministic(ladder: Ladder) -> str:
    """A sentence on the steps whose every bit repeats, where a peer has such a mode."""
    assert ladder.grid is not None
    steps = ladder.taken(deterministic=True)
    ratios = peer_ratios(ladder.grid.record, *steps, peer=FA3_DETERMINISTIC)
    if not ratios:
        return ""
    first = ", ".join(
        label(name, stale=name in ladder.grid.stale)
        for name in first_that_run(ladder.grid.record, steps)
    )
    return f"{first}, whose every bit repeats, over {FA3_DETERMINISTIC}: {summary(ratios)}. "


def latency(record_set: RecordSet) -> str:
    """One row per shape: what a call takes of the device and of the host, attention()'s and the
    peers'.
    """
    found = rows.latency(record_set)
    if not found:
        return STALE if record_set.latency else NOT_MEASURED
    assert record_set.latency is not None
    record = record_set.latency.record
    cells = record["cells"]
    first = cells[0]

    def both(name: str) -> Cell:
        device = shown_of("device_us", name, "{:.1f}".format)
        host = shown_of("host_us", name, _quiet_and_all)
        return lambda row: f"{device(row)} / {host(row)}" if device(row) else "missing"

    columns = {
        ">N": shown("seq"),
        "Mask": mask,
        "Step": shown("step"),
        **{f">{name}": both(name) for name in found[0]["device_us"]},
    }
    states = [first["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    return table_of(columns, found) + (
        f"\n\nMicroseconds on the {record['device']}: of the device / of the host. Batch "
        f"{first['batch']}, heads {first['heads']}, head_dim {first['head_dim']}, "
        f"{record['dtype']}; {inputs(FORWARD)}. "
        "The device: events around the call, of attention() around its step's launch, "
        f"median of {_samples(first['device_us'])} interleaved rounds, L2 flushed before each. "
        "The host: until the call returns, while the device still computes, "
        f"{_host_samples(found)}; of attention() with the choice of its step, of the sdpa with "
        f"that of their backend. {device_states(states)}"
    )


def pictures(record_set: RecordSet) -> str:
    """What the step errs on each head beside torch, both in bf16, from float64."""
    found = rows.pictures(record_set)
    if not found:
        return NOT_MEASURED
    assert record_set.pictures is not None
    record, stale = record_set.pictures.record, record_set.pictures.stale
    outputs = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}

    def both(output: str) -> Cell:
        def cell(row: Row) -> str:
            ours, torch = (row["errors"][output][who] for who in (OURS, SDPA))
            return f"{ours['nrmse']:.2e} / {torch['nrmse']:.2e}"

        return cell

    columns = {"Head": shown("head"), "Mask": mask}
    columns |= {f">{title}": both(output) for output, title in outputs.items()}
    names = " and ".join(label(name, stale=stale) for name in record["sources"])
    head = record["heads"][0]
    return table_of(columns, found) + (
        f"\n\nRoot mean square of the error over that of the output: {names} / torch's "
        f"scaled_dot_product_attention, both in {record['dtype']} on the {record['device']}, from "
        f"float64. {head['seq']} queries and keys, head_dim {head['head_dim']}."
    )


_CACHES = {
    "sliced": "a key more, of a buffer for all",
    "concatenated": "a key more, in new tensors",
    "layered": "a key more in each of 32 layers",
    "fixed": "the same keys again",
}


def decoding(record_set: RecordSet) -> str:
    """What a call of attention(), and of torch's, takes of the host where the cache grows."""
    found = rows.decoding(record_set)
    if not found:
        return STALE if record_set.latency else NOT_MEASURED
    assert record_set.latency is not None
    record = record_set.latency.record
    step = next(who for who in record["decoding"] if who != SDPA)
    (first, last), (_, sdpas_last) = (record["decoding"][who]["keys"] for who in (step, SDPA))
    columns = {
        "Each call has": lambda row: _CACHES[row["cache"]],
        f">attention(), {step}": shown_of("host_us", step, _quiet_and_all),
        f">{SDPA}": shown_of("host_us", SDPA, _quiet_and_all),
    }
    return table_of(columns, found) + (
        f"\n\nMicroseconds of the host on the machine with the {record['device']}, until the call "
        f"returns, {_host_samples(found)}. One query of each of 16 heads, head_dim 128, "
        f"{record['dtype']}, on {first} to {last} keys, by {SDPA} to {sdpas_last}. {SDPA}: torch's "
        "scaled_dot_product_attention with the backend of its choice."
    )


def _quiet_and_all(host_us: tuple[float | None, float]) -> str:
    quiet, all_turns = host_us
    return f"{'never quiet' if quiet is None else format(quiet, '.1f')} ({all_turns:.1f})"


def _host_samples(found: list[Row]) -> str:
    turns = min(row["quiet_turns"] for row in found)
    return (
        f"median over the turns of calls in which the host was quiet (at least {turns} in each "
        "row; in brackets: over all turns), because neighbours share it: before and after a quiet "
        f"turn a loop in Python ran at {QUIET:.0%} of its highest speed or more"
    )


def _samples(by_name: dict[str, list[float]]) -> int:
    return len(next(iter(by_name.values())))


def training_speed(record_set: RecordSet) -> str:
    """What a layer and training steps take on attention() and on its peers, and their losses."""
    found = rows.training_speed(record_set)
    if not found:
        return STALE if record_set.training_speed else NOT_MEASURED
    assert record_set.training_speed is not None
    record = record_set.training_speed.record
    columns = {
        "Workload": shown("workload"),
        "Attention": shown("name"),
        "Code": first_shown(shown("route"), shown("missing", "missing: {}".format)),
        ">Time (ms)": TIME_MS,
        ">p25–p75 (ms)": quartiles,
        ">Speed of ours over it": shown("speedup", bold_from_one),
        ">Peak memory": PEAK_MEMORY,
        ">Loss": shown("loss", "{:.4f}".format),
    }
    workloads = record["workloads"]
    layer, gpt, llama = (workloads[name] for name in WORKLOADS)
    shape = layer["shape"]
    states = [layer["environment"]["before"]]
    states += [workload["environment"]["after"] for workload in workloads.values()]
    return table_of(columns, found) + (
        f"\n\n{record['device']}. layer: forward and backward of attention alone, by autograd; "
        f"batch {shape['batch']}, heads {shape['heads']}/{shape['kv_heads']}, sequence "
        f"{shape['seq_q']}, head_dim {shape['head_dim']}, {shape['dtype']}, "
        f"{'causal' if shape['causal'] else 'not causal'}, stored [batch, sequence, heads, "
        "head_dim]; q, k, v and dout normally distributed with variance 1. gpt: a training step of "
        f"`make train`'s model, {_model(gpt['config'])}. llama: one of a block of Llama 3 with 8 "
        f"billion parameters between an embedding and a head of bytes, {_model(llama['config'])}. "
        "A training step is forward, loss, backward, clipping of the gradients and AdamW, of "
        "float32 parameters under a bf16 autocast. Median of "
        f"{len(layer['attentions'][OURS]['samples_ms'])} interleaved rounds, L2 flushed before "
        "each. In bold: ours is no slower. Peak memory: beyond q, k, v and dout; of a training "
        "step, beyond the parameters and AdamW's state. Loss: of step "
        f"{gpt['config']['steps']} of gpt and {llama['config']['steps']} of llama, in nats a byte, "
        "from the same seed and on the same batches; up to there ours is within "
        f"{_tolerance(gpt)} of each peer's at every step of gpt, within {_tolerance(llama)} of "
        "llama, or nothing would be recorded. "
        f"{device_states(states)}"
    )


def _model(config: dict) -> str:
    return (
        f"{config['parameters'] / 1e6:.1f} M parameters, "
        f"{config['batch']} × {config['context']} bytes"
    )


def _tolerance(workload: dict) -> str:
    return f"{100 * workload['config']['tolerance']:g} %"


def resources(record_set: RecordSet, step: str) -> str:
    """One row per kernel of the step: what the compiler gave it."""
    found = rows.resources(record_set, step)
    if "status" in found[0]:
        return found[0]["status"]
    columns = {
        "Kernel": shown("kernel", code),
        ">Registers": shown("registers"),
        ">Static shared": shown("static_smem", kib),
        ">Dynamic shared": shown("dynamic_smem", kib),
        ">Stack": shown("stack_bytes", "{} B".format),
        ">Spill stores": shown("spill_store_bytes", "{} B".format),
        ">Spill loads": shown("spill_load_bytes", "{} B".format),
    }
    return table_of(columns, found)


def counters(record_set: RecordSet, step: str) -> str:
    """What Nsight Compute counted: one column per kernel, beside the step before's."""
    kernels = rows.counters(record_set, step)
    if "status" in kernels[0]:
        return kernels[0]["status"]

    def clock(kernel: Row) -> str:
        cycles, duration = kernel["cycles"], kernel["duration_ms"]
        return f"{cycles / duration / 1e6:.2f}" if cycles and duration else "n/a"

    def numbers(form: str, *names: str) -> list[Cell]:
        return [shown(name, form.format, none="n/a") for name in names]

    def percent(*names: str) -> list[Cell]:
        return numbers("{:.0f}", *(f"{name}_percent" for name in names))

    lines = {
        "Duration (ms) / cycles / clock (GHz)": [
            *numbers("{:.4g}", "duration_ms"),
            *numbers("{:.3g}", "cycles"),
            clock,
        ],
        "Of elapsed cycles: SM / memory / L1 data (%)": percent("sm", "memory", "l1_data"),
        "Of active cycles: tensor / XU / FMA / LSU (%)": percent("tensor", "xu", "fma", "lsu"),
        "Of active cycles: occupancy / issue (%)": percent("occupancy", "issue"),
        "DRAM read / written / L2 (GB)": numbers(
            "{:.3g}", "dram_read_gb", "dram_write_gb", "l2_gb"
        ),
        "Bank conflicts / local loads / local stores": numbers(
            "{:.3g}", "bank_conflicts", "local_loads", "local_stores"
        ),
    }
    body = [
        [title, *(" / ".join(cell(kernel) for cell in cells) for kernel in kernels)]
        for title, cells in lines.items()
    ]
    stalls = (", ".join(f"{why} {n:.1f}" for why, n in kernel["stalls"]) for kernel in kernels)
    return markdown(
        ["", *(f">{kernel_name(kernel)}" for kernel in kernels)], [*body, ["Top stalls", *stalls]]
    )


def sass(ladder: Ladder) -> str:
    """One row per kernel of each step: what the compiler gave it, and instructions in its code."""
    columns = {
        "Kernel": kernel_name,
        ">Registers": shown("registers"),
        ">Stack": shown("stack_bytes", "{} B".format),
        ">Spills": shown("spill_bytes", "{} B".format),
        ">Instructions": _instructions,
        **{f">{opcode}": _opcode(opcode) for opcode in OPCODES},
    }
    found = rows.sass(ladder)
    if not found:
        return NOT_MEASURED
    table = table_of(status_in(">Registers", columns), found)
    compilers = sorted({row["compiler"] for row in found if "compiler" in row})
    if not compilers:
        return table
    shape = next(iter(ladder.static.records.values()))["shape"]
    return table + (
        "\n\nInstructions are counted as they stand in the code, however often they are executed. "
        f"Compiled for {', '.join(compilers)}: head_dim {shape['head_dim']}, "
        f"{shape['dtype']}, not causal."
    )


def _instructions(row: Row) -> str:
    """Their number, or why they are not counted."""
    counts = row.get("instructions", "")
    return counts if isinstance(counts, str) else str(counts["instructions"])


def _opcode(opcode: str) -> Cell:
    def cell(row: Row) -> str:
        counts = row.get("instructions", "")
        return "" if isinstance(counts, str) else str(counts[opcode])

    return cell


def banks(ladder: Ladder) -> str:
    """A row a place where a step or an experiment accesses shared memory: wavefronts, conflicts."""

    def per_access(row: Row) -> str:
        if "access" not in row:
            return ""
        least, counted = (row[key] / row["accesses"] for key in ("ideal", "wavefronts"))
        return f"{least:.3g} → {counted:.3g}"

    columns = {
        "Step": shown("name"),
        "Access": first_shown(shown("access", code), shown("status")),
        ">Wavefronts per access, least → counted": per_access,
        ">Bank conflicts": shown("conflicts"),
    }
    found = rows.banks(ladder)
    if not found:
        return NOT_MEASURED
    shape = next(iter(ladder.static.records.values()))["shape"]
    return table_of(columns, found) + (
        "\n\nCounted by the SIMT runtime where a wrapper accesses shared memory: batch "
        f"{shape['batch']}, heads {shape['heads']}, {shape['seq_q']} queries, {shape['seq_k']} "
        f"keys, head_dim {shape['head_dim']}, {shape['dtype']}, not causal."
    )


def experiments(record_set: RecordSet, step: str) -> str:
    """One row per experiment: tried, predicted, measured against the step in the same run."""
    columns = {
        "Experiment": linked,
        "Tried": shown("tries"),
        "Predicted": shown("predicts"),
        ">Step (ms)": shown("baseline_ms", "{:.4g}".format),
        ">Experiment (ms)": first_shown(TIME_MS, shown("status")),
        ">Gain": shown("gain", "{:.2f} ×".format),
        ">Registers": shown_each("registers", str),
        ">Stack": shown_each("stack_bytes", "{} B".format),
    }
    found = rows.experiments(record_set, step)
    return table_of(columns, found) if found else "No experiments."
