"""The expressions behind the inline numbers of worklog.md and README.md.

    v04.tflops : .1f                     a number of a record, formatted as by Python's format()
    v04.tflops / v02.tflops : .1f        arithmetic: + - * / and parentheses
    v04.fa3_share : .0%                  one of derived.derived
    b03.error, b03.dk_error              the largest errors of the first output and of another
    peers.sdpa_cudnn.time_ms : .3f       of the latest run of the forward ladder; directly beside
                                         a step's time, of that run
    peers_backward.sdpa_cudnn.time_ms    of the backward one
    experiments.v04_no_padding.gain : .2f
    grid.d64_causal_4096.v07 : .1f       TFLOP/s of a step or a peer in a cell of the grid
    grid_backward.d64_causal_4096.b03    likewise
    distributions.d64_causal_fp16_normal_4.v10           likewise
    grid.d64_causal_4096.v07.error       the largest error of its o, or of the operation's first
                                         output; in distributions likewise
    distributions.d64_causal_fp16_normal_4.rescaled      a share of a cell
    large_head_dim.d512_causal_4096.v15  likewise, and ...v15.error, of head_dim 256 and more or,
                                         as in d576_v512_4096, of v with one of its own
    large_head_dim.over_256              of derived.LARGE_HEAD_DIM_FIGURES, of all its cells
    large_head_dim_backward.mean         likewise, of gradients
    utilisation.d64_4096.v12.exp : .0%   in a cell of the grid, one of utilisation.shares()
    utilisation_backward.d64_4096.b10.tensor             likewise
    v06.sass.attention_forward.HMMA      one of derived.static_derived
    v06.banks.ldmatrix_x4.conflicts
    train.ours.loss, train.sdpa.ms_per_step              of the training on attention(), on torch's
    training_speed.llama.ours.time_ms                    of a workload on attention() or a peer
    decode.mean, decode.smallest_cell    of derived.DECODE_FIGURES, of few queries on many keys
    decode.v13.mean                      of derived.DECODE_STEP_FIGURES, where v13 is taken
    decode.d128_b8_h32_kv8_q1_8192.v13.time_ms    of a cell of these
    lengths.packed_mean                  of derived.LENGTHS_FIGURES, of packed sequences and windows
    lengths.d128_h16_ragged.v14.tflops   of a cell of these
    lengths_backward.mean                likewise, of their gradients
    sharded_x2.h16_causal_131072.forward.ring.time_ms    of attention over two GPUs; likewise
                                                         ...ring.communication.hidden and, of
                                                         derived.ring_ratios, ...ring.of_ideal
    sharded_x2.link.4.512                GB/s each way, of 4 of NCCL's blocks and 512 MiB
    h100 grid.d64_causal_4096.v07        any of these, of the records in profiles/h100

A dotted path walks through the record's JSON and the numbers derived from it; "sass" and "banks"
lead to the static record of the step or experiment. What has no record, or one whose source has
changed, reads "not measured"; arithmetic on times of different runs "not measured together".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..operation import FORWARD, OPERATIONS
from ..problem import (
    DECODE,
    DISTRIBUTIONS,
    LARGE_HEAD_DIMS,
    LENGTHS,
    LENGTHS_BACKWARD,
    SHARDED,
)
from ..record_schema import RING, SHARES, WORKLOADS
from . import utilisation
from .derived import (
    DECODE_FIGURES,
    DECODE_STEP_FIGURES,
    LARGE_HEAD_DIM_FIGURES,
    LENGTHS_FIGURES,
    decode_figures,
    decode_step_figures,
    derived,
    large_head_dim_figures,
    lengths_figures,
    ring_ratios,
    static_derived,
)
from .record_set import GPU_FOLDER, NOT_MEASURED, STALE, Cells, RecordSet, Whole, in_folder

_FOLDER = re.compile(rf"\s*({GPU_FOLDER})\s+(?=[a-z\d(])")
_TOKEN = re.compile(r"\s*([a-z_][\w.]*|\d+(?:\.\d+)?|[-+*/()])\s*")
_PRECEDENCE = ({"+": operator.add, "-": operator.sub}, {"*": operator.mul, "/": operator.truediv})
_STATIC = {"sass", "banks"}
_PEERS = {operation.named("peers"): operation for operation in OPERATIONS.values()}
# By a name of the record set's cells: their operation, and their problems.
_CELLS = {each.named("grid"): (each, each.grid) for each in OPERATIONS.values()} | {
    "distributions": (FORWARD, DISTRIBUTIONS),
    **{each.named("large_head_dim"): (each, LARGE_HEAD_DIMS) for each in OPERATIONS.values()},
}
_LARGE_HEAD_DIM = [each.named("large_head_dim") for each in OPERATIONS.values()]
_UTILISATION = {each.named("utilisation"): each for each in OPERATIONS.values()}
_SHARDED = re.compile(r"sharded_x(\d+)")
_BY_OPERATION = [operation.name for operation in OPERATIONS.values()]
_MIB = 1 << 20
_TIMES = {"time_ms", "time_p25_ms", "time_p75_ms", "tflops", "ms_per_step"}


@dataclass(frozen=True)
class _Compared:
    """A record's figures, what computes them, its problems by cell, and a number of a cell; and
    figures of each of its steps, where there are some.
    """

    figures: tuple[str, ...]
    derive: Callable[[dict], dict]
    problems: Mapping[str, object]
    example: str
    step_figures: tuple[str, ...] = ()
    derive_by_step: Callable[[dict], dict] = dict


_COMPARED = {
    "decode": _Compared(
        DECODE_FIGURES,
        decode_figures,
        DECODE,
        "d128_b8_h32_kv8_q1_8192.v13.time_ms",
        DECODE_STEP_FIGURES,
        decode_step_figures,
    ),
    "lengths": _Compared(LENGTHS_FIGURES, lengths_figures, LENGTHS, "d128_h16_ragged.v14.tflops"),
    "lengths_backward": _Compared(
        LENGTHS_FIGURES, lengths_figures, LENGTHS_BACKWARD, "d128_h16_ragged.b11.tflops"
    ),
}


class _Unavailable(Exception):
    """Its message stands where the number would."""


@dataclass(frozen=True)
class _Value:
    number: float | str
    run: str | None = None  # of a time


_Tree = str | tuple[Callable[[float, float], float], "_Tree", "_Tree"]


def evaluate(expression: str, record_set: RecordSet, others: Sequence[RecordSet] = ()) -> str:
    """The text of an inline number. Raises UsageError for an expression that means nothing.

    others are the record sets of other GPUs, which it may ask for by their folder.
    """
    arithmetic, _, form = expression.partition(":")
    form = form.strip()
    if asked := _FOLDER.match(arithmetic):
        arithmetic = arithmetic[asked.end() :]
        record_set = in_folder(asked[1], record_set, others)
    try:
        format(1.0, form)  # before anything is measured, too
    except ValueError as error:
        raise UsageError(f"'{expression.strip()}': {error}") from None
    tokens = _TOKEN.findall(arithmetic)
    try:
        if _TOKEN.sub("", arithmetic):  # something that is no token
            raise ValueError
        tree = _parse(tokens)
        if tokens:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"'{expression.strip()}' does not read like 'v04.tflops / v02.tflops : .1f'"
        ) from None
    try:
        value = _value(tree, record_set)
    except _Unavailable as reason:
        return str(reason)
    try:
        return format(value.number, form)
    except ValueError as error:
        raise UsageError(f"'{expression.strip()}': {error}") from None


def _parse(tokens: list[str], level: int = 0) -> _Tree:
    """Takes a sum, a product (level 1) or an operand (level 2) from the front of the tokens.

    Raises ValueError where there is none.
    """
    if level == len(_PRECEDENCE):
        return _parse_operand(tokens)
    tree = _parse(tokens, level + 1)
    while tokens and tokens[0] in _PRECEDENCE[level]:
        sign = tokens.pop(0)
        tree = (_PRECEDENCE[level][sign], tree, _parse(tokens, level + 1))
    return tree


def _parse_operand(tokens: list[str]) -> _Tree:
    if not tokens:
        raise ValueError
    token = tokens.pop(0)
    if token == "(":
        tree = _parse(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError
        return tree
    if token in "+-*/)":
        raise ValueError
    return token


def _value(tree: _Tree, record_set: RecordSet) -> _Value:
    if isinstance(tree, str):
        return _operand(tree, record_set)
    combine, *sides = tree
    left, right = (_value(side, record_set) for side in sides)
    for side in (left, right):
        if isinstance(side.number, str):
            raise _Unavailable(side.number)
    if left.run and right.run and left.run != right.run:
        left = _peer_of_run(sides[0], right.run, record_set) or left
        right = _peer_of_run(sides[1], left.run, record_set) or right
        if left.run != right.run:
            raise _Unavailable("not measured together")
    try:
        number = combine(left.number, right.number)
    except ZeroDivisionError:
        raise _Unavailable("undefined: a division by zero") from None
    return _Value(number, left.run or right.run)


def _peer_of_run(tree: _Tree, run: str, record_set: RecordSet) -> _Value | None:
    """A peer's number of that run, if it is one, and there are records of the run."""
    name, *keys = tree.split(".") if isinstance(tree, str) else ("",)
    if name not in _PEERS:
        return None
    records = record_set.of(_PEERS[name]).measured.records.values()
    record = next((record for record in records if record["run"] == run), None)
    return None if record is None else _walk(record, derived, ["peers", *keys], tree)


def _operand(text: str, record_set: RecordSet) -> _Value:
    if text[0].isdigit():
        return _Value(float(text))
    name, *keys = text.split(".")
    if name in _LARGE_HEAD_DIM and len(keys) == 1:
        return _large_head_dim_figure(record_set.cells.get(name), keys, text)
    if name in _CELLS:
        return _cell_number(record_set, name, keys, text)
    if name in _UTILISATION:
        return _utilisation_number(record_set, name, keys, text)
    if name in _PEERS:
        return _walk(record_set.of(_PEERS[name]).newest, derived, ["peers", *keys], text)
    if name == "train":
        return _training_number(record_set.training, keys, text)
    if name == "training_speed":
        return _speed_number(record_set.training_speed, keys, text)
    if name in _COMPARED:
        whole = record_set.decode if name == "decode" else record_set.lengths.get(name)
        return _compared_number(name, whole, keys, text)
    if several := _SHARDED.fullmatch(name):
        return _sharded_number(record_set.sharded.get(int(several[1])), keys, text)
    sources, recorded, derive = record_set.steps, record_set.measured, derived
    if name == "experiments" and keys:
        name = keys.pop(0)
        sources, recorded = record_set.patches, record_set.experiments
    _require(name, [source.name for source in sources], text)
    if keys and keys[0] in _STATIC:
        recorded, derive = record_set.static, static_derived
    if name in recorded.stale:
        raise _Unavailable(STALE)
    return _walk(recorded.records.get(name), derive, keys, text)


def _cell_number(record_set: RecordSet, kind: str, keys: list[str], text: str) -> _Value:
    operation, problems = _CELLS[kind]
    ladder = record_set.of(operation)
    if len(keys) != 2 and keys[2:] != ["error"]:
        example = f"{kind}.{next(iter(problems))}.{operation.letter}07"
        raise UsageError(f"'{text}' does not read like '{example}'")
    cell_name, name, *error = keys
    _require(cell_name, list(problems), text)
    measured = record_set.cells.get(kind)
    cells = {cell["name"]: cell for cell in measured.record["cells"]} if measured else {}
    if cell_name not in cells:
        raise _Unavailable(NOT_MEASURED)
    cell = cells[cell_name]
    if name in measured.stale:
        raise _Unavailable(STALE)
    if name in SHARES and name in cell and not error:
        if cell[name] is None:
            raise _Unavailable(NOT_MEASURED)
        return _Value(cell[name])
    if name not in cell["tflops"] and name in [step.name for step in ladder.steps]:
        raise _Unavailable(NOT_MEASURED)
    _require(name, list(cell["tflops"]), text)
    rate = cell["tflops"][name]
    if isinstance(rate, dict):
        raise _Unavailable("missing")
    if error:
        return _Value(cell["errors"][name][operation.outputs[0].name])
    return _Value(rate, cell["run"])


def _large_head_dim_figure(measured: Cells | None, keys: list[str], text: str) -> _Value:
    _require(keys[0], list(LARGE_HEAD_DIM_FIGURES), text)
    if measured is None or measured.stale:
        raise _Unavailable(STALE if measured else NOT_MEASURED)
    return _walk(large_head_dim_figures(measured.record), lambda _: {}, keys, text)


def _utilisation_number(record_set: RecordSet, kind: str, keys: list[str], text: str) -> _Value:
    operation = _UTILISATION[kind]
    if len(keys) != 3:
        example = f"{kind}.{next(iter(operation.grid))}.{operation.letter}07.tensor"
        raise UsageError(f"'{text}' does not read like '{example}'")
    cell_name, name, unit = keys
    _require(unit, [*utilisation.UNITS, *utilisation.COUNTS], text)
    rate = _cell_number(record_set, operation.named("grid"), [cell_name, name], text)
    ladder = record_set.of(operation)
    assert ladder.grid is not None
    assert not isinstance(rate.number, str)
    if not utilisation.is_modelled(ladder.grid.record["device"]):
        raise _Unavailable("not modelled")
    counts = utilisation.attention(ladder, name)
    if isinstance(counts, str):
        raise _Unavailable(counts)
    head_dim = operation.grid[cell_name].shape.head_dim
    share = utilisation.shares(counts, operation, head_dim, rate.number)[unit]
    if share is None:
        raise _Unavailable("not modelled")
    return _Value(share, rate.run)


def _training_number(training: Whole | None, keys: list[str], text: str) -> _Value:
    if training and training.stale:
        raise _Unavailable(STALE)
    return _walk(training and training.record, lambda _: {}, keys, text)


def _speed_number(speed: Whole | None, keys: list[str], text: str) -> _Value:
    if not keys:
        raise UsageError(f"'{text}' does not read like 'training_speed.llama.ours.time_ms'")
    workload, *keys = keys
    _require(workload, list(WORKLOADS), text)
    if speed and speed.stale:
        raise _Unavailable(STALE)
    measured = speed and speed.record["workloads"][workload]
    return _walk(measured, lambda workload: workload["attentions"], keys, text)


def _compared_number(kind: str, whole: Whole | None, keys: list[str], text: str) -> _Value:
    """Of a record whose cells compare attentions, or of the figures that follow from all cells."""
    compared = _COMPARED[kind]
    of_step = len(keys) == 2 and bool(compared.step_figures)
    if len(keys) not in (1, 3) and not of_step:
        examples = f"'{kind}.mean' or '{kind}.{compared.example}'"
        raise UsageError(f"'{text}' does not read like {examples}")
    if of_step:
        _require(keys[1], list(compared.step_figures), text)
    else:
        _require(keys[0], list(compared.figures if len(keys) == 1 else compared.problems), text)
    if whole is None:
        raise _Unavailable(NOT_MEASURED)
    if whole.other_changed or whole.changed & _steps_of(compared, whole.record, keys):
        raise _Unavailable(STALE)
    if of_step:
        return _walk(compared.derive_by_step(whole.record), lambda _: {}, keys, text)
    if len(keys) == 1:
        return _walk(compared.derive(whole.record), lambda _: {}, keys, text)
    name, *rest = keys
    cell = next((cell for cell in whole.record["cells"] if cell["name"] == name), None)
    return _walk(cell and cell["attentions"] | {"run": cell["run"]}, lambda _: {}, rest, text)


def _steps_of(compared: _Compared, record: dict, keys: list[str]) -> set[str]:
    """The steps of which a number of _compared_number() is."""
    *few, general = record["sources"]
    if keys == ["copy_tb_per_s"]:
        return set()
    if not compared.step_figures or len(keys) == 1:
        return {*few, general}
    if len(keys) == 3:
        return {keys[1]}
    step, figure = keys
    return {step, general} if "gain" in figure else {step}


def _sharded_number(sharded: Whole | None, keys: list[str], text: str) -> _Value:
    if len(keys) < 3:
        example = "sharded_x2.h16_causal_131072.forward.ring.time_ms"
        raise UsageError(f"'{text}' does not read like '{example}' or 'sharded_x2.link.4.512'")
    what, operation, *rest = keys
    _require(what, ["link", *SHARDED], text)
    if what != "link":
        _require(operation, _BY_OPERATION, text)
    if sharded is None or sharded.stale:
        raise _Unavailable(STALE if sharded else NOT_MEASURED)
    record = sharded.record
    if what == "link":
        by_blocks: dict[str, dict] = {}
        for each in record["link"]:
            by_bytes = by_blocks.setdefault(str(each["blocks"]), {})
            by_bytes[f"{each['bytes'] / _MIB:g}"] = each["gb_per_s"]
        return _walk(by_blocks, lambda _: {}, [operation, *rest], text)
    cell = next((cell for cell in record["cells"] if cell["name"] == what), None)
    if cell is None:
        raise _Unavailable(NOT_MEASURED)
    measured, attentions = cell[operation], cell[operation]["attentions"]
    ring = attentions[RING] | ring_ratios(attentions, record["gpus"])
    found = {"run": cell["run"], "flops": measured["flops"], **attentions, RING: ring}
    return _walk(found, lambda _: {}, rest, text)


def _walk(
    record: dict | None, derive: Callable[[dict], dict], keys: list[str], text: str
) -> _Value:
    if record is None:
        raise _Unavailable(NOT_MEASURED)
    node: object = record | derive(record)
    for key in keys:
        if isinstance(node, str):  # "not collected"
            raise _Unavailable(node)
        if node is None:
            raise _Unavailable(NOT_MEASURED)
        if not isinstance(node, dict):
            raise UsageError(f"'{text}': nothing is called '{key}' there")
        if "missing" in node:
            raise _Unavailable("missing")
        _require(key, list(node), text)
        node = node[key]
    if node is None:
        raise _Unavailable(NOT_MEASURED)
    if isinstance(node, (dict, list)):
        raise UsageError(f"'{text}' is not a number")
    return _Value(node, record["run"] if keys and keys[-1] in _TIMES else None)


def _require(name: str, known: list[str], text: str) -> None:
    if name not in known:
        raise UsageError(f"'{text}': no '{name}'; there are {', '.join(known) or 'none'}")
