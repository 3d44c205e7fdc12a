"""The records in `meta_info`: from their own entry or from plain keys, equal on disk, and refused where wrong."""

import numpy as np
import pytest

from hybridrl.data_plane.meta_info import GenerationRequest, UpdatePlan
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from tests.support.data_plane.sample_batches import three_rows


def test_a_record_is_read_from_its_entry_or_from_plain_keys_and_has_defaults():
    request = GenerationRequest(seed=7, validate=True)
    for meta_info in ({"generation_request": request}, {"seed": 7, "validate": True, "eos_token_id": 2}):
        assert GenerationRequest.of(meta_info) == request
    assert GenerationRequest.of({"seed": np.int64(7)}) == GenerationRequest(seed=7)
    assert GenerationRequest.of({}) == GenerationRequest(seed=0, validate=False)
    assert UpdatePlan.of({"balance": True, "mini_batch_size": 4}) == UpdatePlan(mini_batch_size=4, balance=True)


def test_put_into_replaces_an_earlier_record_and_plain_keys_and_keeps_the_rest():
    plan, meta_info = UpdatePlan(mini_batch_size=4), {"balance": True, "update_plan": UpdatePlan(), "step": 3}
    assert plan.put_into(meta_info) == {"step": 3, "update_plan": plan}
    assert meta_info == {"balance": True, "update_plan": UpdatePlan(), "step": 3}


def test_a_batch_file_keeps_the_records(tmp_path):
    records = {"generation_request": GenerationRequest(5, True), "update_plan": UpdatePlan(2, 3, True, True, 4)}
    three_rows(**records).save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").meta_info == records


def test_batches_of_different_requests_cannot_be_joined():
    batches = [three_rows(generation_request=GenerationRequest(seed)) for seed in (1, 1, 2)]
    assert DataProto.concat(batches[:2]).meta_info == {"generation_request": GenerationRequest(1)}
    with pytest.raises(DataError, match="meta_info key 'generation_request'"):
        DataProto.concat(batches[1:])


@pytest.mark.parametrize(
    ("kind", "meta_info", "message"),
    [
        (GenerationRequest, {"generation_request": {"seed": 1}}, r"'generation_request'\]={'seed': 1}: must be a Gen"),
        (GenerationRequest, {"generation_request": UpdatePlan()}, "must be a GenerationRequest"),
        (GenerationRequest, {"generation_request": GenerationRequest(), "seed": 1}, r"plain keys \['seed'\]"),
        (GenerationRequest, {"seed": "1"}, "generation_request.seed='1': must be an integer"),
        (GenerationRequest, {"seed": True}, "generation_request.seed=True: must be an integer"),
        (GenerationRequest, {"validate": "no"}, "generation_request.validate='no': must be a bool"),
        (UpdatePlan, {"mini_batch_size": 0}, "update_plan.mini_batch_size=0: must be an integer of at least 1"),
        (UpdatePlan, {"shuffle_seed": 1.5}, "update_plan.shuffle_seed=1.5: must be an integer of at least 0"),
        (UpdatePlan, {"balance": 1}, "update_plan.balance=1: must be a bool"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(kind, meta_info, message):
    with pytest.raises(DataError, match=message):
        kind.of(meta_info)
