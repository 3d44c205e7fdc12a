"""Which Ray cluster a group uses, and which processes of another group it finds there."""

import pytest

from hybridrl.driver.cluster import ray_cluster
from hybridrl.errors import PlacementError
from hybridrl.framework.parallel import ray_session
from hybridrl.framework.parallel.process_group import find_members
from hybridrl.single_controller.cluster import NAMESPACE
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
    monkeypatch.setattr(ray_cluster, "_addresses_of_own_nodes", set)  # tests nearby have clusters of their own
    with pytest.raises(
        PlacementError, match=r"attach_to=\['learner'\]: no cluster of this user runs.*`ray start --head`"
    ):
        ray_session._wait_for_cluster(["learner"], 0.6)
    assert caplog.text.count("waiting up to 0.6 s for the cluster of attach_to=['learner']") == 1


@pytest.mark.parametrize(("target", "expected"), [("learner", [0, 1]), ("learner/node-0", [0])])
def test_a_group_that_is_found_while_it_starts_is_attached_as_a_whole(target, expected, monkeypatch):
    looks = iter([[], [0], [0, 1], [0, 1]])

    def registered(*, all_namespaces):
        nodes = next(looks, [0, 1])
        return [{"name": f"learner/node-{node}", "namespace": NAMESPACE} for node in nodes]

    monkeypatch.setattr("ray.util.list_named_actors", registered)
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: name)
    found = find_members([target], timeout_s=60.0)
    assert list(found) == [f"learner/node-{node}" for node in expected]
