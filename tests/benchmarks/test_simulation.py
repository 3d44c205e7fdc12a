"""The trainer on a virtual clock: times worked out by hand, and what the schedule must do to them."""

from dataclasses import replace

import pytest

from benchmarks.simulation import DEVICES, MODELS, Costs, Device, Lengths, Model, Simulation, simulate
from benchmarks.simulation.__main__ import main
from hybridrl.errors import ConfigError

pytestmark = pytest.mark.timeout(300)
# One operation per parameter and token: times are counts. No attention, no keys, no overheads.
EXACT = Costs(
    Device(peak_flops=2.0, bandwidth=1e30, link=2.0),
    Model(params=1.0, layers=1, hidden=0, kv_width=0),
    decode_efficiency=1.0,
    step_overhead_s=0.0,
    train_efficiency=1.0,
    update_overhead_s=0.0,
    call_overhead_s=0.0,
    push_overhead_s=0.0,
    prompt_tokens=0,
)
SAME = Lengths(median=8, sigma=0.0, cap=8)
ALONE = {"actor_rollout_ref.actor.use_kl_loss": False}


def run(gpus: int, rollout_gpus: int = 0, *, lengths: Lengths = SAME, costs: Costs = EXACT, **settings):
    chosen = ALONE | {f"trainer.{name}": value for name, value in settings.items()}
    return simulate(
        Simulation(costs, gpus, rollout_gpus, prompts=4, n=2, steps=6, warmup=3, lengths=lengths, settings=chosen)
    )


@pytest.mark.parametrize("gpus, seconds", [(1, 64.0), (2, 32.0), (4, 16.0)])
def test_a_synchronous_step_takes_the_sum_of_its_parts_on_any_number_of_devices(gpus, seconds):
    # 8 responses of 8 tokens: 64 tokens, decoded with 2 operations each at 2 per second, all sequences of a device at
    # once. A forward pass takes as long, an update three times. A push moves 2 bytes per parameter: 1 second.
    result = run(gpus)
    assert result.stages_s["gen"] == pytest.approx(seconds)
    assert result.stages_s["old_log_prob"] == pytest.approx(seconds)
    assert result.stages_s["update_actor"] == pytest.approx(3 * seconds)
    assert result.stages_s["update_weights"] == pytest.approx(1.0)
    assert result.step_s == pytest.approx(5 * seconds + 1)
    assert (result.age_mean, result.tokens_per_s) == (0.0, pytest.approx(64 / result.step_s))


def test_with_a_lag_the_slower_side_sets_the_step_and_the_samples_are_that_old():
    # 2 devices generate in 32 s and receive weights in 1 s; 2 train in 32 + 96 s and send weights in 1 s.
    result = run(2, 2, lag=1)
    assert result.step_s == pytest.approx(32 + 96 + 1)
    assert result.stages_s["gen"] == 0.0  # the responses are there
    assert result.stages_s["old_log_prob"] == pytest.approx(32 + 1)  # after the weights of the step before were sent
    assert (result.age_mean, result.trainer_busy > 0.8 > result.rollout_busy) == (1.0, True)

    # 1 device generates in 64 s, 8 train in 8 + 24 s: generation sets the step, and receives every push.
    slow = run(8, 1, lag=1)
    assert slow.step_s == pytest.approx(64 + 1)


def test_partial_rollouts_generate_the_same_tokens_with_several_versions():
    whole, parts = run(2, 1, lag=2), run(2, 1, lag=2, partial_rollout=True)
    assert parts.step_s == pytest.approx(whole.step_s)
    assert (whole.age_mean, parts.age_mean) == (2.0, 1.5)  # half of the tokens with each version


def test_decoding_waits_for_the_longest_response_and_admits_others_meanwhile():
    one_at_once = replace(EXACT, max_num_seqs=1)
    table = replace(EXACT, decode_table=((1.0, 1.0), (2.0, 1.0)))
    assert EXACT.generate_s([3, 1]) == pytest.approx(2 + 2)  # a step of two, two of one
    assert one_at_once.generate_s([3, 1]) == pytest.approx(4)
    assert table.generate_s([3, 1]) == pytest.approx(3)  # a step of two costs one of one
    assert replace(table, max_num_seqs=2).generate_s([3, 1, 4]) == pytest.approx(5)  # the third starts after 1


def test_lengths_are_those_of_the_prompt_whatever_the_schedule():
    lengths = Lengths()
    found = lengths.statistics(8192)
    assert found["p75"] == pytest.approx(900, rel=0.03)
    assert 20 < found["max"] / found["median"] < 33
    long_tailed = Lengths(median=64, cap=1024)
    tokens = {
        round(result.tokens_per_s * result.step_s * 3)
        for result in (run(1, lengths=long_tailed), run(2, lengths=long_tailed), run(1, 2, lengths=long_tailed, lag=1))
    }
    assert len(tokens) == 1


def test_what_has_no_stand_in_is_refused():
    with pytest.raises(ConfigError, match="no stand-in for .*critic"):
        simulate(Simulation(EXACT, 1, prompts=4, n=2, settings=ALONE | {"algorithm.adv_estimator": "gae"}))
    with pytest.raises(ConfigError, match="12 devices.*multiple of 8"):
        run(12)


def test_the_command_prints_a_step_and_refuses_what_it_does_not_know(capsys, tmp_path):
    table = tmp_path / "table.json"
    table.write_text("[[1, 0.5], [64, 1.0]]")
    small = ["--gpus", "2", "--prompts", "4", "--n", "2", "--steps", "2", "--median", "8", "--cap", "16"]
    assert main([*small, "--decode-table", str(table), *(f"{key}=false" for key in ALONE)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 devices; 4 prompts of 2 responses")
    assert "step " in printed and "update_actor" in printed

    table.write_text("[]")
    assert main([*small, "--decode-table", str(table)]) != 0
    assert "has no pair; give at least [[1, 0.009]]" in capsys.readouterr().err
    assert main([*small, "--model", "/nowhere"]) != 0
    assert "model.path='/nowhere': transformers cannot read it as a model" in capsys.readouterr().err


def test_the_steps_of_a_model_by_its_config_are_predicted(capsys, tiny_qwen2):
    small = ["--gpus", "2", "--prompts", "4", "--n", "2", "--steps", "2", "--median", "8", "--cap", "16"]
    assert main([*small, "--model", str(tiny_qwen2), *(f"{key}=false" for key in ALONE)]) == 0
    assert "step " in capsys.readouterr().out


def test_tail_batching_waits_for_long_responses_in_a_few_rounds_only():
    costs = Costs(DEVICES["h100"], MODELS["qwen2.5-7b"])
    base = Simulation(costs, 8, prompts=32, n=4, steps=12, warmup=0, settings=ALONE)
    tail = ALONE | {"algorithm.filter_groups.order": "tail_batching", "data.gen_batch_size": 40}
    whole, rounds = simulate(base), simulate(replace(base, settings=tail))
    assert rounds.stages_s["gen"] < 0.8 * whole.stages_s["gen"]
    # Four short rounds defer 8 prompts each, and the fifth step trains these 32: the first one with the whole tail.
    seconds = [end - start for start, end in zip((0.0, *rounds.ends_s), rounds.ends_s, strict=False)]
    assert max(seconds[:4]) < 0.6 * seconds[4]
