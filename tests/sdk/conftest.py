"""Fixture: a job in this process."""

import pytest

from hybridrl.sdk import data_queue, role_calls


@pytest.fixture
def make_job(monkeypatch):
    """Return a function that starts a `ThreadJob` of roles: name -> (class, number of processes)."""
    from tests.support.sdk.thread_group import ThreadJob

    jobs = []

    def make(**roles):
        job = ThreadJob(roles)
        jobs.append(job)
        monkeypatch.setattr(role_calls, "lookup_roster", job.lookup_roster)
        monkeypatch.setattr(role_calls, "loss_account", job.loss_account)
        monkeypatch.setattr(data_queue, "register_queue", job.register_queue)
        monkeypatch.setattr(data_queue, "queue_owner", job.queue_owner)
        return job

    yield make
    for job in jobs:
        job.close()
