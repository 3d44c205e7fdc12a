"""Run an agent of PyPI on "2 and 3?" against the endpoint that the environment names; print what it answers.

`python pypi_agent.py NAME`, in an environment with the package (requirements/agents.txt).
"""

import asyncio
import os
import sys
import tempfile

MODEL, URL, TASK, RULE = os.environ["OPENAI_MODEL"], os.environ["OPENAI_BASE_URL"], "2 and 3?", "Be brief."


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def openai_agents(how: str) -> object:
    import agents
    from pydantic import create_model

    agents.set_tracing_disabled(True)
    if how == "chat":
        agents.set_default_openai_api("chat_completions")
    options: dict = {"model": MODEL, "instructions": RULE, "tools": [agents.function_tool(add)]}
    if how == "typed":
        options["output_type"] = create_model("Sum", number=(int, ...))
    if how == "handoff":
        options["handoffs"] = [agents.Agent(name="helper", instructions="You help.", model=MODEL)]
    agent = agents.Agent(name="adder", **options)

    async def stream() -> object:
        result = agents.Runner.run_streamed(agent, TASK)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(stream()) if how == "stream" else agents.Runner.run_sync(agent, TASK).final_output


def pydantic_ai(how: str) -> object:
    from pydantic import create_model
    from pydantic_ai import Agent

    typed = {"output_type": create_model("Sum", number=(int, ...))} if how == "typed" else {"tools": [add]}
    agent = Agent(f"openai-{'responses' if how == 'responses' else 'chat'}:{MODEL}", instructions=RULE, **typed)

    async def stream() -> object:
        async with agent.run_stream(TASK) as result:
            return await result.get_output()

    return asyncio.run(stream()) if how == "stream" else agent.run_sync(TASK).output


def smolagents(how: str) -> object:
    import smolagents

    kind = smolagents.CodeAgent if how == "code" else smolagents.ToolCallingAgent
    model = smolagents.OpenAIServerModel(MODEL, api_base=URL, api_key="none")
    return kind(tools=[smolagents.tool(add)], model=model, max_steps=4).run(TASK)


def mini_swe_agent(_: str) -> object:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    model = get_model(f"openai/{MODEL}", {"model_class": "litellm", "cost_tracking": "ignore_errors"})
    environment = LocalEnvironment(cwd=tempfile.gettempdir())
    agent = DefaultAgent(model, environment, system_template=RULE, instance_template="{{task}}")
    try:
        return agent.run(TASK)["submission"].strip()
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    name, _, variant = sys.argv[1].partition(":")
    print("ANSWER", globals()[name](variant))
