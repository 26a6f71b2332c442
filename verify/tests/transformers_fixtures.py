"""Fixtures that the tests of transformers take over: it is registered, and its calls are kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from torch import Tensor

import common.transformers as integration
from verify.tests.transformers_models import transformers


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every warning of ours is an error, unless a test expects it."""
    monkeypatch.setattr(integration, "_told", set())
    integration.register()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=integration.NAME)
        yield


def spy_on(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """q, k and v of each call of that function."""
    seen = []
    real = getattr(integration, name)

    def spy(q, k, v, *lengths, **options):
        seen.append((q, k, v))
        return real(q, k, v, *lengths, **options)

    monkeypatch.setattr(integration, name, spy)
    return seen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    return spy_on("attention", monkeypatch)


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    return spy_on("attention_varlen", monkeypatch)
