"""Validation in a separate process has the same result as in the training loop, and does not change training."""

import pytest

from tests.support.end_to_end.runs import train

STEPS = {
    "trainer__total_training_steps": 4,
    "trainer__save_freq": -1,
    "trainer__test_freq": 1,
    "trainer__val_before_train": "false",
}


def by_version(rows: list[dict]) -> dict[int, dict]:
    found = [row for row in rows if any(name.startswith("val-core/") for name in row)]
    return {
        int(row.get("val/version", row["step"])): {
            name: value for name, value in row.items() if name.startswith("val-core/")
        }
        for row in found
    }


@pytest.mark.timeout(300)
def test_it_reports_the_version_it_evaluated(tmp_path, tiny_qwen2, ray_cluster):
    inline = train(tmp_path / "inline", tiny_qwen2, **STEPS)
    remote = train(tmp_path / "remote", tiny_qwen2, trainer__backend="ray", trainer__eval_n_gpus=1, **STEPS)
    expected, found = by_version(inline), by_version(remote)
    assert 4 in found and set(found) <= {1, 2, 3, 4} and all(found[version] == expected[version] for version in found)
    norms = [[row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row] for rows in (inline, remote)]
    assert norms[0] == norms[1] and len(norms[0]) == 4
