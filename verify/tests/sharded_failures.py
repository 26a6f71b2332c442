"""How calls of sharded attention end where ranks disagree, or one of them does not do its part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from common import sharded
from common.sharded import ring, ulysses
from verify.tests.sharded_cases import BF16, SHORT_S, Findings, outcome, short_group, tensors

WORLD = "TEST_SHARDED_WORLD"  # a variable of the environment: in which set of ranks a rank is

# What rank 1 does another way than the others: arguments of tensors() and of attention().
DISAGREEMENTS: dict[str, tuple[dict, dict]] = {
    "head_dim": ({"head_dim": 16}, {}),
    "heads": ({"heads": 2}, {}),
    "kv_heads": ({"kv_heads": 1}, {}),
    "batch": ({"batch": 2}, {}),
    "dtype": ({"dtype": BF16}, {}),
    "requires_grad": ({"requires_grad": True}, {}),
    "causal": ({}, {"causal": True}),
    "method": ({}, {"method": "ulysses"}),
    "softmax_scale": ({}, {"softmax_scale": 0.5}),
    "deterministic": ({}, {"deterministic": True}),
}


def wrong_head_dim() -> list[Tensor]:
    q, k, v = tensors()
    return [q, k[..., :4], v]


def no_tensor() -> list:
    return [tensors()[0], [1.0], tensors()[2]]


def with_long_names() -> list[Tensor]:
    """Refused in a message that is longer than what fits, and not in ASCII."""

    class Wrong:
        pass

    Wrong.__name__ = "Ä" * 3000
    return [*tensors()[:2], Wrong()]


# What is wrong with rank 1's inputs alone.
INVALID = {
    "k's head_dim": wrong_head_dim,
    "no tensor": no_tensor,
    "float64": lambda: [t.double() for t in tensors()],
    "a long message": with_long_names,
}


def run_failures(device: str) -> Findings:
    """In groups of all 3 ranks. The last call of a group in which all may go on works."""
    rank, findings = dist.get_rank(), {}

    def play(name: str, call: Callable[[], object]) -> None:
        dist.barrier()
        findings[name] = outcome(call)

    attend = partial(sharded.attention, group=short_group())
    for name, (inputs, options) in DISAGREEMENTS.items():
        own = (inputs, options) if rank == 1 else ({}, {})
        play(name, partial(attend, *tensors(**own[0]), **own[1]))
    for name, inputs in INVALID.items():
        play(name, partial(attend, *(inputs() if rank == 1 else tensors())))
    play("an unknown method", partial(attend, *tensors(), method="rings"))
    play("another call", lambda: unshard_or(partial(attend, *tensors()), rank == 1, attend))
    play("not shard()'s lengths", partial(attend, *tensors(4 + (rank == 1)), causal=True))
    play("keys and queries", partial(attend, *tensors(4, seq_k=5), causal=True))
    play("heads that do not divide", partial(attend, *tensors(heads=4), method="ulysses"))
    play("kv_heads that do not divide", partial(attend, *tensors(heads=6), method="ulysses"))
    play("a right call", partial(attend, *tensors()))

    return findings


def unshard_or(call: Callable[[], object], unshards: bool, attend: partial) -> object:
    if unshards:
        return sharded.unshard(torch.ones(2), attend.keywords["group"], dim=0)
    return call()


def run_end(device: str) -> Findings:
    """That of the rank's world."""
    name = list(ENDS)[int(os.environ[WORLD])]
    if name != "silent at first":
        sharded.unshard(torch.ones(2), dim=0)
    return {"end": outcome(ENDS[name])}


def inputs_of_end() -> list[Tensor]:
    return tensors(heads=6, kv_heads=3, requires_grad=True)


def silent() -> None:
    """Rank 1 is there, but never calls."""
    if dist.get_rank() == 1:
        time.sleep(SHORT_S + 2)
    else:
        sharded.attention(*inputs_of_end())


def silent_unshard() -> None:
    if dist.get_rank() == 1:
        time.sleep(SHORT_S + 2)
    else:
        sharded.unshard(torch.ones(2), dim=0)


def no_backward(method: str) -> None:
    o = sharded.attention(*inputs_of_end(), method=method)
    if dist.get_rank() == 1:
        time.sleep(SHORT_S + 2)
    else:
        o.sum().backward()


def another_pass() -> None:
    """Rank 1 goes on where the others go back."""
    o = sharded.attention(*inputs_of_end())
    if dist.get_rank() == 1:
        sharded.attention(*inputs_of_end())
    else:
        o.sum().backward()


def another_order() -> None:
    """Rank 1 differentiates the second of two calls first."""
    calls = [sharded.attention(*inputs_of_end()) for _ in range(2)]
    for o in reversed(calls) if dist.get_rank() == 1 else calls:
        o.sum().backward()


def fail(*_, **__) -> None:
    raise RuntimeError("a kernel has failed")


def leave(*_, **__) -> None:
    os._exit(0)


def end_in(how: Callable, module, name: str, after: int, **options) -> None:
    """In rank 1 a function ends like that, after so many calls. All others may go on."""
    real, seen = getattr(module, name), []

    def spoiled(*arguments, **keywords):
        seen.append(name)
        return (how if len(seen) > after else real)(*arguments, **keywords)

    if dist.get_rank() == 1:
        setattr(module, name, spoiled)
    sharded.attention(*inputs_of_end(), **options).sum().backward()
    sharded.attention(*inputs_of_end(), **options)


def exit_before() -> None:
    if dist.get_rank() == 1:
        leave()
    sharded.attention(*inputs_of_end())


# How three ranks end where rank 1 does not do its part. A rank launches 3 kernels in forward and as
# many in backward.
ENDS: dict[str, Callable[[], None]] = {
    "silent": silent,
    "silent at first": silent,
    "silent unshard": silent_unshard,
    "no backward (ring)": partial(no_backward, "ring"),
    "no backward (ulysses)": partial(no_backward, "ulysses"),
    "another pass": another_pass,
    "another order": another_order,
    "raises at once": partial(end_in, fail, ring, "_launch", 0),
    "raises in forward": partial(end_in, fail, ring, "_launch", 1),
    "raises in backward": partial(end_in, fail, ring, "_launch", 4),
    "raises at the end": partial(end_in, fail, ring, "_launch", 5),
    "raises in ulysses": partial(end_in, fail, ulysses, "attention_forward", 0, method="ulysses"),
    "raises in ulysses' backward": partial(
        end_in, fail, ulysses, "attention_backward", 0, method="ulysses"
    ),
    "exits before": exit_before,
    "exits in forward": partial(end_in, leave, ring, "_launch", 1),
    "exits in backward": partial(end_in, leave, ring, "_launch", 4),
    "exits in ulysses": partial(end_in, leave, ulysses, "attention_forward", 0, method="ulysses"),
}
