"""A taskset of the package verifiers, and a harness that asks the policy once, in the same process."""

import httpx
import verifiers.v1 as vf

__all__ = ["LettersHarness", "LettersTaskset"]


class LettersData(vf.TaskData):
    letter: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=0.5)
    async def share(self, trace: vf.Trace) -> float:
        """Return how many letters of the answer are the wanted one."""
        text = trace.last_reply or ""
        return float(text.count(self.data.letter))


class LettersConfig(vf.TasksetConfig):
    num_tasks: int = 2


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        return [
            LettersTask(LettersData(prompt=f"Write {letter}.", letter=letter), self.config.task)
            for letter in "ab"[: self.config.num_tasks]
        ]


class LettersHarnessConfig(vf.HarnessConfig):
    is_broken: bool = False


class LettersHarness(vf.Harness[LettersHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        if self.config.is_broken:
            raise RuntimeError("the harness is broken")
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        answer.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
