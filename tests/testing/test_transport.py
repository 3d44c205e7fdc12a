"""`check_transport`: all transports and one from outside pass, and every kind of broken transport fails by name."""

from pathlib import Path

import pytest

from hybridrl.testing import ConformanceError, check_transport

PLUGS = Path(__file__).parents[1] / "support" / "third_party"
TOY = f"{PLUGS / 'toy_transport.py'}:ToyTransport"
NUM_CHECKS = {"object_store": 3, "disk": 3, TOY: 3, "shared_memory": 7, "broadcast": 7}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "broadcast")) for name in NUM_CHECKS]
)
@pytest.mark.timeout(240)
def test_a_transport_passes_every_check_of_its_kind(name, request):
    if name == "object_store":
        request.getfixturevalue("ray_cluster")
    assert len(check_transport(name)) == NUM_CHECKS[name]


@pytest.mark.parametrize(
    ("transport", "check"),
    [
        ("Rounds", "stored versions arrive as they were sent"),
        ("KeepsOneFile", "stored versions arrive as they were sent"),
        ("ForgetsItsName", "stored versions arrive as they were sent"),
        pytest.param("ReversesTheOrder", "every receiver gets every version as it was sent", marks=pytest.mark.slow),
        pytest.param("WaitsForDeadReceivers", "a dead receiver ends the push in time", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(240)
def test_a_broken_transport_fails_the_check_that_names_its_fault(transport, check):
    with pytest.raises(ConformanceError, match=f"{transport}: '{check}' does not hold"):
        check_transport(f"tests.support.third_party.broken_transports:{transport}", timeout_s=2.0)
