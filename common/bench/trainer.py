"""Trains GPTs side by side: of the same seed, on the same batches, each with its own attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from ..errors import UsageError
from ..problem import Problem
from .corpus import draw
from .gpt import GPT, Attention, Size

SEED = 0
BETAS, WEIGHT_DECAY, LARGEST_GRADIENT = (0.9, 0.95), 0.1, 1.0
LAST_RATE = 0.1  # of the highest learning rate


@dataclass(frozen=True)
class Plan:
    """A model, and how it is trained.

    tolerance is how far two losses may drift apart, relatively, each as its mean over `window`
    steps.
    """

    size: Size
    batch: int  # sequences
    steps: int
    warmup: int  # steps in which the learning rate rises
    learning_rate: float  # the highest
    held_out: int  # sequences, at most
    window: int  # steps
    tolerance: float

    @property
    def problem(self) -> Problem:
        """What each layer asks attention to compute."""
        return Problem(self.size.shape(self.batch), "bf16", causal=True)

    def rate(self, step: int) -> float:
        """Of the highest learning rate: it rises linearly and falls by half a cosine."""
        cosine = (1 + math.cos(math.pi * step / self.steps)) / 2
        return min(1, (step + 1) / self.warmup) * (LAST_RATE + (1 - LAST_RATE) * cosine)


class Training:
    """A model, its optimizer and the attention it is trained on; float32, under a bf16 autocast.

    losses: nats a byte, of each step's batch before the step. step_ms: host time of each step, from
    an idle device to an idle device.
    """

    def __init__(self, plan: Plan, attention: Attention, device: torch.device) -> None:
        self.plan = plan
        self.model = GPT(plan.size, SEED).to(device)
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        self._attention = attention
        self._device = device
        matrices = [each for each in self.model.parameters() if each.dim() == 2]
        scales = [each for each in self.model.parameters() if each.dim() != 2]
        groups = (
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": scales, "weight_decay": 0.0},
        )
        self._optimizer = torch.optim.AdamW(groups, plan.learning_rate, BETAS, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, plan.rate)

    def step(self, sequences: Tensor) -> None:
        """Learns sequences, int64 [batch, context + 1], from any device."""
        sequences = sequences.to(self._device)
        start = perf_counter()
        loss = self.update(sequences)
        self.losses.append(loss.item())  # waits for everything above
        self.step_ms.append(round(1000 * (perf_counter() - start), 3))

    def update(self, sequences: Tensor) -> Tensor:
        """The work of a step on the device, where sequences are: nothing waits for it.

        Returns their mean loss [] before it.
        """
        loss = self.add_gradients(sequences)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def add_gradients(self, sequences: Tensor) -> Tensor:
        """The mean loss [] of sequences, whose gradients it adds to the parameters'."""
        loss = self._loss(sequences)
        loss.backward()
        return loss

    def config(self) -> dict:
        """The plan, as records have it, and how many parameters the model has."""
        numbers = asdict(self.plan)
        size = numbers.pop("size")
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {**size, **numbers, "parameters": parameters}

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[Tensor]) -> float:
        """Of batches [batch, context + 1] of the same size, which it does not learn."""
        return torch.stack([self._loss(batch) for batch in batches]).mean().item()

    @torch.no_grad()
    def heads(self, sequence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, bf16 [layers, context, head_dim], of the first sequence [1, context + 1].

        Of each layer that of one head, the first layer's first, the second's second and so on, as
        its attention gets them: with positions.
        """
        kept: list[tuple[Tensor, ...]] = []

        def keep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            head = len(kept) % q.shape[1]
            kept.append(tuple(x[0, head].bfloat16() for x in (q, k, v)))
            return self._attention(q, k, v)

        self._logits(sequence, keep)
        q, k, v = (torch.stack(layers) for layers in zip(*kept, strict=True))
        return q, k, v

    def _loss(self, sequences: Tensor) -> Tensor:
        logits = self._logits(sequences, self._attention)
        return cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())

    def _logits(self, sequences: Tensor, attention: Attention) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            return self.model(sequences[:, :-1], attention)


def train(plan: Plan, trainings: Mapping[str, Training], text: Tensor) -> None:
    """Has each training, by name, learn the same batches of a text, uint8 [bytes].

    They take turns in both orders, so that drifting clocks and temperature affect all alike.
    """
    rng = torch.Generator().manual_seed(SEED)
    progress = tqdm(range(plan.steps), "training", unit="step", leave=False, disable=None)
    for step in progress:
        sequences = draw(text, plan.batch, plan.size.context + 1, rng)
        for name in sorted(trainings, reverse=step % 2 == 1):
            trainings[name].step(sequences)
        progress.set_postfix({name: each.losses[-1] for name, each in trainings.items()})


def require_agreement(plan: Plan, losses: Mapping[str, Sequence[float]]) -> None:
    """Raises UsageError where the losses of two trainings, by name, have drifted apart."""
    means = {
        name: torch.tensor(each, dtype=torch.float64).unfold(0, plan.window, 1).mean(1)
        for name, each in losses.items()
    }
    (one, ours), (other, theirs) = means.items()
    apart = (ours - theirs).abs() / theirs
    wrong = ~(apart <= plan.tolerance)  # as for NaN
    if wrong.any():
        at = int(wrong.nonzero()[0])
        over = f"steps {at + 1} to {at + plan.window}" if plan.window > 1 else f"step {at + 1}"
        raise UsageError(
            f"the losses drift apart: over {over} that of {one} is {ours[at]:.4f}, that of {other} "
            f"{theirs[at]:.4f}, {apart[at]:.2%} apart, where {plan.tolerance:.2%} is allowed"
        )
