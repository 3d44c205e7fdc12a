import json

import pytest

from hybridrl.errors import ConfigError
from hybridrl.training_service.state.tenants import EVERYBODY, Tenant, read_tenants

KEY = "tml-alice-0123456789"


def key_file(tmp_path, content, mode=0o600):
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return str(path)


def test_a_key_has_its_tenant_and_limits(tmp_path):
    tenants = read_tenants(key_file(tmp_path, {KEY: {"name": "alice", "max_models": 3}}))
    assert tenants.of_key(KEY) == Tenant("alice", max_models=3)
    assert tenants.of_key("tml-other-0123456789") is tenants.of_key("") is None


def test_without_a_file_every_key_is_everybodys():
    assert read_tenants(None).of_key("tml-local") is EVERYBODY


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ({}, "must have an object"),
        ({"secret": {"name": "alice"}}, "must begin with tml-"),
        ({KEY: {}}, "has a name"),
        ({KEY: {"name": "alice", "max_modles": 3}}, "may have max_models"),
        ({KEY: {"name": "alice", "max_models": -1}}, "max_models=-1"),
        ({KEY: {"name": "alice"}, KEY + "0": {"name": "alice"}}, "the same name"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, content, words):
    with pytest.raises(ConfigError, match=words):
        read_tenants(key_file(tmp_path, content))


def test_a_file_that_others_can_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tenants(key_file(tmp_path, {KEY: {"name": "alice"}}, mode=0o644))
