"""The tables of worklog.md and README.md: rows.py's values as Markdown, and what they ran on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ..metrics import OPCODES
from ..operation import BACKWARD, FORWARD, OPERATIONS, Operation
from ..problem import TRAINED
from ..quiet import QUIET
from ..record_schema import FA3_DETERMINISTIC, OURS, RING, SDPA, SHARES, WORKLOADS
from ..step import predecessor
from ..text import kib, label, listed, markdown, megabytes
from . import rows
from .derived import CONTEXT_PARALLEL, derived, first_that_run, peer_ratios
from .record_set import NOT_MEASURED, STALE, Cells, Ladder, RecordSet
from .ring_model import NETWORK_BYTES_PER_S, hbm_bytes_per_s
from .rows import Row, latest_steps

Cell = Callable[[Row], str]  # the text of one column in a row
Show = Callable[[Any], str]  # the text of one value


def inputs(operation: Operation) -> str:
    """What is drawn of a call's inputs; o and lse follow from it."""
    drawn = listed(each.name for each in operation.inputs if each not in FORWARD.outputs)
    return f"{drawn} normally distributed with variance 1 (logits of standard deviation 1)"


def _unless_forward(operation: Operation, text: str) -> str:
    """What goes without saying of the forward ladder."""
    return "" if operation == FORWARD else text


def _flops(operation: Operation) -> str:
    ratio = operation.products / FORWARD.products
    return _unless_forward(operation, f"FLOPs are {ratio:g} times forward's. ")


def _peak_memory(operation: Operation) -> str:
    beyond = listed(each.name for each in operation.inputs)
    saved = "; of a peer that differentiates its own forward, also what that has saved"
    return f"what one call takes beyond {beyond}{_unless_forward(operation, saved)}. "


def _max_error(operation: Operation) -> str:
    """Of all outputs the records have one; the tables have the first's."""
    return _unless_forward(operation, f"of {operation.outputs[0].name}, ") + "against float64"


def results(ladder: Ladder) -> str:
    """One row per step, then one per peer, and below what they ran on."""
    columns = {
        "Version": _linked,
        "Change": _first(_value("title"), _value("route"), _value("missing", lambda _: "missing")),
        ">Time (ms)": _first(_MS, _value("status")),
        ">TFLOP/s": _TFLOPS,
        ">% of FA3": _value("fa3_share", "{:.1%}".format),
        ">Step gain": _value("gain", "{:.2f} ×".format),
        ">Registers": _each("registers", str),
        ">Shared memory": _each("smem_bytes", kib),
        ">Spills": _value("spill_bytes", "{} B".format),
        ">Peak memory": _PEAK_MEMORY,
        ">Max error": _ERROR,
    }
    table = _table(columns, rows.steps(ladder) + rows.peers(ladder))
    return table if ladder.newest is None else f"{table}\n\n{_conditions(ladder)}"


def _conditions(ladder: Ladder) -> str:
    record = ladder.newest
    assert record is not None
    operation, shape, environment = ladder.operation, record["shape"], record["environment"]
    states = _device_states([environment["before"], environment["after"]])
    text = (
        f"{record['device']}; batch {shape['batch']}, heads {shape['heads']}, "
        f"sequence {shape['seq_q']}, head_dim {shape['head_dim']}, {shape['dtype']}, not causal; "
        f"{inputs(operation)}; median of {len(record['samples_ms'])} interleaved rounds, "
        f"L2 flushed before each call. {states} {_flops(operation)}"
        "Registers and shared memory: one number per kernel. "
        f"Peak memory: {_peak_memory(operation)}Max error: {_max_error(operation)}; "
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


def _device_states(states: Sequence[dict | str]) -> str:
    """The device's states in the order of time; what throttled it in any but the first."""
    if not all(isinstance(state, dict) for state in states):
        return "Clocks, power and temperature: not collected."

    reasons = dict.fromkeys(
        reason for state in states[1:] for reason in state["throttle_reasons"] or ()
    ) or ["none"]

    def pair(key: str, unit: str) -> str:
        ends = (states[0][key], states[-1][key])
        return " → ".join("?" if end is None else f"{end:.0f}" for end in ends) + f" {unit}"

    return (
        f"Before and after: SM clock {pair('sm_clock_mhz', 'MHz')}, {pair('power_w', 'W')}, "
        f"{pair('temperature_c', '°C')}; throttle reasons after: {', '.join(reasons)}."
    )


def memory(ladder: Ladder) -> str:
    """Peak memory of each step that holds all scores, and of the latest that does not, over N."""
    found = rows.memory(ladder)
    if not found:
        return STALE if ladder.measured.stale else NOT_MEASURED
    names = list(found[0]["bytes"])
    columns = {
        ">N": _value("seq"),
        **{f">{name}": _of("bytes", name, megabytes, none="does not fit") for name in names},
    }
    if "saving" in found[0]:
        title = f">Saving {names[-1]} over {names[0]}"
        columns[title] = _value("saving", "{:.0f} ×".format)
    shape = ladder.measured.records[names[-1]]["shape"]
    beyond = listed(each.name for each in ladder.operation.inputs)
    return (
        f"{_table(columns, found)}\n\nMeasured peak of one call beyond {beyond}, "
        f"batch {shape['batch']}, heads {shape['heads']}, "
        f"head_dim {shape['head_dim']}, {shape['dtype']}."
    )


def peers(ladder: Ladder) -> str:
    """The peers of the latest run."""
    found = rows.peers(ladder)
    if not found:
        return NOT_MEASURED
    columns = {
        "Peer": _value("name"),
        "Code": _first(_value("route"), _value("missing", "missing: {}".format)),
        ">Time (ms)": _MS,
        ">p25–p75 (ms)": _quartiles,
        ">TFLOP/s": _TFLOPS,
        ">Peak memory": _PEAK_MEMORY,
        ">Max error": _ERROR,
    }
    caption = (
        f"\n\nPeak memory: {_peak_memory(ladder.operation)}"
        f"Max error: {_max_error(ladder.operation)}."
    )
    return _table(columns, found) + _unless_forward(ladder.operation, caption)


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
        "Cell": _value("name"),
        ">head_dim": _value("head_dim"),
        "Mask": _mask,
        "Batch × heads": lambda row: f"{row['batch']} × {_heads(row)}",
        ">Queries": _value("seq"),
        ">Keys": _value("seq_k"),
        **{
            f">{title}": _of("tflops", name, "{:.4g}".format, none="missing")
            for name, title in labels.items()
        },
        f">{first} / fastest peer": _value("ratio", _bold_from_one),
    }
    return _table(columns, found) + (
        f"\n\n{first} over the fastest peer: {_summary(peer_ratios(record, *taken))}. "
        f"{_deterministic(ladder)}"
        f"TFLOP/s on the {record['device']} in {record['dtype']}; {inputs(ladder.operation)}; "
        "where the mask is causal, the operations of visible keys are counted: half of them where "
        "there are as many queries as keys. "
        f"{_flops(ladder.operation)}{_how_measured(measured, *taken)}"
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
    columns = {"Inputs": _value("inputs", _code), "dtype": _value("dtype"), "Mask": _mask}
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
    return _table(columns, found) + (
        f"\n\n{label(last, stale=last in measured.stale)} over the fastest peer: "
        f"{_summary(peer_ratios(record, last))}. {record['device']}; batch {shape['batch']}, "
        f"N {shape['seq']}, {shape['heads'] * shape['head_dim']} / D heads. {shares}"
        "normal_s: normally distributed inputs, where s is the standard deviation of the logits; "
        "later_keys_larger: it is 2, and 8 from key 256 on; own_key: each query lies near a key of "
        "its own; first_key_sink: the first key takes nearly all weight; equal_keys: all keys are "
        f"the same ([inputs.py](verify/inputs.py)). {_trained(record)}"
        f"{_how_measured(measured, last)}"
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
        ratio = "missing" if found["ratio"] is None else _bold_from_one(found["ratio"])
        return ratio if found["before"] is None else f"{ratio} ({found['before']:.3f})"

    return cell


def _shares(head_dim: str) -> Cell:
    def cell(row: Row) -> str:
        found = row["by_head_dim"].get(head_dim, {})
        return ", ".join(_percent(found[share]) for share in SHARES if found.get(share) is not None)

    return cell


def _percent(share: float) -> str:
    """0 % only for none, and 100 % only for all."""
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{share:.0%}".replace("%", " %")


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
    return f"{first}, whose every bit repeats, over {FA3_DETERMINISTIC}: {_summary(ratios)}. "


def _how_measured(measured: Cells, *steps: str) -> str:
    """The end of the caption of a table of cells."""
    cells = measured.record["cells"]
    states = [cells[0]["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    rounds = {len(samples) for cell in cells for samples in cell["samples_ms"].values()}
    least, most = min(rounds), max(rounds)
    apart = ", the slow ones apart" if any(cell.get("slow") for cell in cells) else ""
    text = (
        f"Median of {most if least == most else f'{least} to {most}'} interleaved rounds per cell"
        f"{apart}, L2 flushed before each call. In bold: no slower than the fastest peer. "
        f"{_device_states(states)}"
    )
    if measured.previous:
        before = _summary(peer_ratios(measured.previous, *steps))
        text += f" In the run before, of the same sources: {before}."
    return text


def _heads(row: Row) -> str:
    heads, kv_heads = row["heads"], row["kv_heads"]
    return str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"


def _bold_from_one(ratio: float) -> str:
    return f"**{ratio:.3f} ×**" if ratio >= 1 else f"{ratio:.3f} ×"


def _summary(ratios: dict[str, float]) -> str:
    """The ratios by cell in a few words."""
    if not ratios:
        return NOT_MEASURED
    smallest = min(ratios, key=ratios.__getitem__)
    mean = statistics.geometric_mean(ratios.values())
    return (
        f"geometric mean of {len(ratios)} cells {mean:.3f} ×, "
        f"smallest {ratios[smallest]:.3f} × ({smallest})"
    )


def latency(record_set: RecordSet) -> str:
    """One row per shape: what a call takes of the device and of the host, by step and peer."""
    found = rows.latency(record_set)
    if not found:
        return STALE if record_set.latency else NOT_MEASURED
    assert record_set.latency is not None
    record = record_set.latency.record
    cells = record["cells"]
    first = cells[0]
    (step,) = record["sources"]

    def both(name: str) -> Cell:
        device = _of("device_us", name, "{:.1f}".format)
        host = _of("host_us", name, _quiet_and_all)
        return lambda row: f"{device(row)} / {host(row)}" if device(row) else "missing"

    columns = {
        ">N": _value("seq"),
        "Mask": _mask,
        **{f">{name}": both(name) for name in found[0]["device_us"]},
    }
    states = [first["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    return _table(columns, found) + (
        f"\n\nMicroseconds on the {record['device']}: of the device / of the host. Batch "
        f"{first['batch']}, heads {first['heads']}, head_dim {first['head_dim']}, "
        f"{record['dtype']}; {inputs(FORWARD)}. "
        f"The device: events around the call, of {step} around its launch, "
        f"median of {_samples(first['device_us'])} interleaved rounds, L2 flushed before each. "
        "The host: until the call returns, while the device still computes, "
        f"{_host_samples(found)}; for {step} of attention(), for the sdpa with the "
        f"choice of their backend. {_device_states(states)}"
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

    columns = {"Head": _value("head"), "Mask": _mask}
    columns |= {f">{title}": both(output) for output, title in outputs.items()}
    names = " and ".join(label(name, stale=stale) for name in record["sources"])
    head = record["heads"][0]
    return _table(columns, found) + (
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
    (step,) = record["sources"]
    (first, last), (_, sdpas_last) = (record["decoding"][who]["keys"] for who in (step, SDPA))
    columns = {
        "Each call has": lambda row: _CACHES[row["cache"]],
        f">attention(), {step}": _of("host_us", step, _quiet_and_all),
        f">{SDPA}": _of("host_us", SDPA, _quiet_and_all),
    }
    return _table(columns, found) + (
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
        "Workload": _value("workload"),
        "Attention": _value("name"),
        "Code": _first(_value("route"), _value("missing", "missing: {}".format)),
        ">Time (ms)": _MS,
        ">p25–p75 (ms)": _quartiles,
        ">Speed of ours over it": _value("speedup", _bold_from_one),
        ">Peak memory": _PEAK_MEMORY,
        ">Loss": _value("loss", "{:.4f}".format),
    }
    workloads = record["workloads"]
    layer, gpt, llama = (workloads[name] for name in WORKLOADS)
    shape = layer["shape"]
    states = [layer["environment"]["before"]]
    states += [workload["environment"]["after"] for workload in workloads.values()]
    return _table(columns, found) + (
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
        f"{_device_states(states)}"
    )


def _model(config: dict) -> str:
    return (
        f"{config['parameters'] / 1e6:.1f} M parameters, "
        f"{config['batch']} × {config['context']} bytes"
    )


def _tolerance(workload: dict) -> str:
    return f"{100 * workload['config']['tolerance']:g} %"


def sharded(record_set: RecordSet) -> str:
    """For each number of GPUs a table: one row per problem and operation."""
    parts = []
    for gpus, whole in record_set.sharded.items():
        title = f"{gpus} × {whole.record['device']}:"
        parts.append(f"{title}\n\n{_sharded(record_set, gpus)}")
    return "\n\n".join(parts) or NOT_MEASURED


def _sharded(record_set: RecordSet, gpus: int) -> str:
    found = rows.sharded(record_set, gpus)
    if not found:
        return STALE

    def peak_memory(row: Row) -> str:
        sizes = row["peak_memory_bytes"].values()
        return " / ".join("missing" if size is None else megabytes(size) for size in sizes)

    def value(key: str, show: Show) -> Cell:
        return _value(key, show, none="missing")

    columns = {
        ">N": _value("seq"),
        ">Heads": _heads,
        "Mask": _mask,
        "Operation": _value("operation"),
        ">Ring (ms)": _MS,
        ">TFLOP/s a GPU": _TFLOPS,
        f">Over {gpus} × one GPU": value("of_ideal", "{:.3f} ×".format),
        ">Over context_parallel": value("over_context_parallel", _bold_from_one),
        ">Ulysses (ms)": value("ulysses_ms", _milliseconds),
        ">Hidden": _value("hidden", _percent),
        ">Peak memory a GPU, ring / one GPU": peak_memory,
    }
    return f"{_table(columns, found)}\n\n{_sharded_conditions(record_set, gpus, found)}"


def _sharded_conditions(record_set: RecordSet, gpus: int, found: Sequence[Row]) -> str:
    record = record_set.sharded[gpus].record
    cells = record["cells"]
    first = cells[0]
    measured = [cell[each.name]["attentions"] for cell in cells for each in OPERATIONS.values()]
    rings = [attentions[RING] for attentions in measured]
    routes = (attentions[name].get("route") for attentions in measured for name in CONTEXT_PARALLEL)
    peer = next(filter(None, routes), "missing, too").rpartition(",")[0]  # not how it rotates
    rounds = [len(ring["samples_ms"]) for ring in rings]
    once = ", one where that takes long" if min(rounds) == 1 else ""
    states = [first["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    differences = [difference for ring in rings for difference in ring["differences"].values()]
    different = (
        "The ring's outputs differ from one GPU's by at most "
        f"{max(differences):.1e} of their root mean square. "
        if differences
        else ""
    )
    host_ms = statistics.median(ring["host_ms"] for ring in rings)
    return (
        f"Batch {first['batch']}, head_dim {first['head_dim']}, {record['dtype']}; "
        f"{inputs(BACKWARD)}. Steps {listed(record['sources'])}. Ring and Ulysses: attention() of "
        f"a sequence of N tokens that is sharded over the {gpus} GPUs, time of the slowest one. "
        f"Over {gpus} × one GPU: the ring's speed over {gpus} times that of attention() with the "
        "whole problem on one GPU. Over context_parallel: over the faster of torch's two ways to "
        f"rotate ({peer}); in bold: no slower. Median of {_range(rounds, 'd')} interleaved "
        f"rounds{once}, L2 flushed and the GPUs synchronized before each call; they sleep while "
        f"the hosts launch it, which takes {host_ms:.2g} ms in the median row and is in none of "
        "the times. "
        f"Backward's {_flops(BACKWARD)}Hidden: of the time in which tensors travel, the share in "
        "which the GPU computes, in a call by itself. Peak memory: what one call takes of the "
        "fullest GPU beyond q, k, v and dout, and what forward has saved: o and lse, and for the "
        "ring another rank's k and v. "
        f"{different}{_missing(found)}{_device_states(states)}"
    )


def _range(numbers: Sequence[float], form: str) -> str:
    least, most = (format(end, form) for end in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def _missing(found: Sequence[Row]) -> str:
    """A sentence on the attentions that are missing in some rows, and why."""
    reasons: dict[str, dict[str, None]] = {}
    for row in found:
        for name, reason in row["missing"].items():
            reasons.setdefault(name, {})[reason] = None
    names: dict[str, list[str]] = {}  # by their reasons
    for name, why in reasons.items():
        names.setdefault(", ".join(why), []).append(name)
    told = "; ".join(f"{', '.join(which)}: {why}" for why, which in names.items())
    return f"Missing in some rows: {told}. " if told else ""


def sharded_model(record_set: RecordSet) -> str:
    """One row per problem and number of GPUs: ring_model's speed beside the measured one."""
    found = rows.sharded_model(record_set)
    if not found:
        return STALE if record_set.sharded else NOT_MEASURED

    def share(key: str, name: str) -> Cell:
        def cell(row: Row) -> str:
            value = row[key].get(name, NOT_MEASURED)
            return value if isinstance(value, str) else f"{value:.3f}"

        return cell

    def step_ms(row: Row) -> str:
        return " / ".join(map(_milliseconds, row["step_ms"].values()))

    columns = {
        ">Heads": _heads,
        ">N": _value("seq"),
        ">GPUs": _value("gpus"),
        ">A step (ms), forward / backward": step_ms,
    }
    for operation in OPERATIONS.values():
        for key in ("predicted", "measured"):
            columns[f">{operation.name.capitalize()}: {key}"] = share(key, operation.name)
    gpus, whole = next(
        (gpus, whole) for gpus, whole in record_set.sharded.items() if not whole.stale
    )
    link = whole.record["link"]
    most_bytes = max(each["bytes"] for each in link)
    rates = ", ".join(
        f"{each['gb_per_s']:.3g} by {each['blocks']}"
        for each in link
        if each["bytes"] == most_bytes
    )
    return _table(columns, found) + (
        "\n\nThe ring's speed over that of as many GPUs, each with the whole problem; causal mask, "
        f"head_dim {whole.record['cells'][0]['head_dim']}, {whole.record['dtype']}. Predicted by "
        "[ring_model.py](common/report/ring_model.py) from the record of "
        f"{gpus} × {whole.record['device']}: from the speed of one GPU, on the same N or the "
        f"longest that was measured, and what NCCL's blocks move there each way ({rates}, in "
        f"GB/s); beyond 8 GPUs at most {NETWORK_BYTES_PER_S / 1e9:.0f} GB/s a GPU, of a network. "
        f"Merges and sums at {hbm_bytes_per_s(whole.record['device']) / 1e12:.3g} TB/s. A step: "
        "the products of one step of the ring, by themselves; of what it takes to launch a kernel "
        "or to begin a message the model knows nothing, so short steps are slower than it says."
    )


def resources(record_set: RecordSet, step: str) -> str:
    """One row per kernel of the step: what the compiler gave it."""
    found = rows.resources(record_set, step)
    if "status" in found[0]:
        return found[0]["status"]
    columns = {
        "Kernel": _value("kernel", _code),
        ">Registers": _value("registers"),
        ">Static shared": _value("static_smem", kib),
        ">Dynamic shared": _value("dynamic_smem", kib),
        ">Stack": _value("stack_bytes", "{} B".format),
        ">Spill stores": _value("spill_store_bytes", "{} B".format),
        ">Spill loads": _value("spill_load_bytes", "{} B".format),
    }
    return _table(columns, found)


def counters(record_set: RecordSet, step: str) -> str:
    """What Nsight Compute counted: one column per kernel, beside the step before's."""
    kernels = rows.counters(record_set, step)
    if "status" in kernels[0]:
        return kernels[0]["status"]

    def clock(kernel: Row) -> str:
        cycles, duration = kernel["cycles"], kernel["duration_ms"]
        return f"{cycles / duration / 1e6:.2f}" if cycles and duration else "n/a"

    def numbers(form: str, *names: str) -> list[Cell]:
        return [_value(name, form.format, none="n/a") for name in names]

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
        ["", *(f">{_kernel(kernel)}" for kernel in kernels)], [*body, ["Top stalls", *stalls]]
    )


def sass(ladder: Ladder) -> str:
    """One row per kernel of each step: what the compiler gave it, and instructions in its code."""
    columns = {
        "Kernel": _kernel,
        ">Registers": _value("registers"),
        ">Stack": _value("stack_bytes", "{} B".format),
        ">Spills": _value("spill_bytes", "{} B".format),
        ">Instructions": _instructions,
        **{f">{opcode}": _opcode(opcode) for opcode in OPCODES},
    }
    found = rows.sass(ladder)
    if not found:
        return NOT_MEASURED
    table = _table(_status_in(">Registers", columns), found)
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
        "Step": _value("name"),
        "Access": _first(_value("access", _code), _value("status")),
        ">Wavefronts per access, least → counted": per_access,
        ">Bank conflicts": _value("conflicts"),
    }
    found = rows.banks(ladder)
    if not found:
        return NOT_MEASURED
    shape = next(iter(ladder.static.records.values()))["shape"]
    return _table(columns, found) + (
        "\n\nCounted by the SIMT runtime where a wrapper accesses shared memory: batch "
        f"{shape['batch']}, heads {shape['heads']}, {shape['seq_q']} queries, {shape['seq_k']} "
        f"keys, head_dim {shape['head_dim']}, {shape['dtype']}, not causal."
    )


def experiments(record_set: RecordSet, step: str) -> str:
    """One row per experiment: tried, predicted, measured against the step in the same run."""
    columns = {
        "Experiment": _linked,
        "Tried": _value("tries"),
        "Predicted": _value("predicts"),
        ">Step (ms)": _value("baseline_ms", "{:.4g}".format),
        ">Experiment (ms)": _first(_MS, _value("status")),
        ">Gain": _value("gain", "{:.2f} ×".format),
        ">Registers": _each("registers", str),
        ">Stack": _each("stack_bytes", "{} B".format),
    }
    found = rows.experiments(record_set, step)
    return _table(columns, found) if found else "No experiments."


def _table(columns: dict[str, Cell], found: Sequence[Row]) -> str:
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in found])


def _milliseconds(time: float) -> str:
    return f"{time:.4g}" if time < 1e4 else f"{time:.0f}"


def _value(key: str, show: Show = str, none: str = "") -> Cell:
    """Shows row[key]; nothing where the row lacks it, `none` where it is None."""

    def cell(row: Row) -> str:
        if key not in row:
            return ""
        return none if row[key] is None else show(row[key])

    return cell


def _of(key: str, name: str, show: Show, none: str = "") -> Cell:
    """Shows row[key][name], `none` where it is None."""
    return lambda row: none if row[key][name] is None else show(row[key][name])


def _each(key: str, show: Show) -> Cell:
    """Shows the values of a list."""
    return lambda row: " / ".join(show(value) for value in row.get(key, ()))


def _first(*cells: Cell) -> Cell:
    """The first that shows something."""
    return lambda row: next((text for cell in cells if (text := cell(row))), "")


def _quartiles(row: Row) -> str:
    return f"{row['time_p25_ms']:.4g}–{row['time_p75_ms']:.4g}" if "time_p25_ms" in row else ""


def _status_in(title: str, columns: dict[str, Cell]) -> dict[str, Cell]:
    """The columns, where that of this title shows the status of a row without numbers."""
    return columns | {title: _first(columns[title], _value("status"))}


def _linked(row: Row) -> str:
    """The name, linked to its source where it has one."""
    name = f"[{row['name']}]({row['path']})" if "path" in row else row["name"]
    return label(name, stale=row.get("stale", False))


def _kernel(row: Row) -> str:
    return f"{row['step']} {_code(row['kernel'])}" if "kernel" in row else row["step"]


def _mask(row: Row) -> str:
    return "causal" if row["causal"] else "none"


def _code(text: str) -> str:
    return f"`{text}`"


_MS = _value("time_ms", _milliseconds)
_TFLOPS = _value("tflops", "{:.4g}".format)
_PEAK_MEMORY = _value("peak_memory_bytes", megabytes)
_ERROR = _value("error", "{:.1e}".format)
