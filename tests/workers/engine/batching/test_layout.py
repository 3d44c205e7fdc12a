"""Positions of a batch's tokens in the model's input, in numbers worked out by hand."""

import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.attention.spans import sequence_spans
from hybridrl.workers.engine.batching.layout import make_layout, token_grid

# Two rows, prompt width 3, response width 2. Row 0: prompt 5 6, response 7 8. Row 1: prompt 1 2 3, response 4 and
# padding.
BATCH = {
    "input_ids": torch.tensor([[0, 5, 6, 7, 8], [1, 2, 3, 4, 0]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
    "response_mask": torch.tensor([[1, 1], [1, 0]]),
}


def grid_of(**changes):
    return token_grid(DataProto.from_single_dict(BATCH | changes))


def test_padded_rows_start_at_their_first_token():
    layout = make_layout(grid_of(), [1, 0], packed=False)
    assert layout.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    # the state before 4 is token 3 of row 0; before 7 and 8 tokens 1 and 2 of row 1, which starts at 4
    assert layout.state.tolist() == [2, 5, 6]
    assert layout.labels.tolist() == [4, 7, 8]
    assert layout.cell.tolist() == [0, 2, 3]
    assert layout.last.tolist() == [3, 7]


def test_a_shorter_row_is_padded_on_the_right():
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 0]])
    layout = make_layout(
        grid_of(attention_mask=mask, response_mask=torch.tensor([[1, 0], [1, 0]])), [0, 1], packed=False
    )
    assert layout.input_ids.tolist() == [[6, 7, 0, 0], [1, 2, 3, 4]]
    assert layout.last.tolist() == [1, 7]


def test_packed_rows_are_concatenated_and_restart_their_positions():
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 0]])
    layout = make_layout(
        grid_of(attention_mask=mask, response_mask=torch.tensor([[1, 0], [1, 0]])), [0, 1], packed=True
    )
    assert layout.input_ids.tolist() == [[6, 7, 1, 2, 3, 4]]
    assert layout.position_ids.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert layout.state.tolist() == [0, 4]
    assert layout.last.tolist() == [1, 5]


def test_a_row_without_tokens_adds_no_input():
    mask = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    grid = grid_of(attention_mask=mask, response_mask=torch.tensor([[0, 0], [1, 0]]))
    assert make_layout(grid, [0, 1], packed=True).input_ids.tolist() == [[1, 2, 3, 4]]
    for packed in (True, False):
        assert make_layout(grid, [0], packed=packed).input_ids.tolist() == [[0]]


@pytest.mark.parametrize("prompt", [[0, 0, 0], [0, 1, 1]])
def test_a_response_token_without_a_token_before_it_or_that_is_padding_is_refused(prompt):
    # first case: the response is the row's first token; second: response_mask is 1 where there is none
    mask = torch.tensor([prompt + [1, 0], [1, 1, 1, 1, 0]])
    with pytest.raises(DataError, match=r"response_mask\[0, "):
        grid_of(attention_mask=mask)


def test_a_batch_without_response_mask_has_no_response():
    columns = {name: column for name, column in BATCH.items() if name != "response_mask"}
    layout = make_layout(token_grid(DataProto.from_single_dict(columns)), [0, 1], packed=False)
    assert layout.shape == (2, 0)
    assert layout.state.tolist() == []


def test_spans_hold_sequences_of_similar_length():
    # 7, 5 and 4 share a span (7 <= 2 * 4); 3 starts another (7 > 2 * 3) with 2; 9 is too long for it
    spans = sequence_spans([7, 5, 4, 3, 2, 9])
    assert [span.width for span in spans] == [7, 3, 9]
    assert [len(span.cells) for span in spans] == [16, 5, 9]
    second = spans[1]
    assert second.tokens.tolist() == [16, 17, 18, 19, 20, 20]
    assert second.cells.tolist() == [0, 1, 2, 3, 4]
