"""A module for `actor_rollout_ref.model.external_lib`: collectives time out before the call in which they run."""

from hybridrl.workers import process_setup

process_setup.COLLECTIVE_PER_CALL = 0.1
