"""Role rollout: generates responses with a copy of the policy, in the `hf` or the `vllm` engine of this library."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from examples.openrlhf_ppo import common, remote_call
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.sdk import rpc
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.worker import Worker
from hybridrl.system.machine import shared_memory_id
from hybridrl.workers.rollout.base import Rollout, RolloutHealth, RolloutSetup, make_rollout
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, sequence_keys
from hybridrl.workers.weight_transfer import PushReceipt, Receivers, SenderAddress

TIMEOUT_S = 60.0  # for weights that the actor has stored


class VLLMActor(Worker):
    """One generation process."""

    llm: Rollout  # from `init` on

    def __init__(self, config: Mapping[str, Any]):
        self.args, self.is_ready = config, False

    @rpc(remote_call.rollout_init)
    def init(self) -> None:
        if self.is_ready:
            return
        common.init_torch()
        setup = RolloutSetup(
            model_path=common.write_model_config(self.args),
            config=RolloutConfig(name=self.args["rollout"], dtype="float32"),
            eos_token_ids=(common.END,),
            pad_token_id=common.PAD,
            max_prompt_length=self.args["prompt_len"],
            max_response_length=self.args["prompt_len"],
            load_format="dummy",  # the first push brings the weights; nothing is generated before it
        )
        self.receivers = Receivers(rank=self.rank, device="cpu", timeout_s=TIMEOUT_S)
        self.llm = make_rollout(self.args["rollout"], setup)
        self.is_ready = True

    @rpc(remote_call.vllm_wakeup)
    def wake_up(self) -> None:
        self.llm.wake_up()

    @rpc(remote_call.vllm_sleep)
    def sleep(self) -> None:
        self.llm.sleep()

    @rpc(remote_call.vllm_generate)
    def generate(
        self, prompt_token_ids: Sequence[list[int]], seeds: Sequence[int], params: SamplingParams, weights_version: int
    ) -> list[remote_call.RequestOutput]:
        """Return a response per prompt. Raises StaleWeightsError if the weights are of another version."""
        self.llm.require_version(weights_version, holder=f"rollout-{self.rank}")
        if not prompt_token_ids:
            return []
        keys = sequence_keys(torch.tensor(seeds), params.n)
        out = self.llm.generate_tokens(list(prompt_token_ids), keys, params)
        return [
            remote_call.RequestOutput(tokens[mask].tolist(), log_probs[mask].tolist())
            for tokens, log_probs, mask in zip(out.tokens, out.log_probs, out.mask.bool(), strict=True)
        ]

    # -- the receiving end of a push; `WeightSync` calls it

    @register(Dispatch.ONE_TO_ALL)
    def machine_id(self) -> str:
        return shared_memory_id()

    @register(Dispatch.ONE_TO_ALL)
    def join_weight_channel(self, address: SenderAddress) -> None:
        self.receivers.join(address)

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, version: int, sent: PushReceipt | None, adapters: bool = False) -> RolloutHealth:
        """Load the actor's weights, and return what the engine holds afterwards."""
        self.llm.wake_up()
        incoming = self.receivers.receive(version, sent)
        self.llm.load_weights(version, incoming, sent=incoming.fingerprint, adapters=adapters)
        return self.llm.health()

    @rpc(remote_call.end_job)
    def end(self) -> None:
        self.receivers.close()
