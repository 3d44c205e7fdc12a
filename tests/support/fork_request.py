"""The file that Ray runs for each new worker in place of its `setup_worker.py`, see `ray_forks`.

It hands the command to the process that forks the worker, and ends. With `NEW_INTERPRETER` in the environment of an
actor, its worker starts as Ray starts it.
"""

import json
import os
import socket
import sys

ADDRESS = "HYBRIDRL_TEST_FORKS"  # environment variable: the socket of that process
NEW_INTERPRETER = {ADDRESS: ""}
CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="


def main(words: list[str]) -> None:
    """Send command, variables and working directory; of Ray's runtime environments, variables only."""
    command = [word for word in words if not word.startswith((CONTEXT, LANGUAGE))]
    contexts = [json.loads(word.removeprefix(CONTEXT)) for word in words if word.startswith(CONTEXT)]
    variables = os.environ.copy()
    for context in contexts:
        variables |= context["env_vars"]
    if not variables[ADDRESS]:
        os.execve(sys.executable, [sys.executable, *command], variables)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(variables[ADDRESS])
        connection.sendall(json.dumps({"command": command, "variables": variables, "directory": os.getcwd()}).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
