"""The engine's HTTP front over real processes: answers, refusals, routing, aborts, flushes."""

import http.client
import json
import threading
import time
from typing import Any

import pytest
from tests.rigs.procs import Engine, http_json


def post(engine: Engine, body: Any) -> tuple[int, Any]:
    return http_json("POST", f"{engine.url}/generate", body)


def test_the_answer_has_the_contracts_shape(engine: Engine) -> None:
    answer = engine.generate("shape of an answer", 5, dp_rank=1)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 5
    assert isinstance(answer["text"], str)
    assert meta["prompt_tokens"] == len("shape of an answer")
    assert meta["dp_rank"] == 1
    assert meta["cached_tokens"] == sum(meta["cached_tokens_details"].values())
    assert set(meta["cached_tokens_details"]) == {"device", "host", "storage"}


def test_text_and_its_bytes_are_the_same_prompt(engine: Engine) -> None:
    text = "naïve – one token per UTF-8 byte"
    by_ids = post(engine, {"input_ids": list(text.encode()), "sampling_params": {"max_new_tokens": 8}})[1]
    by_text = engine.generate(text, 8)
    assert by_ids["output_ids"] == by_text["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == len(text.encode())


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "x", "input_ids": [1]},
        {"text": ""},
        {"input_ids": []},
        {"input_ids": [272]},
        {"input_ids": [-1]},
        {"input_ids": ["a"]},
        {"input_ids": [1.5]},
        {"text": 3},
        {"text": "x", "temperature": 1},
        {"text": "x", "sampling_params": {"temperature": 0.7}},
        {"text": "x", "sampling_params": {"top_p": 1.0}},
        {"text": "x", "sampling_params": {"max_new_tokens": 0}},
        {"text": "x", "sampling_params": {"max_new_tokens": True}},
        {"text": "x", "sampling_params": {"max_new_tokens": 1024}},
        {"text": "x" * 1024},
        {"text": "x", "dp_rank": 2},
        {"text": "x", "dp_rank": -1},
        {"text": "x", "stream": True},
        [],
        "text",
    ],
)
def test_bad_requests_are_refused_in_json(engine: Engine, body: Any) -> None:
    status, answer = post(engine, body)
    assert status == 422, answer
    assert answer["error"]["code"] == "invalid_request"
    assert not answer["error"]["retryable"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b'{"text": "\\ud800"}', b"[" * 5000])
def test_what_is_not_json_is_refused_in_json(engine: Engine, raw: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=10)
    connection.request("POST", "/generate", raw)
    answer = connection.getresponse()
    assert answer.status == 422
    assert json.loads(answer.read())["error"]["code"] == "invalid_request"
    connection.close()


def test_a_body_over_a_mebibyte_is_refused(engine: Engine) -> None:
    status, answer = post(engine, {"text": "x" * (1 << 20)})
    assert (status, answer["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(("method", "path"), [("GET", "/nope"), ("GET", "/generate"), ("POST", "/health")])
def test_unknown_routes_answer_in_json(engine: Engine, method: str, path: str) -> None:
    status, answer = http_json(method, engine.url + path)
    assert status in (404, 405)
    assert answer["error"]["code"] == "not_found"


def test_requests_go_to_the_replica_that_is_asked_for(engine: Engine) -> None:
    for rank in (0, 1, 0):
        assert engine.generate(f"to {rank}", 2, dp_rank=rank)["meta_info"]["dp_rank"] == rank


def test_without_a_wish_the_least_loaded_replica_serves(engine: Engine) -> None:
    busy = threading.Thread(target=engine.generate, args=("a long answer", 900), kwargs={"dp_rank": 0})
    busy.start()
    until_running(engine, {0})
    ranks = {engine.generate(f"short {i}", 2)["meta_info"]["dp_rank"] for i in range(4)}
    busy.join()
    assert ranks == {1}


def test_both_replicas_give_the_same_tokens(engine: Engine) -> None:
    """Weights come from the seed: which replica serves is no part of the answer."""
    text = "the same model in both processes " * 8
    assert engine.generate(text, dp_rank=0)["output_ids"] == engine.generate(text, dp_rank=1)["output_ids"]


def test_a_repeat_says_that_it_came_from_the_cache(engine: Engine) -> None:
    text = "cached once, read twice. " * 20
    first = engine.generate(text, dp_rank=0)
    again = engine.generate(text, dp_rank=0)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens_details"]["device"] == (len(text) - 1) // 16 * 16
    assert again["output_ids"] == first["output_ids"]


def test_flush_empties_l1_and_l2_of_every_replica(engine: Engine) -> None:
    text = "flushed away. " * 20
    for rank in (0, 1):
        engine.generate(text, dp_rank=rank)
    engine.flush()
    for rank in (0, 1):
        assert engine.generate(text, dp_rank=rank)["meta_info"]["cached_tokens"] == 0


def test_a_flush_of_a_busy_engine_is_refused_when_its_time_is_up(engine: Engine) -> None:
    busy = threading.Thread(target=engine.generate, args=("keeps replica 1 busy", 900), kwargs={"dp_rank": 1})
    busy.start()
    until_running(engine, {1})
    began = time.monotonic()
    status, answer = http_json("POST", f"{engine.url}/flush_cache?timeout=0.2")
    took = time.monotonic() - began
    busy.join()
    assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (400, "not_idle", True)
    assert {"rank": 1, "name": "running_batch", "count": 1} in answer["error"]["details"]["blocked_by"]
    assert 0.2 <= took < 2.0
    engine.flush()


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "1e9", ""])
def test_a_bad_flush_timeout_is_refused(engine: Engine, text: str) -> None:
    status, answer = http_json("POST", f"{engine.url}/flush_cache?timeout={text}")
    assert (status, answer["error"]["code"]) == (422, "invalid_request")


def test_a_caller_that_leaves_aborts_its_request(engine: Engine) -> None:
    """The scheduler drops it: the engine is idle long before 900 tokens could have been made."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=30)
    body = {"text": "nobody waits for this", "sampling_params": {"max_new_tokens": 1000}, "dp_rank": 0}
    began = time.monotonic()
    connection.request("POST", "/generate", json.dumps(body))
    until_running(engine, {0})
    connection.close()
    engine.flush()
    aborted = time.monotonic() - began
    began = time.monotonic()
    engine.generate("nobody waits for this", 1000, dp_rank=0)
    assert aborted < (time.monotonic() - began) / 2


def test_server_info_shows_options_and_storage_view(engine: Engine) -> None:
    status, info = http_json("GET", f"{engine.url}/get_server_info")
    assert status == 200
    assert info["hicache_storage_backend"] is None
    assert info["page_size"] == 16
    assert [state["dp_rank"] for state in info["internal_states"]] == [0, 1]


def until_running(engine: Engine, ranks: set[int]) -> None:
    """Poll until the replicas say that a request is running: a flush that may not wait names them."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        status, answer = http_json("POST", f"{engine.url}/flush_cache?timeout=0")
        if status == 400:
            blocked = answer["error"]["details"]["blocked_by"]
            if ranks <= {entry["rank"] for entry in blocked if entry["name"] == "running_batch"}:
                return
    raise AssertionError(f"no running request on {ranks}")
