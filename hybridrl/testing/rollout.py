"""`check_rollout`: the contract of `Rollout` as a suite that any rollout can be put through.

The rollout under test generates with a tiny model, and everything it returns is compared with plain forward passes of
that model. What the class does not declare in its `capabilities` is not asked for. The checks share one started
rollout, in the calling process, because some engines start slowly.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.config.capabilities import SAMPLING
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.testing import rollout_reference
from hybridrl.testing.conformance import Check, expect, refuses, run_checks
from hybridrl.workers.rollout.base import Rollout, RolloutSetup
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.responses import prompt_columns
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, advance, sequence_keys
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, fingerprint

PAD, EOS = 0, (5, 9)
SEED = 100  # of the first prompt
PROMPT, RESPONSE = 24, 12
LENGTHS = (3, 20, 24, 7, 1, 13)  # of the prompts
TOLERANCE = 1e-3  # of log-probs in float32; engines add in another order
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_mb": 8}


def check_rollout(make: Callable[[RolloutSetup], Rollout], *, device: str = "cpu", **settings: Any) -> list[str]:
    """Run every check that a rollout's capabilities ask for; return their names.

    Args:
        make: Starts the rollout; usually its class. Called once.
        device: "cpu" or "cuda".
        settings: Entries of `actor_rollout_ref.rollout` that the rollout needs.

    Raises:
        ConformanceError: The rollout breaks its contract; the message has the sentence that does not hold.
    """
    with tempfile.TemporaryDirectory(prefix="hybridrl-testing-") as folder:
        path = rollout_reference.save_tiny_model(Path(folder))
        config = replace(RolloutConfig(**SMALL), **settings)
        setup = RolloutSetup(path, config, EOS, PAD, PROMPT, RESPONSE, device=device, load_format="dummy")
        rollout = make(setup)
        case = RolloutCase(rollout, path, rollout_reference.load_tiny_model(path))
        return run_checks(CHECKS, case, capabilities=rollout.capabilities, subject=f"{rollout.engine_name} rollout")


@dataclass
class RolloutCase:
    """A started rollout, the model whose weights it should hold, and the version of its last push."""

    rollout: Rollout
    path: str
    model: Any
    version: int = 0
    prompts: list[list[int]] = field(default_factory=lambda: [_prompt(length) for length in LENGTHS])

    def push(self, model: Any) -> None:
        """Load this model's weights as the next version."""
        self.version += 1
        self.rollout.load_weights(self.version, weights_of(model))
        self.model = model

    def sampling(self, **given: Any) -> SamplingParams:
        """Return greedy sampling, changed by `given`."""
        logprobs = self.rollout.capabilities.log_probs
        return SamplingParams(**{"max_new_tokens": RESPONSE, "do_sample": False, "logprobs": logprobs} | given)

    def generate(
        self, sampling: SamplingParams, *, rows: Iterable[int] | None = None, width: int = PROMPT
    ) -> DataProto:
        """Return the rollout's responses to these prompt rows (all), padded to `width`."""
        return self.rollout.generate(self.batch(rows, width=width), sampling)

    def batch(self, rows: Iterable[int] | None = None, *, width: int = PROMPT) -> DataProto:
        """Return the prompts as the trainer sends them.

        Padded on the left, with a seed for each row.
        """
        chosen = list(range(len(self.prompts)) if rows is None else rows)
        columns = prompt_columns([self.prompts[row] for row in chosen], pad_token_id=PAD, width=width)
        return DataProto.from_dict(tensors=columns | {"seeds": torch.tensor(chosen) + SEED})

    def expect_greedy(self, sampling: SamplingParams, *, what: str) -> None:
        """Compare the rollout's greedy responses with the plain model's."""
        for prompt, ours in zip(self.prompts, responses_of(self.generate(sampling)), strict=True):
            plain = rollout_reference.greedy(self.model, prompt, sampling, eos=EOS)
            expect(ours == plain, f"{what}: the rollout's tokens are {ours}, the plain model's are {plain}")


def weights_of(model: Any) -> Iterator[NamedTensor]:
    """Yield the weights as a push brings them.

    Each tensor is overwritten when the next one is requested.
    """
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().clone()
        yield name, tensor
        tensor.fill_(float("nan"))


def responses_of(batch: DataProto) -> list[list[int]]:
    """Return the tokens of every response, without padding."""
    rows = zip(batch.batch["responses"], batch.batch["response_mask"].bool(), strict=True)
    return [tokens[mask].tolist() for tokens, mask in rows]


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(10, rollout_reference.VOCABULARY_SIZE, (length,), generator=generator).tolist()


# -- The checks, in the order in which they run. Each leaves complete weights behind.


def refuses_without_weights(case: RolloutCase) -> None:
    with refuses(StaleWeightsError, call="generate() before the first push (load_format=dummy)"):
        case.generate(case.sampling())
    expect(case.rollout.health().version is None, "health().version must be None before the first push")
    case.push(case.model)


def decodes_greedily(case: RolloutCase) -> None:
    sampling = case.sampling()
    case.expect_greedy(sampling, what="greedy")
    lengths = {len(tokens) for tokens in responses_of(case.generate(sampling))}
    expect(lengths != {RESPONSE}, "no response ended at an end-of-sequence token, which the tiny model does draw")


def pads_on_the_right(case: RolloutCase) -> None:
    batch = case.generate(case.sampling()).batch
    mask = batch["response_mask"].bool()
    expect(not batch["responses"].is_inference(), "callers write to the tensors: use torch.no_grad(), or clone them")
    expect(bool((mask.long().diff(dim=1) <= 0).all()), "response_mask must be ones, then zeros")
    expect(bool((batch["responses"][~mask] == PAD).all()), f"tokens after the end must be the padding token {PAD}")
    expect(batch["responses"].shape == (len(LENGTHS), RESPONSE), f"responses must have {RESPONSE} columns")


def rows_are_independent(case: RolloutCase) -> None:
    together = responses_of(case.generate(case.sampling()))
    order = [4, 0, 2]
    apart = responses_of(case.generate(case.sampling(), rows=order))
    expect(apart == [together[row] for row in order], "a row's response depends on the other rows of its batch")
    width = max(len(case.prompts[row]) for row in (0, 3))
    narrow = responses_of(case.generate(case.sampling(), rows=(0, 3), width=width))
    expect(narrow == [together[0], together[3]], "a row's response depends on the width of the padding")


def log_probs_are_the_models(case: RolloutCase) -> None:
    temperature = 0.7 if "temperature" in case.rollout.capabilities.sampling else 1.0
    for sampling, scale in (
        (case.sampling(), 1.0),
        (case.sampling(do_sample=True, temperature=temperature), temperature),
    ):
        batch = case.generate(sampling)
        for prompt, response, ours in zip(
            case.prompts, responses_of(batch), batch.batch["rollout_log_probs"], strict=True
        ):
            plain = rollout_reference.log_probs(case.model, prompt, response, temperature=scale)
            difference = (ours[: len(response)] - plain).abs().max().item()
            expect(difference < TOLERANCE, f"log-probs differ from the plain model's by {difference:.2g}")
            expect(bool((ours[len(response) :] == 0).all()), "log-probs of padding must be 0")


def samples_differ(case: RolloutCase) -> None:
    samples = responses_of(case.generate(case.sampling(do_sample=True, n=4)))
    expect(len(samples) == 4 * len(LENGTHS), "a batch must have n rows for each prompt")
    groups = [samples[4 * row : 4 * row + 4] for row in range(len(LENGTHS))]
    expect(any(group[0] != other for group in groups for other in group), "all samples of every prompt are equal")


def samples_follow_seeds(case: RolloutCase) -> None:
    sampling = case.sampling(do_sample=True, n=2)
    first, again = (responses_of(case.generate(sampling)) for _ in range(2))
    expect(first == again, "the same seeds gave other samples in a second call (declared: keyed_sampling)")
    order = [5, 0, 3]
    some = responses_of(case.generate(sampling, rows=order))
    same = [first[2 * row + sample] for row in order for sample in range(2)]
    expect(some == same, "the same seeds gave other samples in another batch (declared: keyed_sampling)")


def a_push_replaces_all_weights(case: RolloutCase) -> None:
    case.push(rollout_reference.load_tiny_model(case.path, changed_by=3))
    case.expect_greedy(case.sampling(), what="after a push of other weights")
    versions = case.generate(case.sampling()).batch["weights_version"].tolist()
    expect(set(versions) == {case.version}, f"weights_version is {versions} after a push of version {case.version}")


def refuses_another_version(case: RolloutCase) -> None:
    case.rollout.require_version(case.version, holder="the test")
    with refuses(StaleWeightsError, call="require_version() of another version than was pushed"):
        case.rollout.require_version(case.version + 1, holder="the test")


def health_reports_the_push(case: RolloutCase) -> None:
    case.push(case.model)
    health, pushed = case.rollout.health(), fingerprint(case.model.named_parameters(), torch.float32)
    expect(health.version == case.version, f"health().version is {health.version} after a push of {case.version}")
    declared = case.rollout.capabilities.reads_own_weights
    expect(health.reads_own_weights == declared, f"health().reads_own_weights must be {declared}, as declared")
    expect(health.fingerprint == (pushed if declared else None), f"health().fingerprint is {health.fingerprint}")
    expect(health.received in (pushed, None), f"health().received is {health.received}, and {pushed} was pushed")


def a_broken_push_leaves_no_weights(case: RolloutCase) -> None:
    def breaks_off() -> Iterator[NamedTensor]:
        yield from list(weights_of(case.model))[:3]
        raise ConnectionError("the sender was lost")

    with refuses(ConnectionError, StaleWeightsError, call="load_weights() of a push that breaks off"):
        case.rollout.load_weights(case.version + 1, breaks_off())
    _expect_stale(case, "after a push that broke off")


def a_damaged_push_is_refused(case: RolloutCase) -> None:
    with refuses(StaleWeightsError, call="load_weights() of a push whose fingerprint differs from what was sent"):
        case.rollout.load_weights(case.version + 1, weights_of(case.model), sent=lambda: 1)
    _expect_stale(case, "after a damaged push")


def an_incomplete_push_is_refused(case: RolloutCase) -> None:
    with refuses(StaleWeightsError, call="load_weights() without one of the weights (declared: reads_own_weights)"):
        case.rollout.load_weights(case.version + 1, list(case.model.named_parameters())[1:])
    _expect_stale(case, "after an incomplete push")


def a_refused_push_is_read_to_its_end(case: RolloutCase) -> None:
    weights = iter([("no.such.weight", torch.zeros(2)), *case.model.named_parameters()])
    with refuses(Exception, call="load_weights() with a name that the model does not have"):
        case.rollout.load_weights(case.version + 1, weights)
    expect(next(weights, None) is None, "weights were left unread; reading may be a collective call of all ranks")
    _expect_stale(case, "after a push with an unknown name")


def _expect_stale(case: RolloutCase, when: str) -> None:
    with refuses(StaleWeightsError, call=f"generate() {when}"):
        case.generate(case.sampling())
    case.push(case.model)


def sleeping_keeps_the_weights(case: RolloutCase) -> None:
    before = responses_of(case.generate(case.sampling()))
    case.rollout.sleep()
    case.rollout.wake_up()
    expect(responses_of(case.generate(case.sampling())) == before, "responses differ after sleep() and wake_up()")


def sampling_is_honoured(case: RolloutCase) -> None:
    free = responses_of(case.generate(case.sampling()))
    for name, sampling in _declared_sampling(case, free):
        plain = replace(sampling, do_sample=False)
        for prompt, ours in zip(case.prompts, responses_of(case.generate(sampling)), strict=True):
            expected = rollout_reference.greedy(case.model, prompt, plain, eos=EOS)
            expect(ours == expected, f"{name}={getattr(sampling, name)!r} gave {ours} instead of {expected}")


def _declared_sampling(case: RolloutCase, free: list[list[int]]) -> Iterator[tuple[str, SamplingParams]]:
    """Yield every declared parameter with sampling whose result is known: one token possible, or greedy."""
    middle = free[0][len(free[0]) // 2]
    values: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 1e-4, "do_sample": True},
        "top_k": {"top_k": 1, "do_sample": True},
        "top_p": {"top_p": 1e-6, "do_sample": True},
        "min_p": {"min_p": 1.0, "do_sample": True},
        "repetition_penalty": {"repetition_penalty": 1.7},
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "min_tokens": {"min_tokens": RESPONSE - 2},
        "stop": {"stop": (rollout_reference.letters([middle]),)},
        "stop_token_ids": {"stop_token_ids": (middle,)},
        "ignore_eos": {"ignore_eos": True},
    }
    for name in SAMPLING:
        if name in case.rollout.capabilities.sampling:
            yield name, case.sampling(**values[name])


def undeclared_sampling_is_refused(case: RolloutCase) -> None:
    given: tuple[dict[str, Any], ...] = (
        {"top_k": 5, "do_sample": True},
        {"min_tokens": 2},
        {"presence_penalty": 0.5},
        {"stop_token_ids": (3,)},
    )
    for changes in given:
        if not set(changes) & case.rollout.capabilities.sampling:
            with refuses(ConfigError, call=f"generate() with {changes}, which is not declared,"):
                case.generate(case.sampling(**changes))


def chunks_equal_one_call(case: RolloutCase) -> None:
    keyed = case.rollout.capabilities.keyed_sampling
    sampling = case.sampling(do_sample=keyed)
    whole = responses_of(case.generate(sampling))
    chunked, done = [list[int]() for _ in case.prompts], 0
    open_rows = list(range(len(chunked)))
    for size in (5, RESPONSE - 5):
        prompts = [[*case.prompts[row], *chunked[row]] for row in open_rows]
        keys = advance(sequence_keys(torch.tensor(open_rows) + SEED, 1), done)
        part = case.rollout.generate_tokens(prompts, keys, replace(sampling, max_new_tokens=size), num_done=done)
        for row, tokens, mask in zip(open_rows, part.tokens, part.mask.bool(), strict=True):
            chunked[row] += tokens[mask].tolist()
        done += size
        open_rows = [row for row in open_rows if len(chunked[row]) == done and chunked[row][-1] not in EOS]
    expect(chunked == whole, f"chunks give {chunked}, one call gives {whole}")


def requests_are_served_like_a_batch(case: RolloutCase) -> None:
    sampling, server = case.sampling(do_sample=case.rollout.capabilities.keyed_sampling), case.rollout.request_engine()
    requests = [Request(str(row), tuple(ids), sampling, seed=SEED + row) for row, ids in enumerate(case.prompts)]
    waiting, outputs = [requests[:2], requests[2:]], dict[str, TokenOutput]()
    while waiting or server.num_open():
        done = server.serve(waiting.pop(0) if waiting else [], [], slice_s=0.0)
        outputs |= {output.request_id: output for output in done}
    expect(not any(output.error for output in outputs.values()), f"requests fail: {[*outputs.values()]}")
    served = [outputs[str(row)].token_ids for row in range(len(requests))]
    whole = responses_of(case.generate(sampling))
    expect(served == whole, f"requests give {served}, a batch gives {whole}")
    expect(all(output.version == case.version for output in outputs.values()), "an output has another version")


CHECKS: tuple[Check[RolloutCase], ...] = (
    Check("it generates nothing before the first push", refuses_without_weights),
    Check("greedy tokens are those of the plain model", decodes_greedily),
    Check("responses are padded on the right", pads_on_the_right),
    Check("a response does not depend on other rows or on padding", rows_are_independent),
    Check("log-probs are those of the plain model", log_probs_are_the_models, ("log_probs",)),
    Check("samples of a prompt differ", samples_differ),
    Check("samples depend on their seeds alone", samples_follow_seeds, ("keyed_sampling",)),
    Check("a push replaces all weights", a_push_replaces_all_weights),
    Check("another version is refused", refuses_another_version),
    Check("health reports the last push", health_reports_the_push),
    Check("a push that breaks off leaves no weights", a_broken_push_leaves_no_weights),
    Check("a damaged push is refused", a_damaged_push_is_refused),
    Check("an incomplete push is refused", an_incomplete_push_is_refused, ("reads_own_weights",)),
    Check("a refused push is read to its end", a_refused_push_is_read_to_its_end),
    Check("sleep and wake_up keep the weights", sleeping_keeps_the_weights),
    Check("declared sampling parameters are honoured", sampling_is_honoured),
    Check("other sampling parameters are refused", undeclared_sampling_is_refused),
    Check("chunks equal one call", chunks_equal_one_call, ("partial",)),
    Check("requests are served like a batch", requests_are_served_like_a_batch, ("requests",)),
)
