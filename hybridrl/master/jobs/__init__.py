"""Submitted jobs: builder, specification, plan, and the supervisor that runs them."""
