"""What a session returns for training is exactly what the engine read and drew, over random conversations."""

import random
from collections import Counter

import pytest

from hybridrl.serving.sessions.matching import BranchKind
from hybridrl.serving.sessions.rows import session_rows
from hybridrl.serving.sessions.session import Session
from tests.support.serving.chat_clients import RandomClient, RandomEngine
from tests.support.serving.chat_templates import FAMILIES, tokenizer_of

CONVERSATIONS = 340  # of each family: over 1000 in all


def play(tokenizer, family: str, seed: int, *, num_steps: int) -> RandomClient:
    rng = random.Random(f"{family} {seed}")
    client = RandomClient(Session("s"), RandomEngine(tokenizer, family, rng), rng, has_tools=rng.random() < 0.8)
    for _ in range(num_steps):
        client.step()
    return client


def assert_rows_have_what_was_drawn(client: RandomClient, *, max_prompt_length: int | None) -> None:
    turns, draws = client.session.turns, client.engine.draws
    assert [turn.token_ids for turn in turns] == [tuple(draw.token_ids) for draw in draws]
    trained: Counter[int] = Counter()
    for row in session_rows(turns, max_prompt_length=max_prompt_length):
        whole, start = row.prompt_ids + row.response_ids, len(row.prompt_ids)
        assert max_prompt_length is None or start <= max_prompt_length
        sampled = set()
        for number in row.turns:
            draw = draws[number]
            first = len(draw.prompt_ids)
            last = first + len(draw.token_ids)
            assert whole[:first] == draw.prompt_ids and whole[first:last] == draw.token_ids
            own = slice(first - start, last - start)
            assert row.response_logprobs[own] == draw.log_probs and row.token_versions[own] == draw.versions
            assert set(row.response_mask[own]) == {int(not trained[number])}
            sampled |= {*range(first - start, last - start)}
            trained[number] += 1
        assert last == len(whole)
        for place in {*range(len(row.response_ids))} - sampled:
            assert (row.response_mask[place], row.response_logprobs[place], row.token_versions[place]) == (0, 0.0, -1)
    assert sorted(trained) == [*range(len(draws))]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_tokens_that_the_engine_read_and_drew(family, tiny_tokenizer):
    tokenizer, kinds = tokenizer_of(family, tiny_tokenizer), Counter()
    for seed in range(CONVERSATIONS):
        client = play(tokenizer, family, seed, num_steps=2 + seed % 7)
        assert_rows_have_what_was_drawn(client, max_prompt_length=(None, 8, 60)[seed % 3])
        assert [turn.kind for turn in client.session.turns] == client.expected, seed
        kinds.update(client.expected)
    assert set(kinds) == {*BranchKind} - {BranchKind.REWRITTEN, BranchKind.RENDERED}
