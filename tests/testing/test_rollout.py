"""`check_rollout`: the built-in rollouts and one from outside pass, and every kind of broken rollout fails by name."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hybridrl.config.capabilities import RolloutCapabilities
from hybridrl.testing import ConformanceError, check_rollout
from hybridrl.workers.rollout import HFRollout, RolloutHealth
from hybridrl.workers.rollout.base import rollout_class
from tests.support.third_party.toy_rollout import ToyRollout

TOY = f"{Path(__file__).parents[1] / 'support' / 'third_party' / 'toy_rollout.py'}:ToyRollout"
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed")
NUM_CHECKS = {"hf": 19, "vllm": 19, TOY: 15}  # of them four need what the toy does not declare


@pytest.mark.parametrize(
    "name", ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow, needs_vllm]), TOY]
)
@pytest.mark.timeout(240)
def test_a_rollout_passes_every_check_for_what_it_declares(name):
    assert len(check_rollout(rollout_class(name))) == NUM_CHECKS[name]


class KeepsOldWeights(ToyRollout):
    def replace_weights(self, weights):
        if self._received is not None:  # the first push is loaded
            return [None for _ in weights]
        return super().replace_weights(weights)


class MissesTheEnd(ToyRollout):
    def generate_tokens(self, prompts, keys, sampling, *, num_done=0):
        self.setup = self.setup.__class__(**vars(self.setup) | {"eos_token_ids": ()})
        return super().generate_tokens(prompts, keys, sampling)


class ForgetsTemperature(ToyRollout):
    def generate_tokens(self, prompts, keys, sampling, *, num_done=0):
        generated = super().generate_tokens(prompts, keys, sampling)
        generated.log_probs *= sampling.temperature
        return generated


class DrawsOnOneStream(ToyRollout):
    capabilities = RolloutCapabilities(keyed_sampling=True, sampling=ToyRollout.capabilities.sampling)

    def generate_tokens(self, prompts, keys, sampling, *, num_done=0):
        return super().generate_tokens(prompts, torch.randint(1 << 40, keys.shape), sampling)


class RepeatsOneSample(ToyRollout):
    def generate_tokens(self, prompts, keys, sampling, *, num_done=0):
        return super().generate_tokens(prompts, torch.zeros_like(keys), sampling)


class LooksAtOtherRows(ToyRollout):
    def generate_tokens(self, prompts, keys, sampling, *, num_done=0):
        longest = max(map(len, prompts))
        return super().generate_tokens([[0] * (longest - len(p)) + p for p in prompts], keys, sampling)


class ClaimsEveryVersion(ToyRollout):
    def current_version(self):
        return 0


class ClaimsToReadItsWeights(ToyRollout):
    capabilities = RolloutCapabilities(reads_own_weights=True)

    def health(self):
        return RolloutHealth(self._version, 17, received=self._received)


class DropsTheRestOfAPush(HFRollout):
    def load_weights(self, version, weights, **options):
        return super().load_weights(version, list(dict(weights).items())[:-1], **options)


class DeclaresTopK(ToyRollout):
    capabilities = RolloutCapabilities(sampling=frozenset({"top_k"}))


class ContinuesAnew(HFRollout):
    def _generate(self, prompts, keys, sampling, *, num_done=0, images=None):
        return super()._generate([prompt[: len(prompt) - num_done] for prompt in prompts], keys, sampling)


@pytest.mark.parametrize(
    ("rollout", "check"),
    [
        (KeepsOldWeights, "a push replaces all weights"),
        (MissesTheEnd, "greedy tokens are those of the plain model"),
        (ForgetsTemperature, "log-probs are those of the plain model"),
        (DrawsOnOneStream, "samples depend on their seeds alone"),
        (RepeatsOneSample, "samples of a prompt differ"),
        (LooksAtOtherRows, "greedy tokens are those of the plain model"),
        (ClaimsEveryVersion, "it generates nothing before the first push"),
        (ClaimsToReadItsWeights, "health reports the last push"),
        (DropsTheRestOfAPush, "it generates nothing before the first push"),
        (DeclaresTopK, "declared sampling parameters are honoured"),
        (ContinuesAnew, "chunks equal one call"),
    ],
)
def test_a_broken_rollout_fails_the_check_that_names_its_fault(rollout, check):
    with pytest.raises(ConformanceError, match=f"rollout: '{check}' does not hold"):
        check_rollout(rollout)
