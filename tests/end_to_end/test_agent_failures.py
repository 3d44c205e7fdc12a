"""A run goes on without the samples whose agent loops crash, and counts them."""

import pytest

from hybridrl import main_ppo
from hybridrl.serving.agent_loop import failures
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from tests.support.end_to_end.runs import metrics, settings

pytestmark = pytest.mark.timeout(300)

LOOPS = """
from hybridrl.serving.agent_loop import AgentLoop, register_agent_loop

tried = set()


@register_agent_loop("shaky")
class Shaky(AgentLoop):
    async def run(self, sampling_params, **row):
        request, index = row["request"], row["extra_info"]["index"]
        response = self.respond(row)
        await response.sample(sampling_params)
        if request.sample == 0 and index % 2:
            raise ConnectionError("the sandbox is gone")
        if request.sample == 1 and request.request_id not in tried:
            tried.add(request.request_id)
            raise RuntimeError("not yet")
        if index == 4:
            raise LookupError("the row has no answer")
        return response.output()
"""


def test_samples_whose_loops_fail_are_left_out_and_counted(tmp_path, tiny_qwen2, monkeypatch):
    monkeypatch.setattr(failures, "BACK_OFF_S", 0.01)
    (tmp_path / "agents.py").write_text(LOOPS)
    seen = []

    class Watching(RayPPOTrainer):
        def advantage(self, ctx):
            super().advantage(ctx)
            seen.append(ctx.batch)

    words = settings(
        tmp_path,
        tiny_qwen2,
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__agent__path=tmp_path / "agents.py",
        actor_rollout_ref__rollout__agent__default_agent_loop="shaky",
        trainer__val_before_train="false",
        trainer__test_freq=-1,
        trainer__save_freq=-1,
    )
    assert main_ppo.main(words, trainer_cls=Watching) == 0
    logged = [row for row in metrics(tmp_path / "run") if "training/rollout_probs_diff_max" in row]
    assert len(seen) == len(logged) == 2
    for batch, row in zip(seen, logged, strict=True):
        indices = [info["index"] for info in batch.non_tensor_batch["extra_info"]]
        left_out = [i for i, index in enumerate(indices) if index == 4 or (i % 3 == 0 and index % 2)]
        columns = batch.batch
        assert (~columns["reward_valid"]).nonzero()[:, 0].tolist() == left_out
        assert columns["response_mask"].sum(-1)[left_out].tolist() == [0] * len(left_out)
        assert not columns["advantages"][left_out].any()
        assert row.get("rollout/agent/samples_left_out", 0) == len(left_out)
        odd = sum(index % 2 for index in indices[::3])
        assert row.get("rollout/agent/failures/ConnectionError", 0) == 3 * odd
        assert row["rollout/agent/failures/RuntimeError"] == 4
        assert row.get("rollout/agent/groups_left_out", 0) == (4 in indices)
        assert "agent_reward" not in batch.non_tensor_batch and "left_out" not in batch.non_tensor_batch
