"""Which Ray cluster a group uses."""

import pytest

from hybridrl.errors import PlacementError
from hybridrl.framework.parallel import ray_session
from tests.support.driver.ray_head import free_port


def test_a_cluster_that_is_gone_is_named_and_not_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not ray_session._is_cluster_here() and caplog.text == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    assert not ray_session._is_cluster_here()
    assert "no Ray cluster answers at 127.0.0.1:" in caplog.text and "starting another one" in caplog.text


def test_attaching_without_a_cluster_ends_with_what_to_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # tests nearby have clusters of their own
    with pytest.raises(PlacementError, match=r"attach_to=\['learner'\]: no cluster runs.*`ray start --head`"):
        ray_session._wait_for_cluster(["learner"], 0.6)
    assert caplog.text.count("waiting up to 0.6 s for the cluster of attach_to=['learner']") == 1
