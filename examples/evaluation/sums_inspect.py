"""A task of inspect-ai that needs no network: the rows of sums.jsonl, scored by the number in the answer.

docs/evaluation.md has the command.
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import match
from inspect_ai.solver import generate

ROWS = Path(__file__).with_name("sums.jsonl")


@task
def sums() -> Task:
    return Task(
        dataset=json_dataset(str(ROWS), FieldSpec(input="question", target="answer")),
        solver=generate(),
        scorer=match(numeric=True),
        config=GenerateConfig(max_tokens=16, temperature=0.0),
    )
