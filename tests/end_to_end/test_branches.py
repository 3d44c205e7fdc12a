"""Episodes with several conversations: the policy learns from each of their tokens once."""

import pytest
import torch

from hybridrl import main_ppo
from hybridrl.serving.agent_loop import AgentLoop, AgentLoopOutput, register_agent_loop
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = pytest.mark.timeout(300)
# Prompt, response and mask of the conversations of each sample.
CONVERSATIONS = [
    [([40, 41], [50, 51, 52], [1, 0, 1]), ([60], [50, 51, 70, 71], [0, 0, 1, 1])],
    [([40, 41], [80, 81, 82, 83], [1, 0, 0, 1])],
]


@register_agent_loop("two_conversations")
class TwoConversations(AgentLoop):
    """Returns the conversations above; the reward is the number of the sample."""

    async def run(self, sampling_params, **row):
        sample = row["request"].sample
        main, *others = (
            AgentLoopOutput(*tokens, [-1.0] * len(tokens[1]), version=0) for tokens in CONVERSATIONS[sample]
        )
        main.reward, main.branches = float(sample), others
        return main


@register_agent_loop("sampled_conversations")
class SampledConversations(AgentLoop):
    """Samples a response, and a second conversation with another prompt in every other sample."""

    async def run(self, sampling_params, **row):
        first, second = self.respond(row), self.respond(row)
        await first.sample(sampling_params)
        output = first.output()
        if row["request"].sample % 2:
            second.observe(self.tokenizer.encode(" Once more: "))
            await second.sample(sampling_params)
            output.branches.append(second.output())
        return output


def run(tmp_path, model, loop: str, **changes: object) -> list[dict]:
    changes = {"trainer__test_freq": -1, "trainer__val_before_train": "false"} | changes
    changes["actor_rollout_ref__rollout__agent__default_agent_loop"] = loop
    tmp_path.mkdir(exist_ok=True)
    assert main_ppo.main(settings(tmp_path, model, actor_rollout_ref__rollout__mode="async", **changes)) == 0
    return metrics(tmp_path / "run")


def gradient_norm(model_path, rows: list[tuple[tuple, float]]) -> float:
    """Return the norm of the gradient of minus the mean of A log pi over the trained tokens of these rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    losses = []
    for (prompt, response, mask), advantage in rows:
        log_probs = model(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
        own = log_probs[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        losses += [-advantage * own[place] for place, trained in enumerate(mask) if trained]
    torch.stack(losses).mean().backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("branches", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_gradient_of_an_episode_is_that_of_hand_made_rows(tmp_path, tiny_qwen2, branches):
    [row] = run(
        *(tmp_path, tiny_qwen2, "two_conversations"),
        algorithm__norm_adv_by_std_in_grpo="false",
        actor_rollout_ref__rollout__n=2,
        actor_rollout_ref__rollout__agent__train_branches=str(branches).lower(),
        actor_rollout_ref__actor__ppo_mini_batch_size=4,
        trainer__total_training_steps=1,
        trainer__save_freq=-1,
    )
    # Scores 0 and 1 in each of four equal groups: the advantages of the two samples are -1/2 and 1/2.
    rows = [
        (tokens, advantage)
        for own, advantage in zip(CONVERSATIONS, (-0.5, 0.5), strict=True)
        for tokens in (own if branches else own[:1])
    ]
    assert row["actor/grad_norm"] == pytest.approx(gradient_norm(tiny_qwen2, rows), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_resumed_run_trains_the_same_conversations(tmp_path, tiny_qwen2, lag):
    changes = {"trainer__lag": lag, "algorithm__filter_groups__enable": "true", "data__gen_batch_size": 6}
    changes["trainer__total_training_steps"] = 4
    whole = run(tmp_path / "whole", tiny_qwen2, "sampled_conversations", **changes)
    assert {row["training/rows_per_episode"] for row in whole} == {1 + 1 / 3}
    committed = tmp_path / "whole" / "run" / "global_step_2"
    changes |= {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": committed}
    run(tmp_path / "cut", tiny_qwen2, "sampled_conversations", **changes)
    policies = [
        weights(tmp_path / name / "run" / "global_step_4", tmp_path / f"{name}.hf") for name in ("whole", "cut")
    ]
    assert largest_difference(*policies) == 0
