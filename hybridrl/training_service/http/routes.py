"""The service over HTTP, with the limits of the OpenAI-compatible endpoint: connections, bodies, deadlines, keys.

Verbs run in threads, because they write files. What computes runs in the executor's thread. A request for an answer
that is not there waits for some seconds and then gets status 408, upon which the SDK asks again.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from hybridrl.errors import ConfigError, DataError, HybridRLError
from hybridrl.serving.openai.access import check_access
from hybridrl.serving.openai.connections import MAX_BODY_BYTES, Connections
from hybridrl.serving.openai.parameters import RequestError
from hybridrl.system.web_origin import is_loopback
from hybridrl.training_service import wire
from hybridrl.training_service.http import listings
from hybridrl.training_service.service import Busy, TrainingService
from hybridrl.training_service.state.ledger import Conflict
from hybridrl.training_service.state.session_table import Gone
from hybridrl.training_service.state.store import SCHEME, NotFound
from hybridrl.training_service.state.tenants import Tenant

logger = logging.getLogger(__name__)
API = "/api/v1"
OPEN_PATHS = (f"{API}/healthz",)
LONG_POLL_S = 20.0  # the SDK waits 45 s for an answer
SWEEP_PERIOD_S = 5.0  # between two looks for sessions whose clients are silent
RETRY_AFTER_S = 1
MAX_DEPTH = 32  # of JSON: what is stored must be readable when the server starts again
MAX_REASON = 200  # characters of why a session ends, which the log has
STATUS = ((NotFound, 404), (Gone, 410), (Conflict, 409), (Busy, 429), (DataError, 400), (ConfigError, 400))
MISTAKES = (LookupError, TypeError, ValueError, AttributeError, OverflowError)  # what a body of another form raises
OPERATIONS = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
AS_JSON = {
    "ForwardBackward": wire.json_pass_output,
    "Forward": wire.json_pass_output,
    "Sample": wire.json_sample_output,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Verb = Callable[[Tenant, Mapping[str, Any]], Mapping[str, Any]]


class TrainingEndpoint:
    """Serves http://host:port/api/v1 from `start` to `stop`.

    Args:
        service: Answers the requests.
        host: Address to listen on.
        port: 0 takes any free port; after `start` the attribute has the real one.
    """

    def __init__(self, service: TrainingService, *, host: str, port: int):
        if not service.tenants.has_keys and not is_loopback(host):
            raise ConfigError(f"--host={host}: other machines could train here without a key; name a file by --keys")
        self.service, self.host, self.port = service, host, port
        self._connections = Connections()

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port is in use."""
        app = web.Application(middlewares=[_format_errors, self._admit], client_max_size=MAX_BODY_BYTES)
        app.add_routes([*self._verbs(), *self._listings(), *self._changes()])
        try:
            self.port = await self._connections.serve(app, self.host, self.port)
        except OSError as error:
            raise ConfigError(f"--port={self.port}: cannot listen at {self.host} ({error.strerror})") from error
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Close all connections and stop listening."""
        self._sweeper.cancel()
        await self._connections.stop()

    async def _sweep(self) -> None:
        """End sessions of silent clients.

        Consumes: The sessions that are open.
        Waits for: The next look, `SWEEP_PERIOD_S` seconds later.
        Unblocked by: The time; `stop` cancels it.
        """
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            try:
                await asyncio.to_thread(self.service.end_silent)
            except OSError as error:
                logger.warning("the store cannot be written (%s); sessions are looked at again", error)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request in if it has a tenant's key.

        One from a web page of another origin is refused.
        """
        with self._connections.in_work(request):
            check_access(request, listens_on=self.host, api_key=None)
            if request.path not in OPEN_PATHS:
                self._tenant(request)
            return await handler(request)

    def _tenant(self, request: web.Request) -> Tenant:
        """Return whose key a request has. Raises RequestError."""
        sent = request.headers.get("X-Api-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (tenant := self.service.tenants.of_key(sent)) is None:
            raise RequestError("the API key is wrong or missing; set TINKER_API_KEY to one of --keys", status=401)
        return tenant

    # -- routes

    def _verbs(self) -> list[web.RouteDef]:
        service = self.service
        verbs: dict[str, Verb] = {
            "client/config": lambda tenant, body: listings.CLIENT_CONFIG,
            "client/dynamic_config": lambda tenant, body: listings.DYNAMIC_CONFIG,
            "telemetry": lambda tenant, body: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": lambda tenant, body: _future(service.create_model(tenant, "create_model", body)),
            "load_weights": self._load_weights,
            "get_info": lambda tenant, body: listings.info(service, tenant, body.get("model_id")),
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "weights_info": lambda tenant, body: listings.weights_info(service, tenant, body.get("tinker_path")),
        }
        for kind in OPERATIONS:
            verbs[kind] = partial(self._submit, kind)
        routes = [web.post(f"{API}/{name}", partial(self._json, verb)) for name, verb in verbs.items()]
        passes = [
            web.post(f"{API}/{name}", partial(self._pass, name == "forward"))
            for name in ("forward", "forward_backward")
        ]
        finish = web.post(f"{API}/sessions/{{id}}/finish", self._finish)
        return [*routes, *passes, finish, web.post(f"{API}/retrieve_future", self._retrieve)]

    def _listings(self) -> list[web.RouteDef]:
        service = self.service

        def runs(tenant: Tenant, request: web.Request) -> Mapping[str, Any]:
            found = [listings.run(service, tenant, model) for model in listings.models(service, tenant)]
            return listings.page(found, request.query, name="training_runs")

        def checkpoints(tenant: Tenant, request: web.Request) -> Mapping[str, Any]:
            found = listings.checkpoints(service, tenant, request.match_info.get("id"))
            return listings.page(found, request.query, name="checkpoints", default=100)

        def sessions(tenant: Tenant, request: web.Request) -> Mapping[str, Any]:
            return listings.page([one.id for one in service.table.of(tenant)], request.query, name="sessions")

        found: dict[str, Callable[[Tenant, web.Request], Mapping[str, Any]]] = {
            "get_server_capabilities": lambda tenant, request: listings.capabilities(service),
            "samplers/{id}": lambda tenant, request: listings.sampler(service, tenant, request.match_info["id"]),
            "training_runs": runs,
            "training_runs/{id}": lambda tenant, request: listings.run(
                service, tenant, service.table.model(tenant, request.match_info["id"])
            ),
            "training_runs/{id}/checkpoints": checkpoints,
            "checkpoints": checkpoints,
            "sessions": sessions,
            "sessions/{id}": lambda tenant, request: listings.session(service, tenant, request.match_info["id"]),
        }
        routes = [web.get(f"{API}/{path}", partial(self._get, listing)) for path, listing in found.items()]
        return [web.get(f"{API}/healthz", _health), *routes]

    def _changes(self) -> list[web.RouteDef]:
        """Return the routes that change stored weights."""
        place = f"{API}/training_runs/{{id}}/checkpoints/{{kind}}/{{name}}"
        return [
            web.delete(place, self._delete),
            web.put(f"{place}/ttl", self._set_ttl),
            web.post(f"{place}/publish", _refuse_publishing),
        ]

    # -- handlers

    async def _json(self, verb: Verb, request: web.Request) -> web.Response:
        body = await self._body(request)
        return web.json_response(await asyncio.to_thread(verb, self._tenant(request), body))

    async def _body(self, request: web.Request) -> Mapping[str, Any]:
        raw = await self._connections.read_body(request)
        return await asyncio.to_thread(_object, raw)

    async def _get(
        self, listing: Callable[[Tenant, web.Request], Mapping[str, Any]], request: web.Request
    ) -> web.Response:
        return web.json_response(await asyncio.to_thread(listing, self._tenant(request), request))

    def _create_session(self, tenant: Tenant, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "create_session", "session_id": self.service.create_session(tenant, body)}

    def _heartbeat(self, tenant: Tenant, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.service.heartbeat(tenant, str(body.get("session_id")))
        return {"type": "session_heartbeat"}

    def _load_weights(self, tenant: Tenant, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if body.get("session_id") is not None:
            return _future(self.service.create_model(tenant, "load_weights", body))
        return self._submit("load_weights", tenant, body)

    def _submit(self, kind: str, tenant: Tenant, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return _future(self.service.submit_json(tenant, kind, body))

    def _create_sampling_session(self, tenant: Tenant, body: Mapping[str, Any]) -> Mapping[str, Any]:
        sampler_id = self.service.create_sampling_session(tenant, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _sample(self, tenant: Tenant, body: Mapping[str, Any]) -> Mapping[str, Any]:
        request_id, sequences = self.service.sample(tenant, body)
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    async def _pass(self, forward_only: bool, request: web.Request) -> web.Response:
        raw = await self._connections.read_body(request)
        if request.content_type != wire.PROTOBUF:
            body = await asyncio.to_thread(_object, raw)
            raw = await asyncio.to_thread(wire.pass_of_json, body, forward_only=forward_only)
        return web.json_response(_future(await asyncio.to_thread(self.service.submit_pass, self._tenant(request), raw)))

    async def _finish(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        reason = (body.get("reason") or {}).get("type") or "finished"
        text = " ".join(str(reason).split())[:MAX_REASON]
        await asyncio.to_thread(self.service.finish, self._tenant(request), request.match_info["id"], text)
        return web.Response(status=204)

    async def _retrieve(self, request: web.Request) -> web.Response:
        """Return an answer.

        Consumes: The answer of one request.
        Waits for: The executor, up to `LONG_POLL_S` seconds.
        Unblocked by: The end of the operation. A client that is gone cancels it.
        """
        body = await self._body(request)
        future = self.service.answer(self._tenant(request), body.get("request_id"))
        try:
            answer = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), LONG_POLL_S)
        except TimeoutError:
            return web.json_response({"queue_state": "active"}, status=408)
        if answer.content_type == wire.PROTOBUF and wire.PROTOBUF not in request.headers.get("Accept", ""):
            as_json = AS_JSON.get(request.headers.get("X-Tinker-Request-Type", ""), _as_json_of(body))
            return web.Response(body=as_json(answer.body), content_type="application/json")
        return web.Response(body=answer.body, content_type=answer.content_type)

    def _stored(self, request: web.Request) -> str:
        named = request.match_info
        return f"{SCHEME}{named['id']}/{named['kind']}/{named['name']}"

    async def _delete(self, request: web.Request) -> web.Response:
        owner = self._tenant(request).name
        await asyncio.to_thread(self.service.store.delete, self._stored(request), owner=owner)
        return web.Response(status=204)

    async def _set_ttl(self, request: web.Request) -> web.Response:
        ttl, owner = (await self._body(request)).get("ttl_seconds"), self._tenant(request).name
        await asyncio.to_thread(self.service.store.set_ttl, self._stored(request), ttl, owner=owner)
        return web.Response(status=204)


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _refuse_publishing(request: web.Request) -> web.Response:
    raise DataError("weights are not published here: give another key's owner the files instead")


def _future(request_id: str) -> dict[str, Any]:
    owner = request_id.rpartition(":")[0]
    return {"request_id": request_id, "model_id": owner if ":train:" in owner else None}


def _as_json_of(body: Mapping[str, Any]) -> Callable[[bytes], bytes]:
    return wire.json_sample_output if ":sample:" in str(body.get("request_id")) else wire.json_pass_output


def _object(raw: bytes) -> Mapping[str, Any]:
    """Return the JSON object in a body. Raises DataError."""
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise DataError(f"the body is a {type(body).__name__}; send an object")
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner = (value for one in level for value in (one.values() if isinstance(one, dict) else one))
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise DataError(f"the body is nested more than {MAX_DEPTH} deep")
    return body


def _status_of(error: Exception) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, MISTAKES) and not isinstance(error, HybridRLError):
        return 400
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


@web.middleware
async def _format_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)
    except Exception as error:
        status = _status_of(error)
        if status >= 500:
            logger.error("%s failed; its client gets status %d", request.path, status, exc_info=error)
        is_ours = isinstance(error, HybridRLError | RequestError)
        text = str(error) if is_ours else f"the body has another form than the API's ({error!r})"
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
        return web.json_response({"detail": text}, status=status, headers=headers)
