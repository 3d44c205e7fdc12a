"""How the processes of a job are called on a Ray cluster. A job's run is `run`; everything of it is called `run/...`."""

from typing import Any

# Names are looked up here; a driver's own namespace would hide its processes from every other driver.
NAMESPACE = "hybridrl"
MASTER = "master"
KEEPER = "keeper"  # of a submitted job: the process that starts the others, and starts them again
NOTES, RECOVERIES = "notes", "recoveries"  # its threads for what the trainer says


def master_name(run: str) -> str:
    return f"{run}/{MASTER}"


def keeper_name(run: str) -> str:
    return f"{run}/{KEEPER}"


def memory_name(run: str) -> str:
    return f"{run}/memory"


def find_actor(name: str) -> Any:
    """Return the actor of this name on the connected cluster, or None. One that Ray starts again is there."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def names_in_use(prefix: str = "") -> list[str]:
    """Return the names of all actors of this library on the connected cluster that begin so."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in found if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix)]


def slot_of(name: str) -> str:
    """Return the slot that a process fills: `run/actor-0` and `run/actor-0.2`, its second life, are both of `actor-0`."""
    return name.rpartition("/")[2].split(".")[0]
