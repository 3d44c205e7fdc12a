"""Submitted jobs: builder, specification, plan, and the supervisor that runs them."""

NAME_VARIABLE = "DLROVER_UNIFIED_JOB_NAME"
"""Variable of the environment with the name of a job, as DLRover's users set it."""
NOT_STARTED = "the job has not started; start the same command again"
"""Note of an error that ended a job before its first call."""
