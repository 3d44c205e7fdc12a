"""`ActorRolloutRefWorker`: one process of the policy, with actor, rollout and reference in any combination.

The name of its role lists the components:

* actor: trains the policy and computes its log-probs (an engine with an optimizer).
* rollout: generates with a copy of the policy's weights, pushed after every update and verified by version and
  fingerprint.
* ref: computes log-probs of the frozen reference policy (an engine without an optimizer).
* teacher: computes log-probs of the teachers of a distillation (an engine without an optimizer for each).

It runs in a worker process. The trainer calls it through `PolicyWorkers`, the request router through `serve`. Pushes of
weights are in `weight_push.py`.
"""

from typing import Any, cast

import torch
import torch.distributed as dist

from hybridrl import workers
from hybridrl.algos.policy_losses import get_policy_loss
from hybridrl.config.engines import log_prob_batching, ref_engine_settings, update_batching
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.rollout_correction import correction_plan
from hybridrl.data_plane.meta_info import GenerationRequest
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.workers import rollout
from hybridrl.workers.distillation import student_terms, teacher_terms
from hybridrl.workers.engine import base
from hybridrl.workers.engine.hf_model import overridden_config, vocabulary_size
from hybridrl.workers.engine_worker import (
    computed_by,
    engine_setup,
    lora_of,
    make_engine,
    micro_batching,
    on_device,
    required_path,
)
from hybridrl.workers.losses import GlobalCounts, OwnLogProbs, actor_loss
from hybridrl.workers.mini_batch import ENGINE_COMPUTE, MINI_BATCH_COMPUTE
from hybridrl.workers.rollout.base import RolloutSetup, load_special_tokens, make_rollout
from hybridrl.workers.rollout.probe import layer_kinds
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import sampling_params
from hybridrl.workers.weight_push import WeightPushMixin

COMPONENTS = ("actor", "rollout", "ref", "teacher")
ROLLOUT_MESH = "rollout"  # tensor-parallel ranks of one engine get the same prompts; the first rank returns the output
ROLLOUT_COMPUTE = make_nd_compute_dataproto_dispatch_fn(ROLLOUT_MESH)


class ActorRolloutRefWorker(WeightPushMixin):
    """One process of the policy.

    Args:
        config: Settings of the whole job.
        role: Components joined by underscores, for instance "actor_rollout_ref" or "ref".
    """

    def __init__(self, config: PPOConfig, role: str):
        self.config, self.role = config, role
        self._sender = None
        self.components = role.split("_")
        unknown = set(self.components) - set(COMPONENTS)
        if unknown:
            raise ValueError(
                f"role={role!r} has unknown components {sorted(unknown)}; components are {', '.join(COMPONENTS)}"
            )

    @classmethod
    def num_peers(cls, config: PPOConfig, role: str) -> int:
        """Return the ranks of an engine for a rollout in processes of its own, which communicate with no others."""
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return size if role == "rollout" and size > 1 else 0

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_optimizer_steps: int = 0) -> None:
        """Load the components of this role onto the device.

        Args:
            total_optimizer_steps: Length of the learning-rate schedule.
        """
        policy = self.config.actor_rollout_ref
        is_alone = self.components == ["rollout"] and policy.rollout.tensor_model_parallel_size == 1
        self._start_process(single_process=is_alone)
        get_policy_loss(policy.actor.policy_loss.loss_mode)  # refuse an unknown name before the first generation
        if "actor" in self.components:
            self._init_actor(total_optimizer_steps)
        self.ref: base.Engine | None = None
        if "ref" in self.components and not ("actor" in self.components and policy.model.uses_lora):
            self._init_ref()
        if "teacher" in self.components:
            self._init_teachers()
        if "rollout" in self.components:
            self._init_rollout()
        if self.device == "cuda" and {"actor", "rollout"} <= set(self.components):
            self.rollout.sleep()  # other models still have to be loaded onto this device; the first push wakes it

    def _init_actor(self, total_optimizer_steps: int) -> None:
        policy, actor = self.config.actor_rollout_ref.model, self.config.actor_rollout_ref.actor
        setup = self._policy_setup(
            policy.path,
            self._engine_settings,
            gradient_checkpointing=policy.enable_gradient_checkpointing,
            optim=actor.optim,
            total_steps=total_optimizer_steps,
            grad_clip=actor.grad_clip,
            lora=lora_of(policy),
            freeze_vision_tower=actor.freeze_vision_tower,
            token_terms=self._student_terms(),
            replays_routes=actor.router_replay.mode != "disabled",
        )
        self.actor = self._set_up(make_engine(actor.strategy, setup))

    def _student_terms(self) -> dict[str, base.TokenTerm]:
        teacher = self.config.distillation
        return student_terms(teacher) if teacher.in_loss else {}

    def _policy_setup(self, path: str | None, settings: EngineSettings, **more: Any) -> base.EngineSetup:
        """Return the setup of a model that computes the policy's micro-batches, arranged as the policy's are."""
        policy = self.config.actor_rollout_ref
        layout = {"packed": policy.model.use_remove_padding, "share_prefixes": policy.actor.use_prefix_grouper}
        return engine_setup(
            self.config, kind="causal_lm", path=path, settings=settings, device=self.device, **layout, **more
        )

    def _init_ref(self) -> None:
        policy = self.config.actor_rollout_ref
        setup = self._policy_setup(policy.model.path, ref_engine_settings(self.config))
        self.ref = self._set_up(make_engine(policy.actor.strategy, setup))

    def _init_teachers(self) -> None:
        policy, settings = self.config.actor_rollout_ref.model, ref_engine_settings(self.config)
        terms = teacher_terms(
            self.config.distillation,
            num_tokens=vocabulary_size(required_path(policy.path), trust_remote_code=policy.trust_remote_code),
        )
        self.teachers: dict[str, base.Engine] = {}
        for key, path in self.config.distillation.teachers().items():
            setup = self._policy_setup(path, settings, token_terms=terms)
            self.teachers[key] = self._set_up(make_engine(self.config.actor_rollout_ref.actor.strategy, setup))
        self._teacher_outputs = ("log_probs", *terms)

    def _init_rollout(self) -> None:
        num_peers = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        self._register_dispatch_collect_info(ROLLOUT_MESH, self.rank // num_peers, self.rank % num_peers == 0)
        policy, data = self.config.actor_rollout_ref.model, self.config.data
        tokens = load_special_tokens(required_path(policy.path), trust_remote_code=policy.trust_remote_code)
        setup = RolloutSetup(
            model_path=required_path(policy.path),
            config=self.config.actor_rollout_ref.rollout,
            eos_token_ids=tokens.eos_ids,
            pad_token_id=tokens.pad_id,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            device=self.device,
            trust_remote_code=policy.trust_remote_code,
            override_config=dict(policy.override_config),
            # A push brings the weights, before which nothing is generated; without an actor there is none.
            load_format="auto" if self.config.only_generates else "dummy",
            seed=self.config.trainer.seed,
            max_images=data.max_images_per_prompt,
        )
        self.rollout = make_rollout(self.config.actor_rollout_ref.rollout.name, setup)
        self._requests: rollout.RequestEngine | None = None  # started by the first ones

    @register(ROLLOUT_COMPUTE)
    def generate_sequences(self, prompts: DataProto, weights_version: int | None = None) -> DataProto:
        """Return responses to the prompts, `n` adjacent rows for each.

        Args:
            prompts: `meta_info` has a `GenerationRequest`, or `validate` and `seed` as plain keys.
            weights_version: Version that the rollout must hold. None: any that was pushed in full.

        Raises:
            StaleWeightsError: The rollout holds another version. Raised before the first token.
        """
        request = GenerationRequest.of(prompts.meta_info)
        self._require_version(weights_version)
        sampling = sampling_params(self.config, validate=request.validate, seed=request.seed, greedy=request.greedy)
        return self.rollout.generate(prompts, sampling)

    @register(Dispatch.ALL_TO_ALL)
    def serve(
        self, requests: list[Request], aborted: list[str], slice_s: float, weights_version: int | None = None
    ) -> list[TokenOutput]:
        """Add requests, abort those in `aborted`, generate for about `slice_s` seconds, and return finished outputs.

        The request router calls it for one replica at a time, repeatedly while the replica has open requests. All
        ranks of an engine get the same calls. See `RequestEngine.serve`.
        """
        self._require_version(weights_version)
        if not self.rollout.capabilities.requests:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name={self.config.actor_rollout_ref.rollout.name}: the rollout serves no "
                "single requests; use actor_rollout_ref.rollout.mode=sync"
            )
        if self._requests is None:
            self._requests = self.rollout.request_engine()
            self._requests.peers = self._engine_peers()
        return self._requests.serve(requests, aborted, slice_s=slice_s)

    def _engine_peers(self) -> "rollout.EnginePeers | None":
        """Return the ranks of this process's engine; None if it is the only one."""
        num_peers = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        first = dist.get_rank() - dist.get_rank() % num_peers
        return None if num_peers == 1 else rollout.EnginePeers(range(first, first + num_peers))

    def _require_version(self, weights_version: int | None) -> None:
        """Raise StaleWeightsError unless the rollout holds this version. None: any that was pushed in full."""
        self.rollout.require_version(weights_version, holder=f"rollout rank {self.rank}")

    @register(ENGINE_COMPUTE)
    def compute_log_prob(self, data: DataProto, sum_pi_squared: bool = False, reference: bool = False) -> DataProto:
        """Return `old_log_probs` and `entropys` (B, R) float32 under the current policy.

        With `router_replay.mode=R2` also the column `routed_experts`; with R3 the rows have it, and it is replayed.

        Args:
            data: Rows of sequences.
            sum_pi_squared: Also return the column `sum_pi_squared`, sum_v pi_v^2 at each token.
            reference: Also return `ref_log_prob`, that of an actor with adapters without them.
        """
        more = ("sum_pi_squared",) if sum_pi_squared else ()
        outputs, routes = ("log_probs", "entropy", *more), {}
        policy = self.config.actor_rollout_ref
        micro = micro_batching(*log_prob_batching(policy.rollout))
        with self._trained():
            if policy.actor.router_replay.mode == "R2":
                recorder = cast(base.RoutingEngine, self.actor)
                out, routes[base.ROUTED_EXPERTS] = recorder.forward_with_routes(data, micro, outputs=outputs)
            else:
                out = self.actor.forward(data, micro, outputs=outputs)
            ref = self._without_adapters(data) if reference else {}
        named = {"old_log_probs": out["log_probs"], "entropys": out["entropy"]} | ref
        columns = named | {name: out[name] for name in more}
        return DataProto.from_dict(tensors=columns, non_tensors=routes, meta_info=computed_by(self.actor))

    @register(ENGINE_COMPUTE)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return `ref_log_prob` (B, R) float32 under the reference policy.

        An actor with adapters is its own reference: the model without them.
        """
        if self.ref is None:
            with self._trained():
                columns = self._without_adapters(data)
            return DataProto.from_dict(tensors=columns, meta_info=computed_by(self.actor))
        with on_device(self.ref, self.device, params=ref_engine_settings(self.config).param_offload):
            out = self.ref.forward(data, self._ref_micro(), outputs=("log_probs",))
        return DataProto.from_dict(tensors={"ref_log_prob": out["log_probs"]}, meta_info=computed_by(self.ref))

    def _without_adapters(self, data: DataProto) -> dict[str, torch.Tensor]:
        """Return `ref_log_prob` (B, R) float32 of the actor's model without its adapters, which chooses its experts."""
        data = data.select(
            non_tensor_batch_keys=[name for name in data.non_tensor_batch if name != base.ROUTED_EXPERTS]
        )
        with cast(base.AdapterEngine, self.actor).adapters_off():
            out = self.actor.forward(data, self._ref_micro(), outputs=("log_probs",))
        return {"ref_log_prob": out["log_probs"]}

    def _ref_micro(self) -> base.MicroBatching:
        return micro_batching(*log_prob_batching(self.config.actor_rollout_ref.ref))

    @register(ENGINE_COMPUTE)
    def compute_teacher_log_prob(self, data: DataProto, teacher: str) -> DataProto:
        """Return `teacher_log_prob` (B, R) float32 under this teacher, and what the divergence needs of it besides.

        With a topk divergence `teacher_top_ids` (B, R, K) int32 and `teacher_top_log_probs` (B, R, K + 1) float32, the
        last one of all other tokens; over the whole vocabulary `teacher_all_log_probs` (B, R, V) float32.

        Args:
            data: Rows of this teacher.
            teacher: Key of the teacher.
        """
        engine = self.teachers[teacher]
        with on_device(engine, self.device, params=ref_engine_settings(self.config).param_offload):
            out = engine.forward(data, self._ref_micro(), outputs=self._teacher_outputs)
        out["teacher_log_prob"] = out.pop("log_probs")
        if "teacher_top_ids" in out:
            out["teacher_top_ids"] = out["teacher_top_ids"].to(torch.int32)
        return DataProto.from_dict(tensors=out)

    @register(MINI_BATCH_COMPUTE)
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on a batch with `old_log_probs`, `advantages` and (for the KL loss) `ref_log_prob`.

        A distillation in the loss reads what `compute_teacher_log_prob` returned. The policy loss is multiplied by
        `rollout_is_weights` if the batch has them. In bypass mode `old_log_probs` are the rollout's, and the loss
        weighs and rejects tokens itself. `mini_batch.py` describes how
        the rows are cut into mini-batches. Without `old_log_probs` the update is one optimizer step, and its own
        log-probs are the old ones (`OwnLogProbs`); the batch then has `batch_row`.

        Returns:
            `meta_info["metrics"]` has one value per optimizer step, equal on every rank. No rows, or without
            `old_log_probs` this rank's, with the columns of `OwnLogProbs.columns`.
        """
        actor = self.config.actor_rollout_ref.actor
        correction = correction_plan(self.config.algorithm.rollout_correction)
        micro = micro_batching(*update_batching(actor))
        own = None if "old_log_probs" in data.batch.keys() else OwnLogProbs(data, epochs=actor.ppo_epochs)

        def make_loss(counts: GlobalCounts) -> base.LossFn:
            loss = actor_loss(actor, counts, correction=correction, distillation=self.config.distillation)
            return loss if own is None else own.used_by(loss)

        with self._trained(optimizer=True):
            metrics = self._update(
                self.actor,
                data,
                micro,
                make_loss=make_loss,
                outputs=(
                    "log_probs",
                    *(("entropy",) if actor.entropy_coeff or own is not None else ()),
                    *self._student_terms(),
                ),
                epochs=actor.ppo_epochs,
                prefix="actor",
            )
        meta_info = {"metrics": metrics | computed_by(self.actor).get("metrics", {})}
        return (
            DataProto(meta_info=meta_info) if own is None else DataProto.from_dict(own.columns(), meta_info=meta_info)
        )

    @register(Dispatch.ONE_TO_ALL)
    def describe_model(self) -> str:
        """Return family, kinds of layers and attention of the actor's model, for the error of a `ParityGate`."""
        policy = self.config.actor_rollout_ref.model
        found = overridden_config(
            required_path(policy.path), dict(policy.override_config), trust_remote_code=policy.trust_remote_code
        )
        kinds, attention = layer_kinds(found), getattr(self.actor, "attention", "unknown")
        return f"family {found.model_type}, layers {', '.join(kinds)}, attention of the trainer {attention}"

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, directory: str) -> None:
        """Write the policy as Hugging Face safetensors with config and tokenizer, and verify names and values."""
        with self._trained() as actor:
            workers.export_hf(actor.weights(), directory, model=self.config.actor_rollout_ref.model, rank=self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def export_adapter(self, directory: str) -> None:
        """Write the policy's adapters in peft's format, and verify names and values."""
        model = self.config.actor_rollout_ref.model
        with self._trained() as actor:
            weights = actor.weights(lora="unscaled_adapters")
            workers.export_adapter(weights, directory, model=model, lora=lora_of(model), rank=self.rank)
