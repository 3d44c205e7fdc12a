"""Fixture: a job in this process, for what the SDK's users write."""

from tests.sdk.conftest import make_job as make_job
