"""The description says what the router does; the metrics count what happened, with labels that cannot grow."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coserve.core.link.generation import CancelRequest, Generate
from coserve.core.link.stats import STALL_BUCKETS, StallCounts
from coserve.core.training.micro_step import MicroStep
from tests.support.api_server import Api, add_adapter, scrape, serve_api
from tests.support.gpu_memory import USE


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        here = {node["$ref"]} if "$ref" in node else set()
        return here.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


async def test_the_description_is_whole(api: Api) -> None:
    status, document = await api.call("GET", "/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {
        (route.method, str(route.resource.canonical))
        for route in api.app.router.routes()
        if route.resource and route.method != "HEAD"
    }
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(names) == len(set(names))
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], path
            assert len(operation["tags"]) == 1, path
            assert {"400", "401", "403"} <= set(operation["responses"])
            assert ("requestBody" in operation) == ((method, path) in BODIES), path
            given = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
            assert given == set(re.findall(r"{(\w+)}", path))
            for response in operation["responses"].values():
                assert response["description"]
                assert response["content"]
    finetune, events = document["paths"]["/finetune"]["post"], document["paths"]["/finetune/{id}/events"]["get"]
    assert {"409", "500", "503"} <= set(finetune["responses"]) and "Retry-After" in finetune["responses"]["429"][
        "headers"
    ]
    form = finetune["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert (set(form["properties"]), form["required"]) == ({"settings", "file", "validation"}, ["settings", "file"])
    headers = [one["name"] for route in (finetune, events) for one in route["parameters"] if one["in"] == "header"]
    assert headers == ["Idempotency-Key", "Last-Event-ID"]
    starting = document["paths"]["/health"]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
    assert {"$ref": "#/components/schemas/Health"} in starting["anyOf"]
    streamed = document["paths"]["/generate"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    text, end = streamed["properties"]["data"]["anyOf"]
    assert {"$ref": "#/components/schemas/GenerateChunk"} in text["contentSchema"]["anyOf"]
    assert {"$ref": "#/components/schemas/ErrorBody"} in text["contentSchema"]["anyOf"]
    assert end == {"const": "[DONE]"}
    generate = schemas["GenerateRequest"]
    assert generate["additionalProperties"] is False
    assert (
        generate["properties"]["n"].items() >= {"type": "integer", "minimum": 1, "maximum": 128, "default": 1}.items()
    )
    assert "\\A" not in str(document)
    assert re.fullmatch(schemas["FinetuneRequest"]["properties"]["adapter"]["pattern"], "a-1")
    assert document["paths"]["/health"]["get"]["security"] == []
    for field in ("text", "completion", "messages", "instruction", "conversations"):
        assert f'"{field}":' in str(schemas["FinetuneRequest"]["properties"]["data"]), "the formats of rows are told"
    assert "lora_alpha" in schemas["LoraRequest"]["description"], "so are PEFT's names for ours"


async def test_fields_are_described_by_what_stands_below_them(api: Api) -> None:
    """Also those of nested structs, and of a struct that adds fields to another."""
    _, document = await api.call("GET", "/openapi.json")
    schemas = document["components"]["schemas"]
    for name in ("TrainingRequest", "TrainingSettings"):
        assert schemas[name]["properties"]["max_grad_norm"]["description"] == "0: no clipping."
    assert schemas["FinetuneRequest"]["properties"]["continue_from"]["description"].startswith(
        "Adapter to continue instead of a new one"
    )
    assert "description" not in schemas["TrainingRequest"]["properties"]["seed"]


async def test_the_root_says_where_to_look(api: Api) -> None:
    status, found = await api.call("GET", "/")
    assert (status, found["name"]) == (200, "coserve")
    for path in (found["health"], found["openapi"]):
        assert (await api.call("GET", path))[0] == 200
    root = Path(__file__).parents[2]
    pages = {
        str(page.relative_to(root))
        for folder in ("guide", "reference")
        for page in (root / "docs" / folder).glob("*.md")
    }
    assert set(found["docs"]) == {"README.md", "docs/design/README.md", *pages}


TINKER = (
    "client/config",
    "client/dynamic_config",
    "create_session",
    "session_heartbeat",
    "create_model",
    "unload_model",
    "get_info",
    "optim_step",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
    "create_sampling_session",
    "asample",
    "retrieve_future",
    "cancel_future",
    "weights_info",
)
BODIES = {
    ("post", path)
    for path in (
        "/generate",
        "/",
        "/v1/files",
        "/v1/fine_tuning/jobs",
        "/generate_stream",
        "/finetune",
        "/adapters",
        "/adapters/{id}/rollback",
        "/adapters/{id}/convert",
        "/v1/completions",
        "/v1/chat/completions",
        "/invocations",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/batches",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/tokenize",
        "/detokenize",
        "/api/v1/sessions/{id}/finish",
        *(f"/api/v1/{name}" for name in TINKER),
        "/sessions",
        *(f"/sessions/{{id}}/{name}" for name in ("forward_backward", "forward", "optim_step", "save", "publish")),
    )
} | {
    ("post", "/admin/keys"),
    ("put", "/admin/quotas/{id}"),
    ("put", "/admin/log-level"),
    ("patch", "/adapters/{id}"),
    ("put", "/aliases/{id}"),
}


async def test_metrics_count_requests_and_jobs(api: Api) -> None:
    await api.works()
    _, job = await api.call("POST", "/finetune", json={"adapter": "a", "data": [{"text": "a b"}]})
    await api.job_until(job["id"], "succeeded")
    api.engine.stats(running=2, waiting=1, memory=USE)
    await api.works()
    found = await scrape(api)
    assert found["coserve_requests_total,finish_reason=length"] == 2
    assert found["coserve_generation_tokens_total"] == 2 * len(api.reply)
    assert found["coserve_time_to_first_token_seconds_count"] == 2
    assert found["coserve_request_queue_time_seconds_count"] == 2
    # Tokens that have piled up leave in one chunk, which has one latency.
    assert 0 < found["coserve_inter_token_latency_seconds_count"] <= 2 * (len(api.reply) - 1)
    assert found["coserve_e2e_request_latency_seconds_count"] == 2
    assert found["coserve_train_tokens_total"] == 30
    assert found["coserve_jobs_ended_total,state=succeeded"] == 1
    assert found["coserve_jobs,state=running"] == 0
    assert found["coserve_num_requests_running"] == 2
    assert found["coserve_kv_cache_usage_ratio"] == 0.25
    assert found["coserve_adapter_pages"] == 3
    assert found["coserve_cuda_graphs_missing"] == 4
    assert found["coserve_memory_planned_bytes"] == USE.planned
    assert found["coserve_memory_peak_bytes"] == 900
    assert found["coserve_train_seconds_total"] == 2.5
    assert found["coserve_engine_up"] == 1


async def test_counters_of_the_engine_go_on_over_its_restarts(api: Api) -> None:
    api.engine.stats()
    await api.works()
    await api.engine.die()
    await api.start_engine()
    api.engine.stats()
    await api.works()
    found = await scrape(api)
    assert found["coserve_serve_seconds_total"] == 3.0
    assert found["coserve_generation_steps_total,beside_training=true,kind=decode"] == 40
    assert found["coserve_generation_step_seconds_total,beside_training=true,kind=decode"] == 1.0
    assert found["coserve_generation_step_seconds_total,beside_training=false,kind=prefill"] == 0.5
    assert found["coserve_preemptions_total"] == 4
    assert found["coserve_step_adapters_total"] == 14
    assert found["coserve_engine_cuda_alloc_total"] == 8
    assert found["coserve_prefix_cache_queries_total"] == 100
    assert found["coserve_prefix_cache_hits_total"] == 60
    assert found["coserve_engine_restarts"] == 1


async def test_stalls_are_a_histogram_by_cause_that_goes_on_over_restarts(api: Api) -> None:
    def stalls(cause: str, *at: int) -> StallCounts:
        buckets = tuple(at.count(bucket) for bucket in range(len(STALL_BUCKETS) + 1))
        return StallCounts(cause=cause, seconds=1.5 * len(at), buckets=buckets)

    api.engine.stats(stalls=(stalls("decode", 0, 1, 1), stalls("gc", len(STALL_BUCKETS))))
    await api.works()
    await api.engine.die()
    await api.start_engine()
    api.engine.stats(stalls=(stalls("decode", 1), stalls("loop", 2)))
    await api.works()
    found = await scrape(api)
    name = "coserve_engine_stall_seconds"
    assert found[f"{name}_bucket,cause=decode,le=0.001"] == 1
    assert found[f"{name}_bucket,cause=decode,le=0.002"] == 4
    assert found[f"{name}_bucket,cause=decode,le=+Inf"] == found[f"{name}_count,cause=decode"] == 4
    assert found[f"{name}_sum,cause=decode"] == 6.0
    assert found[f"{name}_bucket,cause=gc,le=10.0"] == 0
    assert (found[f"{name}_count,cause=gc"], found[f"{name}_count,cause=loop"]) == (1, 1)


async def test_every_metric_is_described(api: Api) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    described = set(re.findall(r"^\| `(coserve_\w+)`", page, re.MULTILINE))
    async with api.http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    served = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    causes = (Path(__file__).parents[2] / "docs/guide/operate.md").read_text().partition("## Stalls")[2]
    assert {f"train_{kind}" for kind in MicroStep} <= set(re.findall(r"`(\w+)`", causes))
    assert described == {name for name in served if name.startswith("coserve_") and not name.endswith("_created")}


async def test_labels_do_not_grow_with_what_clients_say(api: Api) -> None:
    before = len(await scrape(api))
    for index in range(20):
        await api.call("GET", f"/path/{index}")
        await api.call("GET", f"/adapters/name{index}")
        await api.call("POST", "/generate", json={"prompt": "x", "adapter": f"name{index}"})
    assert len(await scrape(api)) - before <= 8


async def test_two_servers_in_one_process_count_apart(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "a") as one, serve_api(tmp_path / "b") as two:
        await one.works()
        assert (await scrape(one))["coserve_requests_total,finish_reason=length"] == 1
        assert (await scrape(two))["coserve_requests_total,finish_reason=length"] == 0


async def test_health_shows_the_base_and_what_runs(api: Api) -> None:
    api.engine.stats(running=2, waiting=1, jobs=1)
    await api.works()
    _, health = await api.call("GET", "/health")
    assert health["status"] == "ready"
    assert health["base"]["name"] == "fake"
    assert (health["running"], health["waiting"], health["jobs"]) == (2, 1, 1)
    assert (health["lora_backend"], health["kv_tokens"], health["notes"]) == ("reference", 1024, ["a fake"])
    assert health["policy"] == "slack", "what auto stands for on a CPU"
    assert await api.engine.saw(Generate)


async def test_dashboards_find_vllms_names(api: Api) -> None:
    await api.works()
    await api.call("POST", "/generate", json={"prompt": "x", "stop": ["sat"]})
    api.engine.stats(running=2, waiting=1)
    await api.works()
    found = await scrape(api)
    labels = ",engine=0,model_name=fake"
    same = {
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum",
        "time_per_output_token_seconds_count": "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_sum": "e2e_request_latency_seconds_sum",
        "request_queue_time_seconds_count": "request_queue_time_seconds_count",
        "request_prefill_time_seconds_sum": "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum": "request_decode_time_seconds_sum",
        "request_inference_time_seconds_count": "request_inference_time_seconds_count",
        "request_prompt_tokens_sum": "request_prompt_tokens_sum",
        "request_generation_tokens_count": "request_generation_tokens_count",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generation_tokens_total",
        "num_requests_running": "num_requests_running",
        "num_requests_waiting": "num_requests_waiting",
        "kv_cache_usage_perc": "kv_cache_usage_ratio",
        "prefix_cache_queries_total": "prefix_cache_queries_total",
        "prefix_cache_hits_total": "prefix_cache_hits_total",
        "num_preemptions_total": "preemptions_total",
    }
    for theirs, ours in same.items():
        assert found[f"vllm:{theirs}{labels}"] == found[f"coserve_{ours}"] > 0, theirs
    ends = {
        reason: found[f"vllm:request_success_total,engine=0,finished_reason={reason},model_name=fake"]
        for reason in ("stop", "length", "abort")
    }
    assert ends == {"stop": 1, "length": 2, "abort": 0}
    bucket = found["vllm:time_to_first_token_seconds_bucket,engine=0,le=+Inf,model_name=fake"]
    assert bucket == found["coserve_time_to_first_token_seconds_bucket,le=+Inf"]
    phases = ("prefill", "decode")
    parts = sum(found[f"coserve_request_{phase}_time_seconds_sum"] for phase in phases)
    assert abs(parts - found["coserve_request_inference_time_seconds_sum"]) < 1e-6


async def test_a_gateway_sees_the_adapters_of_requests_that_run_and_that_wait(api: Api) -> None:
    """In the labels of one sample, whatever ran before: Kubernetes' inference gateways route by it."""

    async def adapters() -> tuple[list[str], list[str]]:
        async with api.http.get("/metrics") as response:
            text = await response.text()
        (found,) = re.findall(r"^vllm:lora_requests_info{(.*)} (\S+)$", text, re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[0]))
        assert labels.pop("max_lora") == str(api.config.max_running)
        assert float(found[1]) == pytest.approx(time.time(), abs=60)
        return labels["running_lora_adapters"].split(","), labels["waiting_lora_adapters"].split(",")

    for name in ("poet", "bard", "sage"):
        add_adapter(api, name)
    assert await adapters() == ([""], [""])
    api.engine.stall_after = 1
    async with AsyncExitStack() as stack:
        for adapter in ({"adapter": "poet"}, {"adapter": "bard@1"}, {}):
            body = {"prompt": "x", "stream": True} | adapter
            response = await stack.enter_async_context(api.http.post("/generate", json=body))
            await response.content.readline()
        api.engine.go_requests.clear()
        waiting = asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x", "adapter": "sage"}))
        await api.engine.saw(Generate, 4)
        assert await adapters() == (["bard", "poet"], ["sage"])
    api.engine.stall_after = None
    api.engine.go_requests.set()
    await waiting
    await api.engine.saw(CancelRequest, 3)
    assert await adapters() == ([""], [""])


async def test_prompts_that_were_never_computed_do_not_count(api: Api) -> None:
    """As vLLM's counter of that name: a client that gives up while its request waits."""
    await api.works()
    before = await scrape(api)
    api.engine.go_requests.clear()
    waiting = asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x" * 50}))
    await asyncio.sleep(0.2)
    waiting.cancel()
    after = await scrape(api)
    api.engine.go_requests.set()
    for name in ("coserve_prompt_tokens_total", "coserve_request_prompt_tokens_count"):
        assert after[name] == before[name]
