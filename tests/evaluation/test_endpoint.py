"""The client of endpoints: what it retries, what it gives up, and what ends the work."""

import asyncio
from collections import Counter

import pytest
from aiohttp import web

from hybridrl.errors import ConfigError
from hybridrl.evaluation import endpoint
from hybridrl.evaluation.endpoint import EndpointModel, find_model, respond_all


class Foreign:
    """An endpoint of somebody else, whose answers a test chooses."""

    def __init__(self, answers=None, *, models=("m",)):
        self.answers, self.models = answers or {}, models
        self.seen: list[dict] = []
        self.headers: list[dict] = []
        self.num_open = self.most_open = 0
        self.tries: Counter = Counter()

    async def list_models(self, request):
        self.headers.append(dict(request.headers))
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def respond(self, request):
        body = await request.json()
        self.seen.append(body)
        question = body["messages"][-1]["content"]
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0.01)
        self.num_open -= 1
        self.tries[question] += 1
        status = self.answers.get((question, self.tries[question]), self.answers.get(question, 200))
        if status != 200:
            return web.json_response({"error": {"message": f"status {status} chosen"}}, status=status)
        choice = {"message": {"content": f"to {question}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})


def ask(foreign: Foreign, questions: list[str], *, max_open: int = 4, before=None):
    """Return the responses of the endpoint to these questions."""

    async def work():
        app = web.Application()
        app.add_routes([web.get("/v1/models", foreign.list_models), web.post("/v1/chat/completions", foreign.respond)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            if before is not None:
                return await before(url)
            requests = [([{"role": "user", "content": text}], {"max_tokens": 4}) for text in questions]
            return await respond_all(EndpointModel(url, "m"), requests, max_open=max_open)
        finally:
            await runner.cleanup()

    return asyncio.run(work())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)


def test_responses_keep_the_order_and_at_most_max_open_requests_are_open():
    foreign = Foreign()
    found = ask(foreign, [str(i) for i in range(20)], max_open=3)
    assert [response.text for response in found] == [f"to {i}" for i in range(20)]
    assert 1 < foreign.most_open <= 3 and foreign.seen[0]["max_tokens"] == 4 and foreign.seen[0]["model"] == "m"


def test_a_failure_that_passes_is_tried_again_and_one_that_stays_has_a_reason():
    foreign = Foreign({("a", 1): 429, ("a", 2): 503, "b": 500, "c": 400})
    a, b, c, d = ask(foreign, ["a", "b", "c", "d"])
    assert (a.text, d.text) == ("to a", "to d") and foreign.tries == {"a": 3, "b": endpoint.TRIES, "c": 1, "d": 1}
    assert b.reason == f"status 500 (status 500 chosen), {endpoint.TRIES} times" and not b.text
    assert c.reason == "status 400 (status 400 chosen)"


def test_a_refused_key_ends_the_work():
    with pytest.raises(ConfigError, match=r"refused with status 401 \(status 401 chosen\)"):
        ask(Foreign({"a": 401}), ["a", "b"])


def test_the_only_model_is_found_with_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    foreign = Foreign(models=["only"])
    found = ask(foreign, [], before=lambda url: find_model(url, name=None, key_variable="MY_KEY"))
    assert found.name == "only" and foreign.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(found)


@pytest.mark.parametrize(("models", "name"), [(["a", "b"], None), (["a"], "c"), ([], None)])
def test_a_model_that_is_not_clear_is_one_error(models, name):
    with pytest.raises(ConfigError, match="Choose one with --model-name"):
        ask(Foreign(models=models), [], before=lambda url: find_model(url, name=name, key_variable="NONE"))


def test_an_address_where_nobody_listens_is_one_error(monkeypatch):
    with pytest.raises(ConfigError, match=r"no OpenAI-compatible endpoint answers there .*hybridrl serve"):
        asyncio.run(find_model("http://127.0.0.1:9/v1", name=None, key_variable="NONE"))
