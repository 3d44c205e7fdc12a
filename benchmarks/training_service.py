"""The overhead of the training service over its worker groups, in one process on the CPU.

    python -m benchmarks.training_service MODEL [--rounds 30]

prints milliseconds of a forward_backward and of a sample: called on the worker groups, by `training_client`, and over
HTTP with two requests each, as the SDK sends them; requests per second of the HTTP server; and memory of a model. All
runs in one process, and milliseconds are its CPU time, the HTTP client's included: other load does not count. Each
round calls all ways in turn; figures are medians.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import numpy as np
import psutil

from hybridrl import training_client
from hybridrl.training_service import wire
from hybridrl.training_service.client import ModelClient, SamplerClient, ServiceClient, datum
from hybridrl.training_service.http.routes import TrainingEndpoint
from hybridrl.training_service.wire import Pass
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

ROWS, LENGTH, NEW_TOKENS, RANK = 8, 64, 16, 16
NUM_REQUESTS, CONNECTIONS = 400, 8
NUM_MODELS = 7  # beside the first: a key may have 8
SLICE_S = 0.2


class HttpClient:
    """Sends requests to an endpoint in this process, from threads of its own."""

    def __init__(self, service: Any):
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(1)
        self._threads.submit(self._loop.run_forever)
        self._endpoint = TrainingEndpoint(service, host="127.0.0.1", port=0)
        self._wait(self._endpoint.start())
        self._session = self._wait(self._open())

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(f"http://127.0.0.1:{self._endpoint.port}/api/v1/")

    async def _post(self, path: str, **body: Any) -> Any:
        async with self._session.post(path, **body) as response:
            raw = await response.read()
            assert response.status == 200, raw
            return raw if response.content_type == wire.PROTOBUF else await response.json()

    async def _operation(self, path: str, **body: Any) -> bytes:
        request_id = (await self._post(path, **body))["request_id"]
        headers = {"Accept": wire.PROTOBUF}
        return await self._post("retrieve_future", json={"request_id": request_id}, headers=headers)

    def operation(self, path: str, **body: Any) -> bytes:
        """Send an operation and fetch its answer."""
        return self._wait(self._operation(path, **body))

    def requests_per_second(self, session_id: str) -> float:
        """Return how many heartbeats a second are answered on several connections."""

        async def many() -> None:
            for _ in range(NUM_REQUESTS // CONNECTIONS):
                await self._post("session_heartbeat", json={"session_id": session_id})

        async def all_connections() -> None:
            await asyncio.gather(*(many() for _ in range(CONNECTIONS)))

        started = time.perf_counter()
        self._wait(all_connections())
        return NUM_REQUESTS / (time.perf_counter() - started)

    def close(self) -> None:
        self._wait(self._session.close())
        self._wait(self._endpoint.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads.shutdown()


def medians(ways: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of each way, called in turns after one round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, call in ways.items():
            started = time.process_time()
            call(number)
            found[name].append(1000 * (time.process_time() - started))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def of_passes(client: ServiceClient, http: HttpClient, rounds: int) -> dict[str, float]:
    """Measure a forward_backward of `ROWS` rows."""
    computation = client.service._computation
    models = {name: client.create_model(rank=RANK) for name in ("group", "client", "http")}
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, 200, (ROWS, LENGTH + 1))
    data = [datum(row[:-1], row[1:], weights=np.ones(LENGTH)) for row in tokens]
    headers = {"Content-Type": wire.PROTOBUF}

    def by_http(number: int) -> None:
        body = wire.pass_message(Pass(models["http"].id, number + 1, data, "cross_entropy"))
        wire.read_pass_output(http.operation("forward_backward", data=body, headers=headers))

    return medians(
        {
            "group": lambda _: computation.run_pass(models["group"].id, Pass("", 0, data, "cross_entropy")),
            "client": lambda _: models["client"].forward_backward(data, "cross_entropy"),
            "http": by_http,
        },
        rounds,
    )


def of_samples(client: ServiceClient, http: HttpClient, rounds: int) -> dict[str, float]:
    """Measure one sample of `NEW_TOKENS` tokens."""
    [replica] = client.service._computation.replicas
    samplers: dict[str, SamplerClient] = {name: client.sampler() for name in ("client", "http")}
    prompt, params = [20, 21, 22, 23], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    sampling = {"max_tokens": NEW_TOKENS, "stop": [], "temperature": 1.0}

    def by_group(number: int) -> None:
        waiting = [Request(str(number), tuple(prompt), params, seed=number)]
        while not replica.sample("base", waiting, SLICE_S):
            waiting = []

    def by_http(number: int) -> None:
        chunks = [{"type": "encoded_text", "tokens": prompt}]
        body = {"sampling_session_id": samplers["http"].id, "seq_id": number, "prompt": {"chunks": chunks}}
        http.operation("asample", json=body | {"sampling_params": {**sampling, "seed": number}})

    return medians(
        {
            "group": by_group,
            "client": lambda number: samplers["client"].sample(prompt, seed=number, **sampling),
            "http": by_http,
        },
        rounds,
    )


def megabytes_of_a_model(client: ServiceClient) -> tuple[float, float]:
    """Return how much resident memory a trained model adds, and its adapters' share."""
    process = psutil.Process()
    tokens = list(range(20, 40))
    data = [datum(tokens[:-1], tokens[1:])]
    models: list[ModelClient] = []
    start = 0
    for number in range(NUM_MODELS + 1):
        models.append(client.create_model(rank=RANK))
        models[-1].forward_backward(data, "cross_entropy")
        models[-1].optim_step(learning_rate=1e-3)
        if number == 0:
            start = process.memory_info().rss
    added = (process.memory_info().rss - start) / NUM_MODELS
    [slots] = [client.service._computation._trainers.worker._slots]  # type: ignore[attr-defined]
    adapters = sum(tensor.nbytes for tensor in slots._initial.values())
    return added / 2**20, adapters / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a model")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    options = {"device": "cpu", "num_threads": 1, "max_rank": RANK, "max_length": 128}
    with tempfile.TemporaryDirectory() as store, training_client(args.model, store=store, **options) as client:
        added, adapters = megabytes_of_a_model(client)
        client.finish()
        client = ServiceClient(client.service)
        http = HttpClient(client.service)
        for what, found in (
            (f"forward_backward of {ROWS} rows of {LENGTH} tokens", of_passes(client, http, args.rounds)),
            (f"sample of {NEW_TOKENS} tokens", of_samples(client, http, args.rounds)),
        ):
            group = found["group"]
            print(f"{what}: worker group {group:.1f} ms of CPU, and on top of it:")
            print(f"  training_client {found['client'] - group:.1f} ms, over HTTP {found['http'] - group:.1f} ms")
        rate = http.requests_per_second(client.session_id)
        print(f"requests: {rate:.0f} a second (heartbeats, {CONNECTIONS} connections, client in the same process)")
        print(f"memory of a further model: {added:.1f} MiB; its adapters have {adapters:.1f} MiB (rank {RANK})")
        http.close()


if __name__ == "__main__":
    main()
