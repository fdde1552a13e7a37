"""`/openapi.json` against the server that it describes, by requests made from it, right and wrong ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckContext
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from stages.decoding import EagleModel
from stages.serve.app import Access
from tests.serve.running_server import RunningServer, running_server

KEY = "sk-tested"
LIGHTLY = settings(
    deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
# How a request is refused for its form; one of the right form may still ask for what cannot be.
OF_FORM = re.compile(r"is no parameter|is missing|not supported; leave it out|is refused: \w+ should")


@pytest.fixture(scope="module")
def server(plain: EagleModel) -> Iterator[RunningServer]:
    with running_server(plain, max_length=48, max_queue=4, access=Access(api_keys=(KEY,))) as running:
        yield running


@pytest.fixture(scope="module")
def described(server: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def right_forms_are_taken(context: CheckContext, response: Response, case: schemathesis.Case) -> None:
    if case.meta is not None and case.meta.generation.mode.is_positive and response.status_code == 400:
        assert not OF_FORM.search(response.json()["error"]["message"])


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_requests_get_the_answers_that_the_description_knows(
    described: Any, path: str, mode: GenerationMode
) -> None:
    statuses: set[int] = set()

    @settings(LIGHTLY, max_examples=30)
    @given(case=described[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        response = case.call_and_validate(
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=60,
            additional_checks=[right_forms_are_taken],
            excluded_checks=[positive_data_acceptance],
        )
        statuses.add(response.status_code)

    check()
    assert statuses >= ({200, 400} if mode.is_positive else {400})


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/models", "/v1/models/{name}"])
def test_what_can_be_read_is_what_the_description_says(described: Any, path: str) -> None:
    @settings(LIGHTLY, max_examples=3)
    @given(case=described[path]["GET"].as_strategy())
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"})

    check()
