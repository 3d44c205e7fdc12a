"""Tools: functions that the policy calls, the threads they run in, and the agent loop that calls them."""
