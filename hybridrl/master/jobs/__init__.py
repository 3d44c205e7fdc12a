"""Submitted jobs: builder, specification, plan, and the supervisor that runs them."""

NAME_VARIABLE = "DLROVER_UNIFIED_JOB_NAME"
"""Variable of the environment with the name of a job, as DLRover's users set it."""
