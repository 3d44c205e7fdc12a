"""The sessions of a service by tenant, with models and sampling sessions.

They are read again after a start.

The service calls it with the executor's lock held. A tenant finds what is its own, and nothing else.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.errors import HybridRLError
from hybridrl.training_service.state import records
from hybridrl.training_service.state.ledger import Ledger
from hybridrl.training_service.state.store import NotFound, Store
from hybridrl.training_service.state.tenants import Tenant, Tenants

logger = logging.getLogger(__name__)


class Gone(HybridRLError):
    """A session has ended, or an answer is not kept any more."""


class SessionTable:
    """See above. `base_model`: name of the model that all of them are of."""

    def __init__(self, store: Store, *, base_model: str):
        self._store, self._base_model = store, base_model
        self._sessions: dict[str, records.ClientSession] = {}

    def add(self, session: records.ClientSession) -> None:
        """Store a new session."""
        session.directory.mkdir()
        session.write()
        self._sessions[session.id] = session

    def add_model(self, session: records.ClientSession, number: int, stored: Mapping[str, Any]) -> records.TrainedModel:
        """Return a model whose file has `stored`."""
        ledger = Ledger(session.model_directory(number))
        model_id = f"{session.id}:train:{number}"
        model = records.TrainedModel(model_id, session.id, session.tenant, self._base_model, ledger, **stored)
        session.models[number] = model
        return model

    def add_sampler(self, session: records.ClientSession, number: int, stored: Mapping[str, Any]) -> records.Sampler:
        """Return a sampling session; `stored` as in the file of the session."""
        sampler_id = f"{session.id}:sample:{number}"
        sampler = records.Sampler(sampler_id, session.id, session.tenant, self._base_model, **stored)
        session.samplers[number] = sampler
        return sampler

    def of(self, tenant: Tenant) -> list[records.ClientSession]:
        """Return a tenant's sessions, newest first."""
        return [one for one in reversed(self._sessions.values()) if one.tenant.name == tenant.name]

    def open(self) -> list[records.ClientSession]:
        """Return the sessions of all tenants that have not ended."""
        return [one for one in self._sessions.values() if not one.ended]

    def ended(self) -> list[records.ClientSession]:
        """Return the sessions of all tenants that have ended."""
        return [one for one in self._sessions.values() if one.ended]

    def find(self, tenant: Tenant, session_id: Any) -> records.ClientSession:
        """Return a tenant's session. Raises NotFound."""
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None or session.tenant.name != tenant.name:
            raise NotFound(f"there is no session {session_id!r}")
        return session

    def find_open(self, tenant: Tenant, session_id: Any) -> records.ClientSession:
        """Return a tenant's session, whose client is alive. Raises NotFound, and Gone if it has ended."""
        session = self.find(tenant, session_id)
        if session.ended:
            raise Gone(f"session {session_id} has ended: {session.ended}")
        session.last_seen = time.monotonic()
        return session

    def model(self, tenant: Tenant, model_id: Any) -> records.TrainedModel:
        """Return a tenant's model. Raises NotFound."""
        session_id, number = _parts(model_id, "train")
        session = self._sessions.get(session_id)
        model = None if session is None else session.models.get(number)
        if model is None or model.tenant.name != tenant.name:
            raise NotFound(f"there is no model {model_id!r}")
        return model

    def sampler(self, tenant: Tenant, sampler_id: Any) -> records.Sampler:
        """Return a tenant's sampling session. Raises NotFound."""
        session_id, number = _parts(sampler_id, "sample")
        session = self._sessions.get(session_id)
        sampler = None if session is None else session.samplers.get(number)
        if sampler is None or sampler.tenant.name != tenant.name:
            raise NotFound(f"there is no sampling session {sampler_id!r}")
        return sampler

    def read(self, tenants: Tenants) -> Iterator[tuple[records.ClientSession, records.TrainedModel]]:
        """Read the sessions that an earlier server stored; yield the models of those that have not ended."""
        by_name = {tenant.name: tenant for tenant in tenants.all()}
        for path in sorted((self._store.root / "sessions").iterdir(), key=lambda one: one.stat().st_mtime):
            try:
                stored = records.read_json(path / records.SESSION_FILE)
            except (OSError, ValueError):
                continue  # the server was killed before a client got its id
            if (tenant := by_name.get(stored["tenant"])) is None:
                logger.warning("session %s is of %s, whose key is gone; it is left out", path.name, stored["tenant"])
                continue
            session = records.ClientSession(
                path.name, tenant, path, stored["metadata"], stored["name"], ended=stored["ended"]
            )
            self._sessions[session.id] = session
            yield from self._read_parts(session, stored["samplers"])

    def _read_parts(
        self, session: records.ClientSession, samplers: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[records.ClientSession, records.TrainedModel]]:
        for number, stored in samplers.items():
            self.add_sampler(session, int(number), stored)
        models = session.directory / "models"
        for path in sorted(models.iterdir(), key=lambda one: int(one.name)) if models.is_dir() else ():
            if not (path / records.MODEL_FILE).exists():
                continue  # the server was killed before a client got its id
            model = self.add_model(session, int(path.name), records.read_json(path / records.MODEL_FILE))
            inflight = [one.version for one in session.samplers.values() if one.inflight_of == model.id]
            model.inflight = inflight[-1] if inflight else None
            if not session.ended:
                yield session, model


def _parts(name: Any, kind: str) -> tuple[str, int]:
    """Return session and number of the id of a model or a sampling session. Raises NotFound."""
    parts = str(name).split(":")
    if len(parts) != 3 or parts[1] != kind or not parts[2].isdecimal():
        raise NotFound(f"{name!r} is no id of this server")
    return parts[0], int(parts[2])
