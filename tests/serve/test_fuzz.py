"""Whatever is sent, the answer is no server error.

A longer run: NONET_FUZZ_EXAMPLES=2000 pytest tests/serve/test_fuzz.py
"""

from __future__ import annotations

import json
import os

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("NONET_FUZZ_EXAMPLES", "25"))
VALID, INVALID = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CASES = [
    (VALID, "GET", "/health"),
    (VALID, "GET", "/metrics"),
    (VALID, "GET", "/v1/models"),
    (VALID, "GET", "/v1/models/{model_id}"),
    *((mode, "POST", path) for mode in (VALID, INVALID) for path in ("/v1/completions", "/v1/chat/completions")),
]
LIMITED = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.timeout(max(300, 2 * EXAMPLES))
@pytest.mark.parametrize(("mode", "method", "path"), CASES)
def test_no_request_made_from_the_schema_is_a_server_error(served, mode, method, path):
    """Valid and invalid requests, generated from the server's own OpenAPI document."""
    operation = schemathesis.openapi.from_url(f"{served}/openapi.json")[path][method]

    @LIMITED
    @given(operation.as_strategy(generation_mode=mode))
    def sent(case: schemathesis.Case) -> None:
        response = case.call()
        assert response.status_code < 500, (response.status_code, response.text[:300], case.body)

    sent()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = SCALARS | st.deferred(lambda: st.lists(JSON, max_size=3) | st.dictionaries(st.text(), JSON, max_size=3))
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "n", "stop", "stream", "logprobs", "echo", "seed", "tools", "user",
    "tool_choice", "logit_bias", "stream_options", "temperature", "metadata", "top_logprobs", "response_format",
]  # fmt: skip


@LIMITED
@given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_known_fields_with_any_value_at_all_are_no_server_error(served, path, body):
    base = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    with httpx2.Client(base_url=served, timeout=30) as client:
        for sent in (body, {**base, "max_tokens": 2, **body}):
            # As careless clients write it: NaN, Infinity and half surrogate pairs included.
            written = json.dumps(sent).encode()
            response = client.post(path, content=written, headers={"Content-Type": "application/json"})
            assert response.status_code < 500, (response.text, sent)
