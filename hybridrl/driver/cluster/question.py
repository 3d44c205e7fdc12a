"""The program that asks a Ray cluster whether it accepts this machine's token: `python question.py ADDRESS FD`.

`ray_cluster.py` runs this file in a process of its own. Ray's client makes the question, and a process that has made
and dropped one before `ray.init` loses its actors on a cluster without tokens. The answer goes to the descriptor FD:
"yes", or the name of the error's class and its text.
"""

import os
import sys


def main() -> None:
    """Ask the cluster of the arguments, and write its answer."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled, without types

    answer = "yes"
    try:
        ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        GcsClient(address=sys.argv[1])
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    os.write(int(sys.argv[2]), answer.encode()[:4096])


if __name__ == "__main__":
    main()
