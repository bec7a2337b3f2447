"""The service keeps to its own OpenAPI description, whatever is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from pyspec.engine import Engine
from tests.server.service import serving
from tests.server.test_guard import fetch


@pytest.fixture(scope="module")
def limited(engine: Engine) -> Any:
    """The same pair, whose answers are short whatever is asked."""
    with serving(engine, max_tokens=4, max_choices=2) as url:
        yield url


def exercise(url: str, mode: GenerationMode, *, n: int, derandomize: bool) -> int:
    """Send requests that fit the description, or do not; returns how many."""
    sent = 0
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=n,
            derandomize=derandomize,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            nonlocal sent
            sent += 1
            # Statuses, types and bodies as described; nothing accepted that is not.
            # What depends on two fields, such as top_logprobs on logprobs, no schema says.
            case.call_and_validate(timeout=120, excluded_checks=[positive_data_acceptance])

        if mode is GenerationMode.POSITIVE or operation.body:
            send()
    return sent


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_breaks_the_service(limited: str, mode: GenerationMode) -> None:
    assert exercise(limited, mode, n=8, derandomize=True) >= 16
    assert fetch(limited, "/health")[0] == 200


@pytest.mark.thorough
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_of_many_breaks_the_service(limited: str, mode: GenerationMode) -> None:
    assert exercise(limited, mode, n=400, derandomize=False) >= 800


def test_the_description_names_every_field_and_its_limits(limited: str) -> None:
    described = json.loads(fetch(limited, "/openapi.json")[2])
    chat = described["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    temperature = chat["properties"]["temperature"]
    assert {"minimum": 0.0, "maximum": 2.0, "type": "number"} in temperature["anyOf"]
    assert "0.8" in temperature["description"]
    for operations in described["paths"].values():
        for operation in operations.values():
            assert operation["description"]
            assert "4XX" in operation["responses"]
            assert "422" not in operation["responses"]
